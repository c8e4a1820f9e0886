"""`--mode compare`: arms with other settings, side by side or in turn, and one report of all."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launcher.plan import THREAD_VARIABLES
from launcher.report.rebuild import rebuild
from model_check.utils.cores import usable_cores
from tests.deadline import DEADLINE_S
from tests.e2e.conftest import TINY, Launcher, Run, launcher_in
from tests.e2e.test_gpus import EIGHT, box, library  # noqa: F401
from tests.e2e.test_run import read_until
from tests.in_process import answer_of
from tests.nvml_fake.build import fake_gpu

PREFIX = re.compile(r"\[(launcher|CPU\d+)\] (\[(full|infini|a|b|bad)\] (\[seed \d+\] )?)?\S")


RESTING = {"RESTS": "0.05"}
"""So that a training of many steps costs no CPU, and is not done before a test has acted."""
HUGE = ("model.hidden_size=8192", "model.num_layers=400", "model.num_heads=64")


def losses(run: Run, arm: str, worker: str) -> list[str]:
    path = run.directory / arm / f"{worker}.events.jsonl"
    events = map(json.loads, path.read_text().splitlines())
    return [event["loss"] for event in events if event["kind"] == "step"]


def first_values(run: Run, arm: str) -> dict[str, Any]:
    """Of the parameters, by the fingerprints of the first step."""
    path = next((run.directory / arm).glob("*.events.jsonl"))
    steps = (json.loads(line) for line in path.read_text().splitlines())
    first = next(event for event in steps if event["kind"] == "step")
    return dict(first["fp"])


def arms_of(run: Run) -> dict[str, Any]:
    return {arm["name"]: arm for arm in run.report()["arms"]}


@pytest.fixture(scope="module")
def both_models(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Run:
    launcher = launcher_in(tmp_path_factory.mktemp("both_models"), token_cache)
    run = launcher("--run-both-models", "--tensorboard-dir=tb", "training.save_last=true")
    assert run.exit_code == 0, run.output
    return run


def test_both_models_train_side_by_side_and_differ_in_attention_alone(both_models: Run) -> None:
    run = both_models
    assert "2 trainings side by side on CPU0 and CPU1" in run.output
    assert all(PREFIX.match(line) for line in run.output.splitlines() if line.strip())
    assert any(line.startswith("[CPU1] [infini] Step [0/4]") for line in run.output.splitlines())
    result = run.report()
    assert (result["verdict"], result["culprits"]) == ("PASS", [])
    assert result["run"]["differing"] == {"model.attention": {"full": "full", "infini": "infini"}}
    for arm, worker in (("full", "cpu0"), ("infini", "cpu1")):
        assert len(losses(run, arm, worker)) == 4
        config = json.loads((run.directory / arm / "config.json").read_text())
        assert config["model"]["attention"] == arm
        assert (run.cwd / ".checkpoints" / arm / "last.pt").is_file()
        assert list((run.cwd / "tb" / "run" / arm / worker).glob("events.*"))
    assert (run.cwd / ".logs/latest").resolve() == run.directory
    # An arm needs no peer in another run.
    figures = run.cwd / "figures.prom"
    assert rebuild([str(run.directory), "--prometheus", str(figures)], lambda line: None) == 0
    told = figures.read_text().splitlines()
    assert {"model_check_exit_code 0", 'model_check_verdict{verdict="PASS"} 1'} <= {*told}


def test_a_gate_is_in_the_arm_of_infini_alone(both_models: Run) -> None:
    run = both_models
    import torch

    names = {}
    for arm in ("full", "infini"):
        saved = torch.load(run.cwd / ".checkpoints" / arm / "last.pt", weights_only=False)
        names[arm] = set(saved["model"])
    assert {name for name in names["infini"] - names["full"]} == {"layers.0.attention.gate"}
    assert names["full"] < names["infini"]
    gates = {name: arm["gates"] for name, arm in arms_of(run).items()}
    assert gates["full"] == []
    (of_infini,) = gates["infini"]
    assert (len(of_infini["shares"]), len(of_infini["shares"][0])) == (1, 2)
    assert sum(of_infini["histogram"]) == 2


def test_equal_settings_give_equal_bits_and_other_data_orders_do_not(scripted: Launcher) -> None:
    run = scripted("--arm", "a", "--arm", "b", "--workers=1", "--seeds=2")
    assert run.exit_code == 0, run.output
    assert "4 trainings one after the other on CPU0" in run.output
    assert "no setting differs between the arms" in run.output
    of = {
        f"{arm}/seed_{seed}": losses(run, f"{arm}/seed_{seed}", "cpu0")
        for arm in "ab"
        for seed in (42, 43)
    }
    assert of["a/seed_42"] == of["b/seed_42"] != of["a/seed_43"] == of["b/seed_43"]
    beside = arms_of(run)["b"]["beside"]["end_loss"]
    assert (beside["mean"], beside["count"]) == (0, 2)
    assert "b: end loss equal to a's" in run.output
    assert arms_of(run)["a"]["figures"]["end_loss"]["std"] > 0


def test_a_training_has_as_many_threads_in_every_turn(scripted: Launcher) -> None:
    arms = ("--arm", "a", "--arm", "b", "--arm", "c")
    done = subprocess.run(
        scripted.arguments("--workers=2", "--dry-run", "--json", *arms),
        cwd=scripted.cwd,
        env={name: value for name, value in scripted.env.items() if name not in THREAD_VARIABLES},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    trainings = [each for turn in json.loads(done.stdout)["turns"] for each in turn]
    threads = [each["processes"][1]["env"]["OMP_NUM_THREADS"] for each in trainings]
    assert threads == [str(max(1, usable_cores() // 2))] * 3


def test_an_arm_that_fails_is_named_and_the_other_one_trains_on(scripted: Launcher) -> None:
    run = scripted("--arm", "a", "--arm", "bad", "debug.drill=nan@1")
    assert run.exit_code == 20, run.output
    result = run.report()
    assert (result["verdict"], result["culprits"]) == ("FAIL", ["bad"])
    assert len(losses(run, "a", "cpu0")) == 4
    last = run.lines("[launcher] ")[-1]
    assert last.startswith("[launcher] FAIL: bad failed: CPU1 failed: non-finite gradient")
    assert last.endswith("; a passed (exit code 20)")
    assert arms_of(run)["a"]["figures"]["end_loss"]["count"] == 1
    assert "end_loss" not in arms_of(run)["bad"]["figures"]
    again = scripted.verb("report", "run")
    assert (again.returncode, again.stdout.splitlines()[-1]) == (20, last)
    assert run.report() == result


def test_an_arm_whose_launcher_is_killed_is_named_and_leaves_nobody(
    scripted: Launcher, alive: Callable[[Path], list[str]]
) -> None:
    process = scripted.start("--arm", "a", "--arm", "b", "--max-steps=100000", **RESTING)
    seen = read_until(process, "[b] Step [1/100000]")
    os.kill(child_of(process.pid, "b"), signal.SIGKILL)
    ahead = max(map(int, re.findall(r"\[a\] Step \[(\d+)/", seen)), default=0)  # arms keep no step
    seen += read_until(process, f"[a] Step [{ahead + 20}/100000]")
    process.send_signal(signal.SIGTERM)
    run = scripted.finish(process, seen)
    assert run.exit_code == 143, run.output
    told = run.report()
    assert told["culprits"] == ["b"]
    assert "b failed: its launcher was killed by SIGKILL (9)" in told["summary"]
    assert scripted.verb("report", "run").returncode == 143
    assert run.report() == told
    assert not [*alive(run.directory / "a"), *alive(run.directory / "b")]


def test_a_comparison_that_is_killed_leaves_nobody(
    scripted: Launcher, alive: Callable[[Path], list[str]]
) -> None:
    process = scripted.start("--arm", "a", "--arm", "b", "--max-steps=100000", **RESTING)
    read_until(process, "[b] Step [1/100000]")
    process.kill()
    directory = scripted.cwd / "run"
    wait_until(lambda: not [*alive(directory / "a"), *alive(directory / "b")])
    assert scripted.verb("report", "run").returncode != 0


def child_of(parent: int, arm: str) -> int:
    """The launcher that runs this arm for that one."""
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in path.read_text().split():
            if f"/run/{arm}.json".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    raise AssertionError(f"nobody runs {arm}")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_arms_and_starts_no_further_one(
    scripted: Launcher, alive: Callable[[Path], list[str]], signum: int
) -> None:
    options = ("--arm", "a", "--arm", "b", "--workers=1", "--max-steps=100000")
    process = scripted.start(*options, **RESTING)
    seen = read_until(process, "[a] Step [1/100000]")
    process.send_signal(signum)
    run = scripted.finish(process, seen)
    assert run.exit_code == 128 + signum, run.output
    assert run.report()["verdict"] == "INCONCLUSIVE"
    assert not alive(run.directory / "a")
    assert not (run.directory / "b").exists()
    assert "Traceback" not in run.output


def test_replicas_of_an_arm_are_compared_with_each_other_alone(scripted: Launcher) -> None:
    flip = "flip_gradient@2:CPU3:layers.0.feed_forward.w2.weight:20"
    arms = ("--arm", "a", "--arm", "b", f"debug.drill={flip}")
    run = scripted(*arms, "--workers=4", "launch.replicas=2", "--max-steps=8")
    assert run.exit_code == 23, run.output
    assert run.report()["culprits"] == ["b"]
    assert (run.directory / "a" / "cpu1.log").is_file()
    assert (run.directory / "b" / "cpu3.log").is_file()


def test_it_goes_on_from_its_checkpoints_wherever_an_arm_runs(scripted: Launcher) -> None:
    arms = ("--arm", "a", "--arm", "b", "training.lr_schedule=constant", "training.save_last=true")
    first = scripted(*arms[:5], "training.save_last=true")
    assert first.exit_code == 0, first.output
    os.rename(first.directory, first.cwd / "first")
    options = ("--workers=1", "--resume=auto", "--max-steps=6", "training.resume_anyway=true")
    again = scripted(*arms[:5], "training.save_last=true", *options)
    assert again.exit_code == 0, again.output
    assert "[CPU0] [b] Step [4/6]" in again.output
    assert "[CPU0] [b] Step [3/6]" not in again.output


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--mode=compare",), "--mode compare: give two arms"),
        (("--arm", "a"), "--mode compare: give two arms"),
        (("--run-both-models", "model.infini.segment_length=32"), "32 tokens are one segment"),
        (("--run-both-models", "--disable-infini-attn"), "each arm gives its own model.attention"),
        (("--run-both-models", "--repeat=2"), "--seeds N trains each arm N times"),
        (("--run-both-models", "training.min_lr=1e-5"), "changes nothing in any arm"),
        (
            ("--run-both-models", "launch.replicas=3", "--workers=2"),
            "launch.replicas = 3: 2 is all there is",
        ),
        (("--run-both-models", "--", "true"), "leave `-- COMMAND` out"),
        (("--seeds=2",), "needs launch.mode=compare"),
        (("--arm", "a", "--arm", "b", "debug.drill=nan@1:CPU7"), "this run has no worker CPU7"),
        (("--arm", "a", "--arm", "b", "debug.drill=nan@1:CPU0"), "this run has no worker CPU0"),
        (("launch.mode=ddp", "--arm", "a", "--arm", "b"), "launch.mode=ddp: has no arms"),
        (("--workers=1", "--arm", "a", "--arm", "b", *HUGE), "moments alone"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(
    scripted: Launcher, argv: tuple[str, ...], told: str
) -> None:
    asked = scripted.arguments(*argv)[3:]
    refused = answer_of(*asked, cwd=scripted.cwd, env=scripted.env)
    assert (refused.returncode, told in refused.stderr) == (2, True), refused.stderr
    assert not (scripted.cwd / "run").exists()


def plan(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def where(turns: list[list[dict[str, Any]]]) -> list[list[tuple[str, list[str]]]]:
    """(directory, GPUs by their pins) of each training of each turn."""
    return [
        [
            (
                "/".join(Path(each["run_dir"]).parts[-2:]),
                [p["env"]["CUDA_VISIBLE_DEVICES"] for p in each["processes"][1:]],
            )
            for each in turn
        ]
        for turn in turns
    ]


def test_arms_and_seeds_are_placed_on_a_box_of_eight(box: Any) -> None:  # noqa: F811
    uuids = [gpu.uuid for gpu in EIGHT]
    asked = ("--run-both-models", "--dry-run", "--json")
    three = plan(box(EIGHT)(*asked, "--seeds=3"))
    (turn,) = where(three["turns"])
    assert [each for _, each in turn] == [[uuid] for uuid in uuids[:6]]
    assert [name for name, _ in turn] == [
        f"{arm}/seed_{seed}" for seed in (42, 43, 44) for arm in ("full", "infini")
    ]
    six = plan(box(EIGHT)(*asked, "--seeds=6"))
    assert [len(turn) for turn in six["turns"]] == [8, 4]
    pairs = plan(box(EIGHT)(*asked, "launch.replicas=4"))
    assert [each for _, each in where(pairs["turns"])[0]] == [uuids[:4], uuids[4:]]


def test_arms_take_turns_on_a_gpu_that_stays_reserved(
    box: Any,  # noqa: F811
    tmp_path: Path,
    token_cache: Path,
) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(TINY | {"system": {"device": "cuda"}}))
    run = box([fake_gpu(0)])(
        *("--config", "tiny.json", "--run-dir", "run", "--arm", "a", "--arm", "b"),
        program=(sys.executable, "-m", "tests.scripted"),
        DATASET_CACHE_DIR=str(token_cache),
    )
    assert run.returncode == 0, run.stdout
    assert "[GPU0] [b] Step [3/4]" in run.stdout
    assert "is busy" not in run.stdout
    for lock in (tmp_path / "locks", tmp_path / "run" / "locks"):  # ours; those of the trainings
        assert [path.stem for path in lock.iterdir()] == [fake_gpu(0).uuid]


def test_busy_gpus_are_left_alone_unless_they_are_asked_for(box: Any) -> None:  # noqa: F811
    busy = [fake_gpu(0, used_mib=40000), fake_gpu(1), fake_gpu(2, used_mib=40000)]
    asked = ("--run-both-models", "--dry-run", "--json")
    told = plan(box(busy)(*asked))
    assert [len(turn) for turn in told["turns"]] == [1, 1]
    assert where(told["turns"])[0][0][1] == [busy[1].uuid]
    named = plan(box(busy)(*asked, "--gpus=0,2"))
    assert [each for _, each in where(named["turns"])[0]] == [[busy[0].uuid], [busy[2].uuid]]


def test_one_size_of_preset_serves_all_arms(box: Any) -> None:  # noqa: F811
    mixed = [fake_gpu(0), fake_gpu(1, total_mib=24564, name="Small")]
    told = plan(box(mixed)("--run-both-models", "--dry-run", "--json"))
    presets = {each["preset"] for turn in told["turns"] for each in turn}
    assert presets == {"production-medium"}
    assert any("the speed of arms does not compare" in note for note in told["notes"])


def test_a_comparison_is_watched_listed_and_refused_as_long_as_it_runs(
    scripted: Launcher,
) -> None:
    process = scripted.start("--arm", "a", "--arm", "b", "--max-steps=100000", **RESTING)
    seen = read_until(process, "[b] Step [1/100000]")
    watched = scripted.verb("watch", "run")
    assert all(f"run/{arm} " in watched.stdout for arm in "ab"), watched.stdout
    again = scripted.verb("report", "run")
    assert (again.returncode, "is still going" in again.stdout) == (2, True)
    process.send_signal(signal.SIGTERM)
    scripted.finish(process, seen)
    over = scripted.verb("watch", "run")
    assert over.returncode == 0
    one = scripted.verb("replay", "run")
    assert (one.returncode, "a comparison: give one training of it" in one.stdout) == (2, True)
    golden = scripted.verb("report", "run", "--write-golden", "g.json")
    assert (golden.returncode, "takes one training of a comp" in golden.stdout) == (2, True)


def test_a_drill_of_one_worker_is_of_the_arm_that_it_trains(scripted: Launcher) -> None:
    run = scripted("debug.drill=nan@1:CPU1", "--arm", "a", "--arm", "b")
    assert (run.exit_code, run.report()["culprits"]) == (20, ["b"]), run.output


def test_a_request_to_save_ends_the_arms_and_begins_no_other(scripted: Launcher) -> None:
    options = ("training.save_on_signal=true", "--max-steps=100000", "--workers=1")
    process = scripted.start(*options, "--arm", "a", "--arm", "b", **RESTING)
    seen = read_until(process, "[a] Step [1/100000]")
    process.send_signal(signal.SIGUSR1)
    run = scripted.finish(process, seen)
    assert (run.exit_code, run.report()["verdict"]) == (0, "INCONCLUSIVE"), run.output
    assert "SIGUSR1 came before a and b had trained" in run.report()["summary"]
    assert (run.cwd / ".checkpoints" / "a").is_dir()
    assert not (run.directory / "b").exists()


def test_a_request_in_its_first_moment_is_answered_too(scripted: Launcher) -> None:
    options = ("training.save_on_signal=true", "--max-steps=100000")
    process = scripted.start(*options, "--arm", "a", "--arm", "b", **RESTING)
    seen = read_until(process, "side by side")
    process.send_signal(signal.SIGUSR1)
    run = scripted.finish(process, seen)
    assert (run.exit_code, run.report()["verdict"]) == (0, "INCONCLUSIVE"), run.output


def test_a_deadline_is_shared_by_the_turns(scripted: Launcher) -> None:
    options = ("--workers=1", "--max-steps=1000000", "--arm", "a", "--arm", "b")
    for seconds in (8, 40, 100):  # how soon both have trained, is the machine's
        run = scripted(*options, f"--deadline={seconds}", RESTS="0.1")
        if run.exit_code == 0:
            break
        assert run.exit_code == 75, run.output
        shutil.rmtree(run.directory)
    assert run.report()["summary"].endswith("; the deadline came before all steps")
    assert all(arm["figures"]["end_loss"]["count"] == 1 for arm in run.report()["arms"])
    assert "1,000,000 steps" not in run.report()["summary"]


def test_files_of_one_arm_that_cannot_be_read_leave_the_others_theirs(scripted: Launcher) -> None:
    process = scripted.start("--arm", "a", "--arm", "b", "--workers=1", "--max-steps=50", **RESTING)
    seen = read_until(process, "turn 2 of 2")
    events = scripted.cwd / "run" / "a" / "cpu0.events.jsonl"
    events.unlink()
    events.mkdir()
    run = scripted.finish(process, seen)
    assert (run.exit_code, run.report()["verdict"]) == (75, "INCONCLUSIVE"), run.output
    assert "a: " in run.report()["summary"]
    assert "Is a directory" in run.report()["summary"]
    assert arms_of(run)["b"]["figures"]["end_loss"]["count"] == 1


def test_ctrl_z_stops_all_trainings_and_fg_goes_on(scripted: Launcher) -> None:
    # Beside us in a group of its own, as a shell starts it: somebody could continue it.
    process = subprocess.Popen(
        scripted.arguments("--arm", "a", "--arm", "b", "--max-steps=100000"),
        cwd=scripted.cwd,
        env=scripted.env | RESTING,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    scripted.started.append(process)
    seen = read_until(process, "[b] Step [1/100000]")
    os.killpg(process.pid, signal.SIGTSTP)
    trainings = [scripted.cwd / "run" / arm for arm in "ab"]
    wait_until(lambda: states(trainings) == {"T"})
    logs = [next(training.glob("cpu*.log")) for training in trainings]
    sizes = [log.stat().st_size for log in logs]
    os.killpg(process.pid, signal.SIGCONT)
    for log, size in zip(logs, sizes, strict=True):
        wait_until(lambda log=log, size=size: log.stat().st_size > size)
    process.send_signal(signal.SIGTERM)
    assert scripted.finish(process, seen).exit_code == 143


def states(directories: list[Path]) -> set[str]:
    """Of the workers of the runs in these directories, two at least."""
    tags = {f"MODEL_CHECK_RUN_DIR={directory}".encode() for directory in directories}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environ = {*(process / "environ").read_bytes().split(b"\0")}
            if environ & tags and any(e.startswith(b"MODEL_CHECK_WORKER=") for e in environ):
                found.append((process / "stat").read_text().rpartition(")")[2].split()[0])
    return {*found} if len(found) >= len(directories) else set()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
