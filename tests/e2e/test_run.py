"""`bash run.sh` from one end to the other: real launcher, real workers, real training."""

import json
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import IN_WORKERS, ROOT, Launcher, Run, pid_of
from tests.launcher.report.report_schema import faults
from tests.launcher.supervise.lab import wait_until_stopped

Alive = Callable[[Path], list[str]]
DETAILS = re.compile(
    r"\[CPU0\] Details \[\d/4\] \| Tokens/s: [\d,]+ \| Memory: [\d.]+ GiB, peak [\d.]+ \| "
    r"Grad Norm by part: (?P<norms>.+)"
)
STEP_LINE = re.compile(
    r"\[CPU[01]\] Step \[\d+/4\] \| Loss: \d+\.\d{4} \| LR: \d\.\d\de[+-]\d\d "
    r"\| Grad Norm: \d+\.\d{4} \| ETA: \d+:\d\d"
)


EVIDENCE_OF_STEP_2 = ("nan_debug_step_2.pkl", "manifest.json", "nan_grad_step_2.pt")


def read_until(process: subprocess.Popen[str], *texts: str) -> str:
    """What a running launcher says, up to the first line that holds one of `texts`."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if any(text in line for text in texts):
            break
    return seen


def test_a_clean_run_passes_compares_and_reports(launcher: Launcher, alive: Alive) -> None:
    run = launcher()
    assert run.exit_code == 0, run.output
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "PASS"}
    for name in ("CPU0", "CPU1"):
        steps = [line for line in run.lines(f"[{name}] Step") if STEP_LINE.fullmatch(line)]
        assert len(steps) == 4, run.output
    assert all(line.startswith(("[launcher] ", "[CPU0] ", "[CPU1] ")) for line in lines_of(run))
    assert "what flows between blocks equal bit for bit in 4 of 4 steps" in run.report()["summary"]
    assert faults(run.report()) == []
    assert run.report()["scope"]["max_rate"] == 0.75
    assert "[launcher] not shown: GPUs, " in run.output
    assert alive(run.directory) == []
    assert_directory_is_whole(run)
    assert not list(run.directory.glob("*.stacks.txt"))


def lines_of(run: Run) -> list[str]:
    return [line for line in run.output.splitlines() if line]


def assert_directory_is_whole(run: Run) -> None:
    names = {path.name for path in run.directory.iterdir()}
    wanted = {"config.json", "run.json", "report.json", "report.html", "launcher.log"}
    wanted |= {f"cpu{n}.{end}" for n in (0, 1) for end in ("log", "events.jsonl")}
    assert wanted <= names
    shown = [line.removeprefix("[CPU0] ") for line in run.lines("[CPU0] ")]
    assert (run.directory / "cpu0.log").read_text().splitlines() == shown
    for name in ("config.json", "run.json", "report.json"):
        json.loads((run.directory / name).read_text())
    assert os.readlink(run.cwd / ".logs" / "latest") == str(run.directory)


def test_the_second_run_finds_the_cache_of_the_first(launcher: Launcher, token_cache: Path) -> None:
    launcher("--workers=1")
    entries = {path: path.stat().st_mtime_ns for path in token_cache.rglob("manifest.json")}
    shutil.rmtree(launcher.cwd / "run")
    second = launcher("--workers=1")
    assert second.exit_code == 0, second.output
    assert json.loads((second.directory / "run.json").read_text())["data"]["hit"] is True
    after = {path: path.stat().st_mtime_ns for path in token_cache.rglob("manifest.json")}
    assert after == entries


def test_a_worker_that_raises_fails_the_run_and_its_peer_is_stopped(launcher: Launcher) -> None:
    run = launcher("debug.drill=raise@1:CPU1", "training.max_steps=2000")
    assert run.exit_code == 1, run.output
    assert run.verdicts() == {"CPU0": "STOPPED", "CPU1": "FAIL"}
    assert run.report()["culprits"] == ["CPU1"]
    assert "last lines of CPU1" in run.output
    assert run.output.rstrip().splitlines()[-1].startswith("[launcher] FAIL: ")


@pytest.mark.parametrize(("fault", "code"), [("kill", 137), ("exit7", 7)])
def test_the_exit_code_of_the_culprit_is_the_exit_code_of_the_run(
    launcher: Launcher, fault: str, code: int
) -> None:
    run = launcher(f"debug.drill={fault}@1:CPU0", "training.max_steps=2000")
    assert run.exit_code == code, run.output
    assert run.verdicts() == {"CPU0": "FAIL", "CPU1": "STOPPED"}


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_non_finite_gradient_names_worker_step_and_module_and_leaves_evidence(
    launcher: Launcher, kind: str
) -> None:
    run = launcher(
        f"debug.drill={kind}@2:CPU1:layers.0.attention.wq.weight",
        "debug.dump_tensors=true",
        "training.max_steps=2000",
    )
    assert run.exit_code == 20, run.output
    assert run.verdicts() == {"CPU0": "STOPPED", "CPU1": "FAIL"}
    cause = next(w["cause"] for w in run.report()["workers"] if w["name"] == "CPU1")
    kinds = {"nan": "NaN", "inf": "Inf"}
    born = "layers.0.attention.wq (backward: gradient of its weight)"
    counts = f"1 {kinds[kind]} of 1,024 values, first at [0, 0], others "
    assert cause.startswith(f"non-finite gradient at step 2, born in {born}: {counts}")
    assert cause.endswith("; it did not come again")
    assert any("GRADIENT DETECTED [CPU 1]" in line for line in run.lines("[CPU1] "))
    evidence = next(w["evidence"] for w in run.report()["workers"] if w["name"] == "CPU1")
    dossier = run.directory / "dossier" / "cpu1"
    assert evidence == [str(dossier / name) for name in EVIDENCE_OF_STEP_2]
    assert all(Path(path).is_file() for path in evidence)
    checkpoints = run.cwd / ".checkpoints" / "cpu1"
    assert (checkpoints / "nan_grad_step_2.pt").is_file()
    dump = pickle.loads((checkpoints / "debug" / "nan_debug_step_2.pkl").read_bytes())
    bad = [name for name, grad in dump["gradients"].items() if not np.isfinite(grad).all()]
    assert bad == ["layers.0.attention.wq.weight"]
    assert all(np.isfinite(value).all() for value in dump["parameters"].values())


def test_of_two_workers_the_one_whose_weight_changed_is_named(launcher: Launcher) -> None:
    weight = "layers.0.attention.wq.weight"
    run = launcher(f"debug.drill=flip@1:CPU1:{weight}:0", "training.max_steps=500")
    assert run.exit_code == 21, run.output
    assert run.verdicts() == {"CPU0": "STOPPED", "CPU1": "SUSPECT"}
    assert f"CPU1: {weight} changed (bit 0 of value 0)" in run.report()["summary"]


def test_of_two_workers_whose_gradients_differ_none_is_named(launcher: Launcher) -> None:
    weight = "layers.0.attention.wq.weight"
    run = launcher(f"debug.drill=flip_gradient@1:CPU1:{weight}:4", "training.max_steps=500")
    assert run.exit_code == 23, run.output
    assert run.verdicts() == {"CPU0": "INCONCLUSIVE", "CPU1": "INCONCLUSIVE"}
    found = run.report()["disagreement"]
    assert (found["step"], found["quantity"], found["tensor"]["name"]) == (1, "gradients", weight)
    assert run.report()["culprits"] == []


def test_of_three_workers_the_flipped_one_is_named(launcher: Launcher) -> None:
    run = launcher("debug.drill=flip@1:CPU2", "--workers", "3", "training.max_steps=500")
    assert run.exit_code == 21, run.output
    assert run.verdicts() == {"CPU0": "STOPPED", "CPU1": "STOPPED", "CPU2": "SUSPECT"}
    assert run.report()["culprits"] == ["CPU2"]


@pytest.mark.parametrize(("fail_on", "code"), [("[]", 0), ("speed", 22)])
def test_a_slow_worker_is_warned_of_with_the_step_from_which_on_it_was(
    launcher: Launcher, fail_on: str, code: int
) -> None:
    run = launcher(
        "debug.drill=slow@12:CPU1:4x",
        *("--workers", "3", "training.max_steps=60", f"launch.fail_on={fail_on}"),
    )
    assert run.exit_code == code, run.output
    assert run.verdicts() == {"CPU0": "PASS", "CPU1": "WARN", "CPU2": "PASS"}
    slow = {worker["name"]: worker["slow"] for worker in run.report()["workers"]}
    assert [name for name, how in slow.items() if how] == ["CPU1"]
    # Noisy steps beside the first may belong to it; a later one interrupts it: ten more follow.
    assert 5 <= slow["CPU1"]["since_step"] <= 50
    assert slow["CPU1"]["ratio"] > 1.5
    told = "slow: [0-9.]+ x its equals (since step|in steps) [1-9]"
    assert any(re.search(f"warning: CPU1: {told}", line) for line in run.lines("[launcher] "))
    assert re.search(told, (run.directory / "report.html").read_text())


def test_a_worker_that_hangs_is_named_and_the_run_ends_with_124(launcher: Launcher) -> None:
    run = launcher("debug.drill=hang@2:CPU0", "--hang-timeout", "3", "--max-steps", "100000")
    assert run.exit_code == 124, run.output
    assert run.verdicts() == {"CPU0": "FAIL", "CPU1": "STOPPED"}
    # Ten times its steps, where those are slow.
    assert re.search(r"\(limit \d+ s\), in wait \(threading.py:", run.report()["summary"])
    for name, calls in (("CPU0", "in before_step"), ("CPU1", "in _loop")):
        file = run.directory / f"{name.lower()}.stacks.txt"
        assert calls in file.read_text()
        assert f"[launcher] {name}: evidence: {file}" in run.output.splitlines()


def test_ctrl_c_stops_everything_and_still_reports(launcher: Launcher, alive: Alive) -> None:
    process = launcher.start("training.max_steps=100000")
    seen = read_until(process, "Step [3/")
    process.send_signal(signal.SIGINT)
    run = launcher.finish(process, seen)
    assert run.exit_code == 130, run.output
    assert set(run.verdicts().values()) == {"STOPPED"}
    assert run.report()["culprits"] == []
    assert alive(run.directory) == []
    assert "Traceback" not in run.output


def test_a_config_file_with_comments_acts(launcher: Launcher) -> None:
    text = launcher.config.read_text()
    launcher.config.write_text(f"// a comment\n{text[:-1]}, /* and */ \n}}")
    run = launcher("--max-steps", "2", "--workers=1")
    assert run.exit_code == 0, run.output
    assert {worker["steps"] for worker in run.report()["workers"]} == {2}


def test_a_typo_in_a_key_is_one_line_with_the_nearest_name_and_starts_nothing(
    launcher: Launcher,
) -> None:
    run = launcher("training.max_step=5")
    assert run.exit_code == 2
    (line,) = lines_of(run)
    assert line == (
        "[launcher] error: command line: training.max_step: no such setting; "
        "did you mean 'training.max_steps'?"
    )
    assert not run.directory.exists()


def test_a_cache_that_cannot_be_written_is_one_clear_line(launcher: Launcher) -> None:
    blocked = launcher.cwd / "file"
    blocked.write_text("not a directory")
    run = launcher(DATASET_CACHE_DIR=str(blocked / "cache"))
    assert run.exit_code == 2, run.output
    assert "data.cache_dir" in run.output
    assert "Traceback" not in run.output
    assert run.report()["exit_code"] == 2
    verdict = run.output.splitlines()[-1]
    assert verdict.startswith("[launcher] FAIL: prepare failed: exit code 2: ")
    assert "data.cache_dir" in verdict


def test_a_gpu_that_was_named_by_hand_and_is_not_there_is_exit_69(launcher: Launcher) -> None:
    # No machine has it: a UUID of zeros.
    env = launcher.env | {"CUDA_VISIBLE_DEVICES": "GPU-00000000", "GPU_RANK": "3"}
    command = [sys.executable, str(ROOT / "pretrain_main.py"), "--debug"]
    done = subprocess.run(
        command, cwd=launcher.cwd, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 69, done.stdout + done.stderr
    assert "names a GPU" in done.stdout + done.stderr


def test_a_disk_that_is_full_before_the_start_is_one_clear_line(
    launcher: Launcher, small_disk: Path
) -> None:
    fill(small_disk)
    run = launcher("--run-dir", str(small_disk / "run"))
    assert run.exit_code == 2, run.output
    assert "No space left on device" in run.output
    assert "Traceback" not in run.output


def test_a_disk_that_fills_before_a_fault_is_replayed_hides_no_verdict(
    launcher: Launcher, small_disk: Path
) -> None:
    env = {"PYTHONPATH": f"{ROOT}:{IN_WORKERS}", "STOPS_AFTER": "CPU1 4"}
    asked = ("--workers=3", "--max-steps=8", "debug.drill=flip@6:CPU1", "launch.replay_s=100")
    process = launcher.start("--run-dir", str(small_disk / "run"), *asked, **env)
    seen = read_until(process, "[CPU1] Step [3/")
    wait_until_stopped(slow := pid_of("CPU1", small_disk / "run"))
    fill(small_disk)
    os.kill(slow, signal.SIGCONT)
    run = launcher.finish(process, seen)
    assert run.exit_code == 21, run.output
    assert run.lines("[launcher] no report: ")
    assert "CPU1 gave the right bits" in run.lines("[launcher] SUSPECT: CPU1: ")[0]


def test_a_disk_that_fills_during_the_run_changes_no_verdict(
    launcher: Launcher, small_disk: Path
) -> None:
    env = {"PYTHONPATH": f"{ROOT}:{IN_WORKERS}", "STOPS_AFTER": "CPU1 4"}
    run_dir = small_disk / "run"
    process = launcher.start("--run-dir", str(run_dir), "--max-steps", "300", **env)
    seen = read_until(process, "[CPU1] Step [3/")
    wait_until_stopped(slow := pid_of("CPU1", run_dir))
    fill(small_disk)
    os.kill(slow, signal.SIGCONT)
    run = launcher.finish(process, seen)
    assert run.exit_code == 0, run.output
    assert "No space left" in run.output
    assert sum("Step [299/" in line for line in lines_of(run)) == 2, "a worker stopped early"


def fill(place: Path) -> None:
    with (place / "filler").open("wb", buffering=0) as filler:
        for size in (65536, 1024, 1):
            try:
                while True:
                    filler.write(b"x" * size)
            except OSError:
                continue


def test_a_notice_by_sigusr1_kills_and_blames_no_worker(launcher: Launcher) -> None:
    process = launcher.start("--max-steps", "400")
    seen = read_until(process, "Step [3/")
    process.send_signal(signal.SIGUSR1)
    run = launcher.finish(process, seen)
    assert run.exit_code == 0, run.output


def test_a_working_directory_of_any_bytes_hides_no_nan(launcher: Launcher) -> None:
    cwd = launcher.cwd / os.fsdecode(b"b\xff")
    cwd.mkdir()
    other = replace(launcher, cwd=cwd)
    run = other("debug.drill=nan@1:CPU1", "data.cache_dir=cache")
    assert run.exit_code == 20, run.output
    assert run.verdicts()["CPU1"] == "FAIL"


def test_closed_standard_streams_do_not_disturb_a_run(launcher: Launcher) -> None:
    command = shlex.join(launcher.arguments("--", "true"))
    done = subprocess.run(
        ["sh", "-c", f"{command} >&- 2>&- <&-"],
        cwd=launcher.cwd,
        env=launcher.env,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0
    assert (launcher.cwd / "run" / "report.json").is_file()


def test_more_workers_than_the_soft_limit_of_open_files_allows(launcher: Launcher) -> None:
    command = shlex.join(launcher.arguments("--workers", "16", "--", "true"))
    done = subprocess.run(
        ["sh", "-c", f"ulimit -Sn 64; exec {command}"],
        cwd=launcher.cwd,
        env=launcher.env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout


def test_a_foreign_command_is_supervised_without_a_data_step(launcher: Launcher) -> None:
    code = "import os; print(os.environ['GPU_RANK'], os.environ['MODEL_CHECK_WORKER'])"
    run = launcher("--", sys.executable, "-c", code)
    assert run.exit_code == 0, run.output
    assert run.lines("[CPU1] ") == ["[CPU1] 1 CPU1"]
    assert not (run.directory / "data.json").exists()


def test_a_nan_on_every_worker_blames_the_settings_and_no_worker(launcher: Launcher) -> None:
    run = launcher("debug.drill=nan@1")
    assert run.exit_code == 20, run.output
    assert (run.report()["culprits"], set(run.verdicts().values())) == ([], {"INCONCLUSIVE"})
    assert [w["cause_class"] for w in run.report()["workers"]] == ["software", "software"]
    assert "not a GPU" in run.report()["summary"]


@pytest.mark.parametrize("drill", ["nan@1:CPU7", "bogus", "nan@99"])
def test_a_drill_that_could_not_act_is_refused_before_anything_starts(
    launcher: Launcher, drill: str
) -> None:
    run = launcher(f"debug.drill={drill}")
    assert run.exit_code == 2
    assert len(lines_of(run)) == 1
    assert not run.directory.exists()


def test_the_settings_of_a_run_can_be_run_again(launcher: Launcher) -> None:
    first = launcher("--max-steps", "2", "--workers", "1")
    again = launcher("--config", f"{first.directory}/config.json", "--run-dir", "again")
    assert again.exit_code == 0, again.output
    other = launcher.cwd / "again" / "config.json"
    assert other.read_bytes() == (first.directory / "config.json").read_bytes()


def test_the_command_line_beats_the_environment_in_every_process(launcher: Launcher) -> None:
    cache = launcher.cwd / "mine"
    run = launcher(f"data.cache_dir={cache}", DATASET_CACHE_DIR=str(launcher.cwd / "other"))
    assert run.exit_code == 0, run.output
    assert any(cache.rglob("manifest.json"))
    assert not (launcher.cwd / "other").exists()


def test_a_signal_between_the_data_and_the_workers_is_answered_with_a_report(
    launcher: Launcher,
) -> None:
    process = launcher.start("--max-steps", "100000")
    seen = read_until(process, "data: found", "data: prepared")
    process.send_signal(signal.SIGTERM)
    run = launcher.finish(process, seen)
    assert run.exit_code == 143, run.output
    assert run.report()["exit_code"] == 143


def test_a_foreign_command_may_train_something_else_on_every_gpu(launcher: Launcher) -> None:
    trainer = f"exec {sys.executable} {ROOT / 'pretrain_main.py'} --config {launcher.config}"
    run = launcher("--", "sh", "-c", f"{trainer} system.seed=$GPU_RANK")
    assert run.exit_code == 0, run.output
    assert "not compared" in run.report()["summary"]


def test_a_foreign_command_that_is_silent_too_long_hangs_at_the_limit(launcher: Launcher) -> None:
    run = launcher("--hang-timeout", "1", "--", "sleep", "100")
    assert run.exit_code == 124, run.output
    assert "(limit 1 s)" in run.report()["summary"]


def test_secrets_reach_no_file_of_a_run(launcher: Launcher) -> None:
    secret = "hf_" + "S3cretS3cretS3cretS3cret"
    run = launcher("--", "true", "--token", secret, f"HF_TOKEN={secret}", HF_TOKEN=secret)
    assert run.exit_code == 0, run.output
    assert secret not in run.output
    run.directory.rename(run.cwd / "command")
    run = launcher("--max-steps=1", "--workers=1", "training.save_last=true", HF_TOKEN=secret)
    assert run.exit_code == 0, run.output
    files = [path for path in run.cwd.rglob("*") if path.is_file()]
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert secret not in run.output


@pytest.mark.parametrize(("drill", "code"), [(None, 0), ("nan@1:CPU1", 20)])
def test_reports_are_rebuilt_from_what_a_run_left_behind(
    launcher: Launcher, drill: str | None, code: int
) -> None:
    run = launcher("--max-steps", "2", *([f"debug.drill={drill}"] if drill else []))
    before = (run.directory / "report.json").read_text()
    (run.directory / "report.json").unlink()
    shutil.rmtree(run.cwd / ".checkpoints", ignore_errors=True)  # the dossier has the evidence
    command = [sys.executable, "-m", "launcher", "report", str(run.directory)]
    done = subprocess.run(
        command, env=launcher.env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == code, done.stdout + done.stderr
    rebuilt = json.loads((run.directory / "report.json").read_text())
    assert rebuilt["workers"] == json.loads(before)["workers"]
    assert rebuilt["summary"] == json.loads(before)["summary"]


def test_of_a_launcher_that_was_killed_the_report_still_tells_what_was_heard(
    launcher: Launcher,
) -> None:
    env = {"PYTHONPATH": f"{ROOT}:{IN_WORKERS}", "STOPS_AFTER": "CPU0 0"}  # or it sees the end
    process = launcher.start("--max-steps", "100000", **env)
    read_until(process, "Step [0/")
    process.kill()
    launcher.finish(process)
    command = [sys.executable, "-m", "launcher", "report", str(launcher.cwd / "run")]
    done = subprocess.run(
        command, env=launcher.env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 70, done.stdout + done.stderr
    assert "did not live to see the end" in done.stdout
    assert "FAIL" not in done.stdout


def test_the_trainer_lives_without_the_launcher(launcher: Launcher, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "model_check", tree / "model_check", ignore=ignore)
    shutil.copytree(ROOT / "config", tree / "config")
    shutil.copy(ROOT / "pretrain_main.py", tree)
    env = launcher.env | {"PYTHONPATH": "", "GPU_RANK": "3"}
    command = [sys.executable, str(tree / "pretrain_main.py"), "--config", str(launcher.config)]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[CPU0] Step [3/4]" in done.stdout


def test_the_plan_is_printed_without_the_trainer(launcher: Launcher, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for package in ("launcher", "model_check", "config"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("engine"))
    env = launcher.env | {"PYTHONPATH": str(tree)}
    command = launcher.arguments("--dry-run", "--json")
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [process["name"] for process in plan["processes"]] == ["prepare", "CPU0", "CPU1"]
    assert not (tmp_path / "run").exists()


def test_details_tell_where_the_gradient_is(launcher: Launcher) -> None:
    run = launcher("--workers=1", "logging.details=true", "logging.log_interval=3")
    assert run.exit_code == 0, run.output
    told = [line for line in run.lines("[CPU0] ") if "Grad Norm" in line]
    steps, details = told[::2], told[1::2]
    assert [line.split("]")[1].split("[")[1] for line in steps] == ["0/4", "3/4"]
    for step, detail in zip(steps, details, strict=True):
        found = DETAILS.fullmatch(detail)
        assert found, detail
        norms = dict(part.split() for part in found["norms"].split(", "))
        assert list(norms) == ["tok_embed", "layers.0", "norm", "output"]
        total = math.sqrt(sum(float(norm) ** 2 for norm in norms.values()))
        assert total == pytest.approx(float(step.split("Grad Norm: ")[1].split()[0]), abs=1e-3)
