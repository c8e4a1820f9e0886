"""The dossier of a faulty worker: what is kept of its tensors, and what is said of the rest."""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from model_check.forensics.dossier import LEFT_FREE_BYTES, write_dossier
from model_check.forensics.manifest import (
    DamagedError,
    DossierError,
    places,
    read_manifest,
    verify,
)
from tests.deadline import DEADLINE_S

ABOUT = {
    "worker": "GPU3",
    "run": "run_1",
    "kind": "nonfinite",
    "step": 7,
    "state_after": 7,
    "event": {"names": ["b"]},
}
GENEROUS = 1 << 20


def written(
    directory: Path,
    tensors: Mapping[str, Tensor],
    guilty: tuple[str, ...] = (),
    most_bytes: int = GENEROUS,
) -> dict[str, Any]:
    path = write_dossier(directory, ABOUT, tensors.items(), guilty=guilty, most_bytes=most_bytes)
    assert path == directory / "manifest.json"
    document: dict[str, Any] = json.loads(path.read_bytes())
    manifest = read_manifest(directory)
    verify(directory, manifest)
    if manifest.file is not None:
        places(directory / manifest.file, manifest)
    return document


def numbers(count: int, first: float = 0.0) -> Tensor:
    return torch.arange(first, first + count, dtype=torch.float32)


def test_guilty_tensors_come_first_and_the_others_while_they_fit(tmp_path: Path) -> None:
    tensors = {"weights/a": numbers(30), "weights/b": numbers(40), "weights/c": numbers(25)}
    document = written(tmp_path, tensors, ("weights/c", "weights/x"), most_bytes=4 * 60)
    assert list(document["tensors"]) == ["weights/c", "weights/a"]
    assert [t["guilty"] for t in document["tensors"].values()] == [True, False]
    assert document["left_out"].keys() == {"weights/b"}
    assert document["left_out"]["weights/b"]["why"] == "no room"
    assert document["left_out"]["weights/b"]["statistics"]["high"] == 39.0
    assert document["absent"] == ["weights/x"]
    kept = load_file(tmp_path / "tensors.safetensors")
    assert kept.keys() == {"weights/a", "weights/c"}
    assert all(torch.equal(kept[name], tensors[name]) for name in kept)


def test_of_a_guilty_tensor_that_is_too_large_its_first_values_are_kept(tmp_path: Path) -> None:
    tensors = {"a": numbers(10), "b": numbers(100).view(10, 10), "c": numbers(100)}
    document = written(tmp_path, tensors, ("b", "c"), most_bytes=130)
    assert document["tensors"]["b"]["slice"] == [0, 32]
    assert document["tensors"]["b"]["shape"] == [10, 10]
    assert document["tensors"]["b"]["statistics"]["high"] == 99.0
    assert [*document["tensors"]] == ["b"]
    assert document["left_out"]["c"]["guilty"]
    assert torch.equal(load_file(tmp_path / "tensors.safetensors")["b"], numbers(32))


def test_a_peer_with_other_values_keeps_the_same_values(tmp_path: Path) -> None:
    cuts = []
    for number in range(2):
        tensors = {f"{n}": torch.randn(50 * n + 1) + number for n in range(9)}
        document = written(tmp_path / str(number), tensors, ("4", "2"), most_bytes=2000)
        cuts.append({name: kept["slice"] for name, kept in document["tensors"].items()})
    assert cuts[0] == cuts[1]


def test_no_room_leaves_statistics_alone(tmp_path: Path) -> None:
    spoilt = numbers(6).view(2, 3)
    spoilt[1, 0], spoilt[1, 1] = float("nan"), float("-inf")
    document = written(tmp_path, {"a": spoilt, "empty": numbers(0)}, ("a",), most_bytes=0)
    assert (document["file"], document["tensors"]) == (None, {})
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
    counted = document["left_out"]["a"]["statistics"]
    assert counted == {
        "num_nan": 1,
        "num_inf": 1,
        "first_nonfinite": [1, 0],
        "norm": 30**0.5,
        "low": 0.0,
        "high": 5.0,
    }
    assert document["left_out"]["empty"]["statistics"]["low"] is None


ODD_NAMES = ("weights/größe\n\x1b[31m", 'a"b\\c', "__metadata__ ", "lone \udcff", "padding")


def test_unusual_tensors_are_kept_bit_for_bit(tmp_path: Path) -> None:
    """Odd sizes of small values would misalign those behind them."""
    tied = numbers(7)
    tensors = {
        "bf16": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        "fp16": torch.tensor([65504, float("inf"), 2**-24], dtype=torch.float16),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.tensor([2**63 - 1, -(2**63)]),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "float8": torch.tensor([1.0, 2.0, 3.0]).to(torch.float8_e4m3fn),
        "float64": torch.tensor([1e300], dtype=torch.float64),
        "complex64": torch.tensor([1 + 2j]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "turned": numbers(12).view(3, 4).t(),
        "tied": tied,
        "tied too": tied,
        "part of tied": tied[2:5],
        "needs grad": numbers(3).requires_grad_(),
        **{name: numbers(3, float(n)) for n, name in enumerate(ODD_NAMES)},
    }
    document = written(tmp_path, tensors, ("bf16", "bool"))
    assert document["left_out"] == {}
    names = {name.encode(errors="backslashreplace").decode(): name for name in tensors}
    assert document["tensors"].keys() == names.keys()
    with safe_open(tmp_path / "tensors.safetensors", "pt") as file:
        for name, own in names.items():
            kept, given = file.get_tensor(name), tensors[own].detach()
            assert (kept.dtype, kept.shape) == (given.dtype, given.shape), name
            assert bits(kept) == bits(given), name
    assert document["tensors"]["int64"]["statistics"]["num_nan"] == 0


def bits(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def test_a_type_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    tensors = {"c": torch.zeros(2, dtype=torch.complex128), "s": numbers(4).to_sparse()}
    document = written(tmp_path, tensors | {"a": numbers(2)})
    assert {n: t["why"] for n, t in document["left_out"].items()} == dict.fromkeys(
        "cs", "safetensors has no such type"
    )


def test_an_earlier_dossier_is_set_aside_whole(tmp_path: Path) -> None:
    for number in range(3):
        written(tmp_path, {"a": numbers(4, float(number))})
        (tmp_path / "difference.json").write_text("{}")
    (tmp_path / "nan_grad_step_7.pt").touch()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["earlier1", "earlier2"]
    for place, first in (("earlier1", 0), ("earlier2", 1), (".", 2)):
        manifest = read_manifest(tmp_path / place)
        verify(tmp_path / place, manifest)
        assert load_file(tmp_path / place / "tensors.safetensors")["a"][0] == first
        assert (tmp_path / place / "difference.json").exists()


class BadGpu(torch.Tensor):
    """A tensor of a GPU that has failed."""

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nx")


def bad_gpu(values: Tensor) -> Tensor:
    return values.as_subclass(BadGpu)


def test_a_gpu_that_fails_leaves_what_was_copied(tmp_path: Path) -> None:
    tensors = {"a": numbers(4), "b": bad_gpu(numbers(4)), "c": numbers(4)}
    document = written(tmp_path, tensors)
    why = "b could not be copied: CUDA error: an illegal memory access was encountered"
    assert document["shortened"] == why
    assert list(document["tensors"]) == ["a"]
    assert {n: t["why"] for n, t in document["left_out"].items()} == {"b": why, "c": why}
    assert load_file(tmp_path / "tensors.safetensors").keys() == {"a"}


def test_a_gpu_that_fails_at_once_leaves_the_manifest(tmp_path: Path) -> None:
    document = written(tmp_path, {"b": bad_gpu(numbers(4))})
    assert document["tensors"] == {}
    assert document["left_out"]["b"]["statistics"] is None


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds 2 MiB more than a dossier leaves free."""
    place, size = tmp_path / "disk", LEFT_FREE_BYTES + (2 << 20)
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let a test mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.root
def test_a_disk_with_little_room_shortens_the_dossier(disk: Path) -> None:
    tensors = {f"{n}": numbers(1 << 18) for n in range(4)}  # 1 MiB each
    document = written(disk / "dossier", tensors, ("2",), most_bytes=1 << 30)
    assert document["shortened"].startswith("disk: room for ")
    assert next(iter(document["tensors"])) == "2"
    assert 1 <= len(document["tensors"]) < 4
    assert len(document["left_out"]) == 4 - len(document["tensors"])


def test_a_file_that_may_not_grow_leaves_the_manifest_alone(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        document = written(tmp_path, {"a": numbers(1 << 18)}, ("a",), most_bytes=1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert document["shortened"] == "disk: tensors.safetensors not written: File too large"
    assert (document["file"], [*document["left_out"]]) == (None, ["a"])
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from model_check.forensics.dossier import write_dossier

class Deadly(torch.Tensor):
    def cpu(self):
        os.kill(os.getpid(), signal.SIGKILL)

tensors = {"a": torch.ones(1 << 20), "b": torch.ones(4).as_subclass(Deadly)}
write_dossier(Path(sys.argv[1]), {}, tensors.items(), guilty=[], most_bytes=1 << 30)
"""


def test_a_worker_that_is_killed_leaves_no_manifest(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=DEADLINE_S)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".tensors.safetensors.")
    with pytest.raises(DossierError, match="no dossier: it has no manifest"):
        read_manifest(tmp_path)
    written(tmp_path, {"a": numbers(4)})
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "tensors.safetensors"]


def test_each_damaged_byte_is_found(tmp_path: Path) -> None:
    document = written(tmp_path, {"a": numbers(4), "b": numbers(3)})
    path = tmp_path / "tensors.safetensors"
    sound = path.read_bytes()
    assert document["sha256"] == hashlib.sha256(sound).hexdigest()
    manifest = read_manifest(tmp_path)
    for place in range(len(sound)):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 4]) + sound[place + 1 :])
        with pytest.raises(DamagedError, match="SHA-256"):
            verify(tmp_path, manifest)
    path.write_bytes(sound[:-1])
    with pytest.raises(DamagedError, match="bytes, the manifest says"):
        verify(tmp_path, manifest)
    path.unlink()
    with pytest.raises(DamagedError, match="is missing"):
        verify(tmp_path, manifest)


def test_memory_holds_a_piece_of_a_tensor_and_not_the_dossier(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
import torch
from model_check.forensics.dossier import write_dossier
one = torch.ones(1 << 23)
write_dossier(Path(sys.argv[1]) / "first", {}, [("a", one)], guilty=[], most_bytes=1 << 30)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tensors = [(f"{n}", one) for n in range(8)]  # 256 MiB
write_dossier(Path(sys.argv[1]) / "all", {}, tensors, guilty=[], most_bytes=1 << 30)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (tmp_path / "all" / "tensors.safetensors").stat().st_size > 256 << 20
    assert int(done.stdout) < 64 << 10, done.stderr  # KiB
