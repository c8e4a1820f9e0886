"""`doctor --quick`: real pynvml, in its own process, over a driver that does not exist."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.history.gpu_history import GpuHistory
from tests.deadline import DEADLINE_S
from tests.in_process import answer_of
from tests.launcher.gpus.conftest import ROOT, Box, box, nvml_dir
from tests.launcher.supervise import stuck_disk
from tests.launcher.verdict.test_past import past
from tests.nvml_fake.build import HANG, FakeGpu, crash, delay, fake_gpu, fake_mig, fake_uuid, fault

__all__ = ["box", "nvml_dir"]

WELL: dict[str, int | str] = {
    "event_types": 31,
    "ecc_uncorrected": 0,
    "remapped_corrected": 0,
    "clocks_event_reasons": 1,
}
LOST = fault("DeviceGetHandleByIndex_v2", 3, 15)

MakeBox = Callable[..., Box]
Done = subprocess.CompletedProcess[str]


def well(index: int, **more: int | str) -> FakeGpu:
    return fake_gpu(index, more=WELL | more)


EIGHT = [well(index) for index in range(8)]


def among_eight(index: int, **more: int | str) -> list[FakeGpu]:
    return [*EIGHT[:index], well(index, **more), *EIGHT[index + 1 :]]


def quick(
    box: Box,
    *arguments: str,
    program: Sequence[str] = (),
    **env: str,
) -> Done:
    """Of this process, or of that of `program`."""
    asked, env = ("doctor", "--quick", *arguments), box.env | {"PYTHONPATH": str(ROOT)} | env
    if not program:
        done = answer_of(*asked, cwd=Path.cwd(), env=env)
    else:
        done = subprocess.run(
            [*program, *asked], env=env, capture_output=True, text=True, timeout=DEADLINE_S
        )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def told(box: Box, *arguments: str, code: int = 0, **env: str) -> list[str]:
    """The lines; the summary and the table fit in 80 columns."""
    done = quick(box, *arguments, **env)
    assert done.returncode == code, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, [lines[0], *table(lines)])) <= 80
    return lines


def table(lines: Sequence[str]) -> list[str]:
    """The rows of GPUs, without the header: they alone end with a number or a dash."""
    return [line for line in lines if re.fullmatch(r"\S+ +GPU\S+ .* (\d+|-)", line)]


def document(box: Box, *arguments: str, **env: str) -> dict[str, Any]:
    done = quick(box, "--json", *arguments, **env)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["exit_code"] == done.returncode
    return found


# What it tells


def test_a_healthy_box_is_a_summary_and_a_table_of_what_nvml_reports(box: MakeBox) -> None:
    """Index, name, memory used and total, as `nvidia-smi --query-gpu` tells them, and more; what a
    GPU does not report is a dash."""
    hot = {"temperature": 83, "utilization": 100, "used_mib": 70000}
    busy = fake_gpu(1, **hot, more=WELL | {"power_mw": 699500, "remapped_uncorrected": 2})
    silent = {"temperature": None, "utilization": None, "used_mib": None, "total_mib": None}
    bare = fake_gpu(2, **silent, more={"event_types": 31})
    assert told(box([EIGHT[0], busy, bare])) == [
        "ok: 3 GPUs",
        "      GPU   name            used/total GiB  °C    W   util  ECC  remapped",
        "ok    GPU0  H100 80GB HBM3        0.0/79.6  31    -    0 %    0         0",
        "ok    GPU1  H100 80GB HBM3       68.4/79.6  83  700  100 %    0         2",
        "ok    GPU2  H100 80GB HBM3               -   -    -      -    -         -",
    ]


def test_a_row_that_waits_to_be_remapped_is_22_and_the_first_line_says_which(box: MakeBox) -> None:
    lines = told(box(among_eight(3, remap_pending=1)), code=22)
    assert lines[0] == "FAIL (1 of 8 GPUs): GPU3: a row of its memory waits to be remapped"
    assert [line[:4] for line in table(lines)] == [*["ok  "] * 3, "FAIL", *["ok  "] * 4]


def test_each_finding_is_told_once_and_with_what_to_do(box: MakeBox) -> None:
    hot = well(5, clocks_event_reasons=0x48)
    lines = told(box([*among_eight(3, remap_pending=1)[:5], hot, *EIGHT[6:]]), code=22)
    text = "\n".join(lines)
    assert [text.count(words) for words in ("waits to be remapped", "its clocks are held")] == [
        1,
        1,
    ]
    assert lines[10] == (
        "FAIL  GPU3                 -> end what runs on it, "
        "then `nvidia-smi --gpu-reset -i 3` or reboot"
    )
    assert lines[11].startswith("warn  GPU5                hardware thermal slowdown: its clocks")


def test_a_lost_gpu_is_69_and_the_others_are_looked_at(box: MakeBox) -> None:
    lines = told(box(among_eight(2, remap_failed=1), [LOST]), code=69)
    rows = table(lines)
    assert re.fullmatch(r"FAIL +GPU3( +-){7}", rows[3])
    assert [row[:4] for row in rows[2:5]] == ["FAIL", "FAIL", "ok  "]
    (lost,) = [line for line in lines[1:] if "nvmlDeviceGetHandleByIndex: GPU is lost" in line]
    assert lost.startswith("FAIL  GPU3  ")


def test_a_gpu_that_is_lost_behind_its_name_is_named_by_telemetry(box: MakeBox) -> None:
    lines = told(box(EIGHT, [fault("DeviceGetPowerUsage", 5, 15)]), code=22)
    assert lines[0].endswith("GPU5: nvmlDeviceGetPowerUsage: GPU is lost (NVML 15)")
    assert table(lines)[5].split()[:2] == ["FAIL", "GPU5"]


@pytest.mark.parametrize(
    ("more", "settings", "code", "words"),
    [
        ({"clocks_event_reasons": 0x48}, [], 0, "hardware thermal slowdown: its clocks are held"),
        ({"clocks_event_reasons": 0x04}, [], 0, ""),
        ({"fabric_state": 2}, [], 0, "the NVLink fabric has not taken it in"),
        ({"fabric_state": 3, "fabric_status": 999}, [], 0, "the NVLink fabric has not"),
        ({"fabric_state": 3}, [], 0, ""),
        ({"fabric_state": 0}, [], 0, ""),
        ({"ecc_uncorrected": 3}, [], 0, "3 uncorrected memory errors since the driver was"),
        ({"power_limit_mw": 300000, "power_default_limit_mw": 700000}, [], 0, "power limit 300 W"),
        (
            {"clocks_event_reasons": 0x48},
            ["launch.fail_on=monitor"],
            22,
            "hardware thermal slowdown",
        ),
        ({"remap_pending": 1}, ["launch.fail_on=isolate"], 0, "waits to be remapped"),
        ({"remap_pending": 1}, ["--gpus", "0,1"], 0, None),
    ],
)
def test_what_is_told_and_what_fails_is_by_the_rules_of_a_run(
    box: MakeBox, more: dict[str, int | str], settings: list[str], code: int, words: str | None
) -> None:
    lines = told(box(among_eight(2, **more)), *settings, code=code)
    row = "".join(row for row in table(lines) if row.split()[1] == "GPU2")
    assert (words is None) is (row == "")
    assert (words or "") in "\n".join(lines)
    assert row[:4] == (("FAIL" if code else "warn") if words else "ok  " if row else "")


@pytest.mark.parametrize("code", [13, 25, 999])
def test_a_driver_that_cannot_tell_its_fabric_tells_all_else(box: MakeBox, code: int) -> None:
    rules = [fault("DeviceGetGpuFabricInfoV", "*", code)]
    assert told(box(EIGHT, rules)) == told(box(EIGHT))


def test_a_gpu_in_use_by_others_is_no_fault(box: MakeBox) -> None:
    taken = fake_gpu(
        0, used_mib=70000, utilization=100, compute_mode=3, processes=[(4711, 70000)], more=WELL
    )
    assert told(box([taken]))[0] == "ok: 1 GPU"
    assert told(box([taken]), "--gpus", "0")[0] == "ok: 1 GPU"
    assert told(box([taken]), "--gpus", "auto")[0] == "ok: 1 GPU"


@pytest.mark.parametrize(
    ("mask", "settings", "code", "words"),
    [
        ("1,2", [], 0, "ok: 2 GPUs"),
        ("1,9", [], 69, "FAIL: visible GPUs: CUDA_VISIBLE_DEVICES='1,9' names GPU 9"),
        ("1", ["launch.expect_gpus=8"], 69, "FAIL: visible GPUs: launch.expect_gpus = 8, found 1"),
        ("", [], 0, "warn: visible GPUs: none: CUDA_VISIBLE_DEVICES=''"),
        ("1", ["--gpus", "nonsense"], 2, "FAIL: GPUs: --gpus nonsense"),
    ],
)
def test_the_gpus_are_those_of_a_run_and_a_missing_one_is_told(
    box: MakeBox, mask: str, settings: list[str], code: int, words: str
) -> None:
    assert told(box(EIGHT), *settings, code=code, CUDA_VISIBLE_DEVICES=mask)[0].startswith(words)


def test_a_machine_without_gpus_says_so_as_the_whole_doctor_does(box: MakeBox) -> None:
    machine = box([])
    nowhere = {"LD_LIBRARY_PATH": "/nowhere"}
    lines = told(machine, **nowhere)
    assert lines[0] == "warn: GPUs: none: no NVIDIA driver (libnvidia-ml.so.1 not found)"
    for asked in ("launch.expect_gpus=8", "launch.gpus=3", "launch.gpus=auto"):
        assert told(machine, asked, code=69, **nowhere)[0].startswith("FAIL: GPUs: none")
    assert told(machine, code=69)[0].startswith("FAIL: GPUs: none: NVIDIA driver 570.124.06 is")


def test_every_mig_instance_is_a_line_with_the_state_of_its_board(
    box: MakeBox, tmp_path: Path
) -> None:
    slices = [fake_mig(0, slot) for slot in range(2)]
    board = fake_gpu(0, mig_mode=1, migs=slices, more=WELL | {"remap_pending": 1})
    path = history(tmp_path, slices[1].uuid)
    lines = told(box([board, EIGHT[1]]), code=22, MODEL_CHECK_HISTORY_FILE=path)
    rows = [row.split()[:2] for row in table(lines)]
    assert rows == [["FAIL", "GPU0.0"], ["FAIL", "GPU0.1"], ["ok", "GPU1"]]
    assert table(lines)[0].split()[-6:-5] == ["0.0/9.8"]
    assert lines[0].startswith("FAIL (2 of 3 GPUs): GPU0.0: a row of its memory waits")
    assert any(line.startswith("FAIL  GPU0.1 ") and "2 transient" in line for line in lines)


@pytest.mark.parametrize("as_json", [False, True])
def test_what_nvml_calls_a_gpu_moves_no_cursor_and_makes_no_line(
    box: MakeBox, as_json: bool
) -> None:
    evil = fake_gpu(0, name="NVIDIA \x1b[2J\rok: 8 GPUs \u202e" + "x" * 20, more=WELL)
    done = quick(box([evil]), *(["--json"] if as_json else []))
    assert done.returncode == 0
    assert not {"\x1b", "\r", "\u202e"} & {*done.stdout}
    if as_json:
        assert json.loads(done.stdout)["gpus"][0]["name"] == evil.name
    else:
        summary, _, row = done.stdout.splitlines()
        assert summary == "ok: 1 GPU"
        assert row.startswith(r"ok    GPU0  \x1b[2J\rok: 8 GPUs \u20 ")


# Its history


def history(directory: Path, *uuids: str, **changes: Any) -> str:
    """A file in which each GPU has had two transient faults."""
    path = directory / "history.jsonl"
    runs = [past(uuid=uuid, run_dir=run, **changes) for uuid in uuids for run in ("/a", "/b")]
    GpuHistory(path).append(runs)
    return str(path)


def test_two_transient_faults_of_a_gpu_are_22(box: MakeBox, tmp_path: Path) -> None:
    path = history(tmp_path, fake_uuid(3), cause="\x1b[2J")
    before = Path(path).read_bytes()
    lines = told(box(EIGHT), code=22, MODEL_CHECK_HISTORY_FILE=path)
    words = "2 transient faults in earlier runs, first on 2026"
    assert lines[0].startswith(f"FAIL (1 of 8 GPUs): GPU3: {words}")
    assert table(lines)[3].startswith("FAIL")
    (held,) = document(box(EIGHT), f"launch.history_file={path}")["gpus"][3]["faults"]
    assert (held["source"], held["severity"]) == ("history", "ISOLATE")
    assert "run.sh history GPU-" in held["cure"]
    assert (
        told(box(EIGHT), "launch.history_file=", MODEL_CHECK_HISTORY_FILE=path)[0] == "ok: 8 GPUs"
    )
    assert Path(path).read_bytes() == before


def test_a_history_that_cannot_be_read_is_told_and_fails_nothing(
    box: MakeBox, tmp_path: Path
) -> None:
    lines = told(box(EIGHT), MODEL_CHECK_HISTORY_FILE=str(tmp_path))
    assert lines[0].startswith(f"warn: history: {tmp_path} cannot be read"[:77])
    assert lines[10].startswith(f"warn  history             {tmp_path} cannot be read: ")
    torn = tmp_path / "torn"
    torn.write_text('{"schema')
    assert "1 lines left out" in told(box(EIGHT), MODEL_CHECK_HISTORY_FILE=str(torn))[-1]


def test_a_history_that_nobody_can_write_and_no_home_are_no_matter(box: MakeBox) -> None:
    assert told(box(EIGHT), MODEL_CHECK_HISTORY_FILE="/proc/none/history.jsonl")[0] == "ok: 8 GPUs"
    names = ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "MODEL_CHECK_HISTORY_FILE")
    without = [f"--unset={name}" for name in names]
    program = ("env", *without, sys.executable, "-m", "launcher")
    assert quick(box(EIGHT), program=program).returncode == 0


# For machines


def test_the_document_is_as_the_docs_say(box: MakeBox) -> None:
    found = document(
        box([EIGHT[0], well(1, remap_pending=1), EIGHT[2]], [LOST.replace(" 3 ", " 2 ")])
    )
    assert list(found) == ["schema", "kind", "exit_code", "summary", "gpus", "checks"]
    assert (found["schema"], found["exit_code"], found["checks"]) == (1, 69, [])
    assert found["gpus"][0] == {
        "gpu": "GPU0",
        "uuid": fake_uuid(0),
        "name": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": "00000000:1B:00.0",
        "faults": [],
        "status": "ok",
        "figures": {
            "memory_used_mib": 4,
            "memory_total_mib": 81559,
            "temperature_c": 31,
            "power_w": None,
            "utilization_percent": 0,
            "ecc_uncorrected": 0,
            "remapped_rows": 0,
        },
    }
    reset = "end what runs on it, then `nvidia-smi --gpu-reset -i 1` or reboot"
    waits = "a row of its memory waits to be remapped"
    assert found["gpus"][1]["faults"] == [
        {"source": "nvml", "severity": "RESET", "figure": waits, "cure": reset}
    ]
    lost = found["gpus"][2]
    assert (lost["gpu"], lost["uuid"], lost["name"], lost["status"]) == ("GPU2", None, None, "FAIL")
    assert lost["faults"][0]["severity"] is None
    assert "power-cycle" in lost["faults"][0]["cure"]
    without = document(box([]), LD_LIBRARY_PATH="/nowhere")
    assert (without["gpus"], without["checks"][0]["status"]) == ([], "warn")


# Its end, whatever hangs


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (delay("DeviceGetName", 4, HANG), "the NVIDIA driver hangs: nvmlDeviceGetName on GPU 4"),
        (delay("DeviceGetClockInfo", 4, HANG), "no answer from nvmlDeviceGetClockInfo on GPU4"),
        (crash("DeviceGetClockInfo", 4), "no answer from nvmlDeviceGetClockInfo on GPU4"),
    ],
)
def test_a_gpu_that_hangs_is_69_and_the_others_are_looked_at(
    box: MakeBox, rule: str, words: str
) -> None:
    lines = told(box(among_eight(6, remap_pending=1), [rule]), code=69)
    assert f"GPU4: {words}" in lines[0] or any(f"GPU4  {words}" in line for line in lines)
    rows = [row[:4] for row in table(lines)]
    assert rows == [*["ok  "] * 4, "FAIL", "ok  ", "FAIL", "ok  "]


@pytest.mark.parametrize("function", ["InitWithFlags", "DeviceGetCount_v2", "EventSetCreate"])
def test_a_driver_that_hangs_as_a_whole_is_69_and_the_call_is_named(
    box: MakeBox, function: str
) -> None:
    text = "\n".join(told(box(EIGHT, [delay(function, "-", HANG)]), code=69))
    assert f"nvml{function.removesuffix('_v2')}" in text


@pytest.fixture
def frozen(tmp_path: Path) -> str:
    """A directory on a disk that does not answer: who looks into it cannot be killed."""
    if os.geteuid() or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("this machine does not let a test mount a file system that hangs")
    return str(tmp_path / "frozen")


@pytest.mark.parametrize("what", ["NVML_FAKE_SCENARIO", "MODEL_CHECK_HISTORY_FILE"])
def test_a_child_that_cannot_be_killed_holds_nobody_up(
    box: MakeBox, frozen: str, tmp_path: Path, what: str
) -> None:
    """nvmlInit reads the scenario: a process that is stuck in the kernel for it is in state D."""
    helper = (sys.executable, stuck_disk.__file__, frozen, sys.executable, "-m", "launcher")
    try:
        done = quick(box(EIGHT), program=helper, **{what: f"{frozen}/kept/file"})
    finally:
        os.kill(int(Path(f"{frozen}.pid").read_text()), signal.SIGKILL)
    lines = done.stdout.splitlines()
    if what == "NVML_FAKE_SCENARIO":
        assert Path(f"{frozen}.asked").exists()
        assert done.returncode == 69
        assert "nvmlInitWithFlags did not return within 3 s" in lines[1]
    else:
        assert done.returncode == 0
        assert [row.split()[:2] for row in table(lines)] == [["ok", f"GPU{n}"] for n in range(8)]
        assert lines[10].startswith(f"warn  history             {frozen}/kept/file: the history")


@pytest.mark.parametrize("num_descriptors", [6, 7])
@pytest.mark.parametrize("kept", ["", "/proc/none/history.jsonl"])
def test_a_machine_without_descriptors_left_is_70_in_one_line(
    box: MakeBox, kept: str, num_descriptors: int
) -> None:
    limited = f'ulimit -n {num_descriptors}; exec {sys.executable} -m launcher "$@"'
    done = quick(box(EIGHT), program=("bash", "-c", limited, "bash"), MODEL_CHECK_HISTORY_FILE=kept)
    assert done.returncode == 70, done.stdout + done.stderr
    assert "Too many open files" in done.stdout + done.stderr


# What it leaves alone


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that was never started: no bytecode, no environment."""
    root = tmp_path / "a checkout"
    for name in ("launcher", "model_check", "config"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("run.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    return root


def traces(directory: Path) -> dict[str, tuple[int, int]]:
    """Everything below it, and when it was changed: a file that came and went changed its
    directory."""
    found = [directory, *directory.rglob("*")]
    return {str(path): ((at := path.lstat()).st_mtime_ns, at.st_size) for path in found}


@pytest.mark.parametrize("rules", [[], [delay("DeviceGetClockInfo", 4, HANG)]])
def test_it_writes_nothing_and_never_imports_torch(
    box: MakeBox, checkout: Path, tmp_path: Path, rules: list[str]
) -> None:
    torch = tmp_path / "first" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text(f"open({str(tmp_path / 'torch was here')!r}, 'w')\n")
    places = {name: str(tmp_path / name) for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR")}
    for place in places.values():
        Path(place).mkdir()
    kept = history(tmp_path, fake_uuid(3))
    machine, before = box(EIGHT, rules), traces(tmp_path)
    done = subprocess.run(
        ["bash", str(checkout / "run.sh"), "doctor", "--quick"],
        cwd=tmp_path,
        env=machine.env
        | places
        | {"PYTHONPATH": str(torch.parent), "MODEL_CHECK_PYTHON": sys.executable}
        | {"MODEL_CHECK_HISTORY_FILE": kept},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stderr) == (69 if rules else 22, "")
    assert len(table(done.stdout.splitlines())) == 8
    assert traces(tmp_path) == before


@pytest.mark.netns
def test_it_needs_no_network(box: MakeBox) -> None:
    program = ("unshare", "--net", sys.executable, "-m", "launcher")
    assert quick(box(EIGHT), program=program).stdout.startswith("ok: 8 GPUs\n")
