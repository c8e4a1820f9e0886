"""A rank, as a program for `nursery`, which finds what it may go on from in the directories
disk/0, disk/1, ... of its node: a line for each training.resume in PLAN["asked"]."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from model_check.config.schema import Settings
from model_check.dist.job import joined
from model_check.engine.run_context import Identity
from model_check.engine.saving.resume import find
from model_check.engine.state import TrainingState
from model_check.errors import CheckpointError
from model_check.utils.worker_env import RankEnv


def main(plan: dict[str, Any]) -> None:
    env = RankEnv.from_environ(os.environ)
    assert env is not None
    os.chdir(plan["nodes"][env.rank])
    with joined(env, torch.device("cpu"), lambda _: 60.0) as world:
        for number, which in enumerate(plan["asked"]):
            channels: Any = SimpleNamespace(say=lambda _: None)
            context = SimpleNamespace(
                directory=Path("disk") / str(number),
                channels=channels,
                world=world,
                identity=Identity("CPU0"),
            )
            try:
                state = SimpleNamespace(context=context, settings=Settings())
                found = find(which, cast(TrainingState, state))
                print("nothing" if found is None else f"{found[0]} {found[1]['step']}")
            except CheckpointError as error:
                print(error)
