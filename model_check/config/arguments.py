"""The options that every entry point shares: --preset, --debug, --config, --max-steps, those about
data, section.key=value."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from model_check.config.data_options import add_data_options, data_flags
from model_check.config.fields import nearest
from model_check.config.load import Request
from model_check.errors import UsageError
from model_check.utils.project_files import version


class Parser(argparse.ArgumentParser):
    """argparse with our manners: `-` and `_` alike, no abbreviations, one message, the nearest
    option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )
        self.add_argument("--version", action=_PrintVersion, nargs=0, help="print it and leave")

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

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


class _PrintVersion(argparse.Action):
    """argparse's own action wants the text before anybody asked for it."""

    def __call__(self, *_: object) -> NoReturn:
        print(f"model-check {version()}")
        raise SystemExit(0)


def add_settings_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", metavar="NAME", help="a file of config/presets/")
    parser.add_argument("--debug", action="store_true", help="same as --preset debug")
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="JSON (comments allowed), YAML or TOML, partial"
    )
    parser.add_argument("--max-steps", metavar="N", help="training.max_steps")
    add_data_options(parser)
    parser.add_argument(
        "--disable-flash-attn", action="store_true", help="model.attention_backend=sdpa"
    )
    parser.add_argument("--tensorboard-dir", metavar="DIR", help="logging.tensorboard_dir")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def add_resume_option(parser: argparse.ArgumentParser) -> None:
    """For who trains; `--checkpoint` is another project's name for it."""
    text = "go on from a checkpoint: auto (the newest), a file or a directory (training.resume)"
    parser.add_argument("--resume", "--checkpoint", metavar="WHICH", help=text)


def resume_flag(namespace: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """What `add_resume_option`'s option stands for."""
    return {} if namespace.resume is None else {"training.resume": ("--resume", namespace.resume)}


def settings_request(
    namespace: argparse.Namespace,
    environ: Mapping[str, str],
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> Request:
    """What the shared options ask for, plus an entry point's own `flags` (name -> (flag,
    value))."""
    if namespace.debug and namespace.preset not in (None, "debug"):
        raise UsageError(f"--debug and --preset {namespace.preset}: give one of them")
    all_flags = data_flags(namespace) | dict(flags or {})
    if namespace.max_steps is not None:
        all_flags["training.max_steps"] = ("--max-steps", namespace.max_steps)
    if namespace.disable_flash_attn:
        all_flags["model.attention_backend"] = ("--disable-flash-attn", "sdpa")
    if namespace.tensorboard_dir is not None:
        all_flags["logging.tensorboard_dir"] = ("--tensorboard-dir", namespace.tensorboard_dir)
    return Request(
        preset="debug" if namespace.debug else namespace.preset,
        config_file=namespace.config,
        overrides=tuple(namespace.overrides),
        flags=all_flags,
        environ=environ,
    )


def _with_dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
