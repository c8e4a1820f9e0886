"""A recording of NVML makes the fake answer the same. None of a real GPU is kept here yet."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.deadline import DEADLINE_S
from tests.nvml_fake.build import build, environment, fake_gpu, fault, scenario
from tests.nvml_fake.record import scenario_of

ROOT = Path(__file__).parents[2]


def record(library: Path, scenario_file: Path, text: str) -> dict[str, Any]:
    """What the recorder says of a scenario, without the time that calls took."""
    scenario_file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "tests.nvml_fake.record"],
        env=environment(library, scenario_file),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    recording: dict[str, Any] = json.loads(done.stdout)
    for gpu in recording["gpus"]:
        for answer in gpu["answers"].values():
            answer.pop("us", None)
    return recording


def test_the_fake_gives_back_what_was_recorded(tmp_path: Path) -> None:
    more: dict[str, int | str] = {
        "power_mw": 650_123, "energy_mj": 2**40, "ecc_corrected": 0, "ecc_uncorrected_total": 3,
        "field_82": 71, "field_270": 2**35, "violation_thermal_ns": 5, "remapped_corrected": 2,
        "remap_failed": 1, "event_types": 31, "clocks_event_reasons": "0x4", "clock_mem": 2619,
    }  # fmt: skip
    gpus = [fake_gpu(0, more=more), fake_gpu(1, name="NVIDIA A10", temperature=None)]
    text = scenario(gpus, [fault("DeviceGetPcieReplayCounter", 1, 999)])
    library = build(tmp_path)
    first = record(library, tmp_path / "scenario", text)
    assert first["gpus"][0]["answers"]["energy_mj"] == {"value": 2**40}
    assert first["gpus"][1]["answers"]["temperature"] == {"code": 3}
    assert first["gpus"][1]["answers"]["pcie_replays"] == {"code": 999}
    assert record(library, tmp_path / "scenario", scenario_of(first)) == first


def test_a_recording_holds_no_uuid_and_no_serial_number(tmp_path: Path) -> None:
    gpu = fake_gpu(0, more={"serial": "1234567890"})
    recording = json.dumps(record(build(tmp_path), tmp_path / "scenario", scenario([gpu])))
    assert gpu.uuid not in recording
    assert "1234567890" not in recording
