"""A run that was asked for: its settings, places and limits, checked before anything starts."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from launcher import run_dir
from launcher.arguments import RunArguments
from launcher.devices import Machine, Picked, pick
from launcher.doctor.limits import check_command
from launcher.gpus.probe import GpuProbe
from launcher.plan import Surroundings, WorkerSpec, plan_command, plan_training
from launcher.supervise.policy import Limits
from model_check.config.load import Loaded, load
from model_check.utils.project_files import PROJECT

ROOT = Path(__file__).resolve().parents[1]


class Session(Struct, frozen=True):
    """A run that was asked for and can be done; nothing of it has started."""

    arguments: RunArguments
    loaded: Loaded
    picked: Picked
    around: Surroundings

    @property
    def specs(self) -> list[WorkerSpec]:
        places = self.picked.places
        if self.arguments.command:
            return plan_command(places, self.arguments.command, self.around)
        return plan_training(places, self.around)

    @property
    def not_compared(self) -> str | None:
        """Why bits of workers are not held against each other; None: they are."""
        if self.arguments.command:
            return "a foreign command may train something else on every GPU"
        if not self.loaded.settings.system.deterministic:
            return "system.deterministic is false"
        return None

    @property
    def groups(self) -> Mapping[str, str]:
        """Worker -> those who must agree with it bit for bit; alone when nothing is compared."""
        if self.not_compared:
            return {place.name: place.name for place in self.picked.places}
        return self.picked.groups

    @property
    def limits(self) -> Limits:
        launch = self.loaded.settings.launch
        silence_s = launch.hang_timeout_s
        if self.arguments.command and self.loaded.sources["launch.hang_timeout_s"] == "default":
            silence_s = 0.0  # a foreign command may be silent for as long as it likes
        return Limits(grace_s=launch.grace_s, silence_s=silence_s)


def open_session(
    arguments: RunArguments, probe: GpuProbe, environ: Mapping[str, str], *, hold: bool
) -> Session:
    """Settings, places and directory name; raises ModelCheckError before anything is touched.

    `hold`: reserve the GPUs (a dry run only looks).
    """
    machine = Machine(probe, environ)
    loaded = load(arguments.request, machine.has_gpu)
    picked = pick(loaded, machine, hold=hold)
    system = replace(loaded.settings.system, device=loaded.device)
    settings = replace(loaded.settings, system=system)
    directory = arguments.run_dir or run_dir.default_path(settings.logging.log_dir)
    around = Surroundings(
        root=PROJECT,
        python=sys.executable,
        environ=environ,
        run_dir=directory.absolute(),
        num_cores=len(os.sched_getaffinity(0)),
    )
    if arguments.command:
        notes = check_command(len(picked.places))
    else:
        from launcher.doctor.preflight import (
            check_training,  # a command's start does not wait for it
        )

        notes = check_training(settings, picked.places)
    picked = replace(picked, notes=(*picked.notes, *notes))
    return Session(arguments, replace(loaded, settings=settings), picked, around)
