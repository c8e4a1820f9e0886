"""Telemetry in whole runs: what a box of fake GPUs does while a command works on it, as reported.

The workers wait for what the test is about (a line in a telemetry file), so nothing is timed.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from model_check.events import decode_gpu
from tests.e2e.conftest import ROOT
from tests.nvml_fake.build import FakeGpu, build, environment, fake_gpu, fault, scenario, xid

DEADLINE_S = 60
WELL: dict[str, int | str] = {
    "power_mw": 690_000,
    "power_limit_mw": 700_000,
    "clock_sm": 1755,
    "max_clock_sm": 1980,
    "clocks_event_reasons": "0x4",
    "ecc_corrected": 0,
    "ecc_uncorrected": 0,
    "remapped_corrected": 0,
    "field_270": 0,
    "pcie_gen": 5,
    "pcie_max_gen": 5,
    "pcie_width": 16,
    "pcie_max_width": 16,
    "event_types": 31,
}


def gpu(index: int, **more: int | str) -> FakeGpu:
    return fake_gpu(index, utilization=98, temperature=64, more=WELL | more)


def wait_for(file: str, pattern: str, count: int = 1) -> str:
    seen = f"$(grep -c '{pattern}' \"$MODEL_CHECK_RUN_DIR/{file}\" 2>/dev/null)"
    return f'while [ "0{seen}" -lt {count} ]; do sleep 0.01; done'


SAMPLED = wait_for("gpu0.telemetry.jsonl", "telemetry", 6)


@dataclass(frozen=True)
class Run:
    exit_code: int
    lines: list[str]
    directory: Path

    def report(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return result

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.lines if line.startswith("[launcher] warning: ")]


Launch = Callable[..., Run]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def launch(tmp_path: Path, library: Path) -> Launch:
    """`launch(gpus, script, *arguments)`: a run of a shell script on every GPU."""

    def run(gpus: Sequence[FakeGpu], script: str, *more: str, rules: Sequence[str] = ()) -> Run:
        scenario_file = tmp_path / "scenario"
        scenario_file.write_text(scenario(gpus, rules))
        env = environment(library, scenario_file)
        env |= {"PYTHONPATH": str(ROOT), "MODEL_CHECK_LOCK_DIR": str(tmp_path / "locks")}
        options = ("--run-dir", "run", "launch.telemetry_interval_s=0.02", *more)
        done = subprocess.run(
            [sys.executable, "-m", "launcher", *options, "--", "sh", "-c", script],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return Run(done.returncode, done.stdout.splitlines(), tmp_path / "run")

    return run


def test_a_healthy_box_has_telemetry_in_its_reports_and_no_warning(launch: Launch) -> None:
    run = launch([gpu(0), gpu(1)], SAMPLED, "launch.fail_on_health=true")
    assert (run.exit_code, run.warnings) == (0, [])
    first, second = run.report()["workers"]
    assert first["telemetry"]["samples"] >= 6
    told = {"temperature_max_c": 64, "power_mean_w": 690.0, "sm_mean_mhz": 1755.0, "xids": {}}
    assert told.items() <= second["telemetry"].items()
    assert first["telemetry"]["memory_temperature_max_c"] is None
    assert first["telemetry"]["throttled_percent"] == {"power cap": 100.0}
    assert "<td>690 W / 700 W</td>" in (run.directory / "report.html").read_text()
    for line in (run.directory / "gpu1.telemetry.jsonl").read_bytes().splitlines():
        decode_gpu(line)


def test_a_sick_box_passes_with_warnings_that_say_what_to_do(launch: Launch) -> None:
    gpus = [
        gpu(0),
        gpu(1, ecc_uncorrected="0|2", remap_pending=1),
        gpu(2, clocks_event_reasons="0x48"),
        gpu(3, pcie_width=8),
        gpu(4),
    ]
    run = launch(gpus, SAMPLED, rules=[xid(4, 79), fault("*", 4, 15, "40+")])
    warnings = [line.removeprefix("[launcher] warning: ") for line in run.warnings]
    beginnings = [
        "GPU1: 2 new uncorrected memory errors (ECC) during this run: distrust its results",
        "GPU1: a row of its memory waits to be remapped",
        "GPU2: hardware thermal slowdown for 100 % of the run (up to 64 C)",
        "GPU3: PCIe link at width x8 of x16",
        "GPU4: Xid 79 (the GPU has fallen off the bus)",
        "GPU4: nvmlDevice",
    ]
    assert [w[: len(b)] for w, b in zip(warnings, beginnings, strict=True)] == beginnings
    assert run.exit_code == 0
    assert "6 warnings about GPU1, GPU2, GPU3, GPU4 (exit code 0)" in run.lines[-1]
    assert any(line.startswith("[launcher] GPU4: Xid 79") for line in run.lines)


def test_a_warning_fails_the_run_with_22_when_the_settings_say_so(launch: Launch) -> None:
    run = launch([gpu(0), gpu(1, remap_failed=1)], SAMPLED, "launch.fail_on_health=true")
    assert run.exit_code == 22
    report = run.report()
    assert [worker["verdict"] for worker in report["workers"]] == ["PASS", "FAIL"]
    assert report["culprits"] == ["GPU1"]
    assert "GPU1: a row of its memory could not be remapped" in run.lines[-1]


def test_a_failed_command_keeps_its_exit_code_beside_a_warning(launch: Launch) -> None:
    script = f"{SAMPLED}; exit 7"
    run = launch([gpu(0, remap_failed=1)], script, "launch.fail_on_health=true")
    assert run.exit_code == 7
    assert len(run.warnings) == 1


def test_an_interval_of_zero_asks_nothing(launch: Launch) -> None:
    run = launch([gpu(0, remap_failed=1)], "true", "launch.telemetry_interval_s=0")
    assert (run.exit_code, run.warnings) == (0, [])
    assert list(run.directory.glob("*.telemetry.jsonl")) == []
    assert run.report()["workers"][0]["telemetry"] is None


def test_the_report_made_again_is_the_same(launch: Launch, tmp_path: Path) -> None:
    run = launch([gpu(0), gpu(1, ecc_uncorrected="0|1")], SAMPLED, "launch.fail_on_health=true")
    first = run.report()
    again = subprocess.run(
        [sys.executable, "-m", "launcher", "report", str(run.directory)],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert again.returncode == 22, again.stderr
    assert run.report() == first


def test_a_device_that_tells_nothing_is_watched_without_a_word(launch: Launch) -> None:
    mute = fake_gpu(0, temperature=None, utilization=None)
    run = launch([mute], SAMPLED)
    assert (run.exit_code, run.warnings) == (0, [])
    told = run.report()["workers"][0]["telemetry"]
    assert (told["ecc_uncorrected_new"], told["xids"], told["power_mean_w"]) == (None, None, None)
