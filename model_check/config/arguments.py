"""The options that every entry point shares: --preset, --debug, --config, --max-steps, those about
data, section.key=value. An option about a setting is that setting by another name."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from model_check.config.fields import nearest
from model_check.config.load import Request
from model_check.config.prepared_dir import read_metadata
from model_check.errors import UsageError
from model_check.utils.project_files import version

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
        self.add_argument("--version", action=_PrintVersion, nargs=0, help="print it and leave")

    def setting(self, name: str, *options: str, **more: Any) -> None:
        """Add options that are the setting `name` by other names."""
        self.add_argument(*options, dest=name, action=KeepSetting, **more)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse; raises UsageError instead of leaving the process."""
        arguments = [_with_dashes(argument) for argument in argv]
        namespace, unknown = self.parse_known_intermixed_args(arguments)
        for argument in unknown:
            known = [option for action in self._actions for option in action.option_strings]
            near = nearest(argument.partition("=")[0], known)
            hint = f"; did you mean {near}?" if near else ""
            raise UsageError(f"{argument}: no such option{hint} (--help lists them)")
        return namespace

    def format_help(self) -> str:
        self.description, self.epilog = map(_filled, (self.description, self.epilog))
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def _filled(text: str | None) -> str | None:
    """Paragraphs that are wider than a terminal of 80 columns, anew; others as they are."""
    import textwrap

    paragraphs = (text or "").split("\n\n")
    return "\n\n".join(
        p
        if max(map(len, p.split("\n"))) <= _COLUMNS
        else textwrap.fill(" ".join(p.split()), _COLUMNS)
        for p in paragraphs
    )


class KeepSetting(argparse.Action):
    """Of an option that is the setting `dest` by another name: keeps (option, value)."""

    def __call__(self, _: object, names: object, values: Any, option: str | None = None) -> None:
        before, _ = getattr(names, self.dest) or (option, None)
        if before != option:
            raise UsageError(f"{before} and {option} are the same option: give one of them")
        setattr(names, self.dest, (option, self.const if self.nargs == 0 else values))


class _PrintVersion(argparse.Action):
    """argparse's own action wants the text before anybody asked for it."""

    def __call__(self, *_: object) -> NoReturn:
        print(f"model-check {version()}")
        raise SystemExit(0)


def add_settings_options(parser: Parser) -> None:
    add = parser.add_argument
    add("--preset", metavar="NAME", help="a file of config/presets/")
    add("--debug", action="store_true", help="same as --preset debug")
    formats = "JSON (comments allowed), YAML or TOML, partial"
    add("--config", metavar="FILE", type=Path, help=formats)
    steps, logs, kernel = "training.max_steps", "logging.tensorboard_dir", "model.attention_backend"
    parser.setting(steps, "--max-steps", metavar="N", help=steps)
    _add_data_options(parser)
    sdpa = f"{kernel}=sdpa"
    parser.setting(kernel, "--disable-flash-attn", nargs=0, const="sdpa", help=sdpa)
    parser.setting(logs, "--tensorboard-dir", metavar="DIR", help=logs)
    add("overrides", nargs="*", metavar="section.key=value")


def add_resume_option(parser: Parser) -> None:
    """For an entry point that trains; `--checkpoint` is another project's name for it."""
    text = "go on from a checkpoint: auto (the newest), a file or a directory (training.resume)"
    parser.setting("training.resume", "--resume", "--checkpoint", metavar="WHICH", help=text)


def settings_request(
    namespace: argparse.Namespace, environ: Mapping[str, str], flags: Flags | None = None
) -> Request:
    """What the options ask for, plus `flags` that an entry point made of several. Raises UsageError
    for options that do not go together."""
    if namespace.debug and namespace.preset not in (None, "debug"):
        raise UsageError(f"--debug and --preset {namespace.preset}: give one of them")
    settings = {name: flag for name, flag in vars(namespace).items() if "." in name and flag}
    return Request(
        preset="debug" if namespace.debug else namespace.preset,
        config_file=namespace.config,
        overrides=tuple(namespace.overrides),
        flags=_data_flags(namespace) | (flags or {}) | settings,
        environ=environ,
    )


def given(namespace: argparse.Namespace, setting: str) -> Any:
    """What an option gave for `setting`; None: no option did."""
    return (getattr(namespace, setting) or ("", None))[1]


def _add_data_options(parser: Parser) -> None:
    add = parser.add_argument
    ready = "a prepared directory to train from (data.dataset)"
    add("--preprocessed-data", "--data-dir", metavar="DIR", help=ready)
    raw = "text to prepare (data.dataset), and to train from"
    add("--raw-data", "--input-dir", metavar="PATH", help=raw)
    out = f"where --raw-data is prepared to (data.output_dir, {DEFAULT_OUTPUT_DIR})"
    add("--output-dir", metavar="DIR", help=out)
    again = "prepare again (data.force_preprocess)"
    parser.setting(_AGAIN, "--force-preprocess", nargs=0, const="true", help=again)
    offline = "never ask the hub (data.offline)"
    parser.setting("data.offline", "--offline-mode", nargs=0, const="true", help=offline)


def _data_flags(names: argparse.Namespace) -> Flags:
    """Where the data is and goes. Raises UsageError for options that do not go together, paths that
    do not exist, or a directory that is not a prepared one."""
    raw, ready, output = names.raw_data, names.preprocessed_data, names.output_dir
    again = given(names, _AGAIN)
    if again and ready and raw is None:
        raise UsageError("--force-preprocess: give the text to prepare again too (--raw-data PATH)")
    if raw and ready and not again:
        raise UsageError(
            "--raw-data and --preprocessed-data: give one; with --force-preprocess the text is "
            "prepared into the directory again"
        )
    if ready is not None and output is not None:
        raise UsageError("--preprocessed-data and --output-dir name the same thing: give one")
    if raw is not None:
        _must_exist("--raw-data", raw)
        target = ready or output or DEFAULT_OUTPUT_DIR
        flag = "--output-dir" if ready is None else "--preprocessed-data"
        return {"data.dataset": ("--raw-data", raw), "data.output_dir": (flag, target)}
    if ready is not None:
        _must_exist("--preprocessed-data", ready)
        if read_metadata(Path(ready).expanduser()) is None:
            raise UsageError(
                f"--preprocessed-data {ready}: not a prepared directory (no metadata.json); "
                "--raw-data PATH prepares one"
            )
        return {"data.dataset": ("--preprocessed-data", ready)}
    return {} if output is None else {"data.output_dir": ("--output-dir", output)}


def _must_exist(option: str, path: str) -> None:
    if not Path(path).expanduser().exists():
        raise UsageError(f"{option} {path}: no such file or directory")


def _with_dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    if "." in name:  # --training.max_steps=3: the setting itself, in the way of Hydra
        return argument.removeprefix("--")
    return name.replace("_", "-") + equals + value
