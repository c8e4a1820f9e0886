"""A comparison that was asked for: its arms, whose settings are checked, and which training of them
runs when and where. Nothing of it has started."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from launcher import run_dir
from launcher.arguments import RunArguments
from launcher.compare.arms import BOTH, Arm, refuse_overruled
from launcher.contain.processes import began_at
from launcher.devices import Hold, Machine, Picked, is_asked_for, pick
from launcher.gpus.probe import GpuProbe
from launcher.gpus.reservation import free
from launcher.gpus.sizes import fitted, memory_gib
from launcher.launch import works_beside_others
from launcher.plan import Place, thread_variables
from launcher.verdict.comparison import TrialRecord
from model_check.config.attention import KINDS
from model_check.config.derived import precision
from model_check.config.drill import worker_of
from model_check.config.fields import all_fields, value_of
from model_check.config.inert import acting, nobody_gave
from model_check.config.load import ENVIRONMENT, Loaded, Request, load, with_checkpoints
from model_check.config.schema import Settings
from model_check.errors import ConfigError, UsageError
from model_check.utils.cores import usable_cores
from model_check.utils.words import listed

_NOT_COMPARED = {
    "launch.repeat": "--seeds N trains each arm N times",
    "launch.soak_s": "--seeds N trains each arm N times",
    "launch.golden": "a golden file is of one training",
}
_OF_ALL = (
    *("launch.mode", "launch.seeds", "launch.replicas"),
    # We have looked, and trainings of our own may have worked there until now.
    *("launch.require_idle", "launch.expect_gpus"),
)
"""Settings of the comparison, not of its trainings."""


class Comparison(Struct, frozen=True):
    """What was asked for and can be done."""

    arguments: RunArguments
    loaded: Mapping[str, Loaded]
    """Arm -> its settings."""
    picked: Picked
    turns: tuple[tuple[TrialRecord, ...], ...]
    """Those of a turn run side by side; the next turn begins when all have ended."""
    environ: Mapping[str, str]
    """Of each training."""
    run_dir: Path
    began_at: float = field(default_factory=began_at)
    """When this process did, monotonic seconds."""

    @property
    def common(self) -> Loaded:
        """Settings of the first arm, for those that are one for all arms."""
        return next(iter(self.loaded.values()))

    @property
    def places(self) -> dict[str, Place]:
        return {place.name: place for place in self.picked.places}

    @property
    def order(self) -> str:
        """In words: side by side, or in turn."""
        num, on = sum(map(len, self.turns)), listed(list(self.used))
        room = len(self.turns[0])
        if room == num:
            return f"{num} trainings side by side on {on}"
        if room == 1:
            return f"{num} trainings one after the other on {on}: there is room for one at a time"
        return f"{num} trainings in {len(self.turns)} turns of {room} on {on}"

    @property
    def used(self) -> dict[str, None]:
        """The names of places with work."""
        return dict.fromkeys(w for turn in self.turns for trial in turn for w in trial.workers)

    @property
    def differing(self) -> dict[str, dict[str, Any]]:
        """Setting -> arm -> its value, of the settings that are not the same in all arms."""
        trees = {name: _resolved(loaded.settings) for name, loaded in self.loaded.items()}
        every = {
            setting: {name: value_of(tree, setting) for name, tree in trees.items()}
            for setting in all_fields()
        }
        return {
            name: values
            for name, values in every.items()
            if any(value != next(iter(values.values())) for value in values.values())
        }


def make_comparison(
    arguments: RunArguments, probe: GpuProbe, environ: Mapping[str, str], hold: Hold
) -> Comparison:
    """Raises ModelCheckError before anything is touched."""
    if len(arguments.arms) < 2:
        raise UsageError(f"--mode compare: give two arms: --arm NAME key=value ..., or {BOTH}")
    if arguments.command:
        raise UsageError("--mode compare is for our trainer: leave `-- COMMAND` out")
    refuse_overruled(arguments.request, arguments.arms)
    machine = Machine(probe, environ)
    loaded = {arm.name: load(arm.of(arguments.request), machine.has_gpu) for arm in arguments.arms}
    common = next(iter(loaded.values()))
    _check(loaded)
    seeds, replicas = seeds_of(common.settings), common.settings.launch.replicas
    needed = len(loaded) * len(seeds) * replicas
    picked = pick(_with_places(common, machine, needed), machine, hold)
    places = picked.places[:needed]
    if len(places) < replicas:
        raise UsageError(f"launch.replicas = {replicas}: {len(places)} is all there is")
    turns = plan_turns(arguments.arms, seeds, places, replicas)
    loaded, notes = _fitted(loaded, arguments, places)
    if len(kinds := dict.fromkeys(place.kind for place in places)) > 1:
        notes += [f"not of one kind: {listed([*kinds])}: the speed of arms does not compare"]
    picked = replace(picked, notes=(*picked.notes, *notes))
    directory = arguments.run_dir or run_dir.default_path(common.settings.logging.log_dir)
    num_workers = len(turns[0]) * replicas
    its_environ = _environ_of_trainings(environ, num_workers)
    comparison = Comparison(arguments, loaded, picked, turns, its_environ, directory.absolute())
    _preflight(comparison)
    return comparison


def plan_turns(
    arms: Sequence[Arm], seeds: Sequence[int], places: Sequence[Place], replicas: int
) -> tuple[tuple[TrialRecord, ...], ...]:
    """All arms with the first seed, then all with the next. Where there is room for all arms, those
    with one seed run beside each other: what the machine does meanwhile, it does to all. From turn
    to turn they change places: a slow GPU is not one arm's. Each training gets `replicas` places.
    """
    names = [place.name for place in places]
    slots = [names[at : at + replicas] for at in range(0, len(names) - replicas + 1, replicas)]
    num = len(slots) // len(arms) * len(arms) or len(slots)
    pairs = [(arm.name, seed) for seed in seeds for arm in arms]
    groups = [pairs[at : at + num] for at in range(0, len(pairs), num)]
    turns_of_seed = -(-len(arms) // num)
    return tuple(
        tuple(
            TrialRecord(
                arm=arm,
                seed=seed,
                directory=arm if len(seeds) == 1 else str(run_dir.seed_path(Path(arm), seed)),
                workers=slots[(at + number // turns_of_seed) % len(slots)],
            )
            for at, (arm, seed) in enumerate(group)
        )
        for number, group in enumerate(groups)
    )


def asked_of(trial: TrialRecord, comparison: Comparison, left_s: float | None) -> Request:
    """What is asked for of this training: what a person gives, and what was decided for it.
    `left_s`: its deadline in seconds; None: none. Raises ConfigError."""
    loaded = loaded_of(trial, comparison)
    settings, first = loaded.settings, comparison.places[trial.workers[0]]
    values = {
        **{n: loaded.value(n) for n, source in loaded.sources.items() if not nobody_gave(source)},
        "system.seed": trial.seed,
        "system.checkpoint_dir": settings.system.checkpoint_dir,
        "logging.tensorboard_dir": settings.logging.tensorboard_dir,
        "training.save_last": settings.training.save_last,
    }
    if first.gpu is None:
        values |= {"launch.workers": len(trial.workers), "launch.first_worker": first.index}
    else:
        gpus = [comparison.places[name].gpu for name in trial.workers]
        values["launch.gpus"] = ",".join(gpu.uuid for gpu in gpus if gpu)
    if left_s is not None:
        values["launch.deadline_s"] = round(left_s, 3)
    left_out = {*_OF_ALL, *_drill_of_others(trial, comparison)}
    layer = {name: value for name, value in values.items() if name not in left_out}
    return Request(loaded.preset, environ=comparison.environ, arm=((trial.directory, layer),))


def loaded_of(trial: TrialRecord, comparison: Comparison) -> Loaded:
    """The settings of its arm, with checkpoints of its own."""
    loaded = comparison.loaded[trial.arm]
    place = Path(loaded.settings.system.checkpoint_dir) / trial.directory
    system = replace(loaded.settings.system, checkpoint_dir=str(place))
    loaded = replace(loaded, settings=acting(replace(loaded.settings, system=system)))
    if comparison.arguments.level:
        return loaded
    return with_checkpoints(loaded, num_copies=len(trial.workers))


def seeds_of(settings: Settings) -> list[int]:
    first = settings.system.seed
    return list(range(first, first + settings.launch.seeds))


def _drill_of_others(trial: TrialRecord, comparison: Comparison) -> list[str]:
    """The setting of a drill, where all arms are given it and it names a worker of another one."""
    loaded = comparison.loaded[trial.arm]
    text, is_own = loaded.value("debug.drill"), loaded.sources["debug.drill"].startswith("--arm ")
    if text is None or is_own:
        return []
    return ["debug.drill"] if worker_of(text) in comparison.used.keys() - {*trial.workers} else []


def _environ_of_trainings(environ: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """`num_workers`: of the fullest turn. A training has as many threads in each turn, and these
    wait as in the first one, unless a person decided."""
    return {
        **thread_variables(usable_cores() // num_workers),
        **({"OMP_WAIT_POLICY": "passive"} if works_beside_others() else {}),
        **{name: value for name, value in environ.items() if name not in ENVIRONMENT},
    }


def _resolved(settings: Settings) -> Settings:
    """As it trains: the precision by its name, and the default for what does nothing."""
    training = replace(settings.training, precision=precision(settings.training))
    return acting(replace(settings, training=training))


def _check(loaded: Mapping[str, Loaded]) -> None:
    """Raises ConfigError for a setting given to all arms that does nothing in any of them, and
    where an arm would be full attention by another name; UsageError for what a comparison has no
    use for."""
    common = next(iter(loaded.values()))
    for name in sorted(frozenset.intersection(*(each.inert for each in loaded.values()))):
        value = common.value(name)
        raise ConfigError(f"{name} = {value}: changes nothing in any arm: leave it out")
    for name, each in loaded.items():
        if why := KINDS[each.settings.model.attention].same_as_full(each.settings):
            raise ConfigError(
                f"--arm {name}: {why}, so this arm would be full attention: a shorter segment, or "
                "a longer training.context_length"
            )
    for name, instead in _NOT_COMPARED.items():
        if common.value(name) != all_fields()[name].default:
            raise UsageError(f"--mode compare: without {name}: {instead}")


def _with_places(loaded: Loaded, machine: Machine, needed: int) -> Loaded:
    """Where nobody says which: the GPUs that are free, as many as there is work for."""
    launch, on_cpu = loaded.settings.launch, loaded.device == "cpu"
    if is_asked_for(loaded, "launch.workers" if on_cpu else "launch.gpus"):
        return loaded
    if on_cpu:
        launch = replace(launch, workers=max(launch.workers, launch.replicas))
    else:
        num_free = min(needed, len(free(machine.visible)))
        launch = replace(launch, gpus=f"auto:{max(launch.replicas, num_free)}")
    return replace(loaded, settings=replace(loaded.settings, launch=launch))


def _fitted(
    loaded: Mapping[str, Loaded], arguments: RunArguments, places: Sequence[Place]
) -> tuple[dict[str, Loaded], list[str]]:
    """With one size of preset for all arms, that the smallest GPU can take; and a line about it."""
    gpus = [place.gpu for place in places if place.gpu]
    requests = {arm.name: arm.of(arguments.request) for arm in arguments.arms}
    each = {
        name: fitted(loaded[name], request, memory_gib(gpus)) for name, request in requests.items()
    }
    notes = dict.fromkeys(note for _, notes in each.values() for note in notes)
    return {name: settings for name, (settings, _) in each.items()}, list(notes)


def _preflight(comparison: Comparison) -> None:
    """What can be known to fail in an arm, before one of them starts. What may fail is said by its
    own launcher. Raises ConfigError and StorageError."""
    from launcher.doctor.preflight import check_memory, check_training

    on_gpus = comparison.common.device == "cuda"
    for turn in comparison.turns:
        requests = [asked_of(trial, comparison, None) for trial in turn]
        settings = [load(request, lambda: on_gpus).settings for request in requests]
        for trial, its_settings in zip(turn, settings, strict=True):
            check_training(its_settings, [comparison.places[name] for name in trial.workers])
        if not on_gpus:
            check_memory([each for each in settings for _ in turn[0].workers])
