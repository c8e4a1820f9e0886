"""The live table below a run's own lines, on a real terminal, with the scripted trainer."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import Launcher
from tests.e2e.test_telemetry import gpu
from tests.nvml_fake.build import build, environment, scenario, xid
from tests.terminal import Terminal


@pytest.fixture
def on_terminal(scripted: Launcher) -> Iterator[Callable[..., Terminal]]:
    """Starts a run, or another verb, on a terminal."""
    terminals: list[Terminal] = []

    def start(
        *argv: str, verb: str = "", columns: int = 80, is_held: bool = False, **env: str
    ) -> Terminal:
        program = [sys.executable, "-m", scripted.module, verb, *argv]
        command = program if verb else scripted.arguments(*argv)
        environ = scripted.env | env | scripted.own
        terminals.append(Terminal(command, scripted.cwd, environ, columns=columns, is_held=is_held))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


def test_a_row_for_each_worker_and_no_line_for_each_step(
    on_terminal: Callable[..., Terminal], scripted: Launcher
) -> None:
    run = on_terminal("--workers", "3", "--max-steps", "40", RESTS="0.05")
    run.until(lambda: "equal, " in run.row("CPU2"))
    assert [bool(run.row(f"CPU{n}")) for n in range(4)] == [True, True, True, False]
    run.rest()
    lines = run.screen.lines
    assert run.process.wait(DEADLINE_S) == 0
    assert lines[-2].startswith("[launcher] ")
    assert any(line.startswith("[launcher] PASS: ") for line in lines)
    assert not run.row("CPU0")
    assert not any("] Step [" in line for line in lines)
    assert (scripted.cwd / "run" / "cpu1.log").read_text().count("Step [") == 40


def test_plain_prints_a_line_for_each_step_and_no_table(
    on_terminal: Callable[..., Terminal],
) -> None:
    run = on_terminal("--plain", "--workers", "2", "--max-steps", "3")
    run.rest()
    lines = run.screen.lines
    assert sum("[CPU1] Step [" in line for line in lines) == 3
    assert not any(line.startswith("worker ") for line in lines)


def test_the_lines_of_a_command_are_all_that_is_known_of_it(
    on_terminal: Callable[..., Terminal],
) -> None:
    run = on_terminal("--workers", "1", "--", "echo", "Step [1/2] | mine")
    assert "[CPU0] Step [1/2] | mine" in run.rest()


def test_one_that_differs_and_an_end_by_ctrl_c(
    on_terminal: Callable[..., Terminal],
) -> None:
    drill = ("debug.drill=flip@5:CPU1", "launch.on_suspect=continue")
    run = on_terminal("--workers", "3", "--max-steps", "100000", *drill, RESTS="0.05")
    run.until(lambda: "differs at step 5" in run.row("CPU1"))
    run.until(lambda: "equal, " in run.row("CPU0"))
    os.killpg(run.process.pid, signal.SIGINT)
    run.rest()
    lines = run.screen.lines
    assert run.process.wait(DEADLINE_S) == 130
    assert not run.row("CPU0")
    assert any("SIGINT received" in line for line in lines)


def test_who_is_silent_is_told_and_that_the_others_wait(
    on_terminal: Callable[..., Terminal],
) -> None:
    run = on_terminal("--workers", "2", "--max-steps", "100000", STOPS_AFTER="CPU1 4")
    run.until(lambda: "the others wait for it" in run.row("CPU1"))
    assert run.row("CPU1").split("silent for ")[1].startswith("1")


def _says(terminal: Terminal, worker: str, note: str) -> bool:
    return note in terminal.row(worker)


def test_an_xid_and_heat_stand_in_the_rows_of_their_gpus(
    on_terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    hot = gpu(2, clocks_event_reasons="0x40")
    (tmp_path / "scenario").write_text(scenario([gpu(0), gpu(1), hot], [xid(1, 79, 3000)]))
    env = environment(build(tmp_path), tmp_path / "scenario")
    env |= {"MODEL_CHECK_LOCK_DIR": str(tmp_path / "locks"), "RESTS": "0.05"}
    options = ("--device", "cuda", "launch.telemetry_interval_s=0.5", "--max-steps", "100000")
    run = on_terminal(*options, columns=160, **env)
    run.until(lambda: "H100" in run.row("GPU0") and "98%" in run.row("GPU0"))
    run.until(lambda: "hardware thermal slowdown" in run.row("GPU2"))
    watch = on_terminal("run", verb="watch", columns=160)
    for terminal in (run, watch):
        for worker, note in (
            ("GPU0", "equal, "),
            ("GPU1", "Xid 79 (the GPU has fallen off the bus)"),
            ("GPU2", "hardware thermal slowdown"),
        ):
            terminal.until(partial(_says, terminal, worker, note))


def test_a_terminal_that_takes_nothing_holds_no_run_up(
    on_terminal: Callable[..., Terminal], scripted: Launcher
) -> None:
    """Ctrl-S, and nobody comes back."""
    run = on_terminal("--workers", "2", "--max-steps", "200", is_held=True)
    assert run.process.wait(DEADLINE_S) == 0
    report = json.loads((scripted.cwd / "run" / "report.json").read_text())
    assert report["verdict"] == "PASS"
