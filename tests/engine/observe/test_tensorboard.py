"""The TensorBoard file: by the format, and by TensorBoard itself where it is installed."""

import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.arguments import parse_run
from model_check.config.arguments import settings_request
from model_check.config.load import load
from model_check.engine.observe.tensorboard import TensorBoardWriter, crc32c
from model_check.errors import StorageError
from pretrain_main import parser as worker_parser
from tests.engine.conftest import Run


def test_the_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the catalogue's check value
    assert crc32c(b"") == 0


def records(path: Path) -> list[bytes]:
    """The records' contents; each checksum is checked."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        body = content[12 : 12 + length]
        for part, start in ((content[:8], 8), (body, 12 + length)):
            (masked,) = struct.unpack("<I", content[start : start + 4])
            rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
            assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == crc32c(part)
        found.append(body)
        content = content[16 + length :]
    return found


def test_a_file_has_a_version_and_a_record_a_step(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path / "logs")
    writer.write(300, {"train/loss": 2.5})
    version, step = records(writer.path)
    assert version[9:] == b"\x1a\x0dbrain.Event:2"
    assert step[9:] == (
        b"\x10\xac\x02"  # step 300
        b"\x2a\x13"  # a summary of 19 bytes
        b"\x0a\x11"  # one value of 17
        b"\x0a\x0atrain/loss" + b"\x15" + struct.pack("<f", 2.5)
    )


def test_what_float32_cannot_hold_is_infinite(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.write(0, {"big": 1e300, "nan": math.nan})
    (_, step) = records(writer.path)
    assert struct.pack("<f", math.inf) in step
    assert struct.pack("<f", math.nan) in step


def test_tensorboard_reads_a_whole_run(tiny_run: Callable[..., Run], tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    run = tiny_run(logging__tensorboard_dir=str(tmp_path / "tb"))()
    (file,) = (tmp_path / "tb").rglob("events.out.tfevents.*")
    read = accumulator.EventAccumulator(str(file.parent)).Reload()
    losses = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert losses == [(s.step, float.fromhex(s.loss)) for s in run.kept.steps()]


def test_a_run_says_where_its_log_is(tiny_run: Callable[..., Run], tmp_path: Path) -> None:
    run = tiny_run(logging__tensorboard_dir=str(tmp_path / "tb"))()
    (file,) = (tmp_path / "tb").rglob("events.out.tfevents.*")
    assert file.parent.name == "gpu6"
    assert f"TensorBoard: tensorboard --logdir {file.parent.parent}" in run.kept.lines
    assert len(records(file)) == 5


def test_both_entry_points_take_the_flag_of_the_guide() -> None:
    argv = ["--tensorboard-dir", "my_logs", "--preset", "cpu"]
    for request in (
        parse_run(argv, {}).request,
        settings_request(worker_parser().read(argv), {}),
    ):
        assert load(request, lambda: False).settings.logging.tensorboard_dir == "my_logs"


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        TensorBoardWriter(tmp_path / "file" / "logs")
