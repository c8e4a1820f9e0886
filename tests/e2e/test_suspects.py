"""What a worker that is wrong leaves behind, and what becomes of the others."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.verdict.observer import SETTLE_S
from tests.deadline import DEADLINE_S
from tests.e2e.conftest import Launcher, Run
from tests.e2e.test_in_step import events, pid_of
from tests.e2e.test_replay import REPLAYS, row
from tests.e2e.test_run import read_until
from tests.e2e.test_verdict import NORM, env_of, with_drills

FLIP = f"flip_gradient@2:CPU1:{NORM}:3"
GUILTY = f"gradients/{NORM}"
CHANGE = f"flip@2:CPU1:{NORM}:3"


def manifest(run: Run, worker: str) -> dict[str, Any]:
    path = run.directory / "dossier" / worker.lower() / "manifest.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def kept(run: Run) -> list[str]:
    return sorted(path.parent.name for path in run.directory.glob("dossier/*/manifest.json"))


def evidence(run: Run, worker: str) -> list[str]:
    (found,) = (w for w in run.report()["workers"] if w["name"] == worker)
    paths: list[str] = found["evidence"]
    return paths


def difference(run: Run, worker: str) -> dict[str, Any]:
    """That of its state and of the healthy one's, which are of the same moment."""
    dossier = run.directory / "dossier" / worker.lower()
    paths = [str(dossier / name) for name in ("manifest.json", "difference.json")]
    assert evidence(run, worker) == paths
    found: dict[str, Any] = json.loads((dossier / "difference.json").read_text())
    assert (found["peer"], found["not_comparable"]) == ("CPU0", None)
    return found


def test_a_real_burn_in_names_who_is_odd_and_who_changed_with_the_bits_and_replays_both(
    launcher: Launcher,
) -> None:
    """CPU0 keeps its state beside each of them, and its checkpoints are where replays begin."""
    drills = {"CPU1": f"flip_gradient@1:all:{NORM}:3", "CPU2": f"flip@6:all:{NORM}:3"}
    going_on = ("--max-steps=8", "launch.max_lead=2", "launch.on_suspect=continue")
    saves = "training.save_interval=1"
    in_replay = {"IN_REPLAY": json.dumps({"CPU2": "exit7@6:all:always"})}
    run = launcher("--workers=3", REPLAYS, *going_on, saves, **env_of(drills, **in_replay))
    assert run.exit_code == 21, run.output
    assert sorted(run.report()["culprits"]) == ["CPU1", "CPU2"]
    # Where CPU2's bits are compared before it tells its change, the run ends with that step.
    assert run.verdicts()["CPU0"] in ("PASS", "STOPPED")
    assert row(run, "CPU1") == ("SUSPECT", "hardware", "transient", "MONITOR")
    assert row(run, "CPU2") == ("SUSPECT", "unknown", "not replayed", "MONITOR")
    tensor = {"name": NORM, "found": {"CPU1": [[0, 3]]}, "num_others": 0}
    assert run.report()["disagreement"]["tensor"] == tensor
    assert "replayed 3 times (steps 1 to 1): CPU1 gave the right bits" in run.output
    assert "not replayed: CPU2 failed first: exit code 7" in run.output
    assert "replay: steps 6 to 6 again on CPU2, beside CPU0" in run.output
    assert f"{NORM} changed (bit 3 of value 0)" in run.report()["summary"]
    assert_it_tells_the_odd_bits(run)
    assert_it_tells_the_changed_bits(run)
    assert [Path(path).parent.name for path in evidence(run, "CPU0")] == ["cpu0", "earlier1"]
    assert all(Path(path).exists() for path in evidence(run, "CPU0"))


def assert_it_tells_the_odd_bits(run: Run) -> None:
    odd = manifest(run, "CPU1")
    assert (odd["kind"], odd["step"]) == ("difference", 1)
    assert odd["state_after"] > 1
    assert next(iter(odd["tensors"])) == GUILTY
    assert odd["tensors"][GUILTY]["guilty"]
    momentum = difference(run, "CPU1")["tensors"][f"exp_avg/{NORM}"]
    assert (momentum["guilty"], momentum["num_differing"]) == (True, 1)
    assert momentum["first"][0]["index"] == [0]


def assert_it_tells_the_changed_bits(run: Run) -> None:
    changed, healthy = manifest(run, "CPU2"), manifest(run, "CPU0")
    assert (changed["kind"], changed["step"]) == ("break", healthy["step"])
    assert changed["state_after"] == healthy["state_after"] > 6
    assert list(changed["tensors"]) == list(healthy["tensors"])
    value = difference(run, "CPU2")["tensors"][f"weights/{NORM}"]["first"][0]
    assert value["index"] == [0]
    assert int(value["xor"], 16) == int(value["odd"], 16) ^ int(value["peer"], 16) != 0


def test_one_that_changed_and_a_healthy_one_leave_their_states_of_the_same_step(
    scripted: Launcher,
) -> None:
    run = scripted("--workers=3", f"debug.drill=flip_moment@2:CPU1:exp_avg_sq.{NORM}:3")
    assert_both_kept(run)
    before = evidence(run, "CPU1")
    assert main(["report", str(run.directory)]) == 21
    assert evidence(run, "CPU1") == before


def assert_both_kept(run: Run) -> None:
    """CPU1, which changed, and CPU0, which is healthy."""
    assert run.exit_code == 21, run.output
    assert kept(run) == ["cpu0", "cpu1"]
    changed, healthy = manifest(run, "CPU1"), manifest(run, "CPU0")
    assert (changed["kind"], changed["step"]) == ("break", healthy["step"])
    assert changed["state_after"] == healthy["state_after"] > 2
    assert evidence(run, "CPU1")[-1].endswith("/difference.json")


def test_one_that_tells_its_change_when_all_were_asked_leaves_its_state_of_the_same_step(
    scripted: Launcher,
) -> None:
    """By then its fingerprints were waited for in vain, so nobody knows a tensor of the fault."""
    late = env_of({"CPU1": CHANGE}, LATE=f"CPU1 {SETTLE_S + 1}")
    assert_both_kept(scripted("--workers=3", **late))


def test_one_that_changed_in_its_last_step_is_compared_too(scripted: Launcher) -> None:
    run = scripted("--workers=3", "training.save_last=true", f"debug.drill=flip@3:CPU1:{NORM}:3")
    assert run.exit_code == 21, run.output
    assert manifest(run, "CPU1")["state_after"] == manifest(run, "CPU0")["state_after"] == 4
    assert evidence(run, "CPU1")[-1].endswith("/difference.json")


@pytest.mark.parametrize("drill", [FLIP, CHANGE])
def test_a_culprit_that_is_killed_while_it_keeps_is_named_all_the_same(
    scripted: Launcher, alive: Callable[[Path], list[str]], drill: str
) -> None:
    run = with_drills(scripted, 3, {"CPU1": drill}, DIES_WHEN_KEEPING="CPU1")
    assert run.exit_code == 21, run.output
    assert run.report()["culprits"] == ["CPU1"]
    assert kept(run) == ["cpu0"]
    assert alive(run.directory) == []


@pytest.mark.parametrize(
    ("drill", "hangs", "num_signals"),
    [(FLIP, "CPU1", 1), (FLIP, "CPU1", 2), (CHANGE, "CPU0", 1)],
)
def test_ctrl_c_does_not_wait_for_evidence(
    scripted: Launcher,
    alive: Callable[[Path], list[str]],
    drill: str,
    hangs: str,
    num_signals: int,
) -> None:
    env = env_of({"CPU1": drill}, HANGS_WHEN_KEEPING=hangs)
    process = scripted.start("--workers=3", "--grace=2", **env)
    seen = read_until(process, f"{hangs} hangs")
    for _ in range(num_signals):
        process.send_signal(signal.SIGINT)
    run = scripted.finish(process, seen)
    assert run.exit_code == 130, run.output
    assert run.verdicts()["CPU1"] == "SUSPECT"
    assert alive(run.directory) == []


def test_a_launcher_that_is_killed_while_they_keep_leaves_nobody(
    scripted: Launcher, alive: Callable[[Path], list[str]]
) -> None:
    env = env_of({"CPU1": FLIP}, HANGS_WHEN_KEEPING="CPU1")
    process = scripted.start("--workers=3", **env)
    read_until(process, "CPU1 hangs")
    process.kill()
    scripted.finish(process)
    until = time.monotonic() + DEADLINE_S
    while alive(scripted.cwd / "run"):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert main(["report", str(scripted.cwd / "run")]) == 21


def test_a_burn_in_finds_every_bad_worker_in_one_run(scripted: Launcher) -> None:
    drills = {
        "CPU1": f"flip_gradient@1:all:{NORM}:3",
        "CPU3": f"flip_gradient@3:all:{NORM}:4:always",
        "CPU4": f"flip@2:all:{NORM}:5",
    }
    run = scripted(
        *("--workers=6", "--max-steps=6", REPLAYS, "launch.on_suspect=continue"),
        **env_of(drills),
    )
    assert run.exit_code == 21, run.output
    assert sorted(run.report()["culprits"]) == ["CPU1", "CPU3", "CPU4"]
    assert row(run, "CPU1") == ("SUSPECT", "hardware", "transient", "MONITOR")
    assert row(run, "CPU3") == ("FAIL", "hardware", "persistent", "ISOLATE")
    assert row(run, "CPU4") == ("SUSPECT", "hardware", "transient", "MONITOR")
    assert [run.verdicts()[name] for name in ("CPU0", "CPU2", "CPU5")] == ["PASS"] * 3
    for name in ("CPU0", "CPU2", "CPU5"):
        path = run.directory / f"{name.lower()}.events.jsonl"
        assert [e["step"] for e in events(path) if e["kind"] == "step"] == list(range(6))
    assert {"cpu1", "cpu3", "cpu4"} < set(kept(run))
    assert run.output.count(": the others go on without CPU") == 3
    before = run.report()
    assert main(["report", str(run.directory)]) == 21
    assert run.report() == before


def test_a_suspect_that_hangs_while_it_keeps_holds_the_others_not(
    scripted: Launcher, alive: Callable[[Path], list[str]]
) -> None:
    process = scripted.start(
        *("--workers=3", "--grace=1", "--max-steps=8", "launch.on_suspect=continue"),
        **env_of({"CPU1": FLIP}, HANGS_WHEN_KEEPING="CPU1"),
    )
    seen = read_until(process, "[CPU2] Trained 8 steps")
    os.kill(pid_of("CPU1", scripted.cwd / "run"), signal.SIGKILL)
    run = scripted.finish(process, seen)
    assert run.exit_code == 21, run.output
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "SUSPECT", "CPU2": "PASS"}
    assert alive(run.directory) == []


def test_ctrl_c_in_one_replay_ends_those_that_would_follow(scripted: Launcher) -> None:
    """Of four, one is out; then one of three is odd. Of the two that are left none could be."""
    drills = {"CPU0": f"flip_gradient@1:all:{NORM}:3", "CPU2": f"flip_gradient@3:all:{NORM}:4"}
    env = env_of(drills, IN_REPLAY=json.dumps({"CPU0": "hang@1:all:always"}))
    process = scripted.start("--workers=4", REPLAYS, "launch.on_suspect=continue", **env)
    seen = read_until(process, "[CPU0 replay] Step [0/")
    process.send_signal(signal.SIGINT)
    run = scripted.finish(process, seen)
    assert run.exit_code == 21, run.output
    for worker in ("CPU0", "CPU2"):
        assert row(run, worker) == ("SUSPECT", "unknown", "not replayed", "MONITOR")
    assert run.verdicts() == {"CPU0": "SUSPECT", "CPU1": "PASS", "CPU2": "SUSPECT", "CPU3": "PASS"}
    assert run.report()["summary"].count("not replayed: SIGINT received") == 2
    assert not list(run.directory.glob("cpu2.replay*"))
