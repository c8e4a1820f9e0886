"""A file that changes while it is read kills nobody."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from model_check.data.read.number_file import NumberFile
from model_check.errors import DataError
from tests.deadline import DEADLINE_S

READER = """
import os, sys, threading
from pathlib import Path
from model_check.data.read.number_file import NumberFile
from model_check.errors import DataError

numbers = NumberFile(os.open(sys.argv[1], os.O_RDONLY), Path(sys.argv[1]), "<u2")
def wait_for_the_gil():
    while True: pass
threading.Thread(target=wait_for_the_gil, daemon=True).start()
print("reads", flush=True)
try:
    while True: numbers.read(5000, 100)
except DataError as error:
    print(error)
"""


def numbers_in(path: Path, *numbers: int) -> NumberFile:
    path.write_bytes(np.asarray(numbers, "<u8").tobytes())
    return NumberFile(os.open(path, os.O_RDONLY), path, "<u8")


def test_it_reads_a_part_or_all_and_finds_what_is_above(tmp_path: Path) -> None:
    numbers = numbers_in(tmp_path / "n", 3, 5, 5, 9)
    assert (len(numbers), numbers[3]) == (4, 9)
    assert numbers.read().tolist() == [3, 5, 5, 9]
    assert numbers.read(1, 2).tolist() == [5, 5]
    assert numbers.read(3, 7).tolist() == [9]
    assert numbers.read(7).tolist() == []
    assert [numbers.first_above(value) for value in (0, 3, 4, 5, 9)] == [0, 1, 1, 3, 4]
    assert numbers.first_above(9, 1, 3) == 3


def test_a_file_without_numbers_is_empty(tmp_path: Path) -> None:
    assert numbers_in(tmp_path / "n").read().tolist() == []


def test_what_is_cut_off_after_it_was_opened_is_told(tmp_path: Path) -> None:
    numbers = numbers_in(tmp_path / "n", *range(10))
    os.truncate(tmp_path / "n", 20)
    assert numbers.read(0, 2).tolist() == [0, 1]
    with pytest.raises(DataError, match="n: was cut off while in use: 20 of 80 bytes are left"):
        numbers.read(0, 3)


def test_a_reader_lives_whenever_its_file_is_cut_off(tmp_path: Path) -> None:
    """Between any two of its instructions: another thread holds the GIL most of the time."""
    path = tmp_path / "n"
    for _ in range(5):
        path.write_bytes(bytes(20_000))
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        os.truncate(path, 0)
        told, _ = reader.communicate(timeout=DEADLINE_S)
        assert reader.returncode == 0
        assert "was cut off while in use: 0 of 20,000 bytes" in told
