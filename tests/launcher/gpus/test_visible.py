"""CUDA_VISIBLE_DEVICES, read as CUDA reads it."""

import json
import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from launcher.gpus.probe import Gpu
from launcher.gpus.visible import order_note, read_mask, visible
from tests.launcher.gpus.conftest import Box
from tests.nvml_fake.build import fake_gpu

UUIDS = ("GPU-ab120000-1", "GPU-ab340000-2", "GPU-cd000000-3", "GPU-ef000000-4")
FOUR = [Gpu(index, uuid, "NVIDIA H100") for index, uuid in enumerate(UUIDS)]


def indices(value: str | None, gpus: list[Gpu] = FOUR) -> list[int]:
    return [gpu.index for gpu in visible(gpus, value)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,1", []),
        ("0,1,0", []),
        ("0,99,1", [0]),
        ("0,-1,1", [0]),
        ("0,2,-1,1", [0, 2]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("1gpu2,2ampere", [1, 2]),
        ("+1", [1]),
        ("1,", [1]),
        ("99", []),
        ("GPU-ab", []),
        ("GPU-ab12", [0]),
        ("GPU-ef,GPU-ab3", [3, 1]),
        (f"{UUIDS[2]},{UUIDS[0]}", [2, 0]),
        ("GPU-ef,GPU-ab", [3]),
        ("GPU-ef,GPU-99,GPU-cd", [3]),
        ("GPU-ef,GPU-ef", []),
        ("GPU-ef,GPU-ef00", []),
        ("GPU-ef,1", [3]),
        ("1,GPU-ef", [1]),
        ("MIG-1234", []),
    ],
)
def test_the_same_devices_in_the_same_order_as_cuda(value: str | None, expected: list[int]) -> None:
    assert indices(value) == expected


NO_NAME = "which is no name of the first one's kind"
LISTED = "NVML lists 4 GPUs, 0 (GPU-ab120000), 1 (GPU-ab340000), 2 (GPU-cd000000), 3 (GPU-ef000000)"


@pytest.mark.parametrize(
    ("value", "lacks", "ignores"),
    [
        (None, None, None),
        ("", None, None),
        (" ", None, None),
        ("-1", None, None),
        ("-1,0", None, None),
        ("NoDevFiles", None, None),
        ("1,", None, None),
        ("0,-1", None, None),
        ("2,0", None, None),
        ("2ampere", None, None),
        ("0,-1,1", None, "CUDA ignores what follows -1 (1)"),
        ("0, -1,99", None, "CUDA ignores what follows -1 (99)"),
        ("1,GPU-ef", f"GPU-ef, and CUDA stops at 'GPU-ef', {NO_NAME}", None),
        ("GPU-ef, GPU-cd", f"GPU-cd, and CUDA stops at ' GPU-cd', {NO_NAME}", None),
        ("0,x,MIG-1,GPU-cd", f"MIG-1 and GPU-cd, and CUDA stops at 'x', {NO_NAME}", None),
        (" GPU-cd", f"GPU-cd, and CUDA stops at ' GPU-cd', {NO_NAME}", None),
        (
            "0,9, GPU-cd",
            f"GPU 9, which is missing: {LISTED}",
            f"CUDA stops at ' GPU-cd', {NO_NAME}",
        ),
        ("GPU-ef,-1,GPU-cd", None, "CUDA ignores what follows -1 (GPU-cd)"),
        ("0,,1", None, f"CUDA stops at '', {NO_NAME}"),
        ("GPU-ef,1", None, "CUDA stops at '1', which is no name of the first one's kind"),
        ("1,x,2", None, "CUDA stops at 'x', which is no name of the first one's kind"),
        ("1,1", "GPU 1 twice, and CUDA then sees no GPU", None),
        ("007,7", "GPU 7 twice, and CUDA then sees no GPU", None),
        ("GPU-ef,GPU-ef00", "GPU-ef00 twice, and CUDA then sees no GPU", None),
        ("4", f"GPU 4, which is missing: {LISTED}", None),
        ("0,99,1", f"GPU 99, which is missing: {LISTED}; CUDA ignores what follows it (1)", None),
        ("3,4,5", f"GPU 4 and GPU 5, which are missing: {LISTED}", None),
        ("GPU-ef,GPU-99", f"GPU-99, which is missing: {LISTED}", None),
        ("GPU-ef,GPU-ab", "GPU-ab, which fits several: 0 (GPU-ab120000), 1 (GPU-ab340000)", None),
        ("MIG-1", f"MIG-1, which is missing: {LISTED}", None),
        ("0,9,-1,1", f"GPU 9, which is missing: {LISTED}", "CUDA ignores what follows -1 (1)"),
    ],
)
def test_what_a_mask_names_and_cannot_have_is_told(
    value: str | None, lacks: str | None, ignores: str | None
) -> None:
    mask, says = read_mask(FOUR, value), f"CUDA_VISIBLE_DEVICES={value!r}"
    assert mask.lacks == (lacks and f"{says} names {lacks}")
    assert mask.ignores == (ignores and f"{says}: {ignores}")


def test_torch_reads_every_mask_the_same_way(box: Callable[..., Box]) -> None:
    uuids = ["GPU-ab120000-1", "GPU-ab340000-2", "GPU-cd000000-3", "GPU-ef000000-4"]
    machine = box([fake_gpu(index, uuid=uuid) for index, uuid in enumerate(uuids)])
    masks = random_masks(400)
    code = (
        "import json, os, sys, torch\n"
        "def read(mask):\n"
        "    os.environ['CUDA_VISIBLE_DEVICES'] = mask\n"
        "    tokens = torch.cuda._parse_visible_devices()\n"
        "    if tokens and isinstance(tokens[0], str):\n"
        "        uuids = torch.cuda._raw_device_uuid_nvml()\n"
        "        tokens = torch.cuda._transform_uuid_to_ordinals(tokens, uuids)\n"
        "    count = torch.cuda._device_count_nvml()\n"
        "    return tokens[:count]\n"
        "print(json.dumps([read(mask) for mask in json.loads(sys.argv[1])]))\n"
    )
    theirs = json.loads(machine.python(code, json.dumps(masks)))
    ours = [indices(mask) for mask in masks]
    assert [t for t in zip(masks, ours, theirs, strict=True) if t[1] != t[2]] == []
    assert len({str(read) for read in theirs}) > 20  # the masks were worth comparing


def random_masks(count: int) -> list[str]:
    chance = random.Random(7)
    numbers = [
        "0",
        "1",
        "2",
        "3",
        " 3",
        "2 ",
        "4",
        "99",
        "-1",
        "+2",
        "1x",
        "x1",
        "",
        "007",
        "GPU-ef",
    ]
    uuids = ["GPU-", "GPU-ab", "GPU-ab12", "GPU-ab3", "GPU-c", UUIDS[3], "GPU-ff", "2", ""]
    pools = [numbers, uuids, [*numbers, *uuids]]
    return [
        ",".join(chance.choices(pools[position % 3], k=chance.randint(1, 4)))
        for position in range(count)
    ]


def mig_machine() -> list[Gpu]:
    """GPU 0 whole; GPU 1 in MIG mode with two instances; GPU 2 in MIG mode without any."""
    instances = tuple(
        Gpu(1, f"MIG-{digits}", "1g.10gb", mig_index=slot)
        for slot, digits in ((0, "aa11"), (3, "bb22"))
    )
    return [
        FOUR[0],
        replace(FOUR[1], mig_enabled=True, mig_devices=instances),
        replace(FOUR[2], mig_enabled=True),
    ]


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        (None, ["GPU0", "GPU1.0", "GPU1.3", "GPU2"]),
        ("1,0", ["GPU1.0", "GPU1.3", "GPU0"]),
        ("GPU-ab3", ["GPU1.0", "GPU1.3"]),
        ("MIG-bb22", ["GPU1.3"]),
        ("MIG-bb22,MIG-aa11", ["GPU1.3", "GPU1.0"]),
        ("MIG-bb", ["GPU1.3"]),
        ("MIG-", []),
        ("MIG-bb22,MIG-bb22", []),
        ("MIG-bb22,0", ["GPU1.3"]),
        ("MIG-99", []),
    ],
)
def test_a_gpu_in_mig_mode_stands_for_its_instances(value: str | None, labels: list[str]) -> None:
    assert [gpu.label for gpu in visible(mig_machine(), value)] == labels


def test_numbers_are_called_ambiguous_only_where_they_are() -> None:
    mixed = [FOUR[0], replace(FOUR[1], name="NVIDIA T4")]
    note = order_note(mixed, "1", None)
    assert note is not None
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in note
    assert "NVIDIA H100, NVIDIA T4" in note
    assert order_note(mixed, "1", "FASTEST_FIRST") == note
    assert order_note(mixed, "1", "PCI_BUS_ID") is None
    assert order_note(mixed, None, None) is None
    assert order_note(mixed, "", None) is None
    assert order_note(mixed, "GPU-ab12", None) is None
    assert order_note(FOUR, "1", None) is None
