"""One rank of a job that meets `debug.drill`, as a program for `nursery`: the plan is the only
argument. Where its working directory is not that of the others, it is on a node of its own. Leaves
what it told, and how it ended, in PLAN["out"].RANK.json."""

import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from model_check.config.drill import parse_drill
from model_check.dist.job import joined
from model_check.engine.assembly import build_trainer
from model_check.engine.run_context import Channels, Identity
from model_check.engine.saving.own_directory import Seeker, checkpoint_directory
from model_check.engine.stop import EndedEarly
from model_check.errors import ModelCheckError, PeerLost
from model_check.events import Event, Step, encode
from model_check.utils.worker_env import RankEnv
from tests.engine.conftest import VOCABULARY, Kept, bare_context, make_settings
from tests.engine.ranks import Shared


def main(plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    env = RankEnv.from_environ(os.environ)
    assert env is not None
    os.chdir(plan["nodes"][env.rank])
    kept, found = (
        Stopping(plan, env.rank),
        Path(f"{plan['out']}.{env.rank}.json"),
    )
    threading.Thread(target=leave_last, args=(found, plan, env), daemon=True).start()
    end: dict[str, Any] = {"code": 0, "error": None, "peer_lost": False}
    try:
        train(plan, env, kept)
    except EndedEarly as notice:
        end["error"] = str(notice)
    except Exception as error:
        code = error.exit_code if isinstance(error, ModelCheckError) else 1
        end = {"code": code, "error": str(error), "peer_lost": isinstance(error, PeerLost)}
    end |= {"events": [json.loads(encode(event)) for event in kept.events], "lines": kept.lines}
    leave(found, end)


def read(directory: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"found.{rank}.json").read_text())
    return found


class Stopping(Kept):
    """Hangs, or hears a notice, when it has told a step."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        super().__init__()
        self.hangs_after = plan["stops_after"] if plan["hangs"] == rank else None
        self.hears_after = plan["stops_after"] if plan["notices"] == rank else None

    def emit(self, event: Event) -> None:
        super().emit(event)
        if isinstance(event, Step) and event.step == self.hangs_after:
            threading.Event().wait()
        if isinstance(event, Step) and event.step == self.hears_after:
            os.kill(os.getpid(), signal.SIGUSR1)


def leave(found: Path, end: dict[str, Any]) -> None:
    beside = found.with_suffix(".part")
    beside.write_text(json.dumps(end | {"at": time.monotonic()}))
    beside.rename(found)


def leave_last(found: Path, plan: dict[str, Any], env: RankEnv) -> None:
    """A rank that hangs ends when all others have ended."""
    others = [Path(f"{plan['out']}.{rank}.json") for rank in range(env.world_size)]
    others.remove(found)
    while not all(path.exists() for path in others):
        time.sleep(0.01)
    if not found.exists() and plan["hangs"] == env.rank:
        os._exit(0)


def train(plan: dict[str, Any], env: RankEnv, kept: Kept) -> None:
    settings, cpu, worker = make_settings(**plan["changes"]), torch.device("cpu"), f"CPU{env.rank}"
    drill, training = settings.debug.drill, settings.training
    settings = replace(settings, system=replace(settings.system, checkpoint_dir="checkpoints"))
    with (
        joined(
            env, cpu, lambda _: plan["wait_s"], settings.launch, lambda: len(kept.steps())
        ) as world,
        checkpoint_directory(Seeker(settings, worker), kept.say, world) as claim,
    ):
        context = dataclasses.replace(
            bare_context(kept),
            world=world,
            identity=Identity(worker, data={"content": plan["data"][env.rank]}),
            channels=Channels(kept.say, kept, is_quiet=not world.is_first),
            claim=claim,
            drill=parse_drill(drill, training.max_steps) if drill else None,
        )
        source = Shared(training.batch_size, training.context_length, world)
        with context.stop.installed(), context.stop.heeded():
            build_trainer(settings, source, VOCABULARY, context).run()
