"""The launcher on boxes of GPUs that do not exist: real pynvml over the fake driver library."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest

from launcher.doctor.packages import TorchBuild
from launcher.gpus.probe import NvmlProbe, Snapshot
from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT
from tests.in_process import answer_of
from tests.launcher.supervise.cgroups import limited
from tests.nvml_fake.build import (
    HANG,
    FakeGpu,
    build,
    delay,
    environment,
    fake_gpu,
    fake_mig,
    fault,
    scenario,
)

LAUNCHER = (sys.executable, "-m", "launcher")
PLANS = {"--dry-run", "config", "doctor", "history"}
"""What starts nothing is asked in this process."""
Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


class Remembered:
    """A scenario's GPUs, of which the real probe asks the fake driver once."""

    seen: ClassVar[dict[str, Snapshot]] = {}

    def __init__(self, text: str) -> None:
        self._text = text

    def snapshot(self) -> Snapshot:
        if self._text not in self.seen:
            self.seen[self._text] = NvmlProbe().snapshot()
        return self.seen[self._text]


@pytest.fixture
def box(tmp_path: Path, library: Path) -> Callable[..., Launch]:
    """Makes a launcher that sees the given GPUs, under the given rules of the fake driver."""

    def make(gpus: Sequence[FakeGpu], rules: Sequence[str] = ()) -> Launch:
        file = tmp_path / "scenario"
        file.write_text(text := scenario(gpus, rules))
        base = environment(library, file)
        base |= {"PYTHONPATH": str(ROOT), "MODEL_CHECK_LOCK_DIR": str(tmp_path / "locks")}

        def launch(
            *arguments: str, program: Sequence[str] = LAUNCHER, starts: bool = True, **env: str
        ) -> subprocess.CompletedProcess[str]:
            if not starts or PLANS & {*",".join(arguments).partition(",--,")[0].split(",")}:
                with patch("launcher.cli.NvmlProbe", lambda: Remembered(text)):
                    return answer_of(*arguments, cwd=tmp_path, env=base | env)
            return subprocess.run(
                [*program, *arguments],
                cwd=tmp_path,
                env=base | env,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )

        return launch

    return make


def plan_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)
    plan["workers"] = [p for p in plan["processes"] if p["name"] != "prepare"]
    return plan


EIGHT = [fake_gpu(index) for index in range(8)]


def test_every_gpu_of_a_box_gets_one_worker_pinned_by_uuid(box: Any) -> None:
    plan = plan_of(box(EIGHT)("--dry-run", "--json"))
    assert (plan["device"], plan["preset"]) == ("cuda", "production")
    assert [worker["name"] for worker in plan["workers"]] == [f"GPU{n}" for n in range(8)]
    pins = [worker["env"]["CUDA_VISIBLE_DEVICES"] for worker in plan["workers"]]
    assert pins == [gpu.uuid for gpu in EIGHT]
    assert [worker["env"]["GPU_RANK"] for worker in plan["workers"]] == list("01234567")


def test_a_driver_that_is_too_old_for_torch_ends_the_run_before_data_are_prepared(
    box: Any, tmp_path: Path
) -> None:
    """The fake one serves CUDA 12.8."""
    for built_for, code in (("13.0", 69), ("12.4", 0), ("11.8", 0)):
        build = TorchBuild(f"2.13.0+cu{built_for}", built_for, None)
        with patch("launcher.doctor.packages.torch_build", lambda build=build: build):
            done = box(EIGHT)("--dry-run")
        assert done.returncode == code, done.stderr
    with patch("launcher.doctor.packages.torch_build", lambda: TorchBuild("2.13", "13.0", None)):
        done = box(EIGHT)("--debug", starts=False)
        on_cpu = box(EIGHT)("--dry-run", "--device", "cpu")
        command = box(EIGHT)("--dry-run", "--", "nvidia-smi")
    assert (done.returncode, on_cpu.returncode, command.returncode) == (69, 0, 0)
    (line,) = done.stderr.splitlines()
    assert "torch 2.13 is for CUDA 13.0, and the driver serves CUDA 12.8 at most: update" in line
    assert not list(tmp_path.glob(".cache"))


BIG, MIDDLE = 81559, 24564
SLICES = fake_gpu(0, mig_mode=1, migs=[fake_mig(0, 0), fake_mig(0, 1)])
HALF_USED = fake_gpu(0, used_mib=50000)
SIZES: dict[str, tuple[list[FakeGpu], list[str], str]] = {
    "24 GiB": ([fake_gpu(0, total_mib=MIDDLE)], [], "production-medium"),
    "one for all": ([fake_gpu(0), fake_gpu(1, total_mib=MIDDLE)], [], "production-medium"),
    "the big one": ([fake_gpu(0), fake_gpu(1, total_mib=MIDDLE)], ["--gpus", "0"], "production"),
    "the freest": ([fake_gpu(0), fake_gpu(1, total_mib=MIDDLE)], ["--gpus", "auto"], "production"),
    "MIG": ([SLICES], [], "production-small"),
    "5 GiB": ([fake_gpu(0, total_mib=4864, reserved_mib=0)], [], "production-small"),
    "half used": ([HALF_USED], [], "production"),
    "not told": ([fake_gpu(0, total_mib=None)], [], "production"),
    "named": ([fake_gpu(0)], ["--preset", "production-small"], "production-small"),
    "debug": ([fake_gpu(0, total_mib=MIDDLE)], ["--debug"], "debug"),
}


@pytest.mark.parametrize("what", SIZES)
def test_the_total_memory_of_the_smallest_gpu_chooses_one_of_three_sizes(
    box: Any, what: str
) -> None:
    gpus, options, preset = SIZES[what]
    launch = box(gpus)
    plan = plan_of(launch("--dry-run", "--json", *options))
    assert plan["preset"] == preset
    is_chosen = preset.startswith("production-") and not options
    assert any(f"preset {preset}: the smallest" in note for note in plan["notes"]) is is_chosen
    shown = json.loads(launch("config", "show", "--json", *options).stdout)
    assert shown["preset"] == preset


def test_a_preset_that_is_named_is_never_replaced(box: Any) -> None:
    done = box([fake_gpu(0, total_mib=MIDDLE)])("--preset", "production", "--dry-run")
    assert done.returncode == 2
    assert "alone need" in done.stderr


@pytest.mark.parametrize(
    ("options", "workers"), [((), 1), (("--gpus", "0,2"), 2), (("--device", "cpu"), 1)]
)
def test_own_text_is_trained_on_by_one_worker_unless_others_are_asked_for(
    box: Any, tmp_path: Path, options: tuple[str, ...], workers: int
) -> None:
    (tmp_path / "own.txt").write_text("text")
    asked = ("train", str(tmp_path / "own.txt"), "--dry-run", "--json", *options)
    plan = json.loads(box(EIGHT)(*asked).stdout)
    assert len([each for each in plan["processes"] if each["name"] != "prepare"]) == workers


def test_an_existing_mask_names_the_workers_that_it_leaves(box: Any) -> None:
    plan = plan_of(box(EIGHT)("--dry-run", "--json", CUDA_VISIBLE_DEVICES="5,3"))
    assert [worker["name"] for worker in plan["workers"]] == ["GPU5", "GPU3"]
    assert plan["workers"][0]["env"]["CUDA_VISIBLE_DEVICES"] == EIGHT[5].uuid


def test_the_debug_preset_keeps_its_full_width_on_gpus(box: Any) -> None:
    done = box(EIGHT)("config", "show", "--json", "--debug")
    settings = json.loads(done.stdout)["settings"]
    assert settings["model.hidden_size"]["value"] == 4096
    assert settings["model.num_layers"]["value"] == 2


def test_auto_takes_the_freest_gpu_and_says_why(box: Any) -> None:
    gpus = [fake_gpu(0, used_mib=30000, processes=[(4711, 30000)]), fake_gpu(1), fake_gpu(2)]
    gpus[2] = fake_gpu(2, used_mib=900)
    plan = plan_of(box(gpus)("--gpus", "auto", "--dry-run", "--json"))
    assert [worker["name"] for worker in plan["workers"]] == ["GPU1"]
    assert "Using GPU 1 (lowest utilization): 0 % used, 79.1 GiB free" in plan["notes"]


def test_auto_says_idle_of_a_gpu_that_is_used_more_than_a_full_one(
    box: Any, tmp_path: Path
) -> None:
    launch = box([fake_gpu(0, used_mib=60_000), fake_gpu(1, utilization=8)])
    run = launch("--gpus", "auto", "--dry-run")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "[launcher] Using GPU 1 (idle): 8 % used, 79.1 GiB free" in run.stdout


def test_a_command_runs_once_a_gpu_with_its_own_pin(box: Any, tmp_path: Path) -> None:
    show = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    done = box(EIGHT[:2])("--run-dir", "run", "--", sys.executable, "-c", show)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line for line in done.stdout.splitlines() if line.startswith("[GPU")}
    assert lines == {f"[GPU0] {EIGHT[0].uuid}", f"[GPU1] {EIGHT[1].uuid}"}
    assert (tmp_path / "run" / "gpu1.log").read_text() == f"{EIGHT[1].uuid}\n"


def test_a_second_launcher_is_refused_a_gpu_that_the_first_one_holds(box: Any) -> None:
    again = [sys.executable, "-m", "launcher", "--gpu", "0", "--run-dir", "two", "--", "true"]
    done = box(EIGHT[:1])("--gpu", "0", "--run-dir", "one", "--", *again)
    assert done.returncode == 69
    assert "is reserved by" in done.stdout


def test_a_host_without_descriptors_is_no_verdict_on_a_gpu(box: Any, tmp_path: Path) -> None:
    launch = box([fake_gpu(index) for index in range(12)])
    limited = ["sh", "-c", 'ulimit -n 50; exec "$@"', "sh", sys.executable, "-m", "launcher"]
    options = ("--run-dir", "run", "launch.fail_on_health=true")
    done = launch(*options, "--", "sleep", "600", program=limited)
    assert done.returncode == 70, done.stdout
    assert "EMFILE" in done.stdout
    assert "warning: " not in done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["verdict"], report["culprits"]) == ("INCONCLUSIVE", [])
    rows = {(row["verdict"], row["cause_class"], row["severity"]) for row in report["workers"]}
    assert rows == {("STOPPED", None, None), ("INCONCLUSIVE", "host", "IGNORE")}


def test_a_worker_that_the_kernel_kills_for_memory_is_no_verdict_on_its_gpu(
    box: Any, tmp_path: Path
) -> None:
    launch = box([fake_gpu(0), fake_gpu(1)])
    greedy = (
        "import os, time\nheld = []\n"
        "while os.environ['GPU_RANK'] == '1': held.append(bytearray(1 << 22))\n"
        "time.sleep(1000)"
    )
    command = ("--", sys.executable, "-I", "-S", "-c", greedy)
    limits = {"memory.limit_in_bytes": "192M", "memory.max": "192M", "memory.swap.max": "0"}
    with limited("memory", limits) as prefix:
        done = launch("--run-dir", "run", *command, program=(*prefix, *LAUNCHER))
    assert done.returncode == 137, done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["verdict"], report["culprits"]) == ("INCONCLUSIVE", [])
    told = "GPU1 was killed for want of host memory: SIGKILL (9) after "
    assert report["summary"].startswith(told)
    assert "FAIL" not in done.stdout
    rows = [(row["verdict"], row["cause_class"], row["severity"]) for row in report["workers"]]
    assert rows == [("STOPPED", None, None), ("INCONCLUSIVE", "host", "IGNORE")]
    again = launch("report", "run")
    assert (again.returncode, told in again.stdout.replace("\n[launcher]  ", "")) == (137, True)
    assert told in (tmp_path / "run" / "report.html").read_text()


BUSY = {
    "a process": (fake_gpu(1, processes=[(4711, 30000)]), "GPU1 is busy: pid 4711 holds 29.3 GiB"),
    "memory": (fake_gpu(1, used_mib=5000), "GPU1 is busy: 4.9 GiB held by"),
    "a hidden process": (fake_gpu(1, used_mib=600), "GPU1 is busy: 0.6 GiB held by"),
    "hidden work": (fake_gpu(1, utilization=97), "GPU1 is busy: 97 % used by graphics or by"),
}


@pytest.mark.parametrize("what", BUSY)
def test_a_busy_gpu_is_told_or_refused_when_idle_ones_are_required(box: Any, what: str) -> None:
    gpu, why = BUSY[what]
    launch = box([fake_gpu(0), gpu])
    told = launch("--dry-run")
    assert told.returncode == 0
    assert f"[launcher] {why}" in told.stdout
    refused = launch("--require-idle", "--run-dir", "refused", "--", "true", starts=False)
    assert (refused.returncode, refused.stdout) == (69, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"[launcher] error: launch.require_idle: {why}")
    assert launch("--require-idle", "--gpus", "0", "--dry-run").returncode == 0
    assert launch("launch.require_idle=true", "--gpus", "1", "--dry-run").returncode == 69


def test_a_gpu_that_does_not_tell_who_uses_it_is_refused_when_idle_ones_are_required(
    box: Any,
) -> None:
    launch = box([fake_gpu(0, used_mib=None)], [fault("DeviceGetComputeRunningProcesses_v3", 0, 4)])
    assert launch("--dry-run").returncode == 0
    refused = launch("--require-idle", "--run-dir", "refused", "--", "true", starts=False)
    assert refused.returncode == 69
    why = "launch.require_idle: GPU0 does not tell who uses it: whether it is idle is not known"
    assert refused.stderr.startswith(f"[launcher] error: {why}")


def test_auto_finds_the_idle_gpu_and_refuses_when_there_are_too_few(box: Any) -> None:
    launch = box([fake_gpu(0, used_mib=5000), fake_gpu(1)])
    plan = plan_of(launch("--gpus", "auto", "--require-idle", "--dry-run", "--json"))
    assert [worker["name"] for worker in plan["workers"]] == ["GPU1"]
    options = ("--gpus", "auto:2", "--require-idle", "--run-dir", "run")
    refused = launch(*options, "--", "true", starts=False)
    assert refused.returncode == 69
    assert "GPU0 is busy" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--gpus", "9"), 69, "there is no GPU 9"),
        (("--gpus", "zero"), 2, "is not a GPU"),
        (("--gpus", "0,0"), 2, "given twice"),
        (("--workers", "3"), 2, "counts CPU workers"),
        (("--device", "cpu", "--gpus", "0"), 2, "give one of the two"),
        (("--device", "cpu", "--require-idle"), 2, "give one of the two"),
    ],
)
def test_gpus_that_cannot_be_had_are_one_line(
    box: Any, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = box(EIGHT[:2])(*arguments, "--dry-run")
    assert (done.returncode, done.stdout) == (code, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("[launcher] error: ")
    assert message in line


def test_a_mask_that_hides_every_gpu_trains_on_the_cpu_and_says_so(box: Any) -> None:
    done = box(EIGHT[:2])("--dry-run", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0
    assert "hides all 2 GPUs" in done.stdout
    asked = box(EIGHT[:2])("--dry-run", "--device", "cuda", CUDA_VISIBLE_DEVICES="-1")
    assert asked.returncode == 69


def test_a_box_that_lost_its_gpus_is_not_passed_by_its_cpu(box: Any) -> None:
    lost = box([])("--dry-run")
    assert (lost.returncode, lost.stdout) == (69, "")
    assert "reports no GPU" in lost.stderr
    assert box([])("--dry-run", "--device", "cpu").returncode == 0


SEVEN = EIGHT[:7]
LISTED = "NVML lists 7 GPUs, 0 (GPU-5d1c92ab), 1 (GPU-6e2da3bc), "
MISSING = {
    "one more than there are": ("0,1,2,3,4,5,6,7", f"names GPU 7, which is missing: {LISTED}"),
    "a wrong index": ("0,99,1", "names GPU 99, which is missing: "),
    "two": ("6,7,8", "names GPU 7 and GPU 8, which are missing: "),
    "a UUID that is gone": (f"{EIGHT[0].uuid},{EIGHT[7].uuid}", f"names {EIGHT[7].uuid}, which is"),
    "nothing but missing ones": ("7", "names GPU 7, which is missing: "),
    "no UUID that is there": (EIGHT[7].uuid, f"names {EIGHT[7].uuid}, which is missing: "),
    "no MIG instance that is there": ("MIG-1,MIG-2", "names MIG-1 and MIG-2, which are missing: "),
    "one twice": ("1,1", "names GPU 1 twice, and CUDA then sees no GPU"),
    "a prefix of several": ("GPU-", "names GPU-, which fits several: 0 (GPU-5d1c92ab), 1 ("),
    "a UUID after a blank": (
        f"{EIGHT[0].uuid}, {EIGHT[1].uuid}",
        f"names {EIGHT[1].uuid}, and CUDA stops at ' {EIGHT[1].uuid}', which is no name of the",
    ),
    "a UUID among numbers": (f"0,{EIGHT[1].uuid}", f"names {EIGHT[1].uuid}, and CUDA stops at"),
    "another prefix of several": (f"{EIGHT[0].uuid},GPU-", "names GPU-, which fits several: "),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_gpu_that_the_mask_names_and_the_machine_lacks_is_exit_69_naming_it(
    box: Any, what: str
) -> None:
    mask, words = MISSING[what]
    launch = box(SEVEN)
    commands = (["--run-dir", "run", "--", "true"], ["--dry-run", "--device", "cuda"])
    for arguments in commands:
        done = launch(*arguments, starts=False, CUDA_VISIBLE_DEVICES=mask)
        assert (done.returncode, done.stdout) == (69, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("[launcher] error: ")
        assert f"CUDA_VISIBLE_DEVICES={mask!r} {words}" in line
    doctor = launch("doctor", CUDA_VISIBLE_DEVICES=mask)
    assert (doctor.returncode, words in doctor.stdout) == (69, True)


def test_expecting_fewer_gpus_lets_a_run_go_without_the_missing_one_and_tells_it(box: Any) -> None:
    launch = box(SEVEN)
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    plan = plan_of(launch("launch.expect_gpus=7", "--dry-run", "--json", **env))
    assert len(plan["workers"]) == 7
    (note,) = plan["notes"]
    assert "names GPU 7, which is missing" in note
    run = launch("launch.expect_gpus=7", "--dry-run", **env)
    assert run.returncode == 0
    assert run.stdout.count("names GPU 7, which is missing") == 1
    doctor = launch("doctor", "launch.expect_gpus=7", **env)
    assert doctor.returncode != 69
    assert "names GPU 7, which is missing" in doctor.stdout


@pytest.mark.parametrize("which", ["all", "auto", "0", "auto:3"])
def test_fewer_gpus_than_expected_are_exit_69_whatever_is_taken(box: Any, which: str) -> None:
    launch = box(SEVEN)
    few = launch("launch.expect_gpus=8", "--gpus", which, "--dry-run")
    assert (few.returncode, few.stdout) == (69, "")
    (line,) = few.stderr.splitlines()
    assert line.startswith("[launcher] error: launch.expect_gpus = 8, found 7: 0 (GPU-5d1c92a")
    assert "dmesg" in line
    assert launch("doctor", "launch.expect_gpus=8").returncode == 69
    more = launch("launch.expect_gpus=6", "--gpus", which, "--dry-run")
    assert more.returncode == 0
    assert more.stdout.count("launch.expect_gpus = 6, found 7: 0 (GPU-5d1c92ab), 1 (") == 1


def test_mig_instances_count_as_gpus(box: Any) -> None:
    gpus = [fake_gpu(0), fake_gpu(1, mig_mode=1, migs=[fake_mig(1, 0), fake_mig(1, 1)])]
    assert box(gpus)("launch.expect_gpus=3", "--dry-run").returncode == 0
    few = box(gpus)("launch.expect_gpus=4", "--dry-run")
    assert few.returncode == 69
    assert "found 3: 0 (GPU-5d1c92ab), 1.0 (MIG-00010000), 1.1 (MIG-00010001)" in few.stderr


def test_expecting_gpus_where_there_is_none_is_exit_69(box: Any) -> None:
    for mask in ("", "-1"):
        done = box(SEVEN)("launch.expect_gpus=1", "--dry-run", CUDA_VISIBLE_DEVICES=mask)
        assert (done.returncode, done.stdout) == (69, "")
        assert "GPUs were asked for (launch.expect_gpus = 1)" in done.stderr
    refused = box(SEVEN)("launch.expect_gpus=1", "--device", "cpu", "--dry-run")
    assert refused.returncode == 2


def test_what_follows_a_terminator_is_told_and_no_error(box: Any) -> None:
    done = box(SEVEN)("--dry-run", CUDA_VISIBLE_DEVICES="0,-1,1")
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if "CUDA ignores" in line]
    assert line == "[launcher] CUDA_VISIBLE_DEVICES='0,-1,1': CUDA ignores what follows -1 (1)"
    quiet = box(SEVEN)("--dry-run", CUDA_VISIBLE_DEVICES="0,1,")
    assert "CUDA_VISIBLE_DEVICES='0" not in quiet.stdout


@pytest.mark.parametrize("mask", ["0,,1", "0,abc"])
def test_what_is_told_of_a_mask_at_the_start_stays_in_the_run_directory(
    box: Any, tmp_path: Path, mask: str
) -> None:
    done = box(SEVEN)("--run-dir", "run", "--", "true", CUDA_VISIBLE_DEVICES=mask)
    assert done.returncode == 0, done.stdout
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    (note,) = run["notes"]
    assert note.startswith(f"CUDA_VISIBLE_DEVICES={mask!r}: CUDA stops at ")
    assert report["run"]["notes"] == [note]
    assert f"[launcher] {note}" in done.stdout.splitlines()


@pytest.mark.parametrize("which", ["0", "auto"])
def test_a_missing_gpu_keeps_nobody_from_one_that_was_asked_for_and_is_told(
    box: Any, which: str
) -> None:
    done = box(SEVEN)("--gpus", which, "--dry-run", CUDA_VISIBLE_DEVICES="0,1,7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("names GPU 7, which is missing") == 1


@pytest.mark.parametrize(
    ("gpus", "rules", "mask", "words"),
    [
        (SEVEN, [], "0,1,2,3,4,5,6,7", "names GPU 7, which is missing"),
        (EIGHT, [fault("DeviceGetHandleByIndex_v2", 5, 15)], None, "GPU 5 cannot be used: nvmlD"),
        (EIGHT, [fault("DeviceGetHandleByIndex_v2", 5, 4)], None, "GPU 5 is left out: this proce"),
        (SEVEN, [], None, "dmesg"),
    ],
)
def test_fewer_gpus_than_auto_wants_are_exit_69_naming_the_lost_one(
    box: Any, gpus: list[FakeGpu], rules: list[str], mask: str | None, words: str
) -> None:
    env = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    for more in (["--dry-run"], ["--run-dir", "run", "--", "true"]):
        done = box(gpus, rules)("--gpus", "auto:8", *more, starts=False, **env)
        assert (done.returncode, done.stdout) == (69, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("[launcher] error: --gpus auto:8, found 7: 0 (GPU-5d1c92ab), 1")
        assert words in line


def test_a_lost_gpu_may_be_left_out_of_all_by_number(box: Any) -> None:
    launch = box(EIGHT, [fault("DeviceGetHandleByIndex_v2", 5, 15)])
    assert launch("--dry-run").returncode == 69
    plan = plan_of(launch("launch.expect_gpus=7", "--dry-run", "--json"))
    assert [worker["name"] for worker in plan["workers"]] == [
        f"GPU{n}" for n in (0, 1, 2, 3, 4, 6, 7)
    ]
    assert plan["notes"][0].startswith("left out: GPU 5 cannot be used")
    assert launch("launch.expect_gpus=7", "--gpus", "5", "--dry-run").returncode == 69


def test_a_gpu_that_does_not_exist_is_named_with_those_that_do(box: Any) -> None:
    done = box(SEVEN)("--gpus", "7", "--dry-run")
    assert done.returncode == 69
    assert "--gpus 7: there is no GPU 7; there are 0 (GPU-5d1c92ab), 1 (" in done.stderr


def test_a_mask_where_there_is_no_driver_is_told(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "0"}

    def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
        return answer_of("--dry-run", *arguments, cwd=tmp_path, env=env)

    done = launch()
    if "device cpu" not in done.stdout:
        pytest.skip("this machine has an NVIDIA driver")
    assert done.returncode == 0
    assert "[launcher] CUDA_VISIBLE_DEVICES='0' names GPUs, and this run uses none" in done.stdout
    assert launch("--device", "cuda").returncode == 69
    assert launch("--gpus", "0").returncode == 69
    assert "names GPUs" not in launch("--device", "cpu").stdout


@pytest.mark.parametrize(("code", "cure"), [(9, "modprobe"), (18, "reboot"), (999, "nvidia-smi")])
def test_a_driver_that_cannot_answer_is_never_taken_for_a_machine_without_gpus(
    box: Any, code: int, cure: str
) -> None:
    done = box(EIGHT[:2], [fault("InitWithFlags", "*", code)])("--dry-run")
    assert (done.returncode, done.stdout) == (69, "")
    (line,) = done.stderr.splitlines()
    assert cure in line


def test_a_worker_runs_on_the_cores_near_its_gpu(box: Any) -> None:
    core = min(os.sched_getaffinity(0))
    near = fake_gpu(0, cpus=f"{1 << core:#x}" if core < 64 else None)
    show = "import os; print(sorted(os.sched_getaffinity(0)))"
    done = box([near])("--run-dir", "run", "--", sys.executable, "-c", show)
    if core < 64:
        assert f"[GPU0] [{core}]" in done.stdout.splitlines()


LOST = fault("DeviceGetUUID", 5, 15)


@pytest.mark.parametrize("which", ["0,2", "GPU-5d1c", "auto", "auto:2"])
def test_a_lost_gpu_that_nobody_asked_for_blocks_nothing_and_is_told(box: Any, which: str) -> None:
    asked = ("--run-dir", "run", "--", "true") if which == "auto" else ("--dry-run",)
    done = box(EIGHT, [LOST])("--gpus", which, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "GPU is lost" in line]
    assert line.startswith("[launcher] left out: GPU 5, PCI 00000000:20:00.0 cannot be used: ")
    assert "power-cycle" in line


def test_a_gpu_whose_driver_calls_hang_keeps_nobody_from_the_others(box: Any) -> None:
    launch = box(EIGHT[:2], [delay("DeviceGetMemoryInfo_v2", 1, HANG)])
    done = launch("--gpus", "0", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "hangs" in line]
    assert line.startswith("[launcher] left out: the NVIDIA driver hangs: nvmlDeviceGetMemoryInfo ")
    refused = launch("--dry-run")
    assert (refused.returncode, refused.stdout) == (69, "")
    assert "nvmlDeviceGetMemoryInfo on GPU 1 did not return" in refused.stderr


@pytest.mark.parametrize("which", ["all", "5", "0,5", "GPU-aaaaaaaa"])
def test_a_lost_gpu_that_was_asked_for_is_exit_69_naming_it(box: Any, which: str) -> None:
    done = box(EIGHT, [LOST])("--gpus", which, "--run-dir", "run", "--", "true", starts=False)
    assert (done.returncode, done.stdout) == (69, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("[launcher] error: GPU 5, PCI 00000000:20:00.0 cannot be used: ")


def test_a_mask_that_leaves_a_lost_gpu_out_leaves_its_trouble_out(box: Any) -> None:
    launch = box(EIGHT, [LOST])
    assert plan_of(launch("--dry-run", "--json", CUDA_VISIBLE_DEVICES="0,1"))["workers"]
    refused = launch("--dry-run", CUDA_VISIBLE_DEVICES="5")
    assert refused.returncode == 69
    assert "GPU is lost" in refused.stderr


def test_a_dry_run_sees_what_other_launchers_hold(box: Any, tmp_path: Path) -> None:
    see = [sys.executable, "-m", "launcher", "--dry-run", "--json", "--gpus"]
    ask = "import subprocess, sys; out = open(sys.argv[1], 'w'); "
    ask += "sys.exit(subprocess.call(sys.argv[2:], stdout=out))"
    launch = box(EIGHT[:2])
    for which in ("auto", "0"):
        unmasked = ("env", "-u", "CUDA_VISIBLE_DEVICES")  # the launcher masks what it starts
        holder = (*unmasked, sys.executable, "-c", ask, str(tmp_path / which), *see, which)
        done = launch("--gpus", "0", "--run-dir", f"run_{which}", "--", *holder)
        assert done.returncode == 0, done.stdout
    plan = json.loads((tmp_path / "auto").read_text())
    assert [p["name"] for p in plan["processes"]][1:] == ["GPU1"]
    (note,) = json.loads((tmp_path / "0").read_text())["notes"]
    assert "GPU 0 (GPU-5d1c92ab) is reserved by pid" in note


def test_a_gpu_without_room_for_the_model_is_refused_before_anything_starts(box: Any) -> None:
    full = fake_gpu(0, used_mib=70_000)
    done = box([full])("--run-dir", "run", starts=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has 10.8 GiB free; weights, gradients and moments of 1,923,125,248" in done.stderr


HIDES = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
NAMES_IT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.mark.parametrize(
    ("settings", "env", "code"),
    [
        ([], {}, 69),
        ([], HIDES, 0),
        ([], NAMES_IT, 69),
        (["launch.expect_gpus=6"], {}, 0),
        (["launch.expect_gpus=7"], {}, 69),
        (["launch.expect_gpus=3"], NAMES_IT, 0),
        (["--gpus", "0,1"], {}, 0),
        (["--gpus", "0,1"], NAMES_IT, 0),
        (["--gpus", "3"], {}, 69),
        (["--gpus", "5"], HIDES, 69),
        (["--gpus", "auto"], {}, 0),
        (["--gpus", "auto:6"], {}, 0),
        (["--gpus", "auto:7"], {}, 69),
    ],
)
def test_the_doctor_judges_a_lost_gpu_as_a_run_with_the_same_settings_does(
    box: Any, settings: list[str], env: dict[str, str], code: int
) -> None:
    gpus = [fake_gpu(index, more={"event_types": 31}) for index in range(7)]
    launch = box(gpus, [fault("DeviceGetHandleByIndex_v2", 3, 15)])
    assert launch(*settings, "--dry-run", **env).returncode == code
    doctor = launch("doctor", "--json", *settings, **env)
    checks = [check for check in json.loads(doctor.stdout)["checks"] if "GPU" in check["name"]]
    assert any(check["status"] == "FAIL" for check in checks) is (code == 69)
    assert (doctor.returncode == 69) is (code == 69)
    (lost,) = [check["status"] for check in checks if check["name"] == "GPU3"]
    assert lost in ("warn", "FAIL")


@pytest.mark.parametrize(
    ("settings", "status"),
    [([], "FAIL"), (["--gpus", "0"], "warn"), (["launch.fail_on=reset"], "warn")],
)
def test_the_doctor_fails_only_a_sick_gpu_that_would_fail_the_run(
    box: Any, settings: list[str], status: str
) -> None:
    sick: dict[str, int | str] = {"remapped_corrected": 0, "remap_failed": 1}
    launch = box([fake_gpu(0, more={"event_types": 31}), fake_gpu(1, more=sick)])
    checks = json.loads(launch("doctor", "--json", *settings).stdout)["checks"]
    (health,) = [check for check in checks if check["name"] == "GPU1 health"]
    assert health["status"] == status
    assert "have the board replaced" in health["advice"]


def test_failing_on_health_needs_telemetry_and_gpus(box: Any) -> None:
    launch = box(EIGHT[:1])
    blind = launch("launch.fail_on_health=true", "launch.telemetry_interval_s=0", "--dry-run")
    assert blind.returncode == 2
    assert "nothing to judge by" in blind.stderr
    assert launch("launch.fail_on_health=true", "--device", "cpu", "--dry-run").returncode == 2


def test_the_doctor_tells_the_health_of_every_gpu(box: Any) -> None:
    more: dict[str, int | str] = {"ecc_uncorrected": 0, "remap_pending": 1, "remapped_corrected": 1}
    well: dict[str, int | str] = {"event_types": 31}
    done = box([fake_gpu(0, more=well), fake_gpu(1, more=more), *EIGHT[2:6]], [LOST])("doctor")
    assert done.returncode == 69, done.stdout
    lines = {line[6:24].strip(): line for line in done.stdout.splitlines()}
    assert lines["GPU0 health"].startswith("ok ")
    assert "remapped rows -; clocks" in lines["GPU0 health"]
    assert lines["GPU1 health"].startswith("FAIL")
    assert "nvidia-smi --gpu-reset -i 1" in lines["GPU1 health"]
    assert lines["GPU2 health"].startswith("warn")
    assert "its health is not known" in lines["GPU2 health"]
    assert lines["GPU5"].startswith("FAIL")


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (["launch.fail_on_health=true", "launch.fail_on=isolate"], 2, "give one of the two"),
        (["launch.fail_on_health=true", "launch.fail_on=speed,monitor,reset,isolate"], 0, ""),
        (["launch.fail_on=isolat"], 2, 'expected list of "isolate" or "reset" or "monitor"'),
        (["launch.fail_on="], 2, 'expected list of "isolate" or "reset" or "monitor"'),
        (["launch.fail_on=speed"], 0, ""),
        (["launch.fail_on=speed", "--device", "cpu"], 0, ""),
        (["launch.fail_on=speed,monitor", "--device", "cpu"], 2, "give one of the two"),
        (["launch.fail_on=monitor", "launch.telemetry_interval_s=0"], 2, "nothing to judge by"),
        (["launch.fail_on=isolate", "launch.telemetry_interval_s=0"], 2, "nothing to judge by"),
        (["launch.fail_on=[]", "launch.telemetry_interval_s=0"], 0, ""),
        (["launch.fail_on=isolate", "--device", "cpu"], 2, "give one of the two"),
        (["launch.fail_on=[]", "--device", "cpu"], 0, ""),
    ],
)
def test_what_fails_a_run_is_a_list_of_known_words(
    box: Any, settings: list[str], code: int, words: str
) -> None:
    done = box(EIGHT[:1])(*settings, "--dry-run")
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr


def test_each_gpu_has_its_history_by_its_uuid(box: Any, tmp_path: Path) -> None:
    two = [fake_gpu(index, more={"serial": f"165402300000{index}"}) for index in range(2)]
    to = {"MODEL_CHECK_HISTORY_FILE": str(tmp_path / "history.jsonl")}
    quiet = "launch.telemetry_interval_s=0"
    assert box(two)("--run-dir", "one", quiet, "--", "true", **to).returncode == 0
    failed = box(two[1:])("--run-dir", "two", quiet, "--", "sh", "-c", "exit 7", **to)
    assert failed.returncode == 7
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [(line["uuid"], line["verdict"]) for line in lines] == [
        (two[0].uuid, "PASS"),
        (two[1].uuid, "PASS"),
        (two[1].uuid, "FAIL"),
    ]
    assert [line["serial"][-1] for line in lines] == ["0", "1", "1"]
    assert all(line["pci_bus_id"] and line["model"] for line in lines)
    shown = box([])("history", two[1].uuid, **to).stdout
    assert [line.split()[2] for line in shown.splitlines() if "  GPU" in line] == ["PASS", "FAIL"]
