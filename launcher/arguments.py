"""argv -> what was asked for. Parses only; `launch` decides whether it can be done."""

import os
import re
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from launcher.compare.arms import BOTH, SEAT, Arm, Seat, split_arms
from launcher.levels import DEFAULT, LEVELS
from model_check.config import aliases
from model_check.config.arguments import (
    Parser,
    add_resume_option,
    add_settings_options,
    settings_request,
)
from model_check.config.dataset import WORDS
from model_check.config.fields import nearest
from model_check.config.load import Request
from model_check.errors import UsageError
from model_check.utils.project_files import COMMAND

_TIME = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>[smh])")
_MODE = "launch.mode"
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_EXIT_CODES = """\
exit codes:
  0 every worker passed        2 usage, configuration, or not comparable
  20 NaN or Inf                21 a worker is named: odd, or its state changed
  22 health (launch.fail_on)   23 workers differ, none can be named
  69 no usable GPU, or one     70 our own fault
     is missing                75 too little was compared (--deadline)
  124 hang                     128+N ended by signal N
  else the exit code of the worker that failed first
"""
_VERBS_HELP = """
verbs (run.sh VERB --help):
  check [LEVEL]           quick, full or burnin: a check of stated length
  doctor                  what of this machine is fine, what not, what to do
  config show             every setting, its value and where it came from
  report RUN_DIR ...      rebuild a run's report; of many runs one of all
  watch [RUN_DIR ...]     runs while they go, as a table
  replay RUN_DIR          compute the steps to a fault once more
  runs [open | clear]     your run directories: list, a report, clear the old
  forensics DOSSIER       what a failed worker kept: tensors, values, bits
  history [UUID]          what became of each GPU in your runs, since ever
  prepare [OPTIONS]       the token cache alone: build, --list, --verify, --gc
  export CHECKPOINT OUT   what transformers loads, made of a checkpoint
  train TEXT [OPTIONS]    train on your own text: one worker, checkpoints
  generate CHECKPOINT     what a trained model says: --prompt "Once upon a time"
  passkey                 what each kind of attention brings back from afar
  completion              for bash's Tab key: source <(./run.sh completion)

examples:
  bash run.sh                                   every GPU, the short check
  bash run.sh --debug                           small, with tensor dumps
  bash run.sh --gpus 0,2 training.max_steps=100
  bash run.sh -- python my_script.py            your own command on every GPU
  bash run.sh --run-both-models                 Infini-attention beside full
  bash run.sh --arm a --arm b training.learning_rate=1e-3
  bash run.sh --wheels wheels/                  a first start without network
  ./train_gpu.sh [GPU] [OPTIONS]                one GPU, 0 unless told
  ./train_auto_gpu.sh [OPTIONS]                 the freest GPU, reserved
"""
_DOCTOR_HELP = """
examples:
  bash run.sh doctor                            before the first run
  bash run.sh doctor launch.expect_gpus=8       a lost GPU is a FAIL
  bash run.sh doctor --json                     for machines
  bash run.sh doctor --quick                    a health check beside jobs
"""
_CHECK_HELP = """
levels:
  quick                   20 steps: about 12 s on an H100
  full                    the steps of a plain run: 100, about 30 s on an H100
  burnin                  full again and again for an hour; the others go on
                          without a GPU that is named (launch.on_suspect)
What you give counts more than what the level says. A first run also makes the
environment and prepares its text. No level tests memory, the bandwidth of PCIe
and NVLink, or power: dcgmi diag -r 3 does.

examples:
  bash run.sh check                             full
  bash run.sh check quick --gpus 0,1
  bash run.sh check burnin --soak 8h
  bash run.sh check burnin -- python my_script.py
"""
_CONFIG_HELP = """
examples:
  bash run.sh config show --debug
  bash run.sh config show --config my.json training.max_steps=20
  bash run.sh config show --json                for machines
"""
_TRAIN_HELP = """
examples:
  bash run.sh train texts/                      a file or a directory of text
  bash run.sh train texts/ training.max_steps=5000 data.validation=held_out=0.05
  bash run.sh train texts/ --resume auto        go on from the newest checkpoint
"""
_ABOUT = {
    "": (
        "Run the same short LLaMA training on every GPU and compare the workers.",
        _EXIT_CODES + _VERBS_HELP,
    ),
    "doctor": (
        "Say what of this machine is fine, what is not, and what to do. It changes\n"
        "nothing, asks no network, and ends with the exit code of a run like this.",
        _EXIT_CODES + _DOCTOR_HELP,
    ),
    "check": (
        "Run the same short LLaMA training on every GPU, compare the workers, and say\n"
        "before it starts how long it takes and what it does not test.",
        _EXIT_CODES + _CHECK_HELP,
    ),
    "train": (
        "Train a small LLaMA on your own text: one worker (the freest GPU), a tokenizer of\n"
        "its own, checkpoints in .checkpoints/. The preset `train`, where nothing else is said.",
        _EXIT_CODES + _TRAIN_HELP,
    ),
    "config show": (
        "Print every setting, its value and where it came from, as a run with these\n"
        "arguments would have it.",
        _CONFIG_HELP,
    ),
}
"""Verb -> what its help says above and below the options."""
_ABOUT_RUN = ("doctor", "config show")
"""Verbs that start no run: their help leaves out what they refuse."""

VERBS = (
    "check",
    "doctor",
    "config",
    "report",
    "watch",
    "replay",
    "runs",
    "history",
    "prepare",
    "export",
    "forensics",
    "train",
    "generate",
    "passkey",
    "completion",
)
"""They come first on a command line."""


class RunArguments(Struct, frozen=True):
    """`run.sh [OPTIONS] [section.key=value ...] [-- COMMAND ARG ...]`."""

    request: Request
    command: tuple[str, ...]
    """A foreign command to supervise; empty: our trainer."""
    run_dir: Path | None
    dry_run: bool
    as_json: bool
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
    seat: Seat | None = None
    """Of one training of it."""

    def seated(self, seat: Seat) -> "RunArguments":
        """What is asked for of one training of a comparison. Raises UsageError and ConfigError."""
        if len(self.arms) != 1:
            raise UsageError(f"{SEAT}: a comparison sets it for its own launchers: unset it")
        (arm,) = self.arms
        request = seat.over(arm.of(self.request))
        return replace(self, request=request, run_dir=seat.directory, arms=(), seat=seat)


def parse_run(argv: Sequence[str], environ: Mapping[str, str], verb: str = "") -> RunArguments:
    """What a run, or a verb that asks about one, was asked for. Raises UsageError or ConfigError;
    `--help` prints and leaves with SystemExit(0)."""
    own, command = _split_command(argv)
    own, arms = split_arms(own)
    parser = _parser(verb)
    names = parser.read(own)
    _refuse_words(names.overrides)
    _take_mode(names, arms)
    return RunArguments(
        request=settings_request(names, environ),
        command=command,
        run_dir=names.run_dir,
        dry_run=names.dry_run,
        as_json=names.json,
        gpu_model=names.gpu_model,
        quick=verb == "doctor" and names.quick,
        arms=arms,
    )


def parse_check(argv: Sequence[str], environ: Mapping[str, str]) -> RunArguments:
    """`check [LEVEL] [OPTIONS] [-- COMMAND]`: a run with the level's settings below all others.
    Raises as `parse_run`."""
    level, options = DEFAULT, [*argv]
    if argv and not argv[0].startswith("-") and "=" not in argv[0]:
        level, *options = argv
    if level not in LEVELS:
        near = nearest(level, LEVELS)
        hint = f"; did you mean {near}?" if near else ""
        raise UsageError(f"check: no such level: {level!r}; there are {', '.join(LEVELS)}{hint}")
    arguments = parse_run(options, environ, "check")
    of_level = (f"check {level}", LEVELS[level])
    return replace(arguments, request=replace(arguments.request, level=of_level), level=level)


def parse_train(argv: Sequence[str], environ: Mapping[str, str]) -> RunArguments:
    """`train TEXT [OPTIONS]`: a run of the preset `train` on that text. Raises as `parse_run`."""
    if {"-h", "--help"} & {*argv}:
        return parse_run(argv, environ, "train")
    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        raise UsageError("train: give the text first: run.sh train texts/ [OPTIONS]")
    text, *options = argv
    if not ("/" in text or text in WORDS or os.path.exists(text)):
        raise UsageError(
            f"train {text}: no such file or directory ({os.path.abspath(text)}); for a dataset of "
            f"the hub with this name: run.sh --preset train data.dataset={text}"
        )
    options = ["--preset", "train", f"data.dataset={text}", *options]
    arguments = parse_run(options, environ, "train")
    if arguments.command:
        raise UsageError("train: `-- COMMAND` is for a run of your own command")
    return replace(arguments, is_alone=True)


def options_of_run() -> list[str]:
    """`--gpus`, `--mode`, ...: those that the help of a run lists."""
    actions = _parser("")._actions
    return [o for a in actions if a.help != SUPPRESS for o in a.option_strings if o[:2] == "--"]


def _take_mode(names: Namespace, arms: Sequence[Arm]) -> None:
    """Arms are for a comparison, whether it is asked for or not. Raises UsageError."""
    option, mode = getattr(names, _MODE) or ("--mode", "compare")
    if arms and mode.lower() != "compare":
        raise UsageError(f"--arm: {option} {mode} has no arms; --mode compare has")
    if arms:
        setattr(names, _MODE, (option, "compare"))


def _refuse_words(overrides: Sequence[str]) -> None:
    """A word among the settings that is no setting may be a verb, misspelt or misplaced. Raises
    UsageError."""
    for word in overrides:
        if word in VERBS:
            raise UsageError(f"{word}: a verb comes first: run.sh {word} ... (--help lists them)")
        if word.isalpha() and (near := nearest(word, [*VERBS, *aliases.VERBS])):
            near = aliases.VERBS.get(near, near)
            raise UsageError(f"{word!r}: no such verb; did you mean {near}? (--help lists them)")
        if word.endswith(".py") and "=" not in word:
            raise UsageError(
                f"{word}: run.sh trains by itself: leave it out (`-- python {word}` runs your own)"
            )
        if word.isalpha():
            raise UsageError(f"{word!r}: no verb, no option, no section.key=value (see --help)")


def _parser(verb: str) -> Parser:
    description, epilog = _ABOUT[verb]
    prog = f"{COMMAND} {verb}".strip()
    command = {"": " [-- COMMAND ARG ...]", "check": " [-- COMMAND ...]"}.get(verb, "")
    first = {"train": " TEXT", "check": " [LEVEL]"}.get(verb, "")
    usage = f"{prog}{first} [OPTIONS] [section.key=value ...]{command}"
    parser = Parser(prog=prog, usage=usage, description=description, epilog=epilog)
    add_settings_options(parser)
    add_resume_option(parser)
    add, setting = parser.add_argument, parser.setting
    which = "all | auto | auto:N | 0,2,5 | GPU-<uuid prefix>"
    setting("launch.gpus", "--gpus", metavar="WHICH", help=which)
    setting("launch.gpus", "--gpu", metavar="N", help="same as --gpus N")
    refuse = "refuse GPUs that somebody else uses (exit code 69)"
    setting("launch.require_idle", "--require-idle", nargs=0, const=True, help=refuse)
    setting("system.device", "--device", metavar="KIND", help="auto | cuda | cpu")
    cpus = "CPU workers, where no GPU is used (2)"
    setting("launch.workers", "--workers", metavar="N", help=cpus)
    modes = "replicate: one isolated, identical run a GPU; ddp: one job on all; fsdp: one whose "
    modes += "model they share; compare: arms"
    setting(_MODE, "--mode", metavar="MODE", help=modes)
    of_run: Callable[[str], str] = str if verb not in _ABOUT_RUN else lambda _: SUPPRESS
    # `split_arms` has taken these out: here they are for --help.
    arm = of_run("an arm of --mode compare; two or more")
    add("--arm", nargs="+", metavar="NAME key=value", help=arm)
    add(BOTH, action="store_true", help=of_run("arms full and infini (model.attention)"))
    often = "how often each arm is trained, each time with another system.seed (1)"
    setting("launch.seeds", "--seeds", metavar="N", help=often)
    again = "a job (ddp, fsdp) that failed goes on so often (0)"
    setting("launch.max_restarts", "--max-restarts", metavar="N", help=again)
    peer = "hold the workers against a golden file (report RUN --write-golden FILE)"
    setting("launch.golden", "--golden", metavar="FILE", help=peer)
    add("--run-dir", metavar="DIR", type=Path, help=of_run("exactly this run directory"))
    setting("launch.grace_s", "--grace", metavar="S", help="seconds from SIGTERM to SIGKILL (10)")
    deadline = "the run is over by then, start-up included; 0: none (0)"
    setting("launch.deadline_s", "--deadline", metavar="S", type=_seconds, help=deadline)
    setting("launch.repeat", "--repeat", metavar="N", help="so many rounds, one report of all")
    soak = "rounds for so long: 90s, 30m, 8h"
    setting("launch.soak_s", "--soak", metavar="TIME", type=_seconds, help=soak)
    hang = "seconds of silence that are a hang; 0: never (300)"
    setting("launch.hang_timeout_s", "--hang-timeout", metavar="S", help=hang)
    if verb == "doctor":
        quick = "NVML and the history of the GPUs alone, in 10 s at most"
        add("--quick", action="store_true", help=quick)
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
    command = tuple(argv[at + 1 :])
    if not command:
        raise UsageError("nothing after --: give the command to supervise")
    return list(argv[:at]), command
