"""Which device, how many threads, and whether it is the GPU that was meant."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher.verdict.agreement import MUST_MATCH
from model_check.config.schema import SystemSettings
from model_check.engine.device import (
    check_uuid,
    default_num_threads,
    describe_device,
    pick_device,
    set_up_process,
)
from model_check.errors import NoGpuError
from model_check.utils.worker_env import WorkerEnv
from tests.deadline import DEADLINE_S

UUID = "7f3b1c1e-0d5c-4a1b-9a55-0123456789ab"
ROOT = Path(__file__).parents[2]
ALONE = WorkerEnv.from_environ({})


def test_a_cpu_worker_gets_the_cpu() -> None:
    assert pick_device("cpu", 0, ALONE) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(("mask", "told"), [(None, "is not set"), ("3", "is '3'")])
def test_cuda_without_a_gpu_is_an_error_that_tells_what_to_do(
    monkeypatch: pytest.MonkeyPatch, mask: str | None, told: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask or "")
    if mask is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    seen = rf"\(built (without CUDA|for CUDA [\d.]+)\) sees no GPU; CUDA_VISIBLE_DEVICES {told}\."
    with pytest.raises(NoGpuError, match=rf"{seen}.*doctor.*system\.device=cpu"):
        pick_device("cuda", 0, ALONE)


@pytest.mark.parametrize("expected", [None, f"GPU-{UUID}", f"GPU-{UUID.upper()}", "MIG-1-2-3"])
def test_the_gpu_that_was_meant_passes(expected: str | None) -> None:
    check_uuid(expected, UUID)


def test_another_gpu_than_meant_is_refused_with_both_names() -> None:
    with pytest.raises(NoGpuError, match=f"given GPU-aaaa and sees GPU-{UUID}"):
        check_uuid("GPU-aaaa", UUID)


@pytest.mark.parametrize(
    ("given", "left"),
    [(None, ":4096:8"), ("", ":4096:8"), (":4096:2:16:8", ":4096:8"), (":16:8", ":16:8")],
)
def test_a_workspace_of_cublas_that_torch_refuses_is_replaced(
    monkeypatch: pytest.MonkeyPatch, given: str | None, left: str
) -> None:
    variable = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(variable, given or "")
    if given is None:
        monkeypatch.delenv(variable)
    mode = torch.get_deterministic_debug_mode()
    try:
        told = set_up_process(SystemSettings(num_threads=torch.get_num_threads()), 1, {})
    finally:
        torch.set_deterministic_debug_mode(mode)
    assert os.environ[variable] == left
    assert (told is not None) == bool(given and given != left)


def test_threads_are_those_of_the_environment_else_a_share_of_the_cores() -> None:
    assert default_num_threads(2, {"OMP_NUM_THREADS": "3"}) == 3
    alone = default_num_threads(1, {"OMP_NUM_THREADS": ""})
    assert default_num_threads(2, {}) == max(1, alone // 2)
    assert default_num_threads(10_000, {}) == 1


def test_a_device_is_described_for_the_comparison_of_workers() -> None:
    detail = describe_device(torch.device("cpu"))
    assert detail["torch"] == torch.__version__
    assert detail["num_threads"] == torch.get_num_threads()
    assert detail["device_name"]


def test_variables_that_decide_bits_are_told_and_others_are_not() -> None:
    """MKL_CBWR=COMPATIBLE gives a product of float32 other bits, ONEDNN_MAX_CPU_ISA one of
    bfloat16."""
    cpu = torch.device("cpu")
    ours = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "MKL_CBWR": "", "HOME": "/root"}
    assert describe_device(cpu, ours)["math_environ"] is None
    theirs = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "MKL_CBWR": "COMPATIBLE"}
    said = describe_device(cpu, theirs)["math_environ"]
    assert said == "CUBLAS_WORKSPACE_CONFIG=:16:8, MKL_CBWR=COMPATIBLE"
    assert "math_environ" in MUST_MATCH


def test_where_bits_are_compared_no_sum_is_in_sixteen_bits_and_new_memory_holds_no_nan() -> None:
    code = (
        "import torch; from model_check.engine.device import set_up_process;"
        "from model_check.config.schema import SystemSettings;"
        "set_up_process(SystemSettings(deterministic={}), 1, {{}});"
        "print(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,"
        " torch.utils.deterministic.fill_uninitialized_memory)"
    )
    for deterministic in (True, False):
        command = [sys.executable, "-c", code.format(deterministic)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S)
        assert done.stdout.split() == [str(not deterministic)] * 2, done.stderr


TAKE_AND_FREE = """
import resource
import torch
from launcher.verdict.agreement import MUST_MATCH
from model_check.engine.device import keep_freed_memory
torch.set_num_threads(2)
keep_freed_memory()
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**20) for _ in range(16)]
    del tensors
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_that_was_freed_is_taken_again_without_the_kernel() -> None:
    command = [sys.executable, "-c", TAKE_AND_FREE]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    faults = [int(line) for line in done.stdout.splitlines()]
    assert faults[-1] < faults[0] / 4, faults
