#!/usr/bin/env python3
"""Build or find the token cache, alone: `python prepare_dataset.py --debug data.dataset=wikitext`.

The launcher runs it once before the workers start; by hand it prepares a machine in advance.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from model_check.config.arguments import Parser, add_settings_options, settings_request
from model_check.config.load import load
from model_check.data.prepare import Prepared, prepare
from model_check.errors import EXIT_SIGNAL_BASE, ModelCheckError, StorageError
from model_check.utils.files import write_atomic

_EPILOG = """\
Exit codes: 0 the cache is whole; 2 the settings, the text, the tokenizer or the disk; 128+N ended
by signal N (nothing half-built is ever found by others).
"""


class Stopped(BaseException):
    """A signal asked us to end."""


def main(argv: Sequence[str]) -> int:
    _stop_on_signals()
    try:
        arguments = _parser().read(argv)
        settings = load(settings_request(arguments, os.environ), _has_gpu).settings
        prepared = prepare(settings, _say)
        if arguments.result is not None:
            _write_result(arguments.result, prepared)
        _say(_summary(prepared))
    except ModelCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Stopped as stop:
        name = signal.Signals(stop.args[0]).name
        print(f"stopped by {name}; nothing unfinished is left", file=sys.stderr)
        return EXIT_SIGNAL_BASE + int(stop.args[0])
    return 0


def _parser() -> Parser:
    parser = Parser(prog="prepare_dataset.py", description=__doc__, epilog=_EPILOG)
    add_settings_options(parser)
    parser.add_argument(
        "--result", metavar="FILE", type=Path, help="write what was found or built, as JSON"
    )
    return parser


def _has_gpu() -> bool:
    """Only chooses between presets when none is named, so the driver's device file and the mask are
    enough; the launcher passes settings that are resolved already."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    return Path("/dev/nvidiactl").exists() and not hidden


def _stop_on_signals() -> None:
    """The first SIGTERM or SIGINT unwinds, so that unfinished work goes; a second one kills."""

    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        raise Stopped(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # a notice to the run, not to us
        signal.signal(signum, signal.SIG_IGN)


def _say(line: str) -> None:
    print(line, flush=True)


def _summary(prepared: Prepared) -> str:
    how = "found" if prepared.hit else "prepared"
    return (
        f"data: {how} {prepared.dataset}: {prepared.num_sequences:,} sequences, "
        f"{prepared.num_tokens:,} tokens, vocabulary {prepared.vocab_size:,}, "
        f"{prepared.seconds:.2f} s ({prepared.path})"
    )


def _write_result(path: Path, prepared: Prepared) -> None:
    result = {
        "schema": 1,
        "path": str(prepared.path),
        "dataset": prepared.dataset,
        "hit": prepared.hit,
        "num_tokens": prepared.num_tokens,
        "num_sequences": prepared.num_sequences,
        "vocab_size": prepared.vocab_size,
    }
    try:
        write_atomic(path, json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"--result {path}: cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
