"""The launcher on boxes of GPUs that do not exist: real pynvml over the fake driver library."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT
from tests.nvml_fake.build import FakeGpu, build, environment, fake_gpu, fault, scenario

DEADLINE_S = 60
Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def box(tmp_path: Path, library: Path) -> Callable[[Sequence[FakeGpu]], Launch]:
    """Makes a launcher that sees the given GPUs."""

    def make(gpus: Sequence[FakeGpu]) -> Launch:
        file = tmp_path / "scenario"
        file.write_text(scenario(gpus))
        base = environment(library, file)
        base |= {"PYTHONPATH": str(ROOT), "MODEL_CHECK_LOCK_DIR": str(tmp_path / "locks")}

        def launch(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "launcher", *arguments]
            return subprocess.run(
                command,
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


BUSY = {
    "a process": (fake_gpu(1, processes=[(4711, 30000)]), "GPU1 is busy: pid 4711 holds 29.3 GiB"),
    "memory": (fake_gpu(1, used_mib=5000), "GPU1 is busy: 4.9 GiB held by"),
}


@pytest.mark.parametrize("what", BUSY)
def test_a_busy_gpu_is_told_or_refused_when_idle_ones_are_required(box: Any, what: str) -> None:
    gpu, why = BUSY[what]
    launch = box([fake_gpu(0), gpu])
    told = launch("--run-dir", "told", "--", "true")
    assert told.returncode == 0
    assert f"[launcher] {why}" in told.stdout
    refused = launch("--require-idle", "--run-dir", "refused", "--", "true")
    assert (refused.returncode, refused.stdout) == (69, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"[launcher] error: launch.require_idle: {why}")
    assert (
        launch("--require-idle", "--gpus", "0", "--run-dir", "idle", "--", "true").returncode == 0
    )
    assert launch("launch.require_idle=true", "--gpus", "1", "--dry-run").returncode == 69


def test_auto_finds_the_idle_gpu_and_refuses_when_there_are_too_few(box: Any) -> None:
    launch = box([fake_gpu(0, used_mib=5000), fake_gpu(1)])
    plan = plan_of(launch("--gpus", "auto", "--require-idle", "--dry-run", "--json"))
    assert [worker["name"] for worker in plan["workers"]] == ["GPU1"]
    refused = launch("--gpus", "auto:2", "--require-idle", "--run-dir", "run", "--", "true")
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
    nonsense = box(EIGHT[:2])("--dry-run", CUDA_VISIBLE_DEVICES="1,1")
    assert nonsense.returncode == 69


def test_a_driver_that_cannot_answer_is_never_taken_for_a_machine_without_gpus(
    box: Any, tmp_path: Path
) -> None:
    launch = box(EIGHT[:2])
    with (tmp_path / "scenario").open("a") as file:
        file.write(fault("InitWithFlags", "*", 18) + "\n")
    done = launch("--dry-run")
    assert done.returncode == 69, done.stdout + done.stderr
    assert "reboot" in done.stderr
    assert "Traceback" not in done.stderr
