"""The fake driver keeps to the binary interface that pynvml was written against."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from tests.deadline import DEADLINE_S
from tests.nvml_fake.build import (
    SONAME,
    build,
    environment,
    fake_gpu,
    fake_uuid,
    fault,
    scenario,
)


@pytest.fixture(scope="module")
def library_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


def run(library_dir: Path, scenario_file: Path, code: str) -> list[str]:
    """The lines that `code` prints; pynvml is imported and started."""
    done = subprocess.run(
        [sys.executable, "-c", "from pynvml import *; import pynvml; nvmlInit()\n" + code],
        env=environment(library_dir, scenario_file),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "name",
    [
        "c_nvmlMemory_t", "c_nvmlMemory_v2_t", "c_nvmlUtilization_t", "c_nvmlProcessInfo_v3_t",
        "nvmlPciInfo_t", "c_nvmlTemperature_v1_t", "c_nvmlViolationTime_t", "c_nvmlFieldValue_t",
        "c_nvmlEventData_t", "c_nvmlGpuFabricInfo_v2_t",
    ],
)  # fmt: skip
def test_structs_have_the_size_that_pynvml_expects(library_dir: Path, name: str) -> None:
    library = ctypes.CDLL(str(library_dir / SONAME))
    assert library.nvml_fake_sizeof(name.encode()) == ctypes.sizeof(getattr(pynvml, name))


def test_only_the_interface_is_exported(library_dir: Path) -> None:
    library = ctypes.CDLL(str(library_dir / SONAME))
    assert not hasattr(library, "read_scenario")
    assert hasattr(library, "nvmlInit_v2")


def test_what_telemetry_asks_is_answered(library_dir: Path, tmp_path: Path) -> None:
    more = {
        "power_mw": 350000, "energy_mj": 12345678901, "clock_sm": 1980, "max_clock_sm": 1980,
        "clocks_event_reasons": "0x4", "pstate": 0, "ecc_uncorrected": 1, "pcie_gen": 5,
    }  # fmt: skip
    file = tmp_path / "scenario"
    file.write_text(scenario([fake_gpu(0, more=more)]))
    code = (
        f"h = nvmlDeviceGetHandleByUUID('{fake_uuid(0)}')\n"
        "print(nvmlDeviceGetIndex(h), nvmlDeviceGetPowerUsage(h))\n"
        "print(nvmlDeviceGetTotalEnergyConsumption(h))\n"
        "print(nvmlDeviceGetClockInfo(h, NVML_CLOCK_SM), nvmlDeviceGetMaxClockInfo(h, 1))\n"
        "print(nvmlDeviceGetCurrentClocksEventReasons(h), nvmlDeviceGetPerformanceState(h))\n"
        "print(nvmlDeviceGetTotalEccErrors(h, NVML_MEMORY_ERROR_TYPE_UNCORRECTED,"
        " NVML_VOLATILE_ECC))\n"
        "print(nvmlDeviceGetCurrPcieLinkGeneration(h), nvmlDeviceGetTemperatureV(h, 0))\n"
        "nvmlShutdown()\n"
    )
    assert run(library_dir, file, code) == [
        "0 350000",
        "12345678901",
        "1980 1980",
        "4 0",
        "1",
        "5 31",
    ]


def test_a_fault_strikes_only_the_call_it_names(library_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "scenario"
    file.write_text(scenario([fake_gpu(0), fake_gpu(1)], [fault("DeviceGetTemperature", 1, 15, 2)]))
    code = (
        "handles = [nvmlDeviceGetHandleByIndex(i) for i in range(2)]\n"
        "for handle in [handles[0], handles[1], handles[0], handles[1], handles[1]]:\n"
        "    try: print(nvmlDeviceGetTemperature(handle, 0))\n"
        "    except NVMLError as error: print(type(error).__name__)\n"
    )
    assert run(library_dir, file, code) == ["31", "31", "31", "NVMLError_GpuIsLost", "31"]


def test_a_scenario_with_a_typo_is_refused_loudly(library_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "scenario"
    file.write_text("gpu\nsett uuid GPU-1\n")
    done = subprocess.run(
        [sys.executable, "-c", "import pynvml; pynvml.nvmlInit()"],
        env=environment(library_dir, file),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 97
    assert "cannot read scenario line: sett" in done.stderr
