"""The world of this process, for as long as it trains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from model_check.config.schema import LaunchSettings
from model_check.dist.ddp import Replicas
from model_check.dist.ranks import Limit, Ranks
from model_check.dist.world import ALONE, World
from model_check.errors import PeerLost
from model_check.utils.worker_env import RankEnv


@contextmanager
def joined(
    env: RankEnv | None,
    device: torch.device,
    limit: Limit,
    launch: LaunchSettings = LaunchSettings(),  # noqa: B008 (frozen)
    num_steps: Callable[[], int] = lambda: 0,
) -> Iterator[World]:
    """The world of a rank; None: of a process that trains alone. Where it ends by an error, its
    connections stay open until the process is gone: to close them would wait for what no peer
    answers any more. `num_steps`: those done by then. Raises PeerLost, ConfigError."""
    if env is None:
        yield ALONE
        return
    ranks: Ranks
    if launch.mode == "fsdp":
        from model_check.dist.fsdp import Shards  # 2 s, for these jobs alone

        ranks = Shards(env, device, limit, launch.fsdp)
    else:
        ranks = Replicas(env, device, limit)
    try:
        yield ranks
    except PeerLost as lost:
        try:
            raise ranks.explained(lost) from lost
        except PeerLost:
            ranks.let_leave()  # a request to end, which comes of that, has this error as its cause
            raise
    except Exception as error:
        ranks.tell_failure(error, num_steps())
        raise
    ranks.leave()
