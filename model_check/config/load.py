"""Sources -> one checked Settings: defaults < preset < file < environment < section.key=value <
flag.

Pure, but that it reads the preset, the settings file and the metadata of a prepared directory, and
looks whether validation text exists, and whether the working directory can be written. A callback
tells whether there is a GPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from model_check.config.aliases import ALIASES
from model_check.config.backends import check_on_device
from model_check.config.checkpoint_settings import resumed_layer
from model_check.config.conflicts import check_together, check_validation_text
from model_check.config.derived import (
    failing_severities,
    num_micro_batches,
    precision,
)
from model_check.config.fields import (
    all_fields,
    did_you_mean,
    flatten,
    nested,
    sections,
    value_of,
)
from model_check.config.files import read_settings_file
from model_check.config.geometry import SIZES, geometry_values, shape_of_weights
from model_check.config.inert import acting, check_acts
from model_check.config.layers import Layer, command_line, in_settings, replaced
from model_check.config.nanotron import from_nanotron, is_nanotron
from model_check.config.places import FALLBACK, fallback_note, fallbacks
from model_check.config.prepared_dir import check_fits, check_stage, prepared_directory, settings_of
from model_check.config.resume import AUTO, COUNTS, check_first_weights
from model_check.config.schema import Settings
from model_check.config.training_defaults import checkpoints, completed, decided
from model_check.errors import ConfigError
from model_check.utils.project_files import PROJECT

SCHEMA = 1
PRESETS_DIR = PROJECT / "config" / "presets"

# The environment carries a worker's place in its run, not settings; these variables are documented
# exceptions.
ENVIRONMENT = {
    "DATASET_CACHE_DIR": "data.cache_dir",
    "HF_HUB_OFFLINE": "data.offline",
    "MODEL_CHECK_HISTORY_FILE": "launch.history_file",
}

# huggingface_hub's own words for yes. It takes anything else for no; we refuse anything else.
_HUB_WORDS = {"1": "true", "ON": "true", "YES": "true", "TRUE": "true"}
_HUB_WORDS |= {"0": "false", "OFF": "false", "NO": "false", "FALSE": "false"}


class Request(Struct, frozen=True):
    """What a command line says about settings."""

    preset: str | None = None
    config_file: Path | None = None
    overrides: tuple[str, ...] = ()
    """`section.key=value`, in order."""
    flags: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Name of a setting -> (flag, value). Flags win over every other source."""
    environ: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Options that were given twice: a line each."""
    level: Layer | None = None
    """Of a check: what its level says, over the preset and below all that a person gives."""
    arm: tuple[Layer, ...] = ()
    """Of an arm of a comparison: its settings, which win over all others, and what was decided for
    this training of it."""


class Loaded(Struct, frozen=True):
    settings: Settings
    sources: Mapping[str, str]
    """Dotted name -> where its value came from: `default`, `preset debug`, `my.json`,
    `--max-steps`."""
    preset: str
    device: str
    """`cuda` or `cpu`: system.device with `auto` decided."""
    notes: tuple[str, ...] = ()
    """What was given and changes nothing: a line each."""
    inert: frozenset[str] = frozenset()
    """The settings among it."""
    decisions: tuple[str, ...] = ()
    """What was decided for a training and nobody asked for: a line each."""

    def value(self, name: str) -> Any:
        """A setting by its dotted name; the names are those of `sources`."""
        return value_of(self.settings, name)

    @property
    def asked_for(self) -> dict[str, Any]:
        """The settings that neither the preset nor a default gave."""
        given = ("default", FALLBACK, f"preset {self.preset}")
        return {name: self.value(name) for name, s in self.sources.items() if s not in given}


def load(request: Request, has_gpu: Callable[[], bool]) -> Loaded:
    """Merge and check everything. Raises ConfigError; nothing is half applied.

    `has_gpu` is called only when system.device is `auto`.
    """
    given, told = _upper_layers(request)
    upper, notes = in_settings(given)
    named = _preset_layers(request.preset, "") if request.preset else []
    level = [request.level] if request.level else []
    device = _device([*named, *level, *upper], has_gpu)
    preset = request.preset or ("production" if device == "cuda" else "cpu")
    presets = [*_preset_layers(preset, device), *level]
    weights = _first_weights(upper)
    shapes = _geometry_layers(presets, upper, weights)
    resumed = _resumed_layers(upper)
    prepared = prepared_directory(_last([*resumed, *upper], "data.dataset")[1] or "")
    if prepared is not None:
        check_stage(*prepared, *_last(presets, "training.stage"))
    # A prepared directory's own settings lie over the presets, below all that a person says.
    beneath = [] if prepared is None else [(str(prepared[0]), settings_of(prepared[1]))]
    places = (FALLBACK, fallbacks(request.environ))
    values: dict[str, Any] = {name: f.default for name, f in all_fields().items()}
    sources = dict.fromkeys(values, "default")
    for label, layer in [places, *presets, *beneath, *resumed, *shapes, *_parts(upper), *upper]:
        _lay_over(values, sources, layer, label)
    if prepared is not None:
        check_fits(*prepared, values, sources)
    settings = msgspec.convert(nested(values), Settings)
    check_first_weights(weights, settings.model)
    settings, sources, lines = completed(settings, sources)
    check_together(settings, sources)
    file = str(request.config_file or "") or None
    of_arm = {ALIASES.get(n, n) for _, layer in request.arm for n in layer} if request.arm else None
    inert = check_acts(settings, sources, file, of_arm)
    notes = (*told, *notes, *inert.values())
    over = f", also over those of preset {preset}" if request.preset else ""
    known = [f"{label}: its settings are taken where none is given{over}" for label, _ in resumed]
    decisions = (*fallback_note(sources, settings), *known, *lines)
    if prepared is None:  # a prepared directory holds what validates; its text may be gone
        check_validation_text(settings, sources)
    check_on_device(settings, sources, device)
    return Loaded(settings, sources, preset, device, notes, frozenset(inert), decisions)


def with_checkpoints(loaded: Loaded, *, num_copies: int) -> Loaded:
    """What is loaded, for a training that so many workers do alike: with its checkpoints."""
    decision = checkpoints(loaded.settings, loaded.sources, num_copies)
    if decision is None:
        return loaded
    settings, sources = decided(loaded.settings, loaded.sources, decision)
    decisions = (*loaded.decisions, decision.note)
    return msgspec.structs.replace(loaded, settings=settings, sources=sources, decisions=decisions)


def to_json(settings: Settings) -> bytes:
    """The whole tree as a settings file with its schema number: loading it alone gives the same
    training again."""
    settings = acting(settings)
    # Both ways to count a batch, to say the precision, and what fails a run, are written in
    # agreement, since a reader may give only one.
    training = msgspec.structs.replace(
        settings.training,
        grad_accum_nums=num_micro_batches(settings),
        use_amp=precision(settings.training) != "fp32",
    )
    launch = msgspec.structs.replace(settings.launch, fail_on=failing_severities(settings.launch))
    resolved = msgspec.structs.replace(settings, training=training, launch=launch)
    tree = {"schema": SCHEMA, **msgspec.to_builtins(resolved)}
    return msgspec.json.format(msgspec.json.encode(tree), indent=2) + b"\n"


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS_DIR.glob("*.json"))


def _upper_layers(request: Request) -> tuple[list[Layer], list[str]]:
    """What a person says, in its order: file, environment, overrides, flags; and what the file says
    that is not taken."""
    layers, notes = ([], []) if request.config_file is None else _file_layers(request.config_file)
    for variable, name in ENVIRONMENT.items():
        text = request.environ.get(variable)
        if text or (text == "" and all_fields()[name].may_be_empty):
            text = _HUB_WORDS.get(text.upper(), text) if variable == "HF_HUB_OFFLINE" else text
            layers.append((variable, flatten({name: text}, variable, text=True)))
    typed = list(command_line(request.overrides, request.flags))
    return [*layers, *typed, *request.arm], [*notes, *request.notes, *replaced(typed)]


def _file_layers(path: Path) -> tuple[list[Layer], list[str]]:
    values = read_settings_file(path)
    if (schema := values.pop("schema", SCHEMA)) != SCHEMA:
        raise ConfigError(f"{path}: schema {schema!r}: written by another version")
    if "on_cpu" in values:
        takes_it = f"--preset {path.stem}, or " if path.stem in preset_names() else ""
        raise ConfigError(f"{path}: on_cpu: only a preset has it: {takes_it}leave it out")
    notes = []
    if is_nanotron(values):
        values, note = from_nanotron(values, str(path))
        notes.append(note)
    # YAML 1.1 reads 1e-5 as a string.
    as_text = path.suffix.lower() in (".yaml", ".yml")
    return [(str(path), flatten(values, str(path), text=as_text))], notes


def _preset_layers(preset: str, device: str) -> list[Layer]:
    if preset not in preset_names():
        there_are = ", ".join(preset_names())
        hint = did_you_mean(preset, preset_names())
        raise ConfigError(f"--preset {preset}: no such preset (there are {there_are}){hint}")
    path = PRESETS_DIR / f"{preset}.json"
    values = read_settings_file(path)
    on_cpu = values.pop("on_cpu", {})
    layers = [(f"preset {preset}", flatten(values, str(path)))]
    if device == "cpu" and on_cpu:
        layers.append((f"preset {preset} (on_cpu)", flatten(on_cpu, f"{path}: on_cpu")))
    return layers


def _last(layers: Sequence[Layer], name: str) -> tuple[str, Any]:
    """The label of the last layer that gives the setting `name`, and its value; None: none does."""
    given = [(label, layer[name]) for label, layer in layers if name in layer]
    return given[-1] if given else ("", None)


def _device(layers: Sequence[Layer], has_gpu: Callable[[], bool]) -> str:
    _, asked = _last(layers, "system.device")
    if asked in (None, "auto"):
        return "cuda" if has_gpu() else "cpu"
    return str(asked)


def _geometry_layers(
    presets: Sequence[Layer], upper: Sequence[Layer], weights: Mapping[str, Any]
) -> list[Layer]:
    """What model.geometry stands for, else the shape of the first weights, `weights`, whose
    tokenizer `auto` finds."""
    label, geometry = _last(upper if weights else [*presets, *upper], "model.geometry")
    if geometry is None or _gives_a_model(upper):
        of_weights = {**weights, "data.tokenizer": "auto"}
        return [("the weights of model.init_from", of_weights)] if weights else []
    _, offline = _last(upper, "data.offline")
    values = geometry_values(geometry, offline=bool(offline))
    flat = flatten({"model": values}, f"{label}: model.geometry = {geometry}")
    return [(f"geometry {geometry}", flat)]


def _first_weights(upper: Sequence[Layer]) -> dict[str, Any]:
    """The shape of those that model.init_from names, by names of settings."""
    label, name = _last(upper, "model.init_from")
    if name is None or _gives_a_model(upper):
        return {}
    _, offline = _last(upper, "data.offline")
    where = f"{label}: model.init_from = {name}"
    return flatten({"model": shape_of_weights(name, offline=bool(offline))}, where)


def _resumed_layers(upper: Sequence[Layer]) -> list[Layer]:
    """The settings of the checkpoint that training.resume names."""
    _, resume = _last(upper, "training.resume")
    if resume in (None, AUTO) or _gives_a_model(upper):
        return []
    if (found := resumed_layer(resume)) is None:
        return []
    label, values = found
    flat = flatten(values, label)
    if any(name in layer for _, layer in upper for name in COUNTS):  # each excludes the others
        flat = {name: value for name, value in flat.items() if name not in COUNTS}
    return [(label, flat)]


def _gives_a_model(upper: Sequence[Layer]) -> bool:
    """Whether a person gives every key of a shape, as the resolved settings of a run do: the file
    or directory that it came from may be gone, the hub out of reach."""
    # `model.rope_scaling.factor` gives `model.rope_scaling`.
    given = {".".join(name.split(".")[:2]) for _, layer in upper for name in layer}
    return given >= {f"model.{key}" for key in SIZES["tiny"]}


def _parts(upper: Sequence[Layer]) -> Iterator[Layer]:
    """Whoever gives the width of a model, or its heads, gives a geometry of their own: what a
    preset says for another width is derived, unless they give it, too."""
    for name, follows in (
        ("model.hidden_size", "model.intermediate_size"),
        ("model.num_heads", "model.num_kv_heads"),
    ):
        if _last(upper, name)[1] is not None:
            yield f"follows {name}", {follows: None}


def _lay_over(
    values: dict[str, Any], sources: dict[str, str], layer: Mapping[str, Any], label: str
) -> None:
    for name, value in layer.items():
        if name in sections():  # a section set to null: its settings are gone
            for inner in [n for n in values if n.startswith(f"{name}.")]:
                del values[inner], sources[inner]
        elif (section := name.rpartition(".")[0]) in values:  # it was null and is opened again
            del values[section], sources[section]
            fresh = {n: f for n, f in all_fields().items() if n.startswith(f"{section}.")}
            values.update({n: f.default for n, f in fresh.items()})
            sources.update(dict.fromkeys(fresh, "default"))
        values[name] = value
        sources[name] = label
