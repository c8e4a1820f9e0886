"""Telemetry in whole runs: what a box of fake GPUs does while a command works on it, as reported.

The workers wait for what the test is about (a line in a telemetry file), so nothing is timed.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from model_check.events import decode_gpu
from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT
from tests.in_process import answer_of
from tests.nvml_fake.build import (
    FakeGpu,
    build,
    crash,
    environment,
    fake_gpu,
    fake_mig,
    fault,
    scenario,
    xid,
)

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
    return f'while [ "0{seen}" -lt {count} ]; do sleep 0.05; done'


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

    def verdicts(self) -> list[str]:
        return [worker["verdict"] for worker in self.report()["workers"]]

    def rebuilt(self) -> int:
        """The exit code of `report`, which must give the same report and say the same."""
        first = self.report()
        asked = ("report", str(self.directory))
        again = answer_of(*asked, cwd=self.directory.parent, env={"PATH": ""})
        assert self.report() == first
        assert any(first["summary"] in line for line in again.stdout.splitlines()), again.stderr
        return again.returncode


ALL = "launch.fail_on_health=true"
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


def test_who_looks_for_one_gpu_of_a_healthy_box_finds_its_lines_alone(launch: Launch) -> None:
    run = launch([gpu(index) for index in range(4)], "echo trained")
    assert run.exit_code == 0, run.lines
    own = [line for line in run.lines if "GPU2" in line]
    assert [line for line in own if re.search("GPU[013]", line)] == []
    assert "[GPU2] trained" in own
    assert "[launcher] GPU2: NVIDIA H100 80GB HBM3 (GPU-7f3eb4cd)" in own
    assert run.lines[-1] == "[launcher] PASS: 4 GPUs ended with exit code 0 (exit code 0)"


def test_a_sick_box_passes_with_warnings_that_say_what_to_do(launch: Launch) -> None:
    gpus = [
        gpu(0),
        gpu(1, ecc_corrected="0|900", clocks_event_reasons="0x80"),
        gpu(2, clocks_event_reasons="0x48"),
        gpu(3, pcie_width=8),
        gpu(4),
    ]
    run = launch(gpus, SAMPLED, rules=[xid(4, 13)])
    warnings = [line.removeprefix("[launcher] warning: ") for line in run.warnings]
    beginnings = [
        "GPU1: 900 new corrected memory errors (ECC) during this run: watch its memory",
        "GPU1: power brake for 100 % of the run",
        "GPU2: hardware thermal slowdown for 100 % of the run (up to 64 C)",
        "GPU3: PCIe link at width x8 of x16",
        "GPU4: Xid 13 (graphics engine exception)",
    ]
    assert [w[: len(b)] for w, b in zip(warnings, beginnings, strict=True)] == beginnings
    assert run.exit_code == 0
    assert run.verdicts() == ["PASS", "WARN", "WARN", "WARN", "WARN"]
    assert {(row["cause_class"], row["severity"]) for row in run.report()["workers"][1:]} == {
        ("hardware", "MONITOR")
    }
    assert "5 warnings about 4 of 5 GPUs (exit code 0)" in run.lines[-1]
    assert any(line.startswith("[launcher] GPU4: Xid 13") for line in run.lines)
    assert run.rebuilt() == run.exit_code


MENDED: dict[str, dict[str, int | str]] = {
    "12 PCIe replays during this run: ": {"pcie_replays": "3|15"},
    "7 NVLink errors during this run: ": {"field_38": "1|2", "field_52": "0|6"},
    "2 newly remapped rows of its memory during this run: ": {"remapped_corrected": "1|3"},
    "4 new corrected memory errors (ECC) during this run: ": {"ecc_corrected_total": "8|12"},
}


def test_errors_that_the_hardware_mended_are_told_and_shown(launch: Launch) -> None:
    run = launch([gpu(0), *(gpu(n, **more) for n, more in enumerate(MENDED.values(), 1))], SAMPLED)
    assert (run.exit_code, run.verdicts()) == (0, ["PASS", *["WARN"] * len(MENDED)])
    page = (run.directory / "report.html").read_text()
    assert "new replays" in page
    for number, (words, warning) in enumerate(zip(MENDED, run.warnings, strict=True), 1):
        assert warning.startswith(f"[launcher] warning: GPU{number}: {words}")
        assert words in page
    assert run.rebuilt() == 0


def test_a_counter_of_links_that_is_told_no_more_is_no_error(launch: Launch) -> None:
    run = launch([gpu(0, field_38=100, field_52="5|-")], SAMPLED)
    assert (run.exit_code, run.warnings, run.verdicts()) == (0, [], ["PASS"])
    assert run.report()["workers"][0]["telemetry"]["nvlink_errors_new"] is None


def test_clocks_and_power_that_somebody_keeps_low_are_told(launch: Launch) -> None:
    slow = gpu(0, clock_sm=660, clocks_event_reasons="0x0")
    weak = gpu(1, power_limit_mw=350_000, power_default_limit_mw=700_000)
    run = launch([slow, weak, gpu(2, power_default_limit_mw=700_000)], SAMPLED)
    beginnings = ["SM clock 660 of 1980 MHz under load, and NVML gives", "power limit 350 W of 700"]
    for index, (line, beginning) in enumerate(zip(run.warnings, beginnings, strict=True)):
        assert line.startswith(f"[launcher] warning: GPU{index}: {beginning}")
    assert (run.exit_code, run.verdicts()) == (0, ["WARN", "WARN", "PASS"])
    assert run.rebuilt() == 0


def test_a_link_that_falls_in_the_middle_of_a_run_is_told_and_shown(launch: Launch) -> None:
    enough = wait_for("gpu0.telemetry.jsonl", '"pcie_width":8', 4)
    run = launch([gpu(0, pcie_width="16|16|8")], enough)
    (warning,) = run.warnings
    assert warning.startswith("[launcher] warning: GPU0: PCIe link at width x8 of x16: reseat")
    assert (run.exit_code, run.verdicts()) == (0, ["WARN"])
    assert "x8 to 16 of 16" in (run.directory / "report.html").read_text()
    assert run.rebuilt() == 0


GONE = fault("DeviceGetHandleByUUID", 1, 6)
HARD: dict[str, tuple[dict[str, int | str], list[str], str, str]] = {
    "uncorrected": (
        {"ecc_uncorrected": "0|2"},
        [],
        "ISOLATE",
        "2 new uncorrected memory errors (ECC) during this run: distrust its results; end what "
        "runs on it, then `nvidia-smi --gpu-reset -i 1`",
    ),
    "failed remap": (
        {"remap_failed": 1},
        [],
        "ISOLATE",
        "a row of its memory could not be remapped: have the board replaced",
    ),
    "pending remap": (
        {"remap_pending": 1},
        [],
        "RESET",
        "a row of its memory waits to be remapped: end what runs on it, then `nvidia-smi",
    ),
    "lost": ({}, [fault("*", 1, 15, "40+")], "ISOLATE", "GPU is lost (NVML 15): telemetry of it"),
    "gone": ({}, [GONE], "ISOLATE", "nvmlDeviceGetHandleByUUID: Not Found (NVML 6): "),
    "Xid 79": ({}, [xid(1, 79)], "ISOLATE", "Xid 79 (the GPU has fallen off the bus): power-cycle"),
}


@pytest.mark.parametrize("what", HARD)
def test_a_gpu_that_is_condemned_is_never_a_green_pass(launch: Launch, what: str) -> None:
    more, rules, severity, words = HARD[what]
    run = launch([gpu(0), gpu(1, **more)], SAMPLED, rules=rules)
    assert run.exit_code == 22, run.lines
    assert run.verdicts() == ["PASS", "FAIL"]
    assert run.lines[-1].startswith("[launcher] FAIL: GPU1: ")
    assert words in run.lines[-1]
    assert run.lines[-1].endswith("(exit code 22)")
    (row,) = [row for row in run.report()["workers"] if row["name"] == "GPU1"]
    assert (row["cause_class"], row["severity"]) == ("hardware", severity)
    assert words in row["cause"]
    assert ["GPU1", "FAIL"] in [line.split()[1:3] for line in run.lines]
    assert '<header class="FAIL">' in (run.directory / "report.html").read_text()
    assert run.report()["culprits"] == ["GPU1"]
    assert run.rebuilt() == 22


def test_an_xid_of_a_whole_board_condemns_each_of_its_mig_instances(launch: Launch) -> None:
    halves = fake_gpu(0, mig_mode=1, migs=[fake_mig(0, 0), fake_mig(0, 1)], more=WELL)
    script = wait_for("gpu0.0.telemetry.jsonl", '"xid":79')
    script += "; " + wait_for("gpu0.1.telemetry.jsonl", '"xid":79')
    run = launch([halves], script, rules=[xid(0, 79)])
    assert (run.exit_code, run.verdicts()) == (22, ["FAIL", "FAIL"]), run.lines
    assert run.report()["culprits"] == ["GPU0.0", "GPU0.1"]
    assert run.rebuilt() == 22


WAIT_FOR_XID = wait_for("gpu0.telemetry.jsonl", '"xid":79')


def test_a_telemetry_file_that_was_harmed_after_the_run_changes_no_report(launch: Launch) -> None:
    run = launch([gpu(0), gpu(1, ecc_uncorrected="0|2")], SAMPLED, rules=[xid(1, 79)])
    assert run.exit_code == 22
    files = [*run.directory.glob("*.telemetry.jsonl")]
    for file in files:
        file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    assert run.rebuilt() == 22
    for file in files:
        file.unlink()
    assert run.rebuilt() == 22
    for file in files:
        file.mkdir()
    assert run.rebuilt() == 22


def test_a_run_directory_that_was_deleted_under_the_run_keeps_its_verdict(launch: Launch) -> None:
    script = f'{wait_for("gpu0.telemetry.jsonl", "counters")}; rm -rf "$MODEL_CHECK_RUN_DIR"'
    run = launch([gpu(0, remap_failed=1)], script)
    assert run.exit_code == 22, run.lines
    assert run.rebuilt() == 22


TALKS = WAIT_FOR_XID.replace("do ", "do echo waits; ", 1)
DEATHS = {
    "its own failure": (f"{WAIT_FOR_XID}; echo CUDA error >&2; exit 7", (), 7, "exit code 7"),
    "a hang": (f"{TALKS}; sleep 600", ("--hang-timeout", "4"), 124, "silent for"),
    "a signal to the launcher": (
        f"{WAIT_FOR_XID}; kill -TERM $PPID; sleep 600",
        (),
        143,
        "SIGTERM received",
    ),
}


@pytest.mark.parametrize("how", DEATHS)
def test_the_first_culprit_decides_and_the_lost_gpu_is_told_beside_it(
    launch: Launch, how: str
) -> None:
    script, options, code, words = DEATHS[how]
    run = launch([gpu(0)], script, *options, rules=[xid(0, 79)])
    assert run.exit_code == code, run.lines
    headline = next(line for line in run.lines if line.endswith(f"(exit code {code})"))
    assert words in headline
    assert headline.count("Xid 79 (the GPU has fallen off the bus): power-cycle") == 1
    (row,) = run.report()["workers"]
    assert (row["verdict"], row["cause_class"], row["severity"]) == ("FAIL", "hardware", "ISOLATE")
    assert run.rebuilt() == code


@pytest.mark.parametrize(
    ("setting", "code", "verdict"),
    [
        ("launch.fail_on=monitor", 22, "FAIL"),
        ("launch.fail_on=[]", 0, "PASS"),
    ],
)
def test_a_slow_link_fails_a_run_only_where_the_settings_say_so(
    launch: Launch, setting: str, code: int, verdict: str
) -> None:
    run = launch([gpu(0), gpu(1, pcie_width=8)], SAMPLED, setting)
    assert (run.exit_code, run.report()["verdict"]) == (code, verdict)
    assert run.verdicts() == ["PASS", "WARN"]
    assert "GPU1" in run.lines[-1]
    assert ("launch.fail_on makes this a failure" in run.lines[-1]) is (code == 22)
    assert run.rebuilt() == code


def test_a_condemned_gpu_that_the_settings_let_pass_is_no_green_pass(launch: Launch) -> None:
    run = launch([gpu(0, remap_failed=1)], SAMPLED, "launch.fail_on=reset")
    assert (run.exit_code, run.verdicts(), run.report()["verdict"]) == (0, ["FAIL"], "WARN")
    assert "could not be remapped: have the board replaced; launch.fail_on lets it" in run.lines[-1]
    assert run.rebuilt() == 0


def test_a_remap_of_before_the_run_counts_and_errors_of_before_it_do_not(launch: Launch) -> None:
    old = gpu(0, ecc_uncorrected=7, ecc_uncorrected_total=9, remapped_uncorrected=3)
    run = launch([old], SAMPLED)
    assert (run.exit_code, run.verdicts()) == (0, ["PASS"])


@pytest.mark.parametrize("more", [{"ecc_uncorrected_total": "0|-"}, {"remap_pending": "0|-"}])
def test_errors_that_are_told_at_the_start_alone_are_not_told_as_none(
    launch: Launch, more: dict[str, int | str]
) -> None:
    run = launch([gpu(0), gpu(1, ecc_uncorrected="0|-", **more)], SAMPLED)
    assert (run.exit_code, run.verdicts()) == (0, ["PASS", "WARN"])
    assert "and no more at the end: its health from then on is not known" in run.warnings[0]
    assert run.report()["workers"][1]["cause_class"] == "unknown"
    assert run.rebuilt() == 0


def test_an_interval_of_zero_asks_nothing_and_says_so(launch: Launch) -> None:
    run = launch([gpu(0, remap_failed=1)], "true", "launch.telemetry_interval_s=0")
    assert (run.exit_code, run.warnings) == (0, [])
    assert "; nobody watched the health of the GPUs (launch.telemetry_int" in run.lines[-1]
    assert run.rebuilt() == 0
    assert list(run.directory.glob("*.telemetry.jsonl")) == []
    assert run.report()["workers"][0]["telemetry"] is None


@pytest.mark.parametrize(("setting", "code"), [("launch.fail_on=isolate,reset", 0), (ALL, 22)])
def test_a_device_that_tells_nothing_is_not_told_as_healthy(
    launch: Launch, setting: str, code: int
) -> None:
    mute = fake_gpu(0, temperature=None, utilization=None)
    run = launch([mute], SAMPLED, setting)
    (warning,) = run.warnings
    assert warning.startswith(
        "[launcher] warning: GPU0: it tells neither memory errors nor Xids: its health is not known"
    )
    assert (run.exit_code, run.verdicts()) == (code, ["WARN"])
    (row,) = run.report()["workers"]
    assert (row["cause_class"], row["severity"]) == ("unknown", "MONITOR")
    told = row["telemetry"]
    assert (told["ecc_uncorrected_new"], told["xids"], told["power_mean_w"]) == (None, None, None)
    assert run.rebuilt() == code


def test_telemetry_that_breaks_is_not_told_as_healthy(launch: Launch) -> None:
    broken = [crash("DeviceGetPowerUsage", 0)]
    script = wait_for("gpu0.telemetry.jsonl", "trouble")
    run = launch([gpu(0)], script, rules=broken)
    assert (run.exit_code, run.verdicts()) == (0, ["WARN"])
    assert "telemetry ended: its process ended" in run.warnings[0]
    assert run.lines[-1].endswith("1 warning about GPU0 (exit code 0)")
    assert run.rebuilt() == 0
    assert launch([gpu(0)], script, ALL, "--run-dir", "again", rules=broken).exit_code == 22


def test_a_driver_that_crashes_in_the_last_look_is_not_told_as_healthy(launch: Launch) -> None:
    """The counters of the end of the run are those that tell the errors of the run."""
    at_the_end = "crash DeviceGetTotalEnergyConsumption 0 0 2"  # once at the start, once at the end
    run = launch([gpu(0, ecc_uncorrected="0|2")], SAMPLED, rules=[at_the_end])
    assert (run.exit_code, run.verdicts()) == (0, ["WARN"])
    assert "telemetry ended: its process ended" in run.warnings[0]
    assert run.report()["workers"][0]["telemetry"]["ecc_uncorrected_new"] is None
    assert run.rebuilt() == 0
