"""argv -> what to do. Builds the real probe, and knows the process's own streams."""

import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from launcher.arguments import RunArguments, parse_check, parse_run, parse_train
from launcher.compare.arms import SEAT, Seat
from launcher.devices import Hold, Machine
from launcher.gpus.probe import NvmlProbe
from launcher.launch import has_rounds, make_launch
from launcher.nodes.absence import Absence
from launcher.output.own_lines import for_terminal
from launcher.output.printer import LAUNCHER_PREFIX
from launcher.part import reason
from launcher.run import run
from model_check.errors import (
    EXIT_INTERNAL,
    EXIT_PASS,
    EXIT_SIGNAL_BASE,
    ModelCheckError,
    UsageError,
)
from model_check.utils.project_files import PACKAGES, PROJECT
from model_check.utils.requests import TO_FORWARD, TO_STOP
from model_check.utils.standard_streams import complain, put
from model_check.utils.words import printable_lines

MEANT = "MODEL_CHECK_MEANT"
"""Of train_gpu.sh and train_auto_gpu.sh: the option that they add, which a message may name."""


def main(argv: Sequence[str] | None = None, mask: Collection[int] | None = None) -> int:
    """Run the command line; returns the exit code that the contract promises. What was printed is
    flushed, unless its reader is gone or its disk is full. `mask`: of signals, to put back where no
    other node of a job waits for this launcher."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    meant = os.environ.pop(MEANT, None)
    seated, tag, absence = os.environ.pop(SEAT, None), "", Absence()
    try:
        seat = None if seated is None else Seat.of(seated)
        tag = seat.tag if seat else ""
        is_of_job = seat is None and _is_run(arguments) and absence.guess(arguments, os.environ)
        if mask is not None and not is_of_job:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return _dispatch(arguments, os.environ, seat, absence)
    except ModelCheckError as error:
        nobody_typed = meant and "--gpu" in str(error)
        _complain(f"error: {error}; {meant}" if nobody_typed else f"error: {error}", tag)
        absence.tell(*reason(error), lambda text: _complain(text, tag))
        return error.exit_code
    # `| head`: its reader is gone.
    except BrokenPipeError:
        return EXIT_SIGNAL_BASE + signal.SIGPIPE
    except KeyboardInterrupt:
        return EXIT_SIGNAL_BASE + signal.SIGINT
    # Our own fault: the whole traceback, for the bug report.
    except Exception as error:
        # 5 ms that no start waits for.
        import traceback

        fault = "error: a fault of Model Check itself; please report it"
        _complain(f"{traceback.format_exc()}{fault}", tag)
        absence.tell(*reason(error), lambda text: _complain(text, tag))
        return EXIT_INTERNAL


def _is_run(argv: Sequence[str]) -> bool:
    """And no other verb."""
    return not argv or argv[0] in ("check", "train") or not argv[0].isalpha()


def _complain(text: str, tag: str) -> None:
    prefix = f"{LAUNCHER_PREFIX}{tag}"
    # Where nobody reads it, the exit code still tells.
    with suppress(OSError):
        for line in for_terminal(printable_lines(text).split("\n"), 2, prefix):
            print(f"{prefix}{line}", file=sys.stderr, flush=True)


def _show(text: str) -> None:
    """Print all of `text`. Raises BrokenPipeError; StorageError when its disk is full."""
    put(printable_lines(text))


def _show_to_person(text: str) -> None:
    """`_show`; on a terminal no wider than that, and in colour."""
    put("\n".join(for_terminal(printable_lines(text).split("\n"), 1, "")))


def _dispatch(
    argv: list[str], environ: Mapping[str, str], seat: Seat | None, absence: Absence
) -> int:
    match argv:
        case ["help", *rest]:
            return _dispatch([*rest, "--help"], environ, seat, absence)
        case ["doctor", *rest]:
            return _doctor(rest, environ)
        case ["config", *rest]:
            return _config(rest, environ)
        case ["report", *rest]:
            return _report(rest)
        case ["watch", *rest]:
            return _watch(rest)
        case ["replay", *rest]:
            return _replay(rest, environ)
        case ["runs", *rest]:
            return _runs(rest, environ)
        case ["history", *rest]:
            return _history(rest, environ)
        case ["check", *rest]:
            return _run(argv, environ, parse_check(rest, environ), seat, absence)
        case ["train", *rest]:
            return _run(argv, environ, parse_train(rest, environ), seat, absence)
        case ["prepare", *rest]:
            _become(str(PROJECT / "prepare_dataset.py"), *rest)
        case ["forensics", *rest]:
            _become("-P", "-m", "model_check.forensics", *rest)
        case ["export", *rest]:
            _become("-P", "-m", "model_check.export", "export", *rest)
        case ["generate", *rest]:
            _become("-P", "-m", "model_check.generate", *rest)
        case ["passkey", *rest]:
            _become("-P", "-m", "model_check.passkey", *rest)
        case ["completion", *_]:
            return _completion()
        case _:
            return _run(argv, environ, parse_run(argv, environ), seat, absence)


def _become(*arguments: str) -> NoReturn:
    """Run another program of ours in place of this process."""
    _refuse_lost_directory()
    path = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    # `__main__` holds signals back for workers, and this program starts none.
    for signum in TO_FORWARD:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*TO_FORWARD, *TO_STOP))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    os.execve(sys.executable, [sys.executable, *arguments], env)


def _refuse_lost_directory() -> None:
    """Raises UsageError where the working directory was deleted: no relative path has a meaning."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory is gone ({error.strerror}): cd to one that exists"
        ) from error


def _run(
    argv: list[str],
    environ: Mapping[str, str],
    arguments: RunArguments,
    seat: Seat | None,
    absence: Absence,
) -> int:
    if arguments.dry_run or arguments.arms or seat is not None:
        absence.end()
    if arguments.as_json and not arguments.dry_run:
        raise UsageError("--json goes with --dry-run; a run leaves report.json in its directory")
    if arguments.gpu_model is not None:
        from launcher.preview.gpu_plan import describe_on_model

        _show(describe_on_model(arguments))
        return EXIT_PASS
    _refuse_lost_directory()
    probe = NvmlProbe()
    hold = Hold.LOOK if arguments.dry_run else Hold.TAKE
    if seat is not None:
        arguments, hold = arguments.seated(seat), Hold.ABOVE
    elif arguments.arms:
        return _compare(argv, arguments, probe, environ, hold)
    launch = replace(make_launch(arguments, probe, environ, hold), absence=absence)
    if arguments.dry_run:
        from launcher.preview.dry_run import describe

        _show(describe(launch, as_json=arguments.as_json))
        return 0
    absence.expect(launch.nodes, environ)
    if has_rounds(launch.loaded.settings.launch):
        from launcher.repeat.rounds import run_rounds

        return run_rounds(launch, argv, sys.stdout.fileno())
    if launch.loaded.settings.launch.max_restarts:
        from launcher.repeat.restarts import run_with_restarts

        return run_with_restarts(launch, argv, sys.stdout.fileno())
    return run(launch, argv, sys.stdout.fileno())


def _compare(
    argv: list[str],
    arguments: RunArguments,
    probe: NvmlProbe,
    environ: Mapping[str, str],
    hold: Hold,
) -> int:
    from launcher.compare.comparison import make_comparison

    comparison = make_comparison(arguments, probe, environ, hold)
    if arguments.dry_run:
        from launcher.preview.dry_run import describe_comparison

        _show(describe_comparison(comparison, probe, as_json=arguments.as_json))
        return EXIT_PASS
    from launcher.compare.compare import run_comparison

    return run_comparison(comparison, argv, sys.stdout.fileno())


def _config(argv: list[str], environ: Mapping[str, str]) -> int:
    from launcher.doctor.gpus import taken
    from launcher.gpus.sizes import fitted, memory_gib
    from model_check.config.describe import show
    from model_check.config.load import load

    if argv[:1] in (["-h"], ["--help"]):
        argv = ["show", *argv]
    if argv[:1] != ["show"]:
        raise UsageError("config: the one thing to ask is `config show [OPTIONS]`")
    arguments = _only_settings(parse_run(argv[1:], environ, "config show"))
    machine = Machine(NvmlProbe(), environ)
    loaded = load(arguments.request, machine.has_gpu)
    if loaded.device == "cuda":
        gpus = taken(machine, loaded.settings.launch.gpus)[0]
        loaded, _ = fitted(loaded, arguments.request, memory_gib(gpus))
    _show(show(loaded, as_json=arguments.as_json))
    return 0


def _doctor(argv: list[str], environ: Mapping[str, str]) -> int:
    from model_check.config.load import load

    arguments = _only_settings(parse_run(argv, environ, "doctor"))
    _refuse_lost_directory()
    settings = load(arguments.request, lambda: False).settings
    as_json = arguments.as_json
    write = _show if as_json else _show_to_person
    if arguments.quick:
        from launcher.doctor.quick import quick

        return quick(environ, settings.launch, as_json=as_json, write=write)
    from launcher.doctor.doctor import doctor

    return doctor(NvmlProbe(), environ, Path.cwd(), settings, as_json=as_json, write=write)


def _only_settings(arguments: RunArguments) -> RunArguments:
    of_run = (arguments.command, arguments.dry_run, arguments.run_dir)
    if any(of_run) or arguments.arms or arguments.gpu_model is not None:
        options = "--dry-run, --gpu-model, --run-dir, --arm and -- COMMAND"
        raise UsageError(f"{options} are for a run, not for a verb")
    return arguments


def _report(argv: list[str]) -> int:
    from launcher.report.rebuild import parser, rebuild

    if {"-h", "--help"} & {*argv}:
        _show(parser().format_help().rstrip())
        return EXIT_PASS
    return rebuild(argv, _show, complain)


def _completion() -> int:
    from launcher.arguments import options_of_run
    from launcher.completion import completion

    _show(completion(options_of_run()))
    return EXIT_PASS


def _watch(argv: list[str]) -> int:
    from launcher.report.watch import watch

    _refuse_lost_directory()
    return watch(argv)


def _runs(argv: list[str], environ: Mapping[str, str]) -> int:
    from launcher.report.runs import runs

    return runs(argv, environ, _show)


def _replay(argv: list[str], environ: Mapping[str, str]) -> int:
    from launcher.repeat.replay_again import replay_again

    return replay_again(argv, NvmlProbe(), environ, sys.stdout.fileno())


def _history(argv: list[str], environ: Mapping[str, str]) -> int:
    from launcher.history.listing import history

    _refuse_lost_directory()
    return history(argv, environ, _show)
