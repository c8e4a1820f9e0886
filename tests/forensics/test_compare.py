"""Two dossiers of one state: which values and bits differ."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_check.forensics.__main__ import main
from model_check.forensics.compare import write_difference
from model_check.forensics.dossier import write_dossier
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.int64, torch.uint8, torch.float8_e5m2, torch.complex64),
)


def dossier(
    directory: Path,
    tensors: Mapping[str, Tensor],
    worker: str = "GPU3",
    most_bytes: int = 1 << 30,
    guilty: tuple[str, ...] = (),
    **about: Any,
) -> Path:
    told = {"worker": worker, "run": "run_1", "kind": "difference", "step": 4, "state_after": 5}
    place = directory / "dossier" / worker.lower()
    path = write_dossier(place, told | about, tensors.items(), guilty=guilty, most_bytes=most_bytes)
    return path.parent


def flipped(tensor: Tensor, *flips: tuple[int, int]) -> Tensor:
    """With these (value, bit) turned over."""
    raw = tensor.clone().view(-1).view(torch.uint8)
    for value, bit in flips:
        raw[value * tensor.element_size() + bit // 8] ^= 1 << bit % 8
    return raw.view(tensor.dtype).view(tensor.shape)


def difference(odd: Path, peer: Path) -> dict[str, Any]:
    path = write_difference(odd, peer)
    assert path == odd / "difference.json"
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_flipped_bit_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    sound = torch.linspace(0.5, 60, 60).view(3, 4, 5).to(dtype)
    highest = 8 * sound.element_size() - 1
    bad = flipped(sound, (7, 0), (7, highest), (59, 3))
    odd = dossier(tmp_path, {"w": bad, "same": sound}, guilty=("w",))
    document = difference(odd, dossier(tmp_path, {"w": sound, "same": sound}, "GPU0"))
    assert (document["odd"], document["peer"], document["num_equal"]) == ("GPU3", "GPU0", 1)
    found = document["tensors"]["w"]
    assert (found["num_differing"], found["num_compared"], found["guilty"]) == (2, 60, True)
    one, two = found["first"]
    assert (one["index"], one["bits"]) == ([0, 1, 2], f"bits 0 and {highest}")
    assert (two["index"], two["bits"]) == ([2, 3, 4], "bit 3")
    assert int(one["xor"], 16) == 1 << highest | 1 == int(one["odd"], 16) ^ int(one["peer"], 16)
    assert len(one["odd"]) == len(one["xor"]) == 2 * sound.element_size()
    assert found["histogram"] == {"0": 1, "3": 1, f"{highest}": 1}


def test_nans_with_other_payloads_differ_and_a_zero_is_not_its_negative(tmp_path: Path) -> None:
    sound = torch.tensor([float("nan"), 0.0, 1.0])
    bad = flipped(sound, (0, 5), (1, 31))
    document = difference(dossier(tmp_path, {"w": bad}), dossier(tmp_path, {"w": sound}, "GPU0"))
    found = document["tensors"]["w"]
    assert [value["index"] for value in found["first"]] == [[0], [1]]
    assert found["first"][0]["odd_value"] is None
    assert found["largest"]["index"] == [1]


def test_what_differs_is_found_in_every_piece(tmp_path: Path) -> None:
    """Of 4 MiB; each dossier is read in three."""
    sound = torch.ones(5 << 19)
    places = random.Random(1).sample(range(sound.numel()), 100)
    bad = flipped(sound, *((place, 22) for place in places), (sound.numel() - 1, 30))
    document = difference(dossier(tmp_path, {"w": bad}), dossier(tmp_path, {"w": sound}, "GPU0"))
    found = document["tensors"]["w"]
    assert found["num_differing"] == 101
    assert [value["index"] for value in found["first"]] == [
        [place] for place in sorted(places)[:16]
    ]
    assert found["histogram"] == {"22": 100, "30": 1}
    assert found["largest"]["odd_value"] == 1.5  # the last one is infinite


def test_the_farthest_value_is_named(tmp_path: Path) -> None:
    sound = torch.ones(1 << 21)
    bad = sound.clone()
    bad[5], bad[1_800_000], bad[9] = 3.0, -100.0, float("inf")
    document = difference(dossier(tmp_path, {"w": bad}), dossier(tmp_path, {"w": sound}, "GPU0"))
    largest = document["tensors"]["w"]["largest"]
    told = (largest["index"], largest["odd_value"], largest["peer_value"])
    assert told == ([1_800_000], -100.0, 1.0)


def test_a_shorter_cut_is_compared_as_far_as_both_go(tmp_path: Path) -> None:
    sound = torch.ones(100)
    bad = flipped(sound, (10, 1), (60, 1))
    odd = dossier(tmp_path, {"w": bad, "v": sound}, guilty=("w",))
    peer = dossier(tmp_path, {"w": sound, "v": sound}, "GPU0", most_bytes=200, guilty=("w",))
    document = difference(odd, peer)
    assert document["tensors"]["w"]["num_compared"] == 50
    assert document["tensors"]["w"]["num_differing"] == 1
    assert document["not_compared"] == {"v": "GPU0 has not kept it"}


def test_scalars_and_empty_tensors_are_compared(tmp_path: Path) -> None:
    sound = {"scalar": torch.tensor(2.0), "empty": torch.empty(0, 3)}
    bad = {"scalar": torch.tensor(-2.0), "empty": torch.empty(0, 3)}
    document = difference(dossier(tmp_path, bad), dossier(tmp_path, sound, "GPU0"))
    assert document["tensors"]["scalar"]["first"][0]["index"] == []
    assert document["num_equal"] == 1


def test_what_cannot_be_compared_says_why(tmp_path: Path) -> None:
    values = {"w": torch.ones(3)}
    odd, later = dossier(tmp_path, values), dossier(tmp_path, values, "GPU0", state_after=6)
    unknown = dossier(tmp_path, values, "GPU1", state_after=None)
    damaged = dossier(tmp_path, values, "GPU2")
    (damaged / "tensors.safetensors").write_bytes(b"x")
    for peer, why in (
        (later, "GPU3 holds the state after 5 steps, GPU0 that after 6 steps"),
        (unknown, "GPU3 holds the state after 5 steps, GPU1 that after ?"),
        (damaged, f"{damaged}/tensors.safetensors: 1 bytes, the manifest says "),
        (tmp_path / "gone", f"{tmp_path / 'gone'}: no dossier"),
    ):
        assert write_difference(odd, peer) is None
        assert json.loads((odd / "difference.json").read_bytes())["not_comparable"].startswith(why)
    assert write_difference(tmp_path / "gone", odd) is None
    assert not (tmp_path / "gone").exists()


def shown(capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert all(len(line) <= 80 for line in out.splitlines())
    return code, out, err


def test_a_person_reads_the_dossier_and_its_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = {"weights/" + "x" * 90: torch.ones(2, 3), "weights/b": torch.ones(4)}
    name = next(iter(sound))
    bad = sound | {name: flipped(sound[name], (4, 30))}
    odd = dossier(tmp_path, bad, guilty=(name,))
    peer = dossier(tmp_path, sound, "GPU0", guilty=(name,))
    dossier(tmp_path, sound, "GPU1", run="another")
    code, out, _ = shown(capsys, odd)
    assert code == 0
    assert out.startswith("GPU3: difference, found at step 4 of run run_1\n")
    assert "after 5 optimizer steps" in out
    assert "checksum holds" in out
    assert "[1, 1]: 7f800000 xor 3f800000 = 40000000, bit 30" in out
    assert out.count("beside GPU") == 1
    assert shown(capsys, odd / "manifest.json", peer)[1] == out


def test_a_finding_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = {
        "kind": "nonfinite",
        "step": 4,
        "where": "loss",
        "loss": "nan",
        "grad_norm": "nan",
        "names": ["norm.weight"],
        "origin": {
            **{"direction": "forward", "module": "layers.1.attention.wq", "tensor": "output"},
            **{"shape": [2, 3], "num_nan": 1, "num_inf": 0, "first": [0, 1]},
        },
        "repeated": True,
    }
    bad = torch.tensor([1.0, float("nan")])
    odd = dossier(tmp_path, {"around/output": bad}, guilty=("around/output",), event=event)
    _, out, _ = shown(capsys, odd)
    assert "found: loss not finite; loss nan" in out
    born = "born in layers.1.attention.wq (forward: its output): 1 NaN of 6 values, first at"
    assert born in " ".join(out.split())
    assert "1 NaN and 0 Inf, first at [1]; others 1.000e+00 to 1.000e+00" in out


def test_damage_and_absence_have_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = dossier(tmp_path, {"w": torch.ones(3)})
    code, _, err = shown(capsys, tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "no dossier: it has no manifest.json" in err
    (odd / "tensors.safetensors").write_bytes(b"x")
    code, out, _ = shown(capsys, odd)
    assert code == 1
    assert "DAMAGED: " in out
    (odd / "manifest.json").write_text("[")
    code, _, err = shown(capsys, odd)
    assert (code, err.count("\n")) == (2, 1)


def spoiler(dice: random.Random, sound: bytes) -> bytes:
    """A damaged file."""
    place = dice.randrange(len(sound))
    huge = (2 ** dice.choice([20, 31, 62, 63])).to_bytes(8, "little")
    return dice.choice(
        [
            sound[:place],
            sound[:place] + bytes([dice.randrange(256)]) + sound[place + 1 :],
            huge + sound[8:],
            sound[place:],
            sound[:place] + b"9" * dice.randrange(1, 400) + sound[place:],
            sound[:place] + b"[" * 20000 + sound[place:],
            b"",
        ]
    )


WRONG: tuple[Any, ...] = (
    *(None, -1, 2**63, 2**70, 1.5, 1e300, True, "", "..", "/etc/passwd", "tensors.safetensors\0"),
    *(
        [],
        [0],
        [[]],
        {},
        {"x": 1},
        [2**61] * 70,
        [2**61, 2**61],
        "\ud800".encode("unicode_escape").decode(),
    ),
)


def misled(dice: random.Random, document: Any) -> Any:
    """With a value of another type or size at some place."""
    if not isinstance(document, dict | list) or not document or dice.random() < 0.1:
        return dice.choice(WRONG)
    if isinstance(document, list):
        at = dice.randrange(len(document))
        return [misled(dice, v) if i == at else v for i, v in enumerate(document)]
    name = dice.choice(list(document))
    if dice.random() < 0.1:
        return {n: v for n, v in document.items() if n != name}
    return document | {name: misled(dice, document[name])}


def with_header(sound: bytes, dice: random.Random) -> bytes:
    """With another header, which is sound JSON: other types, places over each other."""
    size = int.from_bytes(sound[:8], "little")
    header = json.dumps(misled(dice, json.loads(sound[8 : 8 + size]))).encode()
    return len(header).to_bytes(8, "little") + header + sound[8 + size :]


@pytest.mark.parametrize("seed", range(40))
def test_no_damage_makes_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """The checksum is that of the damaged file: a forger can compute it, too."""
    dice = random.Random(seed)
    tensors = {"weights/a": torch.ones(3, 4), "b": torch.tensor([1.5, float("nan")])}
    odd = dossier(tmp_path, tensors, guilty=("b",))
    peer = dossier(tmp_path, tensors, "GPU0")
    manifest, values = odd / "manifest.json", odd / "tensors.safetensors"
    told, sound = json.loads(manifest.read_bytes()), values.read_bytes()
    for _ in range(25):
        bad = dice.choice([spoiler(dice, sound), with_header(sound, dice), sound])
        values.write_bytes(bad)
        document = told | {"bytes": len(bad), "sha256": sha256(bad)}
        document = misled(dice, document) if dice.random() < 0.6 else document
        content = json.dumps(document).encode()
        manifest.write_bytes(spoiler(dice, content) if dice.random() < 0.3 else content)
        code, out, err = shown(capsys, odd)
        assert code in (0, 1, 2)
        assert (code == 2) == (not out)
        assert err.count("\n") <= 1
        write_difference(odd, peer)
        shown(capsys, peer, odd)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_values_over_each_other_are_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = dossier(tmp_path, {"a": torch.ones(4), "b": torch.zeros(4)})
    path = odd / "tensors.safetensors"
    path.write_bytes(path.read_bytes().replace(b"[16,32]", b"[ 8,24]"))
    told = json.loads((odd / "manifest.json").read_bytes())
    told["sha256"] = sha256(path.read_bytes())
    (odd / "manifest.json").write_text(json.dumps(told))
    code, out, _ = shown(capsys, odd)
    assert code == 1
    assert "lie over another tensor's" in " ".join(out.split())


@pytest.mark.parametrize("name", ["tensors.safetensors", "manifest.json"])
def test_a_pipe_in_place_of_a_file_blocks_nobody(tmp_path: Path, name: str) -> None:
    odd = dossier(tmp_path, {"w": torch.ones(3)})
    (odd / name).unlink()
    os.mkfifo(odd / name)
    command = [sys.executable, "-m", "model_check.forensics", str(odd)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == {"tensors.safetensors": 1, "manifest.json": 2}[name]
    assert "Traceback" not in done.stderr
