"""Text of a file, a path, the environment, the command line or a setting never moves the cursor,
colours, or reorders: not one byte of it reaches the terminal as a control character."""

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

import prepare_dataset
from launcher import run_dir
from launcher.verdict.record import RunEnd, RunRecord, WorkerEnd
from model_check import export
from model_check.events import Done, Evidence, Note, encode
from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT, TINY
from tests.e2e.starts import Ended, Start, run_each

# ESC [ 2 J clears the screen; CSI in one character; OSC 52 writes the clipboard; overwriting by a
# backspace and by a carriage return; the right-to-left override; a mark that reorders.
EVIL = "\x1b[2J\x9b31m\x1b]52;c;AAAA\x07 ok\b\bno\rPASS \u202ekcab \u200fx"
ALLOWED = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u2028-\u202e\u2066-\u2069]*")
MARK = "[2J"
"""What is left of it for eyes."""
ONE = ("--device", "cpu", "--workers", "1")
LAUNCHER = (sys.executable, "-P", "-m", "launcher")

STARTS: dict[str, tuple[str, ...]] = {
    "dry run": (*ONE, "--dry-run", "--", "echo", EVIL),
    "dry run for machines": (*ONE, "--dry-run", "--json", "--", "echo", EVIL),
    "config show": ("config", "show", f"data.dataset={EVIL}"),
    "config show for machines": ("config", "show", "--json", f"data.dataset={EVIL}"),
    "unknown setting": (f"data.{EVIL}=1",),
    "wrong value": (f"training.max_steps={EVIL}",),
    "unknown option": (f"--{EVIL}",),
    "unknown verb": (f"doctr{EVIL}",),
    "preset": ("--preset", EVIL),
    "no settings file": ("--config", f"{EVIL}.json"),
    "settings file": ("--config", "evil.json"),
    "YAML": ("--config", "evil.yaml"),
    "GPUs": ("--gpus", EVIL),
    "doctor": ("doctor", f"data.cache_dir={EVIL}"),
    "doctor for machines": ("doctor", "--json", f"data.cache_dir={EVIL}"),
    "report": ("report", "colleague"),
    "report, a name": ("report", EVIL),
    "report, damaged": ("report", "damaged"),
}
PREPARATIONS = {
    "prepare": ("--config", "tiny.json", f"data.dataset={EVIL}"),
    "prepare --list": ("--list", "data.cache_dir=cache"),
    "prepare --verify": ("--verify", "data.cache_dir=cache"),
    "prepare --gc": ("--gc", "data.cache_dir=cache"),
}
EXPORTS = {
    "export": (f"{EVIL}.pt", "out"),
    "export, unknown option": ("a", "b", f"--{EVIL}"),
}
COMMANDS = {
    "run": (*LAUNCHER, *ONE, "--run-dir", f"run{EVIL}", "--", "printf", EVIL),
    "no such command": (*LAUNCHER, *ONE, "--run-dir", f"run{EVIL}", "--", EVIL),
    "training": (sys.executable, str(ROOT / "pretrain_main.py"), f"data.dataset={EVIL}"),
    "training, resume": (sys.executable, str(ROOT / "pretrain_main.py"), "--resume", EVIL),
    "no Python": ("bash", str(ROOT / "run.sh"), "--version"),
}


def a_run_of_a_colleague(directory: Path) -> None:
    """Every text in its files is hostile, but for the workers' names: what is none is refused."""
    end = RunEnd(exit_code=1, reason=EVIL, culprits=("CPU0",))
    worker = WorkerEnd(
        name="CPU0",
        returncode=1,
        spawn_error=EVIL,
        oom=EVIL,
        pid=7,
        stopped_by_us=False,
        duration_s=0.1,
        last_lines=(EVIL,),
        evidence=(EVIL,),
    )
    record = RunRecord(
        command=[EVIL],
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        started_ns=1,
        pid=0,
        cwd=EVIL,
        host=EVIL,
        kernel=EVIL,
        python=EVIL,
        preset=EVIL,
        device=EVIL,
        mode=EVIL,
        drill=EVIL,
        steps=4,
        workers=["CPU0", "CPU1"],
        groups={"CPU0": EVIL, "CPU1": EVIL},
        not_compared=EVIL,
        fail_on=[EVIL],
        versions={"torch": EVIL},
        gpus={},
        notes=[EVIL],
        duration_s=0.1,
        end=end,
        ended=(worker, replace(worker, name="CPU1")),
        healths={},
    )
    directory.mkdir()
    run_dir.write(directory / "run.json", msgspec.to_builtins(record))
    events = [Note(text=EVIL), Evidence(path=EVIL, what=EVIL), Done(exit_code=1, error=EVIL)]
    (directory / "cpu0.events.jsonl").write_bytes(b"".join(map(encode, events)))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_place(tmp_path)


def make_place(directory: Path) -> Path:
    """A working directory whose own name is hostile, and all that lies in it."""
    here = directory / EVIL
    here.mkdir()
    (here / "evil.json").write_text(json.dumps({EVIL: {EVIL: EVIL}}))
    (here / "evil.yaml").write_text('"\\e[2J": {"\\e[2J": 1}\n')
    (here / "tiny.json").write_text(json.dumps(TINY))
    a_run_of_a_colleague(here / "colleague")
    (here / "damaged").mkdir()
    (here / "damaged" / "run.json").write_text(json.dumps({"schema": EVIL}))
    entry = here / "cache" / EVIL
    entry.mkdir(parents=True)
    (entry / "manifest.json").write_text(json.dumps({"schema": 1, "kind": EVIL, "dataset": EVIL}))
    (here / "cache" / f".tmp-{EVIL}").mkdir()
    return here


def environment() -> dict[str, str]:
    env = {n: v for n, v in os.environ.items() if not n.startswith("CUDA_")}
    return env | {"PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8", "CUDA_VISIBLE_DEVICES": EVIL}


def assert_is_harmless(shown: str) -> None:
    assert "Traceback" not in shown
    assert ALLOWED.fullmatch(shown), ascii(shown)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """What each start came to."""
    here = make_place(tmp_path_factory.mktemp("starts"))
    return run_each({case: Start(here, argv) for case, argv in STARTS.items()}, environment())


@pytest.mark.parametrize("case", STARTS)
def test_no_control_character_of_a_start_reaches_the_terminal(
    ended: dict[str, Ended], case: str
) -> None:
    assert_is_harmless(ended[case].shown)
    assert MARK in ended[case].shown, "it is shown, escaped"


@pytest.mark.parametrize("case", COMMANDS)
def test_no_control_character_of_a_process_reaches_the_terminal(place: Path, case: str) -> None:
    env = environment() | ({"MODEL_CHECK_PYTHON": EVIL} if case == "no Python" else {})
    done = subprocess.run(
        COMMANDS[case],
        cwd=place,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=DEADLINE_S,
    )
    assert_is_harmless(done.stdout.decode())
    assert MARK in done.stdout.decode(), "it is shown, escaped"


@pytest.mark.parametrize("case", [*PREPARATIONS, *EXPORTS])
def test_no_control_character_of_a_tool_reaches_the_terminal(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    monkeypatch.chdir(place)
    if case in EXPORTS:
        export.main(EXPORTS[case])
    else:
        monkeypatch.setattr(prepare_dataset, "_stop_on_signals", lambda: None)
        prepare_dataset.main(PREPARATIONS[case])
    shown = "".join(capfd.readouterr())
    assert_is_harmless(shown)
    assert MARK in shown or case.startswith("prepare --"), "it is shown, escaped"
