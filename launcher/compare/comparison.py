"""A comparison that was asked for: its arms, whose settings are checked, and which training of them
runs when and where. Nothing of it has started."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from launcher import run_dir
from launcher.arguments import RunArguments
from launcher.compare.arms import BOTH, Arm, Seat, refuse_overruled
from launcher.contain.processes import began_at
from launcher.devices import Hold, Machine, Picked, is_asked_for, pick
from launcher.gpus.probe import GpuProbe
from launcher.gpus.reservation import free
from launcher.gpus.sizes import fitted, memory_gib
from launcher.launch import notes_on_kernel_log, works_beside_others
from launcher.plan import Place
from model_check.config.derived import precision, segment_length
from model_check.config.fields import all_fields, value_of
from model_check.config.inert import acting
from model_check.config.load import Loaded, load
from model_check.config.schema import Settings
from model_check.errors import ConfigError, UsageError
from model_check.utils.words import listed

_NOT_COMPARED = {
    "launch.repeat": "--seeds N trains each arm N times",
    "launch.soak_s": "--seeds N trains each arm N times",
    "launch.golden": "a golden file is of one training",
}


class Trial(Struct, frozen=True):
    """One training of one arm."""

    arm: Arm
    seed: int
    title: str
    """`infini`; where there are several seeds, `infini seed 43`."""
    directory: Path
    """Within that of the comparison, of `.checkpoints` and of TensorBoard's logs."""
    places: tuple[Place, ...]


class Comparison(Struct, frozen=True):
    """What was asked for and can be done."""

    arguments: RunArguments
    loaded: Mapping[str, Loaded]
    """Arm -> its settings."""
    picked: Picked
    turns: tuple[tuple[Trial, ...], ...]
    """Those of a turn run side by side; the next turn begins when all have ended."""
    environ: Mapping[str, str]
    run_dir: Path
    is_busy: bool
    """Other processes work on these cores, before any of ours does."""
    began_at: float = field(default_factory=began_at)
    """When this process did, monotonic seconds."""

    @property
    def common(self) -> Loaded:
        """Settings of the first arm, for those that are one for all arms."""
        return next(iter(self.loaded.values()))

    @property
    def seeds(self) -> list[int]:
        return _seeds(self.common.settings)

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
    def used(self) -> dict[str, Place]:
        """The places with work, by name."""
        return {p.name: p for turn in self.turns for trial in turn for p in trial.places}

    @property
    def differing(self) -> dict[str, dict[str, Any]]:
        """Setting -> arm -> its value, of the settings that are not the same in all arms."""
        trees = {name: _resolved(loaded.settings) for name, loaded in self.loaded.items()}
        every = {
            setting: {name: value_of(tree, setting) for name, tree in trees.items()}
            for setting in all_fields()
        }
        return {name: values for name, values in every.items() if _differ(list(values.values()))}


def make_comparison(
    arguments: RunArguments, probe: GpuProbe, environ: Mapping[str, str], hold: Hold
) -> Comparison:
    """Raises ModelCheckError before anything is touched."""
    _check_arms(arguments)
    refuse_overruled(arguments.request, arguments.arms)
    machine = Machine(probe, environ)
    loaded = {arm.name: load(arm.of(arguments.request), machine.has_gpu) for arm in arguments.arms}
    common = next(iter(loaded.values()))
    _refuse_what_acts_nowhere(loaded)
    for name, of_arm in loaded.items():
        _check_segments(name, of_arm.settings)
    _check_launch(common)
    seeds, replicas = _seeds(common.settings), common.settings.launch.replicas
    needed = len(loaded) * len(seeds) * replicas
    picked = pick(_with_places(common, machine, needed), machine, hold)
    places = picked.places[:needed]
    if len(places) < replicas:
        raise UsageError(f"launch.replicas = {replicas}: {len(places)} is all there is")
    turns = plan_turns(arguments.arms, seeds, places, replicas)
    loaded, notes = _fitted(loaded, arguments, places)
    gpus = [place.gpu for place in places if place.gpu]
    more_notes = (*notes, *_notes_on_kinds(places), *notes_on_kernel_log(gpus, machine))
    picked = replace(picked, notes=(*picked.notes, *more_notes))
    _preflight(turns, loaded)
    directory = arguments.run_dir or run_dir.default_path(common.settings.logging.log_dir)
    return Comparison(
        arguments, loaded, picked, turns, environ, directory.absolute(), works_beside_others()
    )


def plan_turns(
    arms: Sequence[Arm], seeds: Sequence[int], places: Sequence[Place], replicas: int
) -> tuple[tuple[Trial, ...], ...]:
    """All arms with the first seed, then all with the next. Where there is room for all arms, those
    with one seed run beside each other: what the machine does meanwhile, it does to all. From turn
    to turn they change places: a slow GPU is not one arm's. Each training gets `replicas` places.
    """
    slots = [
        tuple(places[at : at + replicas]) for at in range(0, len(places) - replicas + 1, replicas)
    ]
    num = len(slots) // len(arms) * len(arms) or len(slots)
    pairs = [(arm, seed) for seed in seeds for arm in arms]
    groups = [pairs[at : at + num] for at in range(0, len(pairs), num)]
    turns_of_seed = -(-len(arms) // num)
    return tuple(
        tuple(
            _trial(*pair, slots[(at + number // turns_of_seed) % len(slots)], len(seeds) == 1)
            for at, pair in enumerate(group)
        )
        for number, group in enumerate(groups)
    )


def seat_of(trial: Trial, comparison: Comparison, left_s: float | None) -> Seat:
    """What the launcher of this training is told. `left_s`: its deadline in seconds; None: none."""
    settings = comparison.loaded[trial.arm.name].settings
    decided: dict[str, Any] = {
        "launch.mode": "replicate",
        "launch.seeds": 1,
        "launch.replicas": 1,
        "system.seed": trial.seed,
        "system.checkpoint_dir": _checkpoint_dir(trial, settings),
    }
    if gpus := [place.gpu.uuid for place in trial.places if place.gpu]:
        decided["launch.gpus"] = ",".join(gpus)
    else:
        decided["launch.workers"] = len(trial.places)
    if left_s is not None:
        decided["launch.deadline_s"] = round(left_s, 3)
    return Seat(
        tag=tag_of(trial, comparison),
        run_dir=str(comparison.run_dir / trial.directory),
        run_name=f"{comparison.run_dir.name}/{trial.directory}",
        preset=comparison.loaded[trial.arm.name].preset,
        settings=decided,
        workers=_drilled(trial.arm, list(comparison.used)),
        first_slot=trial.places[0].index,
        num_beside=len(comparison.turns[0]),
        is_busy=comparison.is_busy,
    )


def _checkpoint_dir(trial: Trial, settings: Settings) -> str:
    return str(Path(settings.system.checkpoint_dir) / trial.directory)


def tag_of(trial: Trial, comparison: Comparison) -> str:
    """What stands behind the name at the beginning of each of its lines."""
    seed = f"[seed {trial.seed}] " if len(comparison.seeds) > 1 else ""
    return f"[{trial.arm.name}] {seed}"


def _trial(arm: Arm, seed: int, places: tuple[Place, ...], is_one: bool) -> Trial:
    if is_one:
        return Trial(arm, seed, arm.name, Path(arm.name), places)
    title, directory = f"{arm.name} seed {seed}", run_dir.seed_path(Path(arm.name), seed)
    return Trial(arm, seed, title, directory, places)


def _seeds(settings: Settings) -> list[int]:
    first = settings.system.seed
    return list(range(first, first + settings.launch.seeds))


def _resolved(settings: Settings) -> Settings:
    """As it trains: the precision by its name, and the default for what does nothing."""
    training = replace(settings.training, precision=precision(settings.training))
    return acting(replace(settings, training=training))


def _drilled(arm: Arm, everyone: list[str]) -> tuple[str, ...]:
    """Who may be named by a drill: of all arms anybody, of its own whom it has."""
    return () if "debug.drill" in arm.layer[1] else tuple(everyone)


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def _check_arms(arguments: RunArguments) -> None:
    """Raises UsageError."""
    if len(arguments.arms) < 2:
        raise UsageError(f"--mode compare: give two arms: --arm NAME key=value ..., or {BOTH}")
    if arguments.command:
        raise UsageError("--mode compare is for our trainer: leave `-- COMMAND` out")


def _refuse_what_acts_nowhere(loaded: Mapping[str, Loaded]) -> None:
    """Raises ConfigError for a setting given to all arms that does nothing in any of them."""
    if nowhere := frozenset.intersection(*(each.inert for each in loaded.values())):
        name = min(nowhere)
        value = next(iter(loaded.values())).value(name)
        raise ConfigError(f"{name} = {value}: changes nothing in any arm: leave it out")


def _check_segments(name: str, settings: Settings) -> None:
    """Raises ConfigError where an arm would be full attention by another name."""
    length, context_length = segment_length(settings), settings.training.context_length
    if length is not None and length >= context_length:
        raise ConfigError(
            f"--arm {name}: model.infini.segment_length = {length}: {context_length} tokens are "
            "one segment, so this arm would be full attention: a shorter segment, or a longer "
            "training.context_length"
        )


def _check_launch(loaded: Loaded) -> None:
    """Raises UsageError for what a comparison has no use for."""
    for name, instead in _NOT_COMPARED.items():
        if loaded.value(name) != all_fields()[name].default:
            raise UsageError(f"--mode compare: without {name}: {instead}")


def _with_places(loaded: Loaded, machine: Machine, needed: int) -> Loaded:
    """As many places as there is work for: of those asked for, else of the GPUs that are free."""
    launch = loaded.settings.launch
    if loaded.device == "cpu":
        is_asked = is_asked_for(loaded, "launch.workers")
        room = launch.workers if is_asked else max(launch.workers, launch.replicas)
        launch = replace(launch, workers=min(room, needed))
    elif not is_asked_for(loaded, "launch.gpus"):
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


def _notes_on_kinds(places: Sequence[Place]) -> list[str]:
    kinds = dict.fromkeys(place.kind for place in places)
    if len(kinds) == 1:
        return []
    return [f"not of one kind: {listed(list(kinds))}: the speed of arms does not compare"]


def _preflight(turns: Sequence[Sequence[Trial]], loaded: Mapping[str, Loaded]) -> None:
    """What can be known to fail in an arm, before one of them starts. What may fail is said by its
    own launcher. Raises ConfigError and StorageError."""
    from launcher.doctor.preflight import check_memory, check_training

    everyone = [place.name for turn in turns for trial in turn for place in trial.places]
    checked: set[tuple[str, tuple[Place, ...]]] = set()
    for turn in turns:
        for trial in turn:
            if (trial.arm.name, trial.places) not in checked:
                checked.add((trial.arm.name, trial.places))
                settings = loaded[trial.arm.name].settings
                system = replace(settings.system, checkpoint_dir=_checkpoint_dir(trial, settings))
                settings = replace(settings, system=system)
                check_training(settings, trial.places, _drilled(trial.arm, everyone))
    if not any(trial.places[0].gpu for trial in turns[0]):
        for arms in {tuple(t.arm.name for t in turn for _ in t.places) for turn in turns}:
            check_memory([loaded[name].settings for name in arms])
