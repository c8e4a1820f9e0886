"""A rank, by torchrun's variables: what it finds of each training.resume among its arguments, in
the directories disk/0, disk/1, ...; a line each."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from model_check.config.schema import Settings
from model_check.engine.distributed.job import joined
from model_check.engine.run_context import Identity
from model_check.engine.saving.resume import find
from model_check.engine.state import TrainingState
from model_check.errors import CheckpointError
from model_check.utils.worker_env import RankEnv

with joined(RankEnv.from_environ(), torch.device("cpu"), lambda _: 60.0) as world:
    for number, which in enumerate(sys.argv[1:]):
        channels: Any = SimpleNamespace(say=lambda _: None)
        place = Path("disk") / str(number)
        context = SimpleNamespace(
            directory=place, channels=channels, world=world, identity=Identity("CPU0")
        )
        try:
            state = SimpleNamespace(context=context, settings=Settings())
            found = find(which, cast(TrainingState, state))
            print("nothing" if found is None else f"{found[0]} {found[1]['step']}")
        except CheckpointError as error:
            print(error)
