"""A fault is computed again: in new processes, on the worker that is named for it and on a healthy
one. What the answers prove is in tests/launcher/verdict/test_replay.py."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from launcher.cli import main
from tests.corpus.said import RUNS
from tests.deadline import DEADLINE_S
from tests.e2e.conftest import Launcher, Run, scripted_in
from tests.e2e.test_run import read_until
from tests.e2e.test_verdict import NORM, env_of
from tests.nvml_fake.build import build, environment, fake_gpu, scenario

REPLAYS = "launch.replay_s=200"
ONCE, ALWAYS = f"flip_gradient@2:CPU1:{NORM}:3", f"flip_gradient@2:CPU1:{NORM}:3:always"
CHANGED = f"flip@2:CPU0:{NORM}:3"
UNTOUCHED = ("report.json", "run.json")


def replayed(launcher: Launcher, *arguments: str, **env: str) -> Run:
    return launcher("--workers=3", REPLAYS, *arguments, **env)


def in_replay(**drills: str) -> dict[str, str]:
    """Faults of the replays alone."""
    return env_of({}, IN_REPLAY=json.dumps(drills))


def row(run: Run, worker: str) -> tuple[str, ...]:
    (found,) = (w for w in run.report()["workers"] if w["name"] == worker)
    return tuple(found[key] for key in ("verdict", "cause_class", "repeat", "severity"))


def said(run: Run) -> str:
    (replay,) = json.loads((run.directory / "run.json").read_text())["end"]["replays"]
    text: str = replay["said"]
    assert f"; {text}" in run.report()["summary"]
    return text


def num_replays(run: Run, worker: str) -> int:
    return len(list(run.directory.glob(f"{worker.lower()}.replay*.events.jsonl")))


@pytest.mark.slow
def test_what_a_rotation_sees_late_is_replayed_from_before_it(launcher: Launcher) -> None:
    """Checkpoints lie between the fault and the step that shows it."""
    drill = "flip@3:CPU1:tok_embed.weight:3:always"
    saves = ("--max-steps=30", "training.save_interval=2", "model.num_layers=4")
    run = replayed(launcher, f"debug.drill={drill}", "debug.fingerprints=rotate", *saves)
    assert run.exit_code == 21, run.output
    assert run.report()["disagreement"]["step"] > 3
    assert row(run, "CPU1") == ("FAIL", "hardware", "persistent", "ISOLATE")


def test_of_two_workers_the_replay_tells_whose_bits_were_right(scripted: Launcher) -> None:
    run = scripted("--workers=2", REPLAYS, f"debug.drill={ONCE}")
    assert run.exit_code == 23, run.output
    assert {path.name for path in (run.directory / "dossier").iterdir()} == {"cpu0", "cpu1"}
    assert run.report()["culprits"] == []
    for worker in ("CPU0", "CPU1"):
        assert row(run, worker) == ("INCONCLUSIVE", "unknown", "transient", "MONITOR")
    assert said(run) == "replayed: CPU0 gave its bits again, and CPU1 gave those of CPU0"


def test_the_replay_of_a_resumed_run_begins_where_that_began(scripted: Launcher) -> None:
    scripted("--workers=3", "--max-steps=2", "training.save_last=true", "--run-dir", "first")
    last = scripted.cwd / ".checkpoints" / "cpu0" / "last.pt"
    last_ns = last.stat().st_mtime_ns
    fault = f"debug.drill=flip_gradient@3:CPU1:{NORM}:3"
    run = replayed(scripted, "--max-steps=5", "--resume", "auto", "training.save_interval=4", fault)
    assert run.exit_code == 21, run.output
    assert said(run) == "replayed 3 times (steps 2 to 3): CPU1 gave the right bits"
    # Told in whole seconds, the start of a run would come before what was written just before it.
    started_at = datetime.fromisoformat(
        json.loads((run.directory / "run.json").read_text())["started_at"]
    )
    assert started_at.timestamp() > last_ns / 1e9
    last.write_bytes(b"another one")
    again = scripted.verb("replay", str(run.directory), "CPU1")
    assert again.returncode == 75, again.stdout
    assert "cpu0/last.pt, with which the run began, was written over" in again.stdout


def test_checkpoints_of_a_later_run_are_not_begun_with(scripted: Launcher) -> None:
    saves = ("--workers=3", "--max-steps=6", "training.save_interval=1")
    run = scripted(*saves, f"debug.drill=flip_gradient@4:CPU1:{NORM}:3")
    other = str(scripted.cwd / "other")
    scripted(*saves, "training.learning_rate=0.003", "--run-dir", other)
    again = scripted.verb("replay", str(run.directory), "launch.replay_s=100")
    assert again.returncode == 21, again.stdout
    assert said(run) == "replayed 3 times (steps 0 to 4): CPU1 gave the right bits"


def test_a_replay_that_would_take_too_long_is_told_and_not_begun(scripted: Launcher) -> None:
    run = scripted("--workers=3", "launch.replay_s=0.01", f"debug.drill={ONCE}")
    assert run.exit_code == 21, run.output
    assert row(run, "CPU1") == ("SUSPECT", "unknown", "not replayed", "MONITOR")
    assert re.fullmatch(
        r"not replayed: 3 steps need about \d+ s, and 0 s are left \(launch.replay_s\)", said(run)
    )
    assert num_replays(run, "CPU1") == 0


def test_a_replay_that_fails_leaves_the_verdict_of_what_is_known(scripted: Launcher) -> None:
    run = replayed(scripted, f"debug.drill={ONCE}", **in_replay(CPU1="kill@1:all:always"))
    assert "[CPU1 replay] Step [0/4]" in run.output
    assert "[CPU2 replay] Step [0/4]" in run.output
    assert run.exit_code == 21, run.output
    assert row(run, "CPU1") == ("SUSPECT", "unknown", "not replayed", "MONITOR")
    assert "CPU1 failed first: killed by SIGKILL" in said(run)
    assert run.report()["culprits"] == ["CPU1"]


def test_a_replay_that_hangs_has_its_time_and_no_more(
    scripted: Launcher, alive: Callable[[Path], list[str]]
) -> None:
    """The limit is more than its steps need on the busiest machine, or none would begin."""
    env = in_replay(CPU1="hang@1:all:always")
    run = scripted("--workers=3", "launch.replay_s=15", "--grace=1", f"debug.drill={ONCE}", **env)
    assert run.exit_code == 21, run.output
    assert row(run, "CPU1") == ("SUSPECT", "unknown", "not replayed", "MONITOR")
    assert said(run) == "not replayed: the replay took longer than 15 s"
    assert alive(run.directory) == []


@pytest.mark.parametrize(
    ("drill", "hang", "last", "repeat", "shown"),
    [
        (ONCE, {"CPU1": "hang@1:all:always"}, 0, "not replayed", "not replayed: SIGINT received"),
        (ALWAYS, {"CPU2": "hang@2:all:always"}, 2, "unsettled", "replayed once"),
    ],
)
def test_ctrl_c_twice_ends_the_replays_and_what_they_have_shown_stands(
    scripted: Launcher,
    alive: Callable[[Path], list[str]],
    drill: str,
    hang: dict[str, str],
    last: int,
    repeat: str,
    shown: str,
) -> None:
    """Nothing in the first case; no further one begins in the second."""
    given = ("--workers=3", REPLAYS, f"debug.drill={drill}")
    process = scripted.start(*given, **in_replay(**hang))
    seen = read_until(process, f"[CPU1 replay] Step [{last}/")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    run = scripted.finish(process, seen)
    assert run.exit_code == 21, run.output
    assert row(run, "CPU1") == ("SUSPECT", "unknown", repeat, "MONITOR")
    assert num_replays(run, "CPU1") == 1
    assert said(run).startswith(shown)
    assert alive(run.directory) == []


def test_ctrl_c_while_the_run_is_torn_down_lets_no_replay_begin(scripted: Launcher) -> None:
    process = scripted.start(
        *("--workers=3", "--grace=100", REPLAYS, f"debug.drill={ONCE}"),
        **in_replay(),
        LINGERS="CPU2",
    )
    seen = read_until(process, "CPU2 lingers")
    process.send_signal(signal.SIGINT)
    seen += read_until(process, "once more kills at once")
    process.send_signal(signal.SIGINT)
    run = scripted.finish(process, seen)
    assert run.exit_code == 21, run.output
    assert said(run) == "not replayed: SIGINT received"
    assert "replay: steps" not in run.output
    assert not list(run.directory.glob("*.replay*"))


def test_a_launcher_that_is_killed_in_the_replay_leaves_nobody_and_what_is_known(
    scripted: Launcher, alive: Callable[[Path], list[str]]
) -> None:
    process = scripted.start(
        *("--workers=3", REPLAYS, f"debug.drill={ONCE}"),
        **in_replay(CPU1="hang@1:all:always"),
    )
    read_until(process, "[CPU1 replay] Step [0/")
    process.kill()
    scripted.finish(process)
    until = time.monotonic() + DEADLINE_S
    while alive(scripted.cwd / "run"):
        assert time.monotonic() < until
        time.sleep(0.02)
    again = scripted.verb("report", str(scripted.cwd / "run"))
    assert again.returncode == 21, again.stdout
    assert (
        "CPU1: keep it in service, and watch it: cause not known, not replayed (MONITOR)"
        in again.stdout
    )


def test_a_later_answer_takes_the_place_of_an_earlier_one(scripted: Launcher) -> None:
    """At first a healthy worker errs, too, so nobody is blamed."""
    wrong = in_replay(CPU0=f"flip_gradient@1:all:{NORM}:4:always")
    run = replayed(scripted, f"debug.drill={ALWAYS}", **wrong)
    assert run.exit_code == 23, run.output
    assert row(run, "CPU0") == ("INCONCLUSIVE", "unknown", None, "MONITOR")
    assert row(run, "CPU2")[0] in ("STOPPED", "PASS")
    assert "CPU0 gave other bits than in the run, too (step 1, " in said(run)
    again = scripted.verb("replay", str(run.directory), "launch.replay_s=100")
    assert again.returncode == 21, again.stdout
    assert row(run, "CPU1") == ("FAIL", "hardware", "persistent", "ISOLATE")
    assert "CPU1: take it out of service: hardware fault, repeats (ISOLATE)" in again.stdout
    assert "CPU1 was wrong again in 4 of 4 replays, first in the gradient of" in said(run)
    assert num_replays(run, "CPU1") == 1 + 4
    assert len(run.report()["replays"]) == 1
    assert main(["report", str(run.directory)]) == 21
    assert row(run, "CPU1") == ("FAIL", "hardware", "persistent", "ISOLATE")


def test_the_second_transient_fault_of_a_gpu_takes_it_out_of_service(scripted: Launcher) -> None:
    """Also when a replay that somebody asks for is what tells of the second one."""
    scenario_file = scripted.cwd / "scenario"
    scenario_file.write_text(scenario([fake_gpu(0)]))
    scripted.environ |= environment(build(scripted.cwd), scenario_file)
    scripted.environ["MODEL_CHECK_HISTORY_FILE"] = str(scripted.cwd / "history.jsonl")
    once = ("system.device=cuda", "--gpus=0", f"debug.drill=flip@2:GPU0:{NORM}:3")
    first = scripted(*once, REPLAYS)
    assert row(first, "GPU0") == ("SUSPECT", "hardware", "transient", "MONITOR")
    assert scripted(*once, "--run-dir", str(scripted.cwd / "asked")).exit_code == 21
    again = scripted.verb("replay", "asked", "launch.replay_s=100")
    third = scripted(*once, REPLAYS, "--run-dir", str(scripted.cwd / "third"))
    for code, output, times in (
        (again.returncode, again.stdout, "the second time"),
        (third.exit_code, third.output, "3 times now"),
    ):
        assert code == 21, output
        assert "GPU0: take it out of service: hardware fault, did not repeat (ISOLATE)" in output
        assert f"; {times}: first " in output
    listed = scripted.verb("history", "GPU0", "--file", str(scripted.cwd / "history.jsonl"))
    assert listed.returncode == 0, listed.stdout
    assert listed.stdout.count("transient") >= 3


@pytest.fixture(scope="module")
def suspected(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Launcher:
    """Beside a run that names CPU1 and was not replayed."""
    launcher = scripted_in(tmp_path_factory.mktemp("suspected"), token_cache)
    run = launcher("--workers=3", f"debug.drill={ALWAYS}")
    assert row(run, "CPU1") == ("SUSPECT", "unknown", "not replayed", "MONITOR")
    return launcher


def test_ctrl_c_in_a_replay_that_somebody_asked_for_leaves_the_report_as_it_was(
    suspected: Launcher,
) -> None:
    directory = suspected.cwd / "run"
    before = {name: (directory / name).read_bytes() for name in UNTOUCHED}
    process = subprocess.Popen(
        [sys.executable, "-m", suspected.module, "replay", "run", REPLAYS],
        cwd=suspected.cwd,
        env=suspected.env | in_replay(CPU1="hang@1:all:always") | suspected.own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        seen = read_until(process, "[CPU1 replay] Step [0/")
        process.send_signal(signal.SIGINT)
        again = suspected.finish(process, seen)
    assert again.exit_code == 130, again.output
    assert before == {name: (directory / name).read_bytes() for name in before}


def test_a_replay_on_other_software_leaves_the_report_as_it_was(
    suspected: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instructions of another CPU stand for another torch, driver or GPU."""
    directory = suspected.cwd / "run"
    before = {name: (directory / name).read_bytes() for name in UNTOUCHED}
    other = json.dumps({name: {"isa": "AVX512"} for name in ("CPU0", "CPU1")})
    monkeypatch.setitem(suspected.environ, "DETAILS", other)
    again = suspected.verb("replay", "run", "launch.replay_s=100")
    assert again.returncode == 75, again.stdout
    assert "not replayed: not comparable: isa AVX2 in the run, AVX512 now" in again.stdout
    assert before == {name: (directory / name).read_bytes() for name in before}


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Launcher:
    """Beside a run of two workers that passed."""
    launcher = scripted_in(tmp_path_factory.mktemp("passed"), token_cache)
    assert launcher("--max-steps=3").exit_code == 0
    return launcher


def test_a_worker_that_passed_gives_its_bits_again_or_is_told(passed: Launcher) -> None:
    report = passed.cwd / "run" / "report.json"
    before = report.read_bytes()
    again = passed.verb("replay", "run", "cpu1", "launch.replay_s=100")
    assert again.returncode == 0, again.stdout
    assert "replayed 3 times (steps 0 to 2): CPU1 gave the right bits" in again.stdout
    assert report.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere/run.json: not a run directory: No such file or directory"),
        (["run", "CPU7"], "replay: this run has no CPU7 (it has CPU0, CPU1)"),
        (["run", "--gpu", "3"], "replay: this run has no GPU3 (it has CPU0, CPU1)"),
        (["run", "CPU0", "CPU1"], "replay: CPU0 and CPU1: name one worker"),
        (["run"], "names no worker: say which (it has CPU0, CPU1)"),
        (["run", "CPU0", "launch.replay=3"], "launch.replay: "),
    ],
)
def test_what_cannot_be_replayed_is_one_line(
    passed: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(passed.cwd)
    assert main(["replay", *arguments]) == 2
    (line,) = "".join(capfd.readouterr()).splitlines()
    assert message in line


def test_a_step_that_was_not_finite_has_no_bits_to_compare(
    passed: Launcher, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its last finite step would clear a GPU that the run condemns."""
    run = RUNS / "nan_one"
    monkeypatch.chdir(passed.cwd)
    for which in ([], ["CPU1"]):
        assert main(["replay", str(run), *which]) == 2
        (line,) = "".join(capfd.readouterr()).splitlines()
        assert "CPU1 met a NaN or Inf in step 2, and computed it again itself" in line


def test_a_gpu_that_is_gone_is_told_with_its_uuid(passed: Launcher) -> None:
    run = passed.cwd / "gone"
    shutil.copytree(passed.cwd / "run", run)
    record = json.loads((run / "run.json").read_text())
    gpus = {name: {"uuid": f"GPU-of-{name}"} for name in record["workers"]}
    (run / "run.json").write_text(json.dumps(record | {"device": "cuda", "gpus": gpus}))
    told = passed.verb("replay", "gone", "CPU1")
    assert told.returncode == 69, told.stdout
    assert "not here any more: CPU1 (GPU-of-CPU1)" in told.stdout
