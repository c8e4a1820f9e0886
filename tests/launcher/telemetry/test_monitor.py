"""Telemetry under a real supervisor: real sampler, real pynvml, a driver that does not exist.

Whatever becomes of NVML, the workers run to their end and the run ends as they did.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.contain import processes
from launcher.contain.processes import wait_for_any
from launcher.telemetry.sampler import field_value
from model_check.events import Counters, GpuEvent, Telemetry, Trouble, Watched, Xid, decode_gpu
from tests.deadline import DEADLINE_S
from tests.launcher.gpus.conftest import ROOT, Box
from tests.launcher.telemetry.conftest import SUPERVISE, Supervise
from tests.nvml_fake.build import (
    HANG,
    crash,
    delay,
    fake_gpu,
    fake_mig,
    fake_uuid,
    fault,
    xid,
)

MakeBox = Callable[..., Box]
UUIDS = {"GPU0": fake_uuid(0), "GPU1": fake_uuid(1)}
BLIND = (
    "GPU0: it tells neither memory errors nor Xids: its health is not known: "
    "see what `nvidia-smi -q` says"
)


NO_LAST_LOOK = r"there was no last look within \d+\.\d s"


def until(pattern: str, worker: str = "gpu0", count: int = 1) -> str:
    """A shell script that ends when so many lines of telemetry match."""
    file = f'"$RUN_DIR/{worker}.telemetry.jsonl"'
    seen = f"$(grep -c '{pattern}' {file} 2>/dev/null)"
    return f'while [ "0{seen}" -lt {count} ]; do sleep 0.05; done'


def told(directory: Path, worker: str = "gpu0") -> list[GpuEvent]:
    lines = (directory / f"{worker}.telemetry.jsonl").read_bytes().splitlines()
    return [decode_gpu(line) for line in lines]


def test_samples_and_counters_of_every_gpu_are_kept_line_by_line(
    box: MakeBox, supervise: Supervise, tmp_path: Path
) -> None:
    more = {"power_mw": 350500, "power_limit_mw": 700000, "ecc_uncorrected": 0, "field_82": 71}
    gpus = [fake_gpu(0, utilization=97, more=more), fake_gpu(1)]
    run = supervise(box(gpus), UUIDS, until("telemetry", count=3))
    assert (run["exit_code"], run["leftovers"], run["said"]) == (0, [], [])
    head, first, *_, last = told(tmp_path)
    assert isinstance(head, Watched)
    assert (head.uuid, head.interval_s, head.schema) == (fake_uuid(0), 0.02, 1)
    assert isinstance(first, Counters)
    assert isinstance(last, Counters)
    assert first.ecc_uncorrected == 0
    samples = [event for event in told(tmp_path) if isinstance(event, Telemetry)]
    assert len(samples) == run["samples"]["GPU0"] >= 3
    assert (samples[0].power_w, samples[0].memory_temperature_c) == (350.5, 71)
    assert samples[0].t < samples[1].t
    assert len(told(tmp_path, "gpu1")) >= 4


def test_what_a_device_does_not_tell_is_absent_and_never_zero(
    box: MakeBox, supervise: Supervise, tmp_path: Path
) -> None:
    silent = fake_gpu(0, temperature=None, utilization=None, used_mib=None)
    run = supervise(box([silent]), {"GPU0": fake_uuid(0)}, until("telemetry"))
    assert (run["said"], run["lost"]) == ([], [])
    assert run["symptoms"] == [BLIND]
    (sample, *_) = [event for event in told(tmp_path) if isinstance(event, Telemetry)]
    assert sample == Telemetry(t=sample.t)
    (counters, *_) = [event for event in told(tmp_path) if isinstance(event, Counters)]
    assert counters == Counters(t=counters.t, watches_xids=False)


def test_a_value_may_come_and_go(box: MakeBox, supervise: Supervise, tmp_path: Path) -> None:
    gpu = fake_gpu(0, temperature="40|-|60")
    supervise(box([gpu]), {"GPU0": fake_uuid(0)}, until("telemetry", count=3))
    seen = [event.temperature_c for event in told(tmp_path) if isinstance(event, Telemetry)]
    assert seen[:3] == [40, None, 60]


def test_an_xid_is_told_when_it_comes_with_its_meaning(
    box: MakeBox, supervise: Supervise, tmp_path: Path
) -> None:
    gpus = [fake_gpu(0), fake_gpu(1, more={"event_types": 31})]
    run = supervise(box(gpus, [xid(1, 45), xid(1, 79, 60)]), UUIDS, until('"xid":79', "gpu1"))
    codes = [event.xid for event in told(tmp_path, "gpu1") if isinstance(event, Xid)]
    assert codes == [45, 79]
    assert "[launcher] GPU1: Xid 79 (the GPU has fallen off the bus): power-cycle" in run["said"][1]
    (symptom,) = [line for line in run["symptoms"] if line != BLIND]  # 45 follows from others
    assert symptom.startswith("GPU1: Xid 79")


def test_a_gpu_lost_in_the_middle_is_named_once_and_the_others_are_watched_on(
    box: MakeBox, supervise: Supervise, tmp_path: Path
) -> None:
    gpus = [fake_gpu(0), fake_gpu(1)]
    script = until("trouble") + "; " + until("telemetry", "gpu1", count=12)
    run = supervise(box(gpus, [fault("*", 0, 15, "60+")]), UUIDS, script)
    (line,) = run["said"]
    assert line.startswith("[launcher] GPU0: nvmlDevice")
    assert "GPU is lost (NVML 15): telemetry of it ends; it fell off the bus" in line
    assert (run["exit_code"], run["lost"]) == (0, ["GPU0"])
    assert run["samples"]["GPU1"] >= 12 > run["samples"]["GPU0"] >= 1
    assert isinstance(told(tmp_path)[-1], Trouble)


def test_an_unknown_error_leaves_a_gap_and_is_told_once(
    box: MakeBox, supervise: Supervise, tmp_path: Path
) -> None:
    rules = [fault("DeviceGetPowerUsage", 0, 999, nth) for nth in (2, 3)]
    script = until("trouble") + "; " + until("telemetry", count=4)
    run = supervise(box([fake_gpu(0)], rules), {"GPU0": fake_uuid(0)}, script)
    (line,) = run["said"]
    assert "nvmlDeviceGetPowerUsage: Unknown Error (NVML 999): telemetry has a gap; " in line
    assert "nvidia-smi" in line
    assert run["lost"] == []
    assert run["symptoms"] == [line.removeprefix("[launcher] ")]


def test_a_call_that_never_returns_is_named_and_the_run_goes_on(
    box: MakeBox, supervise: Supervise
) -> None:
    script = until("telemetry ended\\|silent", "gpu1")
    rules = [delay("DeviceGetPowerUsage", 1, HANG, 3)]
    run = supervise(box([fake_gpu(0), fake_gpu(1)], rules), UUIDS, script, deadline_s=3.0)
    (line,) = run["said"]
    assert line.startswith("[launcher] no more telemetry: NVML was silent for 3.02 s")
    assert "(nvmlDeviceGetPowerUsage on GPU1 did not return; see `dmesg" in line
    assert line.endswith("; the run goes on")
    assert (run["exit_code"], run["lost"], run["children"]) == (0, ["GPU0", "GPU1"], [])
    assert run["samples"] == {"GPU0": 3, "GPU1": 2}


def test_gpus_that_wake_up_one_after_the_other_are_no_silence(
    box: MakeBox, supervise: Supervise
) -> None:
    uuids = {f"GPU{index}": fake_uuid(index) for index in range(6)}
    slow = [delay("DeviceGetHandleByUUID", "*", 700)]
    machine = box([fake_gpu(index) for index in range(6)], slow)
    run = supervise(machine, uuids, until("telemetry"), deadline_s=3.0)
    assert (run["exit_code"], run["said"], run["lost"]) == (0, [], [])


def test_a_pause_of_the_whole_machine_is_no_silence_of_nvml(box: MakeBox) -> None:
    code = (
        "import time\n"
        "from launcher.telemetry.monitor import Monitor\n"
        f"monitor = Monitor({{'GPU0': {fake_uuid(0)!r}}}, None, 1.0, print)\n"
        "monitor.start(time.monotonic())\n"
        "later = monitor.due + 1000\n"
        "monitor.forgive_silence(later)\n"
        "monitor.tick(later)\n"
        "monitor.close(30)\n"
        "print(monitor.records['GPU0'].is_lost)"
    )
    assert box([fake_gpu(0)]).python(code).split() == ["False"]


def test_a_last_look_that_hangs_does_not_hold_up_the_end(
    box: MakeBox, supervise: Supervise
) -> None:
    rules = [delay("DeviceGetTotalEccErrors", 0, HANG, 5)]  # the second time that counters are read
    run = supervise(box([fake_gpu(0)], rules), {"GPU0": fake_uuid(0)}, until("telemetry"))
    (line,) = run["said"]
    assert re.search(NO_LAST_LOOK + r" \(nvmlDeviceGetTotalEccErrors on GPU0", line)
    assert (run["exit_code"], run["children"]) == (0, [])


def test_gpus_whose_workers_ended_before_it_was_started_are_looked_at(
    box: MakeBox, tmp_path: Path
) -> None:
    spawned = (
        "from launcher.contain.processes import wait_for_any\n"
        "from launcher.supervise.worker import spawn\n"
        "def ended(*arguments):\n"
        "    spawned = spawn(*arguments)\n"
        "    wait_for_any([spawned.pidfd], 60_000)\n"
        "    return spawned\n"
    )
    late = SUPERVISE.replace("companion=monitor", "companion=monitor, spawn=ended")
    machine = box([fake_gpu(0), fake_gpu(1)])
    said = machine.python(spawned + late, str(tmp_path), json.dumps(UUIDS), "30", "true")
    run = json.loads(said)
    assert (run["exit_code"], run["lost"], run["children"]) == (0, [], [])
    assert run["samples"] == {"GPU0": 1, "GPU1": 1}


def test_a_sampler_that_starts_slowly_is_waited_for_longer_than_a_call(box: MakeBox) -> None:
    code = (
        "import time\n"
        "from unittest import mock\n"
        "from launcher.gpus import nvml_child\n"
        "from launcher.telemetry.monitor import Monitor\n"
        "command, slowly = nvml_child.child_command, ('sh', '-c', 'sleep 0.5; exec \"$@\"', 'sh')\n"
        "with mock.patch.object(nvml_child, 'child_command', lambda *a: [*slowly, *command(*a)]):\n"
        f"    monitor = Monitor({{'GPU0': {fake_uuid(0)!r}}}, None, 0.02, print)\n"
        "    monitor.start(time.monotonic())\n"
        "    monitor.close(wait_s=0.1)\n"
        "print(monitor.records['GPU0'].counters is not None)\n"
    )
    assert box([fake_gpu(0)]).python(code) == "True\n"


def test_a_last_look_at_many_gpus_may_take_its_time(box: MakeBox, supervise: Supervise) -> None:
    """The driver's locks are busiest when the workers end."""
    uuids = {f"GPU{index}": fake_uuid(index) for index in range(8)}
    slow = [delay("DeviceGetTotalEnergyConsumption", "*", 500, nth) for nth in range(9, 17)]
    machine = box([fake_gpu(index) for index in range(8)], slow)
    run = supervise(machine, uuids, until("telemetry", "gpu7"))
    assert (run["exit_code"], run["said"], run["lost"]) == (0, [], [])


def test_a_gpu_that_had_its_last_look_is_not_blamed_for_one_that_hangs_in_it(
    box: MakeBox, supervise: Supervise
) -> None:
    known = {"event_types": 31}
    gpus = [fake_gpu(index, more=known) for index in range(2)]
    hangs = [delay("DeviceGetTotalEnergyConsumption", 1, HANG, 2)]
    run = supervise(box(gpus, hangs), UUIDS, until("telemetry", "gpu1"))
    assert (run["exit_code"], run["lost"], run["children"]) == (0, ["GPU1"], [])
    (symptom,) = run["symptoms"]
    assert re.match(f"GPU1: telemetry ended: {NO_LAST_LOOK}", symptom)


def test_one_look_at_many_gpus_waits_for_each(box: MakeBox) -> None:
    uuids = {f"GPU{index}": fake_uuid(index) for index in range(4)}
    code = (
        "from launcher.telemetry.monitor import look\n"
        f"records = look({uuids!r}, deadline_s=3.0)\n"
        "print([record.is_lost for record in records.values()])"
    )
    slow = [delay("DeviceGetHandleByUUID", "*", 900)]
    machine = box([fake_gpu(index) for index in range(4)], slow)
    assert machine.python(code).strip() == "[False, False, False, False]"


@pytest.mark.parametrize(
    "rule",
    [
        delay("DeviceGetHandleByUUID", 1, HANG),
        delay("DeviceGetTotalEccErrors", 1, HANG),
        delay("DeviceGetTemperature", 1, HANG),
        crash("DeviceGetTemperature", 1),
    ],
)
def test_one_look_gives_up_the_gpu_that_hangs_and_asks_the_others_again(
    box: MakeBox, rule: str
) -> None:
    uuids = {f"GPU{index}": fake_uuid(index) for index in range(3)}
    code = (
        "from launcher.telemetry.monitor import look\n"
        f"records = look({uuids!r}, deadline_s=3.0)\n"
        "for record in records.values():\n"
        "    print(record.sample and record.sample.temperature_c, bool(record.counters),\n"
        "        *(trouble.call for trouble in record.health().trouble))"
    )
    first, second, third = box([fake_gpu(n) for n in range(3)], [rule]).python(code).splitlines()
    assert (first, third) == ("31 True", "31 True")
    assert second.endswith(f"nvml{rule.split()[1].removesuffix('_v2')} on GPU1")


def test_one_look_ends_in_time_however_many_gpus_hang(box: MakeBox) -> None:
    uuids = {f"GPU{index}": fake_uuid(index) for index in range(8)}
    code = (
        "from launcher.telemetry.monitor import look\n"
        f"records = look({uuids!r}, deadline_s={DEADLINE_S}, most_s=2.0)\n"
        "print({record.is_lost for record in records.values()})"
    )
    machine = box([fake_gpu(n) for n in range(8)], [delay("DeviceGetTemperature", "*", HANG)])
    assert machine.python(code).strip() == "{True}"


def test_a_driver_that_crashes_takes_only_the_sampler_along(
    box: MakeBox, supervise: Supervise
) -> None:
    script = until("its process ended")
    run = supervise(box([fake_gpu(0)], [crash("DeviceGetClockInfo", 0)]), UUIDS, script)
    assert any("no more telemetry: its process ended (nvmlDevice" in line for line in run["said"])
    assert (run["exit_code"], run["lost"]) == (0, ["GPU0", "GPU1"])


MISMATCH = fault("InitWithFlags", "*", 18)
UNKNOWN = fault("InitWithFlags", "*", 999)


@pytest.mark.parametrize(("rule", "why"), [(MISMATCH, "reboot"), (UNKNOWN, "NVML 999")])
def test_nvml_that_breaks_after_the_start_is_one_line_with_a_cure(
    box: MakeBox, supervise: Supervise, rule: str, why: str
) -> None:
    run = supervise(box([fake_gpu(0), fake_gpu(1)], [rule]), UUIDS, until("trouble"))
    (line,) = run["said"]
    assert line.startswith("[launcher] NVML: nvmlInitWithFlags: ")
    assert why in line
    assert (run["exit_code"], run["lost"], run["samples"]["GPU1"]) == (0, ["GPU0", "GPU1"], 0)


def test_a_library_that_is_gone_is_one_line(supervise: Supervise, tmp_path: Path) -> None:
    run = supervise(Box(tmp_path, tmp_path / "none"), {"GPU0": "GPU-1"}, until("trouble"))
    assert len(run["said"]) == 1
    assert "reinstall the driver" in run["said"][0]
    assert run["exit_code"] == 0


def test_a_mig_instance_has_its_own_memory_and_its_boards_health(
    box: MakeBox, supervise: Supervise, tmp_path: Path
) -> None:
    board = {"event_types": 31, "power_mw": 300000, "remapped_corrected": 2}
    instances = [fake_mig(0, 0, used_mib=1500), fake_mig(0, 1)]
    gpu = fake_gpu(0, mig_mode=1, migs=instances, temperature=66, more=board)
    uuids = {"GPU0.0": instances[0].uuid, "GPU0.1": instances[1].uuid}
    script = until("xid", "gpu0.0") + "; " + until("telemetry", "gpu0.1")
    run = supervise(box([gpu], [xid(0, 94)]), uuids, script)
    (sample, *_) = [e for e in told(tmp_path, "gpu0.0") if isinstance(e, Telemetry)]
    assert (sample.memory_used_mib, sample.temperature_c, sample.power_w) == (1500, 66, 300.0)
    (counters, *_) = [e for e in told(tmp_path, "gpu0.1") if isinstance(e, Counters)]
    assert counters.remapped_corrected == 2
    assert run["symptoms"][0].startswith("GPU0.0: Xid 94 (contained memory error")


def test_a_sampler_that_cannot_be_started_costs_only_telemetry(
    box: MakeBox, tmp_path: Path
) -> None:
    machine = box([fake_gpu(0)])
    code = (
        "import resource, sys, time\n"
        "from pathlib import Path\n"
        "from launcher.telemetry.monitor import Monitor\n"
        "monitor = Monitor({'GPU0': 'GPU-1'}, Path(sys.argv[1]), 1.0, print)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (5, 5))\n"
        "monitor.start(time.monotonic()); monitor.close()\n"
        "print(monitor.fd, monitor.pid, monitor.records['GPU0'].is_lost)\n"
    )
    *lines, last = machine.python(code, str(tmp_path)).splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        "no more telemetry: its process cannot be started"
    ]
    assert last == "None None True"
    assert [type(event) for event in told(tmp_path)] == [Watched, Trouble]  # `report` reads it


def sampler_of(pid: int) -> int | None:
    """The sampler among the children of a supervisor."""
    for child in processes.children(pid):
        if b"launcher.telemetry.sampler" in processes.read_proc(child, "cmdline"):
            return child
    return None


def test_the_sampler_dies_with_a_supervisor_that_is_killed(box: MakeBox, tmp_path: Path) -> None:
    machine = box([fake_gpu(0)], [delay("DeviceGetPowerUsage", 0, HANG)])  # not even reading
    arguments = [str(tmp_path), json.dumps({"GPU0": fake_uuid(0)}), "100", "sleep 1000"]
    command = [sys.executable, "-c", SUPERVISE, *arguments]
    with subprocess.Popen(command, env=machine.env, cwd=ROOT) as supervisor:
        end = time.monotonic() + DEADLINE_S
        # It tells counters before the call in which it hangs.
        while (pid := sampler_of(supervisor.pid)) is None or len(told(tmp_path)) < 2:
            assert time.monotonic() < end
        pidfd = os.pidfd_open(pid)
        supervisor.send_signal(signal.SIGKILL)
    assert wait_for_any([pidfd], 1000 * DEADLINE_S)
    os.close(pidfd)


def test_one_look_tells_the_state_of_now(box: MakeBox) -> None:
    more: dict[str, Any] = {"remapped_corrected": 3, "remap_pending": 1, "ecc_corrected": 7}
    code = (
        "from launcher.telemetry.monitor import look\n"
        f"record = look({{'GPU0': {fake_uuid(0)!r}}})['GPU0']\n"
        "counters = record.counters\n"
        "print(counters.ecc_corrected, counters.remap_pending, record.health().samples)"
    )
    assert box([fake_gpu(0, more=more)]).python(code).split() == ["7", "True", "1"]


def test_a_field_of_a_type_that_only_a_newer_driver_knows_is_not_told() -> None:
    number = SimpleNamespace(uiVal=71)
    known = SimpleNamespace(nvmlReturn=0, valueType=1, value=number)
    assert field_value(known) == 71
    assert field_value(SimpleNamespace(nvmlReturn=0, valueType=99, value=number)) is None
    assert field_value(SimpleNamespace(nvmlReturn=3, valueType=1, value=number)) is None


def test_what_a_whole_job_is_sent_does_not_end_the_sampler(
    box: MakeBox, supervise: Supervise, tmp_path: Path
) -> None:
    """`scancel --signal`, `systemctl stop`: the launcher answers, and its workers may go on."""
    find = "grep -l telemetry[.]sampler /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3"
    script = (
        f"{until('telemetry')}; for p in $({find}); do "
        'if [ "$(cut -d" " -f4 /proc/$p/stat)" = $PPID ]; then kill -TERM $p; kill -USR1 $p; '
        'echo $p > "$RUN_DIR/sampler"; fi; done; '
        "seen=$(wc -l < $RUN_DIR/gpu0.telemetry.jsonl); "
        'while [ "$(wc -l < $RUN_DIR/gpu0.telemetry.jsonl)" -lt $((seen + 5)) ]; '
        "do sleep 0.01; done"
    )
    run = supervise(box([fake_gpu(0)]), {"GPU0": fake_uuid(0)}, script)
    assert (run["exit_code"], run["said"], run["lost"]) == (0, [], [])
    assert (tmp_path / "sampler").read_text().strip()


def test_what_a_whole_job_is_sent_at_its_start_does_not_end_the_sampler(box: MakeBox) -> None:
    code = (
        "import os, signal, time\n"
        "from launcher.telemetry.monitor import Monitor\n"
        f"monitor = Monitor({{'GPU0': {fake_uuid(0)!r}}}, None, 1.0, print)\n"
        "monitor.start(time.monotonic())\n"
        "for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):\n"
        "    os.kill(monitor.pid, signum)\n"
        "monitor.close(30)\n"
        "print(monitor.records['GPU0'].health() is not None)"
    )
    assert box([fake_gpu(0)]).python(code).split() == ["True"]
