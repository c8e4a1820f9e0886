"""The NVML probe, through the real pynvml, against the fake driver, in fresh processes."""

import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.gpus.codes import cure_for
from tests.deadline import DEADLINE_S
from tests.launcher.gpus.conftest import ROOT, Box
from tests.nvml_fake.build import HANG, crash, delay, fake_gpu, fake_mig, fake_uuid, fault

MakeBox = Callable[..., Box]
NO_GPU = 69
CALL_S = 3.0
"""For one call: more than a busy machine stalls a process."""


def the_gpu(snapshot: dict[str, Any]) -> dict[str, Any]:
    (gpu,) = snapshot["gpus"]
    assert isinstance(gpu, dict)
    return gpu


def refused(answer: dict[str, Any]) -> str:
    """The message of a refusal, which is always one line with exit code 69."""
    assert (answer.get("class"), answer.get("exit_code")) == ("NoGpuError", NO_GPU), answer
    message = answer["error"]
    assert isinstance(message, str)
    assert "\n" not in message
    return message


def test_eight_gpus_are_read_in_pci_order(box: MakeBox) -> None:
    snapshot = box([fake_gpu(index) for index in range(8)]).snapshot()
    assert (snapshot["driver_version"], snapshot["cuda_driver_version"]) == ("570.124.06", "12.8")
    assert [gpu["index"] for gpu in snapshot["gpus"]] == list(range(8))
    assert [gpu["uuid"] for gpu in snapshot["gpus"]] == [fake_uuid(index) for index in range(8)]
    assert snapshot["gpus"][7]["pci_bus_id"] == "00000000:22:00.0"
    assert snapshot["reason"] is None
    assert snapshot["notes"] == []


@pytest.mark.parametrize("code", [3, 14, 999])
def test_a_gpu_that_cannot_tell_its_serial_number_is_one(box: MakeBox, code: int) -> None:
    gpus = [fake_gpu(index, more={"serial": f"165402300000{index}"}) for index in range(2)]
    snapshot = box(gpus, [fault("DeviceGetSerial", 1, code)]).snapshot()
    assert [gpu["serial"] for gpu in snapshot["gpus"]] == ["1654023000000", None]


ODD = os.fsdecode(b"H100 \xc3\x28\xff")


def test_a_name_and_a_serial_that_are_no_text_cost_no_gpu(box: MakeBox) -> None:
    odd = fake_gpu(1, name=ODD, more={"serial": ODD})
    named = box([fake_gpu(0), odd], driver=os.fsdecode(b"570\xff")).snapshot()
    assert named["driver_version"] == "570\ufffd"
    assert [gpu["name"] for gpu in named["gpus"]] == ["NVIDIA H100 80GB HBM3", "H100 \ufffd(\ufffd"]
    assert [gpu["serial"] for gpu in named["gpus"]] == [None, None]
    assert named["broken"] == []


@pytest.mark.parametrize(("field", "begin"), [("uuid", "GPU-"), ("bus_id", "0:1C:00.0")])
def test_a_gpu_that_nothing_could_find_again_is_broken_by_itself(
    box: MakeBox, field: str, begin: str
) -> None:
    snapshot = box([fake_gpu(0), fake_gpu(1, **{field: begin + ODD})]).snapshot()
    assert [gpu["index"] for gpu in snapshot["gpus"]] == [0]
    (broken,) = snapshot["broken"]
    assert broken["index"] == 1
    assert "its answer is no text" in broken["why"]


def test_a_mask_changes_nothing(box: MakeBox) -> None:
    snapshot = box([fake_gpu(0), fake_gpu(1)]).snapshot(CUDA_VISIBLE_DEVICES="1")
    assert len(snapshot["gpus"]) == 2


def test_every_field_of_a_busy_gpu_is_read(box: MakeBox) -> None:
    busy = fake_gpu(
        0, used_mib=30720, utilization=97, temperature=71, compute_mode=3, cpus="0x3 0x0",
        processes=[(4711, 30000), (4712, -1)],
    )  # fmt: skip
    gpu = the_gpu(box([busy]).snapshot())
    assert gpu["name"] == "NVIDIA H100 80GB HBM3"
    assert (gpu["total_mib"], gpu["used_mib"], gpu["reserved_mib"]) == (81559, 30720, 551)
    assert (gpu["utilization_percent"], gpu["temperature_c"]) == (97, 71)
    assert gpu["compute_mode"] == "exclusive_process"
    assert gpu["processes"] == [[4711, 30000], [4712, None]]
    assert gpu["mig_enabled"] is False


def test_cores_near_a_gpu_are_those_that_this_process_may_use(box: MakeBox) -> None:
    code = (
        "import os; os.sched_setaffinity(0, {0});"
        "from launcher.gpus.probe import NvmlProbe; print(NvmlProbe().snapshot().gpus[0].cpus)"
    )
    assert box([fake_gpu(0, cpus="0x3")]).python(code).strip() == "frozenset({0})"
    assert box([fake_gpu(0, cpus="0x2")]).python(code).strip() == "frozenset()"


def test_what_a_device_does_not_tell_is_none(box: MakeBox) -> None:
    silent = fake_gpu(
        0, total_mib=None, used_mib=None, reserved_mib=None, utilization=None, temperature=None,
        compute_mode=None,
    )  # fmt: skip
    rules = [fault("DeviceGetComputeRunningProcesses_v3", 0, 3)]
    gpu = the_gpu(box([silent], rules, cuda=None).snapshot())
    for field in ("total_mib", "used_mib", "reserved_mib", "utilization_percent"):
        assert gpu[field] is None, field
    for field in ("temperature_c", "compute_mode", "processes"):
        assert gpu[field] is None, field
    assert gpu["cpus"] == []


def test_no_processes_is_not_the_same_as_not_told(box: MakeBox) -> None:
    assert the_gpu(box([fake_gpu(0)]).snapshot())["processes"] == []


def test_an_old_driver_counts_its_own_share_as_used(box: MakeBox) -> None:
    gpu = the_gpu(box([fake_gpu(0)], [fault("DeviceGetMemoryInfo_v2", "*", 13)]).snapshot())
    assert (gpu["used_mib"], gpu["reserved_mib"]) == (555, None)


def test_mig_instances_are_listed_under_their_parent(box: MakeBox) -> None:
    rules = [fault("DeviceGetUtilizationRates", 0, 3)]
    parent = fake_gpu(0, mig_mode=1, cpus="0x1", migs=[fake_mig(0, 0), None, fake_mig(0, 2)])
    gpu = box([parent, fake_gpu(1, mig_mode=0)], rules).snapshot()["gpus"][0]
    assert gpu["mig_enabled"] is True
    first, third = gpu["mig_devices"]
    assert (first["index"], first["mig_index"], third["mig_index"]) == (0, 0, 2)
    assert first["uuid"] == "MIG-00000000-0000-5000-8000-000000000000"
    assert (first["total_mib"], first["used_mib"]) == (9984, 12)
    assert first["utilization_percent"] is None
    assert (first["temperature_c"], first["compute_mode"], first["cpus"]) == (31, "default", [0])


def test_mig_switched_off_has_no_instances(box: MakeBox) -> None:
    gpu = the_gpu(box([fake_gpu(0, mig_mode=0)]).snapshot())
    assert (gpu["mig_enabled"], gpu["mig_devices"]) == (False, [])


def test_a_prohibited_gpu_is_seen_as_such(box: MakeBox) -> None:
    assert the_gpu(box([fake_gpu(0, compute_mode=2)]).snapshot())["compute_mode"] == "prohibited"


def test_without_the_drivers_library_there_are_no_gpus_and_a_reason(
    box: MakeBox, tmp_path: Path
) -> None:
    snapshot = box([]).snapshot(LD_LIBRARY_PATH=str(tmp_path))
    assert snapshot["gpus"] == []
    assert snapshot["reason"].startswith("no NVIDIA driver (libnvidia-ml.so.1 not found)")


def test_a_driver_without_gpus_gives_a_reason(box: MakeBox) -> None:
    snapshot = box([]).snapshot()
    assert snapshot["gpus"] == []
    assert snapshot["reason"] == "NVIDIA driver 570.124.06 is loaded and reports no GPU"


def test_a_library_that_does_not_load_is_an_error(box: MakeBox, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    message = refused(box([]).snapshot(LD_LIBRARY_PATH=str(tmp_path)))
    assert "file too short" in message or "invalid ELF header" in message
    assert "reinstall the driver" in message


@pytest.mark.parametrize(
    ("code", "says", "cure"),
    [
        (4, "Insufficient Permissions", "/dev/nvidia*"),
        (9, "Driver Not Loaded", "modprobe nvidia"),
        (10, "Timeout", "reboot"),
        (17, "operating system", "cgroup"),
        (18, "mismatch", "in a container restart it"),
        (20, "Insufficient Memory", "free -h"),
        (999, "Unknown Error", "in a container restart it"),
    ],
)
def test_an_nvml_that_cannot_start_says_why_and_what_to_do(
    box: MakeBox, code: int, says: str, cure: str
) -> None:
    message = refused(box([fake_gpu(0)], [fault("InitWithFlags", "-", code)]).snapshot())
    assert message.startswith("NVML cannot be used: nvmlInitWithFlags: ")
    assert says in message
    assert f"(NVML {code})" in message
    assert cure in message
    assert "--device cpu" in message


def the_broken_one(snapshot: dict[str, Any]) -> tuple[int, str]:
    (gpu,) = snapshot["broken"]
    return gpu["index"], gpu["why"]


def test_a_gpu_that_is_lost_at_enumeration_is_named_and_the_others_are_read(box: MakeBox) -> None:
    gpus = [fake_gpu(index) for index in range(4)]
    snapshot = box(gpus, [fault("DeviceGetHandleByIndex_v2", 2, 15)]).snapshot()
    index, message = the_broken_one(snapshot)
    assert index == 2
    assert message.startswith("GPU 2 cannot be used: nvmlDeviceGetHandleByIndex: GPU is lost")
    assert "power-cycle" in message
    assert [gpu["index"] for gpu in snapshot["gpus"]] == [0, 1, 3]


def test_a_box_on_which_no_gpu_answers_is_refused_naming_the_first(box: MakeBox) -> None:
    gpus = [fake_gpu(index) for index in range(4)]
    message = refused(box(gpus, [fault("DeviceGetHandleByIndex_v2", "*", 15)]).snapshot())
    assert message.startswith("GPU 0 cannot be used: nvmlDeviceGetHandleByIndex: GPU is lost")


@pytest.mark.parametrize(
    "function", ["DeviceGetMemoryInfo_v2", "DeviceGetTemperature", "DeviceGetUtilizationRates"]
)
def test_a_gpu_that_is_lost_in_any_later_call_is_named_with_its_bus_id(
    box: MakeBox, function: str
) -> None:
    gpus = [fake_gpu(0), fake_gpu(1)]
    index, message = the_broken_one(box(gpus, [fault(function, 1, 15)]).snapshot())
    assert index == 1
    assert message.startswith("GPU 1, PCI 00000000:1C:00.0 cannot be used: ")


def test_a_gpu_that_needs_a_reset_is_told_with_the_command(box: MakeBox) -> None:
    message = refused(box([fake_gpu(0)], [fault("DeviceGetName", 0, 16)]).snapshot())
    assert "nvidia-smi --gpu-reset -i 0" in message


def test_a_gpu_that_this_process_may_not_open_is_left_out_with_a_note(box: MakeBox) -> None:
    gpus = [fake_gpu(0), fake_gpu(1)]
    snapshot = box(gpus, [fault("DeviceGetHandleByIndex_v2", 0, 4)]).snapshot()
    assert [gpu["index"] for gpu in snapshot["gpus"]] == [1]
    assert snapshot["notes"] == ["GPU 0 is left out: this process may not open it"]


def test_no_permission_for_any_gpu_is_an_error(box: MakeBox) -> None:
    rules = [fault("DeviceGetHandleByIndex_v2", "*", 4)]
    assert "/dev/nvidia*" in refused(box([fake_gpu(0), fake_gpu(1)], rules).snapshot())


def test_a_driver_that_hangs_as_a_whole_is_given_up_and_the_call_is_named(box: MakeBox) -> None:
    message = refused(box([fake_gpu(0)], [delay("InitWithFlags", "-", HANG)]).snapshot(CALL_S))
    assert message.startswith(
        "the NVIDIA driver hangs: nvmlInitWithFlags did not return within 3 s; "
    )
    assert message.endswith("(--device cpu, without --gpus, trains on the CPU)")


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        (
            [delay("DeviceGetHandleByIndex_v2", 2, HANG)],
            "the NVIDIA driver hangs: nvmlDeviceGetHandleByIndex on GPU 2 did not return within 3",
        ),
        (
            [delay("DeviceGetMemoryInfo_v2", 2, HANG)],
            "the NVIDIA driver hangs: nvmlDeviceGetMemoryInfo on GPU 2 did not return within 3 s",
        ),
        (
            [crash("DeviceGetName", 2)],
            "NVML broke in nvmlDeviceGetName on GPU 2 (killed by SIGSEGV (11)); ",
        ),
    ],
)
def test_a_gpu_about_which_a_call_never_returns_is_named_and_the_others_are_read(
    box: MakeBox, rules: list[str], named: str
) -> None:
    gpus = [fake_gpu(index) for index in range(4)]
    snapshot = box(gpus, rules).snapshot(CALL_S)
    index, message = the_broken_one(snapshot)
    assert index == 2
    assert message.startswith(named)
    assert [gpu["index"] for gpu in snapshot["gpus"]] == [0, 1, 3]


def test_a_gpu_that_was_given_up_is_not_asked_again(box: MakeBox) -> None:
    """Each time would take as long."""
    code = (
        "from launcher.gpus.probe import NvmlProbe\n"
        f"probe = NvmlProbe(deadline_s={CALL_S})\n"
        "probe.snapshot()\n"
        "import json, os\n"
        "rules = open(os.environ['NVML_FAKE_SCENARIO'], 'a')\n"
        "rules.write('fault DeviceGetHandleByIndex_v2 0 999\\n'); rules.close()\n"
        "seen = probe.snapshot()\n"
        "print(len(seen.gpus), [gpu.why.split(':')[0] for gpu in seen.broken])\n"
    )
    machine = box([fake_gpu(0), fake_gpu(1)], [delay("DeviceGetHandleByIndex_v2", 0, HANG)])
    assert machine.python(code).strip() == "1 ['the NVIDIA driver hangs']"


def test_a_box_whose_every_gpu_hangs_is_refused_naming_the_first(box: MakeBox) -> None:
    gpus = [fake_gpu(index) for index in range(2)]
    rules = [delay("DeviceGetHandleByIndex_v2", "*", HANG)]
    message = refused(box(gpus, rules).snapshot(CALL_S))
    assert message.startswith("the NVIDIA driver hangs: nvmlDeviceGetHandleByIndex on GPU 0 did")
    assert message.endswith("(--device cpu, without --gpus, trains on the CPU)")


def test_a_time_for_all_calls_ends_them_and_names_each_gpu_that_hung(box: MakeBox) -> None:
    code = (
        "from launcher.gpus.probe import NvmlProbe\n"
        "try: NvmlProbe(deadline_s=4.0, most_s=7.0).snapshot()\n"
        "except Exception as error: print(error)"
    )
    rules = [delay("DeviceGetHandleByIndex_v2", "*", HANG)]
    message = box([fake_gpu(index) for index in range(8)], rules).python(code)
    assert "nvmlDeviceGetHandleByIndex on GPU 0 did not return within 4 s; " in message
    assert "7 s did not suffice up to nvmlDeviceGetHandleByIndex on GPU 1; " in message


def test_a_slow_call_within_the_deadline_is_waited_for(box: MakeBox) -> None:
    slow = [delay("DeviceGetHandleByIndex_v2", "*", 300)]
    assert len(box([fake_gpu(0), fake_gpu(1)], slow).snapshot()["gpus"]) == 2


def test_every_gpu_of_a_big_box_may_take_its_time_to_wake_up(box: MakeBox) -> None:
    slow = [delay("DeviceGetHandleByIndex_v2", "*", 450)]  # in all more than 2 deadlines
    sixteen = [fake_gpu(index) for index in range(16)]
    snapshot = box(sixteen, slow).snapshot(CALL_S, start_deadlines=2)
    assert len(snapshot.get("gpus", ())) == 16, snapshot


def test_calls_that_are_slow_without_end_are_not_told_as_one_that_hangs(box: MakeBox) -> None:
    message = refused(box([fake_gpu(0)], [delay("*", 0, 400)]).snapshot(CALL_S, 1))
    assert message.startswith("NVML is too slow: 3 s did not suffice up to nvmlDevice")


def test_a_driver_library_that_crashes_takes_only_the_reader_along(box: MakeBox) -> None:
    message = refused(box([fake_gpu(0)], [crash("DeviceGetName", 0)]).snapshot())
    assert message.startswith("NVML broke in nvmlDeviceGetName on GPU 0 (killed by SIGSEGV (11)); ")


def test_a_hanging_reader_ends_by_itself_when_its_launcher_is_killed(box: MakeBox) -> None:
    machine = box([fake_gpu(0)], [delay("DeviceGetCount_v2", "-", HANG)])
    code = (
        "import os, threading; from launcher.gpus.probe import NvmlProbe\n"
        "def tell():\n"
        "    children = '/proc/self/task/%d/children' % os.getpid()\n"
        "    while not (pids := open(children).read().split()): pass\n"
        "    print(pids[0], flush=True)\n"
        "threading.Thread(target=tell, daemon=True).start()\n"
        f"NvmlProbe(deadline_s={DEADLINE_S}).snapshot()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=machine.env, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        reader = os.pidfd_open(int(launcher.stdout.readline()))
        launcher.kill()
    try:
        assert select.select([reader], [], [], DEADLINE_S)[0], "the reader is still there"
    finally:
        os.close(reader)


def test_what_a_whole_job_is_sent_does_not_end_the_reader(box: MakeBox) -> None:
    """`systemctl stop`, `scancel`: the launcher answers."""
    code = (
        "import os, signal, threading; from launcher.gpus.probe import NvmlProbe\n"
        "def end():\n"
        "    children = '/proc/self/task/%d/children' % os.getpid()\n"
        "    while not (pids := open(children).read().split()): pass\n"
        "    os.kill(int(pids[0]), signal.SIGTERM)\n"
        "threading.Thread(target=end).start()\n"
        "print(len(NvmlProbe(deadline_s=20.0).snapshot().gpus))\n"
    )
    slow = [delay("DeviceGetHandleByIndex_v2", 0, 300)]
    assert box([fake_gpu(0)], slow).python(code).split() == ["1"]


def test_asking_leaves_no_driver_library_in_this_process(box: MakeBox) -> None:
    code = (
        "import sys; from launcher.gpus.probe import NvmlProbe; NvmlProbe().snapshot();"
        "maps = open('/proc/self/maps').read();"
        "print('pynvml' in sys.modules, 'libnvidia-ml' in maps)"
    )
    assert box([fake_gpu(0)]).python(code).split() == ["False", "False"]


def test_every_code_has_a_cure() -> None:
    for code in (None, *range(1, 31), 999):
        assert cure_for(code)
        assert "{" not in cure_for(code, 3)
