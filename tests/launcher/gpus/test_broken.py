"""Which broken GPUs a run would have used."""

import pytest

from launcher.gpus.broken import broken_needed
from launcher.gpus.probe import BrokenGpu, Gpu, Snapshot

GPUS = (
    Gpu(0, "GPU-aa00", "H100"),
    Gpu(1, "GPU-bb11", "H100"),
    Gpu(2, "GPU-cc22", "H100", mig_enabled=True, mig_devices=(Gpu(2, "MIG-dd", "H100"),)),
)
BOX = Snapshot("570", gpus=GPUS, broken=(BrokenGpu(3, "lost"), BrokenGpu(5, "lost")))


@pytest.mark.parametrize(
    ("selector", "mask", "needed"),
    [
        ("all", None, [3, 5]),
        ("all", "0,1", []),
        ("all", "0,5,1", [5]),
        ("all", "GPU-aa,GPU-bb", []),
        ("all", "GPU-aa,GPU-ff", [3, 5]),
        ("all", "MIG-dd", []),
        ("all", "", []),
        ("0,2", None, []),
        ("0, 3", None, [3]),
        ("GPU-bb", None, []),
        ("gpu-BB,mig-d", None, []),
        ("GPU-ee", None, [3, 5]),
        ("0,GPU-ee", None, [3, 5]),
        ("auto", None, []),
        ("auto:3", None, []),
    ],
)
def test_a_broken_gpu_counts_only_for_a_run_that_asks_for_it(
    selector: str, mask: str | None, needed: list[int]
) -> None:
    assert [gpu.index for gpu in broken_needed(selector, None, mask, BOX)] == needed


def test_a_sound_box_has_none() -> None:
    assert broken_needed("all", None, None, Snapshot("570", gpus=GPUS)) == []
