"""argv -> what to do. Builds the real probe, and knows the process's own streams.

`do_NAME` carries out the verb NAME, `do_run` a command line without a verb.
"""

import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from launcher.arguments import RunArguments, parse_check, parse_run, parse_train
from launcher.devices import Hold, Machine
from launcher.gpus.probe import NvmlProbe
from launcher.launch import has_rounds, make_launch
from launcher.nodes.absence import Absence
from launcher.output.own_lines import for_terminal
from launcher.output.printer import LAUNCHER_PREFIX
from launcher.part import reason
from launcher.run import run
from launcher.verbs import VERBS, Verb, chosen
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


Start = Callable[[RunArguments], int]
"""Starts what was asked for, or prints its plan; returns the exit code."""


def main(argv: Sequence[str] | None = None, mask: Collection[int] | None = None) -> int:
    """Run the command line; returns the exit code that the contract promises. What was printed is
    flushed, unless its reader is gone or its disk is full. `mask`: of signals, to put back where no
    other node of a job waits for this launcher."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    meant = os.environ.pop(MEANT, None)
    absence = Absence()
    try:
        verb, rest = chosen(arguments)
        is_of_job = verb.starts_run and absence.guess(arguments, os.environ)
        if mask is not None and not is_of_job:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return _carry_out(verb, rest, partial(_start, arguments, absence))
    except ModelCheckError as error:
        nobody_typed = meant and "--gpu" in str(error)
        _complain(f"error: {error}; {meant}" if nobody_typed else f"error: {error}")
        absence.tell(*reason(error), _complain)
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
        _complain(f"{traceback.format_exc()}{fault}")
        absence.tell(*reason(error), _complain)
        return EXIT_INTERNAL


def _complain(text: str) -> None:
    # Where nobody reads it, the exit code still tells.
    with suppress(OSError):
        for line in for_terminal(printable_lines(text).split("\n"), 2, LAUNCHER_PREFIX):
            print(f"{LAUNCHER_PREFIX}{line}", file=sys.stderr, flush=True)


def _show(text: str) -> None:
    """Print all of `text`. Raises BrokenPipeError; StorageError when its disk is full."""
    put(printable_lines(text))


def _show_to_person(text: str) -> None:
    """`_show`; on a terminal no wider than that, and in colour."""
    put("\n".join(for_terminal(printable_lines(text).split("\n"), 1, "")))


def _carry_out(verb: Verb, rest: list[str], start: Start) -> int:
    _refuse_lost_directory()
    if verb.program:
        _become(verb.program, rest)
    function: Callable[..., int] = globals()[f"do_{verb.name or 'run'}"]
    return function(rest, start) if verb.starts_run else function(rest)


def _become(program: str, arguments: Sequence[str]) -> NoReturn:
    """Run another program of ours in place of this process."""
    how = [str(PROJECT / program)] if program.endswith(".py") else ["-P", "-m", program]
    path = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    # `__main__` holds signals back for workers, and this program starts none.
    for signum in TO_FORWARD:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*TO_FORWARD, *TO_STOP))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    os.execve(sys.executable, [sys.executable, *how, *arguments], env)


def _refuse_lost_directory() -> None:
    """Raises UsageError where the working directory was deleted: no relative path has a meaning."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory is gone ({error.strerror}): cd to one that exists"
        ) from error


def do_run(rest: list[str], start: Start) -> int:
    return start(parse_run(rest, os.environ))


def do_check(rest: list[str], start: Start) -> int:
    return start(parse_check(rest, os.environ))


def do_train(rest: list[str], start: Start) -> int:
    return start(parse_train(rest, os.environ))


def _start(argv: list[str], absence: Absence, arguments: RunArguments) -> int:
    if arguments.dry_run or arguments.arms:
        absence.end()
    if arguments.as_json and not arguments.dry_run:
        raise UsageError("--json goes with --dry-run; a run leaves report.json in its directory")
    if arguments.gpu_model is not None:
        from launcher.preview.gpu_plan import describe_on_model

        _show(describe_on_model(arguments))
        return EXIT_PASS
    probe = NvmlProbe()
    hold = Hold.LOOK if arguments.dry_run else Hold.TAKE
    if arguments.arms:
        return _compare(argv, arguments, probe, hold)
    launch = replace(make_launch(arguments, probe, os.environ, hold), absence=absence)
    if arguments.dry_run:
        from launcher.preview.dry_run import describe

        _show(describe(launch, as_json=arguments.as_json))
        return 0
    absence.expect(launch.nodes, os.environ)
    if has_rounds(launch.loaded.settings.launch):
        from launcher.repeat.rounds import run_rounds

        return run_rounds(launch, argv, sys.stdout.fileno())
    if launch.loaded.settings.launch.max_restarts:
        from launcher.repeat.restarts import run_with_restarts

        return run_with_restarts(launch, argv, sys.stdout.fileno())
    return run(launch, argv, sys.stdout.fileno())


def _compare(argv: list[str], arguments: RunArguments, probe: NvmlProbe, hold: Hold) -> int:
    from launcher.compare.comparison import make_comparison

    comparison = make_comparison(arguments, probe, os.environ, hold)
    if arguments.dry_run:
        from launcher.preview.dry_run import describe_comparison

        _show(describe_comparison(comparison, probe, as_json=arguments.as_json))
        return EXIT_PASS
    from launcher.compare.compare import run_comparison

    return run_comparison(comparison, argv, sys.stdout.fileno())


def do_config(rest: list[str]) -> int:
    from launcher.doctor.gpus import taken
    from launcher.gpus.sizes import fitted, memory_gib
    from model_check.config.describe import show
    from model_check.config.load import load

    options = rest[1:] if rest[:1] == ["show"] else rest
    arguments = parse_run(options, os.environ, VERBS["config"])
    machine = Machine(NvmlProbe(), os.environ)
    loaded = load(arguments.request, machine.has_gpu)
    if loaded.device == "cuda":
        gpus = taken(machine, loaded.settings.launch.gpus)[0]
        loaded, _ = fitted(loaded, arguments.request, memory_gib(gpus))
    _show(show(loaded, as_json=arguments.as_json))
    return EXIT_PASS


def do_doctor(rest: list[str]) -> int:
    from model_check.config.load import load

    arguments = parse_run(rest, os.environ, VERBS["doctor"])
    settings = load(arguments.request, lambda: False).settings
    write = _show if arguments.as_json else _show_to_person
    if arguments.quick:
        from launcher.doctor.quick import quick

        return quick(os.environ, settings.launch, as_json=arguments.as_json, write=write)
    from launcher.doctor.doctor import doctor

    return doctor(
        NvmlProbe(), os.environ, Path.cwd(), settings, as_json=arguments.as_json, write=write
    )


def do_report(rest: list[str]) -> int:
    from launcher.report.rebuild import rebuild

    return rebuild(rest, _show, complain)


def do_watch(rest: list[str]) -> int:
    from launcher.report.watch import watch

    return watch(rest)


def do_replay(rest: list[str]) -> int:
    from launcher.repeat.replay_again import replay_again

    return replay_again(rest, NvmlProbe(), os.environ, sys.stdout.fileno())


def do_runs(rest: list[str]) -> int:
    from launcher.report.runs import runs

    return runs(rest, os.environ, _show)


def do_history(rest: list[str]) -> int:
    from launcher.history.listing import history

    return history(rest, os.environ, _show)


def do_completion(rest: list[str]) -> int:
    from launcher.completion import completion

    _show(completion(rest))
    return EXIT_PASS
