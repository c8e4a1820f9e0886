"""argv -> what was asked for. Parses only; `launch` decides whether it can be done."""

import os
import re
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from launcher.compare.arms import BOTH, Arm, split_arms
from launcher.levels import DEFAULT, DETERMINISTIC, LEVELS, SEED
from launcher.verbs import RUN, VERBS, Verb, check_word, help_of
from model_check.config.arguments import (
    Parser,
    add_resume_option,
    add_settings_options,
    settings_request,
)
from model_check.config.dataset import WORDS
from model_check.config.fields import did_you_mean
from model_check.config.load import Request
from model_check.errors import UsageError
from model_check.utils.project_files import COMMAND

_TIME = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>[smh])")
_MODE = "launch.mode"
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_SETTINGS = (
    ("--gpus", "launch.gpus", "WHICH", "all | auto | auto:N | 0,2,5 | GPU-<uuid prefix>"),
    ("--gpu", "launch.gpus", "N", "same as --gpus N"),
    ("--require-idle", "launch.require_idle", "",
     "refuse GPUs that somebody else uses (exit code 69)"),
    ("--device", "system.device", "KIND", "auto | cuda | cpu"),
    ("--workers", "launch.workers", "N", "CPU workers, where no GPU is used (2)"),
    ("--mode", _MODE, "MODE", "replicate: one isolated, identical run a GPU; ddp: one job on all; "
     "fsdp: one whose model they share; compare: arms"),
    ("--seeds", "launch.seeds", "N",
     "how often each arm is trained, each time with another system.seed (1)"),
    ("--max-restarts", "launch.max_restarts", "N",
     "a job (ddp, fsdp) that failed goes on so often (0)"),
    ("--golden", "launch.golden", "FILE",
     "hold the workers against a golden file (report RUN --write-golden FILE)"),
    ("--grace", "launch.grace_s", "S", "seconds from SIGTERM to SIGKILL (10)"),
    ("--deadline", "launch.deadline_s", "S",
     "the run is over by then, start-up included; 0: none (0)"),
    ("--repeat", "launch.repeat", "N", "so many rounds, one report of all"),
    ("--soak", "launch.soak_s", "TIME", "rounds for so long: 90s, 30m, 8h"),
    ("--hang-timeout", "launch.hang_timeout_s", "S",
     "seconds of silence that are a hang; 0: never (300)"),
)  # fmt: skip
"""Option, setting, value (none: a switch), help."""


class RunArguments(Struct, frozen=True):
    """`run.sh [OPTIONS] [section.key=value ...] [-- COMMAND ...]`."""

    request: Request
    command: tuple[str, ...]
    """A foreign command to supervise; empty: our trainer."""
    run_dir: Path | None
    dry_run: bool
    as_json: bool
    plain: bool = False
    """On a terminal, too, each step is a line."""
    gpu_model: str | None = None
    """A GPU that need not be here: what the run would take on it."""
    quick: bool = False
    """Of the doctor: NVML and the history alone."""
    level: str = ""
    """Of `run.sh check`; empty: another verb, or none."""
    is_alone: bool = False
    """One worker, on the freest GPU, unless the settings say how many, or ask for a job."""
    arms: tuple[Arm, ...] = ()
    """Of a comparison."""


def parse_run(argv: Sequence[str], environ: Mapping[str, str], verb: Verb = RUN) -> RunArguments:
    """What a run, or a verb that asks about one, was asked for. Raises UsageError or ConfigError;
    `--help` prints and leaves with SystemExit(0)."""
    own, command = _split_command(argv)
    own, arms = split_arms(own)
    parser = parser_of(verb)
    names = parser.read(own)
    _take_mode(names, arms)
    _refuse_unsuitable(verb, names, command, arms)
    return RunArguments(
        request=settings_request(names, environ),
        command=command,
        run_dir=names.run_dir,
        dry_run=names.dry_run,
        as_json=names.json,
        plain=names.plain,
        gpu_model=names.gpu_model,
        quick=verb.name == "doctor" and names.quick,
        arms=arms,
    )


def parse_check(argv: Sequence[str], environ: Mapping[str, str]) -> RunArguments:
    """`check [LEVEL] [OPTIONS] [-- COMMAND]`: a run with the level's settings below all others.
    Raises as `parse_run`."""
    level, options = DEFAULT, [*argv]
    if argv and not argv[0].startswith("-") and "=" not in argv[0]:
        level, *options = argv
    if level not in LEVELS:
        hint = did_you_mean(level, LEVELS)
        raise UsageError(f"check: no such level: {level!r}; there are {', '.join(LEVELS)}{hint}")
    arguments = parse_run(options, environ, VERBS["check"])
    of_level = (f"check {level}", LEVELS[level])
    return replace(arguments, request=replace(arguments.request, level=of_level), level=level)


def parse_train(argv: Sequence[str], environ: Mapping[str, str]) -> RunArguments:
    """`train TEXT [OPTIONS]`: a run of the preset `train` on that text. Raises as `parse_run`."""
    if {"-h", "--help"} & {*argv}:
        return parse_run(argv, environ, VERBS["train"])
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        raise UsageError("train: give the text first: run.sh train texts/ [OPTIONS]")
    text, *options = argv
    if not ("/" in text or text in WORDS or os.path.exists(text)):
        raise UsageError(
            f"train {text}: no such file or directory ({os.path.abspath(text)}); for a dataset of "
            f"the hub with this name: run.sh --preset train data.dataset={text}"
        )
    options = ["--preset", "train", f"data.dataset={text}", *options]
    arguments = parse_run(options, environ, VERBS["train"])
    return replace(arguments, is_alone=True)


def _refuse_unsuitable(
    verb: Verb, names: Namespace, command: Sequence[str], arms: Sequence[Arm]
) -> None:
    """Raises UsageError."""
    if command and verb.starts_run and not verb.takes_command:
        raise UsageError(f"{verb.name}: `-- COMMAND` is for a run of your own command")
    if verb.name == "check" and not command and getattr(names, DETERMINISTIC):
        raise UsageError(
            "check: --deterministic is for `-- COMMAND`: our own training is deterministic unless "
            "system.deterministic is false"
        )
    of_run = (command, names.dry_run, names.run_dir, arms, names.gpu_model)
    if any(of_run) and not verb.starts_run:
        raise UsageError(
            f"{verb.name}: --dry-run, --gpu-model, --run-dir, --arm and -- COMMAND are for a run"
        )


def _take_mode(names: Namespace, arms: Sequence[Arm]) -> None:
    """Arms are for a comparison, whether it is asked for or not. Raises UsageError."""
    option, mode = getattr(names, _MODE) or ("--mode", "compare")
    if arms and mode.lower() != "compare":
        raise UsageError(f"--arm: {option} {mode} has no arms; --mode compare has")
    if arms:
        setattr(names, _MODE, (option, "compare"))


def parser_of(verb: Verb) -> Parser:
    """For a run, or a verb that takes a run's options."""
    command = " [-- COMMAND ...]" if verb.takes_command else ""
    usage = f"{COMMAND} {verb.usage}".strip() + f" [OPTIONS] [section.key=value ...]{command}"
    above, below = help_of(verb)
    parser = Parser(usage=usage, description=above, epilog=below)
    add_settings_options(parser, check_word)
    add_resume_option(parser)
    for option, setting, metavar, text in _SETTINGS:
        kind = _seconds if option in ("--deadline", "--soak") else None
        more = {"metavar": metavar, "type": kind} if metavar else {"nargs": 0, "const": True}
        parser.setting(setting, option, help=text, **more)
    of_run: Callable[[str], str] = str if verb.starts_run else lambda _: SUPPRESS
    add = parser.add_argument
    # `split_arms` has taken these out: here they are for --help.
    arm = of_run("an arm of --mode compare; two or more")
    add("--arm", nargs="+", metavar="NAME key=value", help=arm)
    add(BOTH, action="store_true", help=of_run("arms full and infini (model.attention)"))
    add("--run-dir", metavar="DIR", type=Path, help=of_run("exactly this run directory"))
    if verb.name == "check":
        seed = "of the random numbers that COMMAND, or our training, begins with (system.seed)"
        parser.setting(SEED, "--seed", metavar="N", help=seed)
        form = "COMMAND takes torch's deterministic operations, and others where it has none"
        parser.setting(DETERMINISTIC, "--deterministic", nargs=0, const=True, help=form)
    if verb.name == "doctor":
        quick = "NVML and the history of the GPUs alone, in 10 s at most"
        add("--quick", action="store_true", help=quick)
    lines = "each step as a line, as in a pipe, in place of the live table of a terminal"
    add("--plain", action="store_true", help=of_run(lines))
    add("--dry-run", action="store_true", help=of_run("print the plan, start nothing"))
    elsewhere = "with --dry-run: memory, time and MFU on a GPU that is not here (H100, A100, ...)"
    add("--gpu-model", metavar="NAME", help=of_run(elsewhere))
    add("--json", action="store_true", help="the plan (or a verb's answer) for machines")
    return parser


def _seconds(text: str) -> str:
    """`90s`, `30m`, `8h` -> the setting, in seconds. A number stays, to be judged as a setting.
    Raises ArgumentTypeError."""
    if (match := _TIME.fullmatch(text)) is not None:
        return str(float(match["number"]) * _UNITS_S[match["unit"]])
    with suppress(ValueError):
        float(text)
        return text
    raise ArgumentTypeError(f"{text!r} is no time: give seconds, or 90s, 30m, 8h")


def _split_command(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    if "--" not in argv:
        return list(argv), ()
    at = argv.index("--")
    if at + 1 == len(argv):
        raise UsageError("nothing after --: give the command to supervise")
    return list(argv[:at]), tuple(argv[at + 1 :])
