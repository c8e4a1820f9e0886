"""The doctor's lines and exit code, for GPUs as a probe tells them."""

import fcntl
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.doctor.doctor import doctor
from launcher.doctor.machine import check_cgroups
from launcher.doctor.packages import TorchBuild, check_torch, torch_build
from launcher.doctor.storage import check_storage
from launcher.gpus.probe import BrokenGpu, Gpu, GpuProcess, Snapshot
from launcher.gpus.reservation import LOCK_DIR
from launcher.telemetry.health import Record
from model_check.config.schema import DataSettings, LaunchSettings, LoggingSettings, Settings
from model_check.errors import NoGpuError
from model_check.events import Counters, GpuEvent, Telemetry, Trouble

IDLE = Gpu(0, "GPU-00000000-a", "NVIDIA H200", total_mib=143_771, used_mib=0, utilization_percent=0)
BUSY = Gpu(
    1,
    "GPU-11111111-b",
    "NVIDIA H200",
    total_mib=143_771,
    used_mib=30_720,
    processes=(GpuProcess(4711, 30_720),),
)
HEALTHY = Counters(
    t=1, ecc_corrected=3, ecc_uncorrected=0, remapped_corrected=0, remap_failed=False
)
CPU_TORCH = TorchBuild("2.13.0+cpu", None, None)
CUDA_TORCH = TorchBuild("2.13.0", "13.0", None)


def snapshot(*gpus: Gpu, cuda: str = "13.0") -> Snapshot:
    return Snapshot("580.95.05", cuda, gpus)


class Probe:
    """Answers what it was given, or raises it."""

    def __init__(self, answer: Snapshot | NoGpuError) -> None:
        self.answer = answer

    def snapshot(self) -> Snapshot:
        if isinstance(self.answer, NoGpuError):
            raise self.answer
        return self.answer


class Office:
    """Asks the doctor in a directory of its own."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.lines: list[str] = []
        self.telemetry: list[GpuEvent] = [HEALTHY]
        self.expect_gpus: int | None = None

    def visit(self, answer: Snapshot | NoGpuError, *, as_json: bool = False, **env: str) -> int:
        self.lines = []
        return doctor(
            Probe(answer),
            {"HOME": str(self.cwd), **env},
            self.cwd,
            Settings(
                data=DataSettings(cache_dir="cache"),
                launch=LaunchSettings(expect_gpus=self.expect_gpus),
            ),
            as_json=as_json,
            write=self.lines.append,
            look=self.look,
        )

    def look(self, uuids: Mapping[str, str]) -> dict[str, Record]:
        """What telemetry says of every GPU."""
        records = {label: Record() for label in uuids}
        for record in records.values():
            for event in self.telemetry:
                record.record(event)
        return records

    def line(self, name: str) -> str:
        """The one line about `name`."""
        (found,) = [line for line in self.lines if line[6:].startswith(f"{name:<18}  ")]
        return found


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


def test_a_machine_without_gpus_is_fine_and_says_why_there_are_none(office: Office) -> None:
    assert office.visit(Snapshot(reason="no NVIDIA driver")) == 0
    assert office.line("GPUs").startswith("warn  GPUs                none: no NVIDIA driver -> ")
    assert "FAIL" not in "".join(line[:4] for line in office.lines)
    assert office.lines[-1].split(":")[1].startswith(" 0 FAIL, ")


def test_a_broken_driver_is_exit_code_69(office: Office) -> None:
    assert office.visit(NoGpuError("GPU 2 cannot be used: reset it")) == 69
    assert "FAIL  GPUs                GPU 2 cannot be used: reset it" in office.lines


def test_a_gpu_of_somebody_else_is_a_warning_with_his_pid(office: Office) -> None:
    office.visit(snapshot(IDLE, BUSY))
    assert office.line("GPU0").startswith("ok ")
    assert office.line("GPU1").startswith("warn")
    assert "110.4 of 140.4 GiB free" in office.line("GPU1")
    assert "pid 4711 holds 30.0 GiB" in office.line("GPU1")


def test_what_cuda_visible_devices_leaves_is_told(office: Office) -> None:
    office.visit(snapshot(IDLE, BUSY), CUDA_VISIBLE_DEVICES="1")
    assert office.line("visible GPUs").endswith("GPU1: CUDA_VISIBLE_DEVICES='1'")
    assert "(hidden)" in office.line("GPU0")
    office.visit(snapshot(IDLE), CUDA_VISIBLE_DEVICES="")
    assert office.line("visible GPUs").startswith("warn")


def test_a_gpu_that_no_process_can_use_is_exit_code_69(office: Office) -> None:
    prohibited = Gpu(0, "GPU-0", "NVIDIA H200", compute_mode="prohibited")
    assert office.visit(snapshot(prohibited)) == 69
    assert "compute mode 'prohibited'" in office.line("GPU0")
    assert "memory -" in office.line("GPU0")


@pytest.mark.parametrize(
    ("build", "seen", "status"),
    [
        (CPU_TORCH, Snapshot(reason="none"), "ok"),
        (CPU_TORCH, snapshot(IDLE), "FAIL"),
        (CUDA_TORCH, snapshot(IDLE), "ok"),
        (CUDA_TORCH, snapshot(IDLE, cuda="12.8"), "FAIL"),
        (TorchBuild("2.11.0", "12.8", None), snapshot(IDLE, cuda="13.0"), "ok"),
        (TorchBuild("2.13.0", None, "7.0"), snapshot(IDLE), "FAIL"),
        (CUDA_TORCH, None, "ok"),
    ],
)
def test_torch_must_be_built_for_what_the_driver_serves(
    build: TorchBuild, seen: Snapshot | None, status: str
) -> None:
    assert check_torch(build, seen).status == status


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    import torch

    assert torch_build() == TorchBuild(
        torch.__version__, torch.version.cuda, getattr(torch.version, "hip", None)
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_a_token_is_told_and_never_shown(office: Office, as_json: bool) -> None:
    secret = "hf_verySecretValue"
    (office.cwd / ".env").write_text(f"HF_TOKEN={secret}\n")
    for env in ({}, {"HF_TOKEN": secret}, {"HF_TOKEN": f"'{secret}' "}):
        office.visit(snapshot(IDLE), as_json=as_json, **env)
        assert secret not in "\n".join(office.lines)


def test_where_a_token_was_found_is_told(office: Office) -> None:
    office.visit(snapshot())
    assert office.line("HF_TOKEN").startswith("warn")
    (office.cwd / ".env").write_text("export HF_TOKEN=hf_x\n")
    office.visit(snapshot())
    assert "which the preparation of data reads" in office.line("HF_TOKEN")
    (office.cwd / "token").write_text("hf_x")
    office.visit(snapshot(), HF_HOME=str(office.cwd))
    assert "stored in" in office.line("HF_TOKEN")
    office.visit(snapshot(), HF_TOKEN="hf_x")
    assert office.line("HF_TOKEN").split() == ["ok", "HF_TOKEN", "set"]


@pytest.mark.root
def test_a_token_in_a_file_of_another_user_is_not_read(office: Office) -> None:
    (office.cwd / ".env").write_text("HF_TOKEN=hf_x\n")
    os.chown(office.cwd / ".env", 4711, 4711)
    office.visit(snapshot())
    assert office.line("HF_TOKEN").startswith("warn")
    assert "/.env is not read: it belongs to another user" in office.line("HF_TOKEN")


@pytest.mark.root
def test_who_can_delete_reservations_is_told(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = office.cwd / "locks"
    monkeypatch.setenv(LOCK_DIR, str(locks))
    for mode, owner, told in (
        (0o1777, 0, None),
        (0o1777, 4711, "uid 4711 can delete reservations"),
        (0o777, 0, "everybody who may write there can delete"),
    ):
        locks.mkdir(exist_ok=True)
        locks.chmod(mode)
        os.chown(locks, owner, owner)
        office.visit(snapshot(IDLE))
        if told is None:
            assert not any("GPU locks" in line for line in office.lines)
            continue
        assert told in office.line("GPU locks")
        assert f"chown root {locks}; chmod 1777 {locks}" in office.line("GPU locks")


def test_prepared_data_is_counted(office: Office) -> None:
    assert office.visit(Snapshot(reason="no NVIDIA driver")) in (0, 2)
    assert "none in" in office.line("prepared data")
    entry = office.cwd / "cache" / "embedded__12345678"
    entry.mkdir(parents=True)
    (entry / "manifest.json").write_bytes(b" " * 2**20)
    office.visit(snapshot())
    assert f"1 in {office.cwd / 'cache'}, 1.0 MiB" in office.line("prepared data")


def test_a_place_that_cannot_be_written_fails(office: Office) -> None:
    (office.cwd / "cache").symlink_to("/proc")  # where nobody can create a file
    assert office.visit(Snapshot(reason="no NVIDIA driver")) == 2
    assert office.line("token caches").startswith("FAIL")


def test_looking_leaves_nothing_behind(office: Office) -> None:
    office.visit(snapshot(IDLE))
    assert list(office.cwd.iterdir()) == []


def test_json_holds_what_the_lines_say(office: Office) -> None:
    code = office.visit(NoGpuError("broken"), as_json=True)
    (text,) = office.lines
    document = json.loads(text)
    assert (document["schema"], document["kind"]) == (1, "doctor")
    assert (document["exit_code"], code) == (69, 69)
    checks = {check["name"]: check for check in document["checks"]}
    assert checks["GPUs"] == {"status": "FAIL", "name": "GPUs", "found": "broken", "advice": ""}
    assert sys.executable in checks["python"]["found"]


def test_a_broken_gpu_beside_sound_ones_fails_with_its_cure(office: Office) -> None:
    broken = BrokenGpu(1, "GPU 1 cannot be used: GPU is lost; power-cycle")
    seen = Snapshot("580", "13.0", (IDLE,), (broken,))
    assert office.visit(seen) == 69
    assert office.line("GPU1").startswith("FAIL  GPU1                GPU 1 cannot be used")
    assert office.line("GPU0").startswith("ok")


def test_what_telemetry_knows_is_told_and_what_it_does_not_is_a_dash(office: Office) -> None:
    office.visit(snapshot(IDLE))
    line = office.line("GPU0 health")
    assert line.startswith("ok    GPU0 health         ECC errors (corrected/uncorrected) 3/0")
    assert "load, - in its life; remapped rows 0/-; clocks: -; PCIe gen - of -" in line


@pytest.mark.parametrize(
    ("event", "status", "words"),
    [
        (Counters(t=1, remap_pending=True), "FAIL", "pending; clocks: -"),
        (Counters(t=1, remap_failed=True), "FAIL", "have the board replaced"),
        (Counters(t=1, ecc_uncorrected=1), "warn", "uncorrected memory errors since the driver"),
        (Telemetry(t=1, clocks_event_reasons=0x48), "warn", "its clocks are held back now"),
        (Telemetry(t=1), "warn", "it tells neither memory errors nor Xids"),
        (
            Trouble(t=1, call="nvmlDeviceX", code=15, text="lost", lost=True),
            "FAIL",
            "power-cycle the machine",
        ),
    ],
)
def test_what_would_fail_a_run_is_a_fail_with_its_exit_code(
    office: Office, event: GpuEvent, status: str, words: str
) -> None:
    office.telemetry = [event]
    code = office.visit(snapshot(IDLE))
    assert office.line("GPU0 health").startswith(status)
    assert words in office.line("GPU0 health")
    assert code == (22 if status == "FAIL" else code)
    assert office.visit(snapshot(IDLE), CUDA_VISIBLE_DEVICES="") != 22  # nothing would run on it
    assert office.line("GPU0 health").startswith("warn")


@pytest.mark.parametrize(
    ("mask", "expected", "status", "code", "words"),
    [
        ("0,7", None, "FAIL", 69, "names GPU 7, which is missing: NVML lists 1 GPU, 0 (GPU-0000"),
        ("0,7", 1, "warn", 0, "GPU0: CUDA_VISIBLE_DEVICES='0,7' names GPU 7"),
        ("0,-1,7", None, "warn", 0, "CUDA ignores what follows -1 (7)"),
        ("0,0", None, "FAIL", 69, "names GPU 0 twice, and CUDA then sees no GPU"),
        ("none", None, "FAIL", 69, "CUDA_VISIBLE_DEVICES='none'"),
        (None, 2, "FAIL", 69, "launch.expect_gpus = 2, found 1: 0 (GPU-0000"),
        (None, 1, "ok", 0, "CUDA_VISIBLE_DEVICES is not set"),
    ],
)
def test_a_gpu_that_is_missing_is_told_as_a_run_would(
    office: Office, mask: str | None, expected: int | None, status: str, code: int, words: str
) -> None:
    office.expect_gpus = expected
    env = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert office.visit(snapshot(IDLE), **env) in (code, max(code, 2))  # 2: a package is missing
    assert office.line("visible GPUs").startswith(status)
    assert words in office.line("visible GPUs")


def test_a_driver_without_gpus_is_exit_code_69_unless_none_are_wanted(office: Office) -> None:
    gone = Snapshot("580", reason="NVIDIA driver 580 is loaded and reports no GPU")
    assert office.visit(gone) == 69
    assert office.visit(gone, CUDA_VISIBLE_DEVICES="") != 69
    office.expect_gpus = 8
    assert office.visit(Snapshot(reason="no NVIDIA driver")) == 69


def test_the_power_cap_and_idleness_are_no_warning(office: Office) -> None:
    office.telemetry = [HEALTHY, Telemetry(t=1, clocks_event_reasons=0x5, pcie_gen=1)]
    office.visit(snapshot(IDLE))
    assert "clocks: idle, power cap" in office.line("GPU0 health")
    assert office.line("GPU0 health").startswith("ok")


def test_earlier_runs_are_counted_with_the_command_that_removes_them(tmp_path: Path) -> None:
    """As root also beside those of another user."""
    ours, theirs = (tmp_path / f"model_check_logs_{n}_a" for n in (1, 2))
    for directory in (ours, theirs):
        directory.mkdir()
        (directory / "gpu0.log").write_bytes(b" " * 2**20)
    (tmp_path / "model_check_logs_4_a").symlink_to(tmp_path)
    os.chown(theirs, 4711, 4711) if os.geteuid() == 0 else theirs.rename(tmp_path / "other")
    logging = LoggingSettings(log_dir=str(tmp_path))
    found = check_storage({}, tmp_path, Settings(logging=logging))
    (finding,) = [finding for finding in found if finding.name == "run directories"]
    assert finding.found == f"1 in {tmp_path}, 1.0 MiB"
    assert "run.sh runs clear" in finding.advice


def test_a_cgroup_that_a_run_left_behind_is_told_with_what_to_do(tmp_path: Path) -> None:
    assert check_cgroups([str(tmp_path)]).found == "none left behind"
    left = tmp_path / "user.slice" / f"model_check_{'a0' * 16}"
    left.mkdir(parents=True)
    (tmp_path / "user.slice" / "model_check_of_somebody").mkdir()
    (left / "cgroup.procs").write_text("")
    told = str(check_cgroups([str(tmp_path)]))
    assert told.startswith("ok    cgroups of runs     1 left behind, empty -> ")
    assert told.endswith(f"rmdir {left}")
    (left / "cgroup.procs").write_text(f"{os.getpid()}\n")
    told = str(check_cgroups([str(tmp_path)]))
    assert told.startswith("warn")
    assert f"pid {os.getpid()} (state " in told


def test_a_cgroup_that_somebody_holds_is_no_leftover(tmp_path: Path) -> None:
    held = tmp_path / f"model_check_{'a0' * 16}"
    held.mkdir()
    fd = os.open(held, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert check_cgroups([str(tmp_path)]).found == "none left behind"
    os.close(fd)
    assert check_cgroups([str(tmp_path)]).found == "1 left behind, empty"
