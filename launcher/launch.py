"""A run that was asked for: its settings, places and limits, checked before anything starts."""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from launcher import run_dir
from launcher.arguments import RunArguments
from launcher.compare.arms import BOTH
from launcher.contain.processes import began_at
from launcher.devices import Hold, Machine, Picked, pick
from launcher.doctor.machine import check_command
from launcher.gpus.probe import Gpu, GpuProbe
from launcher.gpus.sizes import fitted, memory_gib
from launcher.history.gpu_history import GpuHistory, path_of
from launcher.levels import DETERMINISTIC, MAX_STEPS, SEED, notes_on_level
from launcher.nodes.absence import Absence
from launcher.nodes.failures import silence_limit_s
from launcher.nodes.interfaces import check_interfaces
from launcher.nodes.job import check_job, nodes_of_job, note_on_nodes
from launcher.plan import LaunchContext, WorkerSpec, plan_command, plan_training
from launcher.supervise.policy import MOMENT_S, Limits
from launcher.telemetry.kernel_log import UNLISTED, against, read_kernel_log, unlisted
from launcher.verdict.golden import Golden
from launcher.verdict.observer import NEVER
from launcher.verdict.own_command import CheckedCommand, words_of
from model_check.config.checkpoint_settings import checkpoints_at
from model_check.config.layers import command_line
from model_check.config.load import Loaded, load, with_checkpoints
from model_check.config.ranks import JOBS
from model_check.config.resume import AUTO
from model_check.config.schema import LaunchSettings, Settings
from model_check.errors import ConfigError, UsageError
from model_check.utils.cores import usable_cores
from model_check.utils.evidence import EVIDENCE_S
from model_check.utils.secrets import masked_argv
from model_check.utils.slurm import SlurmStep

_MOST_CROWDED = 10.0
"""A load of more processes a core makes nobody wait longer."""


class Launch(Struct, frozen=True):
    """A run that was asked for and can be done; nothing of it has started."""

    arguments: RunArguments
    loaded: Loaded
    picked: Picked
    context: LaunchContext
    began_at: float = field(default_factory=began_at)
    """When this process did, monotonic seconds."""
    started_at: float = field(default_factory=time.time)
    """When it was planned, seconds since the epoch."""
    check: CheckedCommand | None = None
    """Of a command of a person's own; None: our trainer, or a command that is compared with
    nothing."""
    golden: Golden | None = None
    """The file that launch.golden names."""
    nodes: SlurmStep | None = None
    """Those of its job; None: the job is this node's alone, or it is none."""
    goes_on_from: Path | None = None
    """The checkpoint that a restart was given; None: it begins as it began."""
    absence: Absence = field(default_factory=Absence)
    """From their meeting, until this launcher comes there."""

    def in_directory(self, directory: Path) -> "Launch":
        return replace(self, context=replace(self.context, run_dir=directory))

    @property
    def specs(self) -> list[WorkerSpec]:
        places, context = self.picked.places, replace(self.context, held=self._held)
        if self.arguments.command:
            return plan_command(places, self.arguments.command, context, self.check)
        return plan_training(places, context)

    @property
    def is_job(self) -> bool:
        """Whether the workers are the ranks of one."""
        return self.context.num_ranks is not None

    @property
    def _held(self) -> frozenset[str]:
        """The workers with equals: Watch gives them credit."""
        sizes = Counter(self.groups.values())
        return frozenset(name for name, group in self.groups.items() if sizes[group] > 1)

    @property
    def not_compared(self) -> str | None:
        """Why the bits of workers are not compared; None: they are."""
        if self.arguments.command:
            what = "a foreign command may train something else on every GPU"
            return what if self.check is None else None
        # Ranks sum their gradients: what follows is the same on all, whatever kernels do.
        if not (self.loaded.settings.system.deterministic or self.is_job):
            return "system.deterministic is false"
        return None

    @property
    def groups(self) -> dict[str, str]:
        """Worker -> the group whose members must agree bit for bit; its own where nothing is
        compared."""
        is_compared = self.not_compared is None
        return {p.name: p.kind if is_compared else p.name for p in self.picked.places}

    @property
    def history(self) -> GpuHistory | None:
        """Of its GPUs; None: the settings ask for none."""
        path = path_of(self.loaded.settings.launch.history_file, self.context.environ)
        return None if path is None else GpuHistory(path)

    @property
    def limits(self) -> Limits:
        launch = self.loaded.settings.launch
        silence_s = launch.hang_timeout_s
        if self.arguments.command and self.loaded.sources["launch.hang_timeout_s"] == "default":
            # A foreign command may be silent for as long as it likes.
            silence_s = 0.0
        deadline_s = launch.deadline_s
        until = self.began_at + deadline_s if deadline_s else NEVER
        # On a busy machine workers start one after the other.
        load = os.getloadavg()[0] / self.context.num_cores
        num_here = len(self.picked.places)
        return Limits(
            launch.grace_s,
            silence_s,
            moment_s=MOMENT_S * min(max(1.0, load), _MOST_CROWDED),
            until=until,
            deadline_s=deadline_s,
            is_job=self.is_job,
            num_distant=(self.context.num_ranks or num_here) - num_here,
            elsewhere_s=2 * EVIDENCE_S + self.node_silence_s,
        )

    @property
    def node_silence_s(self) -> float:
        """How long another node may be silent."""
        return silence_limit_s(self.loaded.settings.launch.rank_timeout_s)


def has_rounds(launch: LaunchSettings) -> bool:
    """Also where it is one: who asks for rounds finds each in a directory of its own."""
    return launch.repeat is not None or launch.soak_s > 0


def make_launch(
    arguments: RunArguments, probe: GpuProbe, environ: Mapping[str, str], hold: Hold
) -> Launch:
    """Settings, places and directory name. Raises ModelCheckError before anything is touched."""
    machine = Machine(probe, environ)
    loaded = load(arguments.request, machine.has_gpu)
    if loaded.settings.launch.mode == "compare":
        raise UsageError(f"--mode compare: give two arms: --arm NAME key=value ..., or {BOTH}")
    is_job = loaded.settings.launch.mode in JOBS  # it takes all GPUs
    if (arguments.is_alone and not is_job) or _goes_on_alone(loaded.settings, arguments):
        loaded = _alone(loaded)
    _refuse_rounds_that_go_on(loaded)
    if arguments.command and loaded.settings.debug.drill:
        raise ConfigError("debug.drill acts in our trainer alone: a command of yours has no drill")
    picked = pick(loaded, machine, hold)
    gpus = [place.gpu for place in picked.places if place.gpu]
    more_notes = [*loaded.notes, *notes_on_kernel_log(gpus, machine)]
    if not arguments.command:
        loaded, size_notes = fitted(loaded, arguments.request, memory_gib(gpus))
        more_notes += size_notes
        if not arguments.level:
            loaded = with_checkpoints(loaded, num_copies=1 if is_job else len(picked.places))
    check = _check_of(arguments, loaded)
    if arguments.level:
        more_notes += notes_on_level(arguments.level, loaded, {gpu.name for gpu in gpus}, check)
    picked = replace(picked, notes=(*picked.notes, *more_notes))
    system = replace(loaded.settings.system, device=loaded.device)
    settings = replace(loaded.settings, system=system)
    nodes = nodes_of_job(environ) if is_job else None
    num_here = len(picked.places)
    context = _context(arguments, settings, environ, num_here, nodes)
    if is_job:
        num_nodes = 1 if nodes is None else nodes.num_nodes
        check_job(settings, picked.places, arguments.command, num_nodes)
        check_interfaces(environ, is_here_alone=num_nodes == 1, on_gpus=bool(gpus))
    if arguments.command:
        notes = check_command(len(picked.places))
    else:
        # The start of a foreign command does not wait for this import.
        from launcher.doctor.packages import refuse_old_driver
        from launcher.doctor.preflight import check_training

        if gpus:
            refuse_old_driver(picked.snapshot)
        checked = check_training(settings, picked.places, context.num_ranks)
        notes = [*loaded.decisions, *checked]
    if is_job and (note := note_on_nodes(environ, nodes, num_here)):
        notes = [*notes, note]
    picked = replace(picked, notes=(*picked.notes, *notes))
    loaded = replace(loaded, settings=settings)
    launch = Launch(arguments, loaded, picked, context, check=check, nodes=nodes)
    return launch if settings.launch.golden is None else _with_golden(launch, settings)


def _check_of(arguments: RunArguments, loaded: Loaded) -> CheckedCommand | None:
    """By the command line and the level of a check: a preset, and a settings file, are for our own
    training."""
    if not (arguments.command and arguments.level):
        return None
    request = arguments.request
    typed = {label for label, _ in command_line(request.overrides, request.flags)}
    _, of_level = request.level or ("", {})

    def asked(name: str) -> Any:
        return loaded.value(name) if loaded.sources[name] in typed else of_level.get(name)

    return CheckedCommand(
        seed=asked(SEED),
        deterministic=bool(asked(DETERMINISTIC)),
        max_steps=asked(MAX_STEPS),
        words=words_of(masked_argv(arguments.command)),
    )


def _context(
    arguments: RunArguments,
    settings: Settings,
    environ: Mapping[str, str],
    num_here: int,
    nodes: SlurmStep | None,
) -> LaunchContext:
    """`num_here`: workers. As if each of several nodes had as many, until they meet."""
    is_job = settings.launch.mode in JOBS
    directory = arguments.run_dir or run_dir.default_path(settings.logging.log_dir)
    if nodes is not None:
        directory = run_dir.node_path(directory, nodes.node, is_named=bool(arguments.run_dir))
    return LaunchContext(
        environ=environ,
        run_dir=directory.absolute(),
        num_cores=usable_cores(),
        is_busy=works_beside_others(),
        num_ranks=num_here * (1 if nodes is None else nodes.num_nodes) if is_job else None,
        first_rank=0 if nodes is None else num_here * nodes.node,
        has_other_nodes=nodes is not None,
        node=0 if nodes is None else nodes.node,
        comparison=run_dir.comparison_of(directory.absolute()),
    )


def notes_on_kernel_log(gpus: Sequence[Gpu], machine: Machine) -> list[str]:
    """A line for each thing that the kernel has told of these GPUs before, or of one that NVML does
    not list."""
    if not gpus:
        return []
    logged = read_kernel_log()
    lost = unlisted(machine.snapshot.gpus, logged)
    return [
        *(f"{gpu.label}: before this run: {symptom}" for gpu, symptom in against(gpus, logged)),
        *(f"kernel log: PCI {each.address}, {UNLISTED}: {each.symptom}" for each in lost),
    ]


def works_beside_others() -> bool:
    """Whether other processes work on these cores now."""
    return os.getloadavg()[0] > usable_cores() / 2


def _with_golden(launch: Launch, settings: Settings) -> Launch:
    """Raises ConfigError where nothing could be held against the file, UsageError where it cannot
    be read."""
    from launcher.report.golden import read_golden  # a run without one does not wait for it

    name = str(settings.launch.golden)
    if launch.not_compared is not None:
        why = f"it would be compared with nothing, since {launch.not_compared}"
        raise ConfigError(f"launch.golden = {name}: {why}; leave it out")
    golden = read_golden(Path(name))
    if (why_not := golden.why_not(launch.check)) is not None:
        raise ConfigError(f"launch.golden = {name}: {why_not}; leave it out")
    return replace(launch, golden=golden)


def _refuse_rounds_that_go_on(loaded: Loaded) -> None:
    """Raises UsageError where the second round would begin with what the first one saved."""
    if not has_rounds(loaded.settings.launch):
        return
    both = "--repeat and --soak compute the same steps in each round, from the start of training"
    if loaded.settings.training.resume is not None:
        raise UsageError(f"{both}: without --resume")
    if loaded.settings.launch.max_restarts:
        raise UsageError(f"{both}: without --max-restarts")


def _goes_on_alone(settings: Settings, arguments: RunArguments) -> bool:
    """Whether it goes on from a checkpoint that one worker has written."""
    resume, mode = settings.training.resume, settings.launch.mode
    if resume in (None, AUTO) or mode != "replicate" or arguments.command:
        return False
    try:
        return bool(checkpoints_at(Path(str(resume))))
    except OSError:
        return False


def _alone(loaded: Loaded) -> Loaded:
    """One worker, where nobody said how many."""
    name, value = ("gpus", "auto") if loaded.device == "cuda" else ("workers", 1)
    if loaded.sources[f"launch.{name}"] != "default":
        return loaded
    launch = replace(loaded.settings.launch, **{name: value})
    return replace(loaded, settings=replace(loaded.settings, launch=launch))
