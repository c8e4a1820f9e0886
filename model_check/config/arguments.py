"""The options that every entry point shares: --preset, --debug, --config, --max-steps, those about
data, section.key=value. An option about a setting is that setting by another name, and each setting
is an option by its own name, and by those of `aliases`: --hidden-size 768."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from model_check.config.aliases import (
    ABSENT,
    ABSENT_VALUES,
    ALIASES,
    CONFIG_NAMES,
    UNNEEDED,
    VALUES,
    why_absent,
)
from model_check.config.fields import all_fields, did_you_mean, full_name
from model_check.config.load import Request, preset_names
from model_check.config.prepared_dir import read_metadata
from model_check.errors import UsageError
from model_check.utils.project_files import version
from model_check.utils.standard_streams import put

DEFAULT_OUTPUT_DIR = "preprocessed_data"
_AGAIN = "data.force_preprocess"
_COLUMNS = 80

Flags = dict[str, tuple[str, Any]]
"""Dotted name -> (flag, value)."""


class Parser(argparse.ArgumentParser):
    """argparse with our manners: `-` and `_` alike, no abbreviations, one message, the nearest
    option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )
        self.check_word: Callable[[str], object] | None = None
        """Refuses what stands in the place of section.key=value; None: no setting is taken."""
        self.register("type", Path, _path)
        self.add_argument("--version", action=_PrintVersion, nargs=0, help="print it and leave")

    def setting(self, name: str, *options: str, **more: Any) -> None:
        """Add options that are the setting `name` by other names."""
        self.add_argument(*options, dest=name, action=KeepSetting, **more)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse; raises UsageError instead of leaving the process."""
        arguments = [with_dashes(argument) for argument in argv]
        if self.check_word:
            self._add_settings(arguments)
        namespace, unknown = self.parse_known_intermixed_args(arguments)
        for argument in arguments:
            if argument in unknown:
                raise self._refused(argument)
            if self.check_word and argument in namespace.overrides:
                self.check_word(argument)
        return namespace

    def _add_settings(self, arguments: Sequence[str]) -> None:
        """The options among them that no entry point declares, and that are settings. --help does
        not list them."""
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
            option, equals, _ = argument.partition("=")
            key = option.removeprefix("--").replace("-", "_")
            if not option.startswith("--") or option in self._option_string_actions:
                continue
            name = full_name(key)
            is_known = name in UNNEEDED or ALIASES.get(name, name) in all_fields()
            if is_known and option not in ABSENT:
                is_alone = not equals and not _is_word_for(name, following)
                more = {"nargs": 0, "const": "true"} if _is_switch(name) and is_alone else {}
                self.setting(name, option, help=argparse.SUPPRESS, **more)

    def _refused(self, argument: str) -> UsageError:
        option = argument.partition("=")[0]
        if why := why_absent(option):
            return UsageError(f"{option}: {why}")
        known = [name for action in self._actions for name in action.option_strings]
        if self.check_word:
            known += [f"--{name}" for name in _setting_options()]
        hint = did_you_mean(option, known)
        return UsageError(f"{argument}: no such option{hint} (--help lists them)")

    def _check_value(self, action: argparse.Action, value: str) -> None:
        if action.choices is not None and value not in action.choices:
            hint, known = did_you_mean(value, action.choices), ", ".join(action.choices)
            raise UsageError(f"{value!r}: none of {known}{hint} (--help lists the options)")

    def _print_message(self, message: str, _: object = None) -> None:
        """The help: argparse hides that it could not be written."""
        put(message, end="")

    def format_help(self) -> str:
        self.description, self.epilog = map(_filled, (self.description, self.epilog))
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def _path(text: str) -> Path:
    """`~` is a home, also where the shell left it (`--run-dir=~/a`). Empty is a variable of a
    script that is not set: not the working directory, which Path makes of it. Raises
    ArgumentTypeError."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(os.path.expanduser(text))


def _filled(text: str | None) -> str | None:
    """Paragraphs that are wider than a terminal of 80 columns, anew; others, and those with
    indented lines (examples), as they are."""
    import textwrap

    paragraphs = (text or "").split("\n\n")
    return "\n\n".join(
        p
        if "\n " in p or max(map(len, p.split("\n"))) <= _COLUMNS
        else textwrap.fill(" ".join(p.split()), _COLUMNS)
        for p in paragraphs
    )


def _is_switch(name: str) -> bool:
    """Whether the option of that name may stand without a value."""
    if name in UNNEEDED:
        return UNNEEDED[name].is_switch
    field = all_fields()[ALIASES.get(name, name)]
    return field.is_bool or bool(field.choices and "true" in VALUES.get(name, {}))


def _is_word_for(name: str, following: str) -> bool:
    """Whether what follows a switch is its value: `--mixed-precision fp16`, `--compile false`."""
    setting = ALIASES.get(name, name)
    choices = all_fields()[setting].choices if setting in all_fields() else ()
    words = (*choices, *VALUES.get(name, {}), *ABSENT_VALUES.get(setting, {}))
    return following.lower() in ("true", "false", *words)


def _setting_options() -> list[str]:
    """`max-iters`: the settings and their other names, as options."""
    keys = [name.rpartition(".")[2] for name in (*all_fields(), *ALIASES)]
    return [key.replace("_", "-") for key in keys]


_REPLACED = "replaced"
"""Of a namespace: a line for each value that a later one took the place of."""


class KeepSetting(argparse.Action):
    """Of an option that is the setting `dest` by another name: keeps (option, value)."""

    def __call__(self, _: object, names: object, values: Any, option: str | None = None) -> None:
        value = self.const if self.nargs == 0 else values
        before, old = getattr(names, self.dest) or (option, value)
        if before != option:
            raise UsageError(f"{before} and {option} are the same option: give one of them")
        if old != value:
            again = f"{option} {value} takes the place of {option} {old}"
            setattr(names, _REPLACED, (*getattr(names, _REPLACED, ()), again))
        setattr(names, self.dest, (option, value))


class _PrintVersion(argparse.Action):
    """argparse's own action wants the text before anybody asked for it."""

    def __call__(self, *_: object) -> NoReturn:
        put(f"model-check {version()}")
        raise SystemExit(0)


def add_settings_options(parser: Parser, check_word: Callable[[str], object] = str) -> None:
    parser.check_word = check_word
    add = parser.add_argument
    files = "a file of config/presets/"
    for option, text in (("--preset", files), ("--config-name", argparse.SUPPRESS)):
        add(option, dest="preset", action=KeepSetting, metavar="NAME", help=text)
    add("--debug", action="store_true", help="same as --preset debug")
    formats = "JSON (with // comments), YAML or TOML, partial"
    for option, text in (("--config", formats), ("--config-file", argparse.SUPPRESS)):
        add(option, dest="config", action=KeepSetting, metavar="FILE", type=Path, help=text)
    steps, logs, kernel = "training.max_steps", "logging.tensorboard_dir", "model.attention_backend"
    parser.setting(steps, "--max-steps", metavar="N", help=steps)
    _add_data_options(parser)
    sdpa = f"{kernel}=sdpa"
    parser.setting(kernel, "--disable-flash-attn", nargs=0, const="sdpa", help=sdpa)
    full = "model.attention"
    parser.setting(full, "--disable-infini-attn", nargs=0, const="full", help=f"{full}=full")
    parser.setting(logs, "--tensorboard-dir", metavar="DIR", help=logs)
    as_option = (
        "also as an option: --hidden-size 768; names of other trainers:\ndocs/coming-from.md"
    )
    add("overrides", nargs="*", metavar="section.key=value", help=as_option)


def add_resume_option(parser: Parser) -> None:
    """For an entry point that trains; `--checkpoint` is another project's name for it."""
    text = "go on from a checkpoint: auto (the newest), a file or a directory (training.resume)"
    parser.setting("training.resume", "--resume", "--checkpoint", metavar="WHICH", help=text)


def settings_request(
    namespace: argparse.Namespace, environ: Mapping[str, str], prepares: Flags | None = None
) -> Request:
    """What the options ask for. `prepares`: the entry point prepares data, and made these flags of
    several options. Raises UsageError for options that do not go together."""
    option, preset = namespace.preset or ("", None)
    if preset is not None and option == "--config-name":
        preset = _preset_of(preset)
    if namespace.debug and preset not in (None, "debug"):
        raise UsageError(f"--debug and {option} {preset}: give one of them")
    named = {name for name in vars(namespace) if "." in name or name in UNNEEDED}
    settings = {name: flag for name, flag in vars(namespace).items() if name in named and flag}
    return Request(
        preset="debug" if namespace.debug else preset,
        config_file=None if namespace.config is None else namespace.config[1],
        overrides=tuple(namespace.overrides),
        flags=_data_flags(namespace, prepares is not None) | (prepares or {}) | settings,
        environ=environ,
        notes=getattr(namespace, _REPLACED, ()),
    )


def _preset_of(config_name: str) -> str:
    """The preset for another project's name of a configuration. Raises UsageError where there is
    none yet."""
    name = config_name.replace("-", "_")
    preset = CONFIG_NAMES.get(name, config_name)
    why = ABSENT.get(f"--config-name={name}")
    if why is None and preset not in preset_names():
        why = "no such preset; a settings file of your own is --config FILE"
    if why is not None:
        there_are = ", ".join(preset_names())
        raise UsageError(f"--config-name {config_name}: {why}; presets are {there_are}")
    return preset


def given(namespace: argparse.Namespace, setting: str) -> Any:
    """What an option gave for `setting`; None: no option did."""
    return (getattr(namespace, setting) or ("", None))[1]


def _add_data_options(parser: Parser) -> None:
    add = parser.add_argument
    ready = "a prepared directory to train from (data.dataset)"
    add("--preprocessed-data", "--data-dir", action=KeepSetting, metavar="DIR", help=ready)
    raw = "text to prepare (data.dataset), and to train from"
    add("--raw-data", "--input-dir", action=KeepSetting, metavar="PATH", help=raw)
    out = f"where --raw-data is prepared to (data.output_dir, {DEFAULT_OUTPUT_DIR})"
    add("--output-dir", metavar="DIR", help=out)
    again = "prepare again (data.force_preprocess)"
    parser.setting(_AGAIN, "--force-preprocess", nargs=0, const="true", help=again)
    offline = "never ask the hub (data.offline)"
    parser.setting("data.offline", "--offline-mode", nargs=0, const="true", help=offline)


def _data_flags(names: argparse.Namespace, prepares: bool) -> Flags:
    """Where the data is and goes. Raises UsageError for options that do not go together, paths that
    do not exist, or a directory that is not a prepared one."""
    as_raw, raw = names.raw_data or ("", None)
    as_ready, ready = names.preprocessed_data or ("", None)
    output = names.output_dir
    again = given(names, _AGAIN)
    if again and ready and raw is None:
        raise UsageError("--force-preprocess: give the text to prepare again too (--raw-data PATH)")
    if raw and ready and not again:
        raise UsageError(
            f"{as_raw} and {as_ready}: give one; with --force-preprocess the text is prepared into "
            "the directory again"
        )
    if ready is not None and output is not None:
        raise UsageError(f"{as_ready} and --output-dir name the same thing: give one")
    if raw is not None:
        _must_exist(as_raw, raw)
        target = ready or output or DEFAULT_OUTPUT_DIR
        return {
            "data.dataset": (as_raw, raw),
            "data.output_dir": (as_ready or "--output-dir", target),
        }
    if ready is not None:
        _must_exist(as_ready, ready)
        if read_metadata(Path(ready).expanduser()) is None:
            raise UsageError(
                f"{as_ready} {ready}: not a prepared directory (no metadata.json); "
                "--raw-data PATH prepares one"
            )
        return {"data.dataset": (as_ready, ready)}
    if output is not None and not prepares:  # of Hugging Face's Trainer it is the checkpoints'
        raise UsageError(
            f"--output-dir {output}: is where --raw-data is prepared to, and there is none; "
            f"--save-dir {output} (system.checkpoint_dir) is where checkpoints go"
        )
    return {} if output is None else {"data.output_dir": ("--output-dir", output)}


def _must_exist(option: str, path: str) -> None:
    if not Path(path).expanduser().exists():
        raise UsageError(f"{option} {path}: no such file or directory")


def with_dashes(argument: str) -> str:
    """An option with `-` for `_`; a setting that was given as one without its dashes."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    if "." in name:  # --training.max_steps=3: the setting itself, in the way of Hydra
        return argument.removeprefix("--")
    return name.replace("_", "-") + equals + value
