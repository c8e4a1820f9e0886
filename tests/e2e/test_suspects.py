"""What a worker that is wrong leaves behind, and what becomes of the others."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.verdict.settling import SETTLE_S
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


def test_the_odd_one_and_a_healthy_one_leave_the_same_slice_of_the_same_step(
    launcher: Launcher,
) -> None:
    run = launcher("--workers=3", f"debug.drill={FLIP}")
    assert run.exit_code == 21, run.output
    assert kept(run) == ["cpu0", "cpu1"]
    odd, healthy = manifest(run, "CPU1"), manifest(run, "CPU0")
    assert (odd["kind"], odd["step"]) == ("difference", 2)
    assert odd["state_after"] == healthy["state_after"] > odd["step"]
    assert list(odd["tensors"]) == list(healthy["tensors"])
    assert next(iter(odd["tensors"])) == GUILTY
    assert odd["tensors"][GUILTY]["guilty"]
    dossier = run.directory / "dossier/cpu1"
    assert evidence(run, "CPU1") == [str(dossier / n) for n in ("manifest.json", "difference.json")]
    difference = json.loads((dossier / "difference.json").read_text())
    assert difference["peer"] == "CPU0"
    momentum = difference["tensors"][f"exp_avg/{NORM}"]
    assert momentum["num_differing"] == 1
    assert momentum["first"][0]["index"] == [0]
    told = launcher.verb("forensics", str(dossier))
    assert told.returncode == 0, told.stdout
    assert f"exp_avg/{NORM}" in told.stdout
    reference = launcher.verb("forensics", str(dossier.with_name("cpu0")))
    assert "the healthy one beside CPU1" in reference.stdout
    assert "the healthy one" not in told.stdout


def test_of_two_that_differ_both_leave_theirs(launcher: Launcher) -> None:
    run = launcher("--workers=2", f"debug.drill={FLIP}")
    assert run.exit_code == 23, run.output
    assert kept(run) == ["cpu0", "cpu1"]
    assert manifest(run, "CPU0")["state_after"] == manifest(run, "CPU1")["state_after"]


@pytest.mark.parametrize("drill", [CHANGE, f"flip_moment@2:CPU1:exp_avg_sq.{NORM}:3"])
@pytest.mark.parametrize("then", ["stop", "continue"])
def test_one_that_changed_and_a_healthy_one_leave_the_same_slice_of_the_same_step(
    launcher: Launcher, drill: str, then: str
) -> None:
    run = launcher("--workers=3", f"debug.drill={drill}", f"launch.on_suspect={then}")
    difference = of_the_changed_slice(run)
    value = difference["tensors"][next(iter(manifest(run, "CPU1")["tensors"]))]["first"][0]
    assert value["index"] == [0]
    assert int(value["xor"], 16) == int(value["odd"], 16) ^ int(value["peer"], 16) != 0
    before = evidence(run, "CPU1")
    assert launcher.verb("report", str(run.directory)).returncode == 21
    assert evidence(run, "CPU1") == before


def of_the_changed_slice(run: Run) -> dict[str, Any]:
    """CPU1 changed, CPU0 is healthy, and difference.json compares the same slices of theirs."""
    assert run.exit_code == 21, run.output
    assert kept(run) == ["cpu0", "cpu1"]
    changed, healthy = manifest(run, "CPU1"), manifest(run, "CPU0")
    assert (changed["kind"], changed["step"]) == ("break", healthy["step"])
    assert changed["state_after"] == healthy["state_after"] > 2
    assert list(changed["tensors"]) == list(healthy["tensors"])
    dossier = run.directory / "dossier/cpu1"
    assert evidence(run, "CPU1") == [str(dossier / n) for n in ("manifest.json", "difference.json")]
    difference: dict[str, Any] = json.loads((dossier / "difference.json").read_text())
    assert (difference["peer"], difference["not_comparable"]) == ("CPU0", None)
    return difference


@pytest.mark.parametrize("then", ["stop", "continue"])
def test_one_that_tells_its_change_when_all_were_asked_leaves_the_same_slice(
    launcher: Launcher, then: str
) -> None:
    """By then its fingerprints were waited for in vain, so nobody knows a tensor of the fault."""
    late = env_of({"CPU1": CHANGE}, LATE=f"CPU1 {SETTLE_S + 1}")
    assert of_the_changed_slice(launcher("--workers=3", f"launch.on_suspect={then}", **late))


def test_one_that_changed_in_its_last_step_is_compared_too(launcher: Launcher) -> None:
    run = launcher("--workers=3", "training.save_last=true", f"debug.drill=flip@3:CPU1:{NORM}:3")
    assert run.exit_code == 21, run.output
    assert manifest(run, "CPU1")["state_after"] == manifest(run, "CPU0")["state_after"] == 4
    assert evidence(run, "CPU1")[-1].endswith("/difference.json")


def test_a_worker_alone_that_changed_leaves_its_state_at_once(launcher: Launcher) -> None:
    run = launcher("--workers=1", f"debug.drill=flip@2:CPU0:{NORM}:3")
    assert run.exit_code == 21, run.output
    assert kept(run) == ["cpu0"]
    found = manifest(run, "CPU0")
    assert (found["kind"], found["step"], found["state_after"]) == ("break", 2, 3)
    assert next(iter(found["tensors"])) == f"weights/{NORM}"


def test_statistics_alone_are_kept_where_nothing_else_may_be(launcher: Launcher) -> None:
    run = launcher("--workers=3", "launch.dossier_gib=0", f"debug.drill={FLIP}")
    assert run.exit_code == 21, run.output
    found = manifest(run, "CPU1")
    assert (found["tensors"], found["bytes"]) == ({}, 0)
    assert found["left_out"][GUILTY]["statistics"]["norm"] > 0


def test_a_disk_that_is_full_is_told_and_the_verdict_stands(launcher: Launcher) -> None:
    directory = launcher.cwd / "run"
    directory.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k,mode=700", "tmpfs", str(directory)]
    if os.system(" ".join(mount)) != 0:
        pytest.skip("needs to mount a small file system")
    try:
        run = launcher("--workers=3", f"debug.drill={FLIP}", "training.max_steps=6")
        assert run.exit_code == 21, run.output
        assert "CPU1 differs in" in run.output
        told = manifest(run, "CPU1")
        assert told["shortened"].startswith("disk")
    finally:
        os.system(f"umount {directory}")


@pytest.mark.parametrize("drill", [FLIP, CHANGE])
def test_a_culprit_that_is_killed_while_it_keeps_is_named_all_the_same(
    launcher: Launcher, alive: Callable[[Path], list[str]], drill: str
) -> None:
    run = with_drills(launcher, 3, {"CPU1": drill}, DIES_WHEN_KEEPING="CPU1")
    assert run.exit_code == 21, run.output
    assert run.report()["culprits"] == ["CPU1"]
    assert kept(run) == ["cpu0"]
    assert alive(run.directory) == []


@pytest.mark.parametrize(
    ("drill", "hangs", "num_signals"),
    [(FLIP, "CPU1", 1), (FLIP, "CPU1", 2), (CHANGE, "CPU1", 1), (CHANGE, "CPU0", 1)],
)
def test_ctrl_c_does_not_wait_for_evidence(
    launcher: Launcher,
    alive: Callable[[Path], list[str]],
    drill: str,
    hangs: str,
    num_signals: int,
) -> None:
    env = env_of({"CPU1": drill}, HANGS_WHEN_KEEPING=hangs)
    process = launcher.start("--workers=3", "--grace=2", **env)
    seen = read_until(process, f"{hangs} hangs")
    for _ in range(num_signals):
        process.send_signal(signal.SIGINT)
    run = launcher.finish(process, seen)
    assert run.exit_code == 130, run.output
    assert run.verdicts()["CPU1"] == "SUSPECT"
    assert alive(run.directory) == []


def test_a_launcher_that_is_killed_while_they_keep_leaves_nobody(
    launcher: Launcher, alive: Callable[[Path], list[str]]
) -> None:
    env = env_of({"CPU1": FLIP}, HANGS_WHEN_KEEPING="CPU1")
    process = launcher.start("--workers=3", **env)
    read_until(process, "CPU1 hangs")
    process.kill()
    launcher.finish(process)
    until = time.monotonic() + DEADLINE_S
    while alive(launcher.cwd / "run"):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert launcher.verb("report", str(launcher.cwd / "run")).returncode == 21


def test_a_burn_in_finds_every_bad_worker_in_one_run(launcher: Launcher) -> None:
    drills = {
        "CPU1": f"flip_gradient@1:all:{NORM}:3",
        "CPU3": f"flip_gradient@3:all:{NORM}:4:always",
        "CPU4": f"flip@2:all:{NORM}:5",
    }
    run = launcher(
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
    assert launcher.verb("report", str(run.directory)).returncode == 21
    assert run.report() == before


def test_a_second_odd_one_is_judged_by_those_left(launcher: Launcher) -> None:
    """Of four, one is out; then one of three is odd. Of the two that are left none could be."""
    drills = {"CPU0": f"flip_gradient@1:all:{NORM}:3", "CPU2": f"flip_gradient@3:all:{NORM}:4"}
    run = launcher("--workers=4", "launch.on_suspect=continue", **env_of(drills))
    assert run.exit_code == 21, run.output
    assert run.verdicts() == {"CPU0": "SUSPECT", "CPU1": "PASS", "CPU2": "SUSPECT", "CPU3": "PASS"}


def test_a_healthy_worker_keeps_the_state_of_each_of_two_suspects(launcher: Launcher) -> None:
    drills = {"CPU1": f"flip_gradient@1:all:{NORM}:3", "CPU2": f"flip_gradient@2:all:{NORM}:3"}
    run = launcher(
        *("--workers=4", "--max-steps=12", "launch.max_lead=6", "launch.on_suspect=continue"),
        **env_of(drills),
    )
    assert run.exit_code == 21, run.output
    for worker, of_step in (("CPU1", 1), ("CPU2", 2)):
        dossier = run.directory / "dossier" / worker.lower()
        assert manifest(run, worker)["step"] == of_step
        difference = json.loads((dossier / "difference.json").read_text())
        assert (difference["peer"], difference["not_comparable"]) == ("CPU0", None)
        momentum = difference["tensors"][f"exp_avg/{NORM}"]
        assert momentum["guilty"]
        told = launcher.verb("forensics", str(dossier))
        assert "beside CPU0" in told.stdout
    assert [Path(path).parent.name for path in evidence(run, "CPU0")] == ["cpu0", "earlier1"]
    assert all(Path(path).exists() for path in evidence(run, "CPU0"))


def test_a_suspect_that_hangs_while_it_keeps_holds_the_others_not(
    launcher: Launcher, alive: Callable[[Path], list[str]]
) -> None:
    process = launcher.start(
        *("--workers=3", "--grace=1", "--max-steps=8", "launch.on_suspect=continue"),
        **env_of({"CPU1": FLIP}, HANGS_WHEN_KEEPING="CPU1"),
    )
    seen = read_until(process, "[CPU2] Trained 8 steps")
    os.kill(pid_of("CPU1", launcher.cwd / "run"), signal.SIGKILL)
    run = launcher.finish(process, seen)
    assert run.exit_code == 21, run.output
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "SUSPECT", "CPU2": "PASS"}
    assert alive(run.directory) == []


def test_ctrl_c_in_one_replay_ends_those_that_would_follow(launcher: Launcher) -> None:
    drills = {"CPU0": f"flip_gradient@1:all:{NORM}:3", "CPU2": f"flip_gradient@3:all:{NORM}:4"}
    env = env_of(drills, IN_REPLAY=json.dumps({"CPU0": "hang@1:all:always"}))
    process = launcher.start("--workers=4", REPLAYS, "launch.on_suspect=continue", **env)
    seen = read_until(process, "[CPU0 replay] Step [0/")
    process.send_signal(signal.SIGINT)
    run = launcher.finish(process, seen)
    assert run.exit_code == 21, run.output
    for worker in ("CPU0", "CPU2"):
        assert row(run, worker) == ("SUSPECT", "unknown", "not replayed", "MONITOR")
    assert run.report()["summary"].count("not replayed: SIGINT received") == 2
    assert not list(run.directory.glob("cpu2.replay*"))
