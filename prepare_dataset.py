#!/usr/bin/env python3
"""Build or find the token cache, alone: `python prepare_dataset.py --debug data.dataset=wikitext`.

The launcher runs it once before the workers start; by hand it prepares a machine in advance.
"""

import signal

# These signals are notices to the run, and a scheduler sends them to the whole job.
if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    try:
        from launcher.install.by_hand import become_ready
    except ImportError:  # without the launcher the packages are the caller's business
        pass
    else:
        become_ready()

import io
import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from model_check.config.arguments import Parser, add_settings_options, settings_request
from model_check.config.load import load
from model_check.config.prepared_dir import DATASET, prepared_directory
from model_check.config.schema import Settings
from model_check.data.build.prepare import Prepared, prepare
from model_check.data.build.request import cache_root
from model_check.data.build.tool import add_tool_options, tool_flags, with_stride
from model_check.data.cache.housekeeping import (
    UNUSED_DAYS,
    collect_garbage,
    list_cache,
    verify_cache,
)
from model_check.data.sources.weights import weights_directory
from model_check.errors import EXIT_SIGNAL_BASE, ModelCheckError, StorageError, UsageError
from model_check.utils.files import write_atomic
from model_check.utils.secrets import mask_others
from model_check.utils.standard_streams import complain, open_missing_streams, put
from model_check.utils.words import printable_lines

_EPILOG = """\
Exit codes: 0 the cache is whole; 2 the settings, the text, the tokenizer, the disk, or an entry
that --verify found bad; 70 a tokenizing process died; 128+N ended by signal N (nothing half-built
is ever found by others, and the same command goes on from there).

examples:
  bash run.sh prepare data.dataset=texts/     before a run, as it would
  bash run.sh prepare --list
  bash run.sh prepare --gc --older-than 30
"""


class Stopped(BaseException):
    """A signal asked this process to end."""


def main(argv: Sequence[str]) -> int:
    open_missing_streams()
    _stop_on_signals()
    mask_others()
    # A name may have characters that the terminal's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        arguments = _parser().read(argv)
        request = settings_request(arguments, os.environ, tool_flags(arguments))
        loaded = load(request, _has_gpu)
        if arguments.stride is not None:
            length = loaded.settings.training.context_length
            loaded = load(with_stride(request, arguments.stride, length), _has_gpu)
        for note in loaded.notes:
            _say(note)
        settings = loaded.settings
        if _looked_after_cache(arguments, settings):
            return 0
        # Fetched here, once: workers only open it.
        weights_directory(settings, _say)
        prepared = prepare(settings, _say, _bar if sys.stdout.isatty() else None)
        if arguments.result is not None:
            _write_result(arguments.result, prepared)
        _say(_summary(prepared))
        if len(prepared.splits) > 1:
            _say(_division(prepared))
    except ModelCheckError as error:
        complain(f"error: {error}")
        return error.exit_code
    # `| head` has read enough.
    except BrokenPipeError:
        return EXIT_SIGNAL_BASE + signal.SIGPIPE
    except Stopped as stop:
        name = signal.Signals(stop.args[0]).name
        complain(
            f"stopped by {name}; what was finished is kept: the same command goes on from there"
        )
        return EXIT_SIGNAL_BASE + int(stop.args[0])
    return 0


def _parser() -> Parser:
    parser = Parser(prog="prepare_dataset.py", description=__doc__, epilog=_EPILOG)
    add_settings_options(parser)
    add_tool_options(parser)
    parser.add_argument(
        "--result", metavar="FILE", type=Path, help="write what was found or built, as JSON"
    )
    house = parser.add_mutually_exclusive_group()
    house.add_argument(
        "--list", action="store_true", help="what lies in data.cache_dir, or in --output-dir"
    )
    house.add_argument(
        "--verify", action="store_true", help="check every checksum in there, set aside what is bad"
    )
    house.add_argument(
        "--gc",
        action="store_true",
        help="remove what was set aside, what dead builders left, and what was not used for long",
    )
    parser.add_argument(
        "--older-than",
        metavar="DAYS",
        type=float,
        help=f"how long that is ({UNUSED_DAYS} days)",
    )
    return parser


def _looked_after_cache(arguments: Namespace, settings: Settings) -> bool:
    """Do what --list, --verify or --gc ask for. False: none was given. Raises UsageError,
    DataError, StorageError."""
    if arguments.older_than is not None and not arguments.gc:
        raise UsageError("--older-than: is for --gc alone")
    older_than = UNUSED_DAYS if arguments.older_than is None else arguments.older_than
    # Written so that nan is refused, too.
    if not older_than >= 0:
        raise UsageError(f"--older-than {older_than:g}: days, 0 or more")
    cache = cache_root(settings)
    if settings.data.output_dir is None and (found := prepared_directory(settings.data.dataset)):
        cache = found[0] / DATASET
    if arguments.list:
        list_cache(cache, _say)
    elif arguments.verify:
        verify_cache(cache, _say)
    elif arguments.gc:
        collect_garbage(cache, older_than, _say)
    return bool(arguments.list or arguments.verify or arguments.gc)


def _has_gpu() -> bool:
    """Only chooses the preset when none is named, so the driver's device file and the mask are
    enough. The launcher passes settings that are resolved already."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    return Path("/dev/nvidiactl").exists() and not hidden


def _stop_on_signals() -> None:
    """The first SIGTERM or SIGINT unwinds, so that unfinished work is removed; a second one kills.
    SIGINT stays ignored if it was: this is a job in a shell's background."""

    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        raise Stopped(signum)

    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    # Ignored, since the processes that we start inherit that.
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)


def _say(line: str) -> None:
    if sys.stdout.isatty():
        _bar("")
    put(printable_lines(line))


def _bar(text: str) -> None:
    columns = shutil.get_terminal_size().columns
    put(f"\r\x1b[K{text[: columns - 1]}", end="")


def _summary(prepared: Prepared) -> str:
    how = "found" if prepared.hit else "prepared"
    dropped = sum(split.num_dropped for split in prepared.splits.values())
    view = prepared.view
    return (
        f"data: {how} {view.dataset}: {view.num_sequences:,} sequences, "
        f"{view.num_tokens:,} tokens{_in_no_sequence(dropped)}, "
        f"vocabulary {view.vocab_size:,}, {prepared.seconds:.2f} s ({prepared.path})"
    )


def _in_no_sequence(num_tokens: int) -> str:
    return f" ({num_tokens:,} of them in no sequence)" if num_tokens else ""


def _division(prepared: Prepared) -> str:
    parts = []
    for name, split in prepared.splits.items():
        where = "at the end of the text"
        if split.num_documents:
            where = f"of {split.num_documents:,} document{'s'[: split.num_documents > 1]}"
        shared = f", {split.num_trained_on:,} of them trained on" if split.num_trained_on else ""
        parts.append(
            f"{name} {split.num_sequences:,} sequence{'s'[: split.num_sequences > 1]} {where}"
            f"{shared} ({split.num_tokens:,} tokens, {split.num_dropped:,} in no sequence)"
        )
    return f"data: {'; '.join(parts)}"


def _write_result(path: Path, prepared: Prepared) -> None:
    result = {
        "schema": 1,
        "path": str(prepared.path),
        "dataset": prepared.view.dataset,
        "hit": prepared.hit,
        "num_tokens": prepared.view.num_tokens,
        "num_sequences": prepared.view.num_sequences,
        "vocab_size": prepared.view.vocab_size,
        "speaks": prepared.speaks,
        "splits": {name: msgspec.to_builtins(split) for name, split in prepared.splits.items()},
    }
    try:
        write_atomic(path, json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"--result {path}: cannot be written: {error.strerror}") from error


def command() -> int:
    """The command `model-check-prepare`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
