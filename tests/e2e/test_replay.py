"""A fault is computed again: real trainers in new processes, on the worker that is named for it and
on a healthy one."""

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

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import TINY, Launcher, Run
from tests.e2e.test_run import read_until
from tests.e2e.test_verdict import NORM, env_of

REPLAYS = "launch.replay_s=200"
ONCE, ALWAYS = f"flip_gradient@2:CPU1:{NORM}:3", f"flip_gradient@2:CPU1:{NORM}:3:always"
CHANGED = f"flip@2:CPU0:{NORM}:3"


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


def test_a_fault_that_comes_once_is_transient(launcher: Launcher) -> None:
    run = replayed(launcher, f"debug.drill={ONCE}")
    assert run.exit_code == 21, run.output
    assert row(run, "CPU1") == ("SUSPECT", "hardware", "transient", "MONITOR")
    assert run.report()["verdict"] == "SUSPECT"
    assert run.report()["culprits"] == ["CPU1"]
    assert said(run) == "replayed once (steps 0 to 2): CPU1 gave the right bits"
    assert "[CPU1 replay] Step [2/4]" in run.output
    assert "[CPU0 replay] Step [2/4]" in run.output
    assert "[CPU2 replay]" not in run.output
    assert "CPU1: MONITOR (hardware, transient)" in run.output


def test_a_fault_that_comes_again_with_the_same_bits_is_persistent(launcher: Launcher) -> None:
    run = replayed(launcher, f"debug.drill={ALWAYS}")
    assert run.exit_code == 21, run.output
    assert row(run, "CPU1") == ("FAIL", "hardware", "persistent", "ISOLATE")
    assert run.report()["verdict"] == "FAIL"
    assert "same wrong bits again" in said(run)
    assert num_replays(run, "CPU1") == 2


@pytest.mark.parametrize(
    ("drill", "expected"),
    [
        (CHANGED, ("SUSPECT", "hardware", "transient", "MONITOR")),
        (f"{CHANGED}:always", ("FAIL", "hardware", "persistent", "ISOLATE")),
    ],
)
def test_state_that_changes_is_judged_in_a_run_of_one_worker_too(
    launcher: Launcher, drill: str, expected: tuple[str, ...]
) -> None:
    run = launcher("--workers=1", REPLAYS, f"debug.drill={drill}")
    assert run.exit_code == 21, run.output
    assert row(run, "CPU0") == expected


def test_a_healthy_worker_that_strays_from_its_own_record_clears_everybody(
    launcher: Launcher,
) -> None:
    env = in_replay(CPU0=f"flip_gradient@1:all:{NORM}:4:always")
    run = replayed(launcher, f"debug.drill={ONCE}", **env)
    assert run.exit_code == 2, run.output
    assert run.report()["verdict"] == "INVALID"
    assert run.report()["culprits"] == []
    assert set(run.verdicts().values()) == {"INVALID"}
    assert row(run, "CPU1") == ("INVALID", "software", None, "IGNORE")
    assert "CPU0 gave other bits than in the run (step 1, " in said(run)


def test_other_wrong_bits_must_come_eight_times(launcher: Launcher) -> None:
    """A kernel that varies would give them, too, though not each time, nor on one worker alone."""
    env = in_replay(CPU1=f"flip_gradient@1:all:{NORM}:4:always")
    run = replayed(launcher, f"debug.drill={ONCE}", **env)
    assert row(run, "CPU1") == ("FAIL", "hardware", "persistent", "ISOLATE")
    assert ": CPU1 was wrong again, with other bits, first in " in said(run)
    assert num_replays(run, "CPU1") == 8


def test_of_two_workers_the_replay_tells_whose_bits_were_right(launcher: Launcher) -> None:
    run = launcher("--workers=2", REPLAYS, f"debug.drill={ONCE}")
    assert run.exit_code == 23, run.output
    assert run.report()["culprits"] == []
    for worker in ("CPU0", "CPU1"):
        assert row(run, worker) == ("INCONCLUSIVE", "unknown", "transient", "MONITOR")
    assert said(run) == "replayed: CPU0 gave its bits again, and CPU1 gave those of CPU0"


def test_a_replay_begins_with_the_newest_checkpoint_that_is_older_than_the_fault(
    launcher: Launcher,
) -> None:
    """The healthy worker's: the suspect's own may hold its fault."""
    drill = f"flip_gradient@4:CPU1:{NORM}:3"
    run = replayed(launcher, f"debug.drill={drill}", "--max-steps=6", "training.save_interval=1")
    assert run.exit_code == 21, run.output
    assert said(run) == "replayed once (steps 4 to 4): CPU1 gave the right bits"


def test_what_a_rotation_sees_late_is_replayed_from_before_it(launcher: Launcher) -> None:
    """Checkpoints lie between the fault and the step that shows it."""
    drill = "flip@3:CPU1:tok_embed.weight:3:always"
    saves = ("--max-steps=30", "training.save_interval=2", "model.num_layers=4")
    run = replayed(launcher, f"debug.drill={drill}", "debug.fingerprints=rotate", *saves)
    assert run.exit_code == 21, run.output
    assert run.report()["disagreement"]["step"] > 3
    assert row(run, "CPU1") == ("FAIL", "hardware", "persistent", "ISOLATE")


def test_each_of_two_suspects_in_one_step_is_asked_by_itself(launcher: Launcher) -> None:
    drills = {
        "CPU1": "flip_activation@2:all:always",
        "CPU3": f"flip_gradient@2:all:{NORM}:3:always",
    }
    run = launcher("--workers=5", REPLAYS, **env_of(drills))
    assert run.exit_code == 21, run.output
    for worker in drills:
        assert row(run, worker) == ("FAIL", "hardware", "persistent", "ISOLATE")


def test_the_replay_of_a_resumed_run_begins_where_that_began(launcher: Launcher) -> None:
    launcher("--workers=3", "--max-steps=2", "training.save_last=true", "--run-dir", "first")
    last_ns = (launcher.cwd / ".checkpoints" / "cpu0" / "last.pt").stat().st_mtime_ns
    run = replayed(
        launcher,
        *("--max-steps=5", "--resume", "auto", "training.save_interval=4"),
        f"debug.drill=flip_gradient@3:CPU1:{NORM}:3",
    )
    assert run.exit_code == 21, run.output
    assert said(run) == "replayed once (steps 2 to 3): CPU1 gave the right bits"
    # Told in whole seconds, the start of a run would come before what was written just before it.
    started_at = datetime.fromisoformat(
        json.loads((run.directory / "run.json").read_text())["started_at"]
    )
    assert started_at.timestamp() > last_ns / 1e9


def test_a_replay_that_would_take_too_long_is_told_and_not_begun(launcher: Launcher) -> None:
    run = launcher("--workers=3", "launch.replay_s=0.01", f"debug.drill={ONCE}")
    assert run.exit_code == 21, run.output
    assert row(run, "CPU1") == ("SUSPECT", "unknown", "not replayed", "MONITOR")
    assert re.fullmatch(
        r"not replayed: 3 steps need about \d+ s, and 0 s are left \(launch.replay_s\)", said(run)
    )
    assert num_replays(run, "CPU1") == 0


@pytest.mark.parametrize(
    ("fault", "why_not"),
    [
        ("exit7@1:all:always", "CPU1 failed first: exit code 7"),
        ("kill@1:all:always", "CPU1 failed first: killed by SIGKILL"),
        ("nan@1:all:always", "CPU1 failed first: exit code 20"),
    ],
)
def test_a_replay_that_fails_leaves_the_verdict_of_what_is_known(
    launcher: Launcher, fault: str, why_not: str
) -> None:
    run = replayed(launcher, f"debug.drill={ONCE}", **in_replay(CPU1=fault))
    assert run.exit_code == 21, run.output
    assert row(run, "CPU1") == ("SUSPECT", "unknown", "not replayed", "MONITOR")
    assert why_not in said(run)
    assert run.report()["culprits"] == ["CPU1"]
    dossier = json.loads((run.directory / "dossier/cpu1/manifest.json").read_text())
    assert dossier["kind"] == "difference"  # of the run
    assert not list((launcher.cwd / ".checkpoints").rglob("nan_*"))


def test_a_replay_that_hangs_has_its_time_and_no_more(
    launcher: Launcher, alive: Callable[[Path], list[str]]
) -> None:
    env = in_replay(CPU1="hang@1:all:always")
    run = launcher("--workers=3", "launch.replay_s=40", "--grace=1", f"debug.drill={ONCE}", **env)
    assert run.exit_code == 21, run.output
    assert row(run, "CPU1") == ("SUSPECT", "unknown", "not replayed", "MONITOR")
    assert said(run) == "not replayed: the replay took longer than 40 s"
    assert alive(run.directory) == []


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGINT, signal.SIGINT]])
def test_ctrl_c_ends_the_replay_and_the_verdict_stands(
    launcher: Launcher, alive: Callable[[Path], list[str]], signals: list[signal.Signals]
) -> None:
    process = launcher.start(
        *("--workers=3", REPLAYS, f"debug.drill={ONCE}"),
        **in_replay(CPU1="hang@1:all:always"),
    )
    seen = read_until(process, "[CPU1 replay] Step [0/")
    for signum in signals:
        process.send_signal(signum)
    run = launcher.finish(process, seen)
    assert run.exit_code == 21, run.output
    assert row(run, "CPU1") == ("SUSPECT", "unknown", "not replayed", "MONITOR")
    assert said(run) == "not replayed: SIGINT received"
    assert alive(run.directory) == []


def test_ctrl_c_while_the_run_is_torn_down_lets_no_replay_begin(launcher: Launcher) -> None:
    process = launcher.start(
        *("--workers=3", "--grace=100", REPLAYS, f"debug.drill={ONCE}"),
        **in_replay(),
        LINGERS="CPU2",
    )
    seen = read_until(process, "CPU2 lingers")
    process.send_signal(signal.SIGINT)
    seen += read_until(process, "once more kills at once")
    process.send_signal(signal.SIGINT)
    run = launcher.finish(process, seen)
    assert run.exit_code == 21, run.output
    assert said(run) == "not replayed: SIGINT received"
    assert "replay: steps" not in run.output
    assert not list(run.directory.glob("*.replay*"))


def test_ctrl_c_in_a_replay_that_somebody_asked_for_leaves_the_report_as_it_was(
    launcher: Launcher,
) -> None:
    run = launcher("--workers=3", REPLAYS, f"debug.drill={ALWAYS}")
    before = {name: (run.directory / name).read_bytes() for name in ("report.json", "run.json")}
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", "replay", str(run.directory)],
        cwd=run.cwd,
        env=launcher.env | in_replay(CPU1="hang@1:all:always"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    launcher.started.append(process)
    seen = read_until(process, "[CPU1 replay] Step [0/")
    process.send_signal(signal.SIGINT)
    again = launcher.finish(process, seen)
    assert again.exit_code == 130, again.output
    assert before == {name: (run.directory / name).read_bytes() for name in before}


def test_a_launcher_that_is_killed_in_the_replay_leaves_nobody_and_what_is_known(
    launcher: Launcher, alive: Callable[[Path], list[str]]
) -> None:
    process = launcher.start(
        *("--workers=3", REPLAYS, f"debug.drill={ONCE}"),
        **in_replay(CPU1="hang@1:all:always"),
    )
    read_until(process, "[CPU1 replay] Step [0/")
    process.kill()
    launcher.finish(process)
    until = time.monotonic() + DEADLINE_S
    while alive(launcher.cwd / "run"):
        assert time.monotonic() < until
        time.sleep(0.02)
    again = launcher.verb("report", str(launcher.cwd / "run"))
    assert again.returncode == 21, again.stdout
    assert "CPU1: MONITOR (unknown, not replayed)" in again.stdout


def test_a_run_that_is_over_is_replayed_when_somebody_asks(launcher: Launcher) -> None:
    run = launcher("--workers=3", f"debug.drill={ALWAYS}")
    assert row(run, "CPU1") == ("SUSPECT", "unknown", "not replayed", "MONITOR")
    again = launcher.verb("replay", str(run.directory), "launch.replay_s=100")
    assert again.returncode == 21, again.stdout
    assert row(run, "CPU1") == ("FAIL", "hardware", "persistent", "ISOLATE")
    assert "CPU1: ISOLATE (hardware, persistent)" in again.stdout
    assert launcher.verb("report", str(run.directory)).returncode == 21
    assert row(run, "CPU1") == ("FAIL", "hardware", "persistent", "ISOLATE")


def test_a_replay_on_other_software_leaves_the_report_as_it_was(launcher: Launcher) -> None:
    """The instructions of another CPU stand for another torch, driver or GPU."""
    run = launcher("--workers=3", f"debug.drill={ALWAYS}")
    before = {name: (run.directory / name).read_bytes() for name in ("report.json", "run.json")}
    launcher.environ["ATEN_CPU_CAPABILITY"] = "default"
    again = launcher.verb("replay", str(run.directory), "launch.replay_s=100")
    assert again.returncode == 75, again.stdout
    assert "not replayed: not comparable: isa" in again.stdout
    assert before == {name: (run.directory / name).read_bytes() for name in before}


def test_checkpoints_of_a_later_run_are_not_begun_with(launcher: Launcher) -> None:
    saves = ("--workers=3", "--max-steps=6", "training.save_interval=1")
    run = launcher(*saves, f"debug.drill=flip_gradient@4:CPU1:{NORM}:3:always")
    time.sleep(2.5)  # file times are compared with seconds
    other = str(launcher.cwd / "other")
    launcher(*saves, "training.learning_rate=0.003", "--run-dir", other)
    again = launcher.verb("replay", str(run.directory), "launch.replay_s=100")
    assert again.returncode == 21, again.stdout
    assert row(run, "CPU1") == ("FAIL", "hardware", "persistent", "ISOLATE")
    assert said(run).startswith("replayed twice (steps 0 to 4)")


def test_a_later_answer_takes_the_place_of_an_earlier_one(launcher: Launcher) -> None:
    wrong = in_replay(CPU0=f"flip_gradient@1:all:{NORM}:4:always")
    run = replayed(launcher, f"debug.drill={ALWAYS}", **wrong)
    assert run.exit_code == 2, run.output
    again = launcher.verb("replay", str(run.directory))
    assert again.returncode == 21, again.stdout
    assert row(run, "CPU1") == ("FAIL", "hardware", "persistent", "ISOLATE")
    assert len(run.report()["replays"]) == 1


def test_what_a_replay_tells_later_is_in_the_history(launcher: Launcher) -> None:
    kept = f"launch.history_file={launcher.cwd / 'history.jsonl'}"
    launcher("--workers=3", REPLAYS, kept, f"debug.drill={ONCE}")
    second = ("--run-dir", str(launcher.cwd / "second"))
    launcher("--workers=3", kept, f"debug.drill={ONCE}", *second)
    again = launcher.verb("replay", "second", "launch.replay_s=100")
    assert again.returncode == 21, again.stdout
    assert "CPU1: ISOLATE (hardware, transient)" in again.stdout
    assert "; the second time: first " in again.stdout


def test_a_run_whose_own_beginning_was_written_over_is_not_replayed(launcher: Launcher) -> None:
    first = ("--workers=3", "--max-steps=2", "--run-dir", str(launcher.cwd / "first"))
    launcher(*first, "training.save_last=true")
    drill = f"debug.drill=flip_gradient@3:CPU1:{NORM}:3"
    resumed = ("--max-steps=5", "--resume=auto", "training.save_last=true")
    run = replayed(launcher, *resumed, "launch.on_suspect=continue", drill)
    assert run.exit_code == 21, run.output
    assert said(run).endswith("cpu0/last.pt, with which the run began, was written over")


def test_a_worker_that_passed_gives_its_bits_again_or_is_told(launcher: Launcher) -> None:
    run = launcher("--workers=2", "--max-steps=3")
    before = (run.directory / "report.json").read_bytes()
    again = launcher.verb("replay", str(run.directory), "cpu1")
    assert again.returncode == 0, again.stdout
    assert "replayed once (steps 0 to 2): CPU1 gave the right bits" in again.stdout
    assert (run.directory / "report.json").read_bytes() == before


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
    passed: Launcher, arguments: list[str], message: str
) -> None:
    told = passed.verb("replay", *arguments)
    assert told.returncode == 2, told.stdout
    (line,) = told.stdout.splitlines()
    assert message in line


def test_a_gpu_that_is_gone_is_told_with_its_uuid(passed: Launcher) -> None:
    run = passed.cwd / "gone"
    shutil.copytree(passed.cwd / "run", run)
    record = json.loads((run / "run.json").read_text())
    gpus = {name: {"uuid": f"GPU-of-{name}"} for name in record["workers"]}
    (run / "run.json").write_text(json.dumps(record | {"device": "cuda", "gpus": gpus}))
    told = passed.verb("replay", "gone", "CPU1")
    assert told.returncode == 69, told.stdout
    assert "not here any more: CPU1 (GPU-of-CPU1), CPU0 (GPU-of-CPU0)" in told.stdout


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Launcher:
    """Beside a run of two workers that passed."""
    directory = tmp_path_factory.mktemp("passed")
    config = directory / "tiny.json"
    config.write_text(json.dumps(TINY))
    launcher = Launcher(directory, token_cache, config)
    assert launcher("--max-steps=1").exit_code == 0
    return launcher


def test_the_second_transient_fault_of_a_worker_takes_it_out_of_service(
    launcher: Launcher,
) -> None:
    env = {"MODEL_CHECK_HISTORY_FILE": str(launcher.cwd / "history.jsonl")}
    first = replayed(launcher, f"debug.drill={ONCE}", **env)
    assert row(first, "CPU1") == ("SUSPECT", "hardware", "transient", "MONITOR")
    second = replayed(launcher, f"debug.drill={ONCE}", "--run-dir", "second", **env)
    assert second.exit_code == 21, second.output
    assert "CPU1: ISOLATE (hardware, transient)" in second.output
    assert "; the second time: first " in second.output
    listed = launcher.verb("history", "CPU1", "--file", env["MODEL_CHECK_HISTORY_FILE"])
    assert listed.returncode == 0, listed.stdout
    assert listed.stdout.count("transient") >= 2
