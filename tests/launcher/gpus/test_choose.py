"""Which GPUs a selector takes, which is the freest, and which broken ones a run would have used."""

from typing import Any

import pytest
from msgspec.structs import replace

from launcher.gpus.choose import (
    broken_needed,
    check_selector,
    choose,
    describe_choices,
    rank_free,
    why_busy,
    why_not_idle,
    why_unusable,
)
from launcher.gpus.probe import BrokenGpu, Gpu, GpuProcess, Snapshot
from launcher.gpus.visible import visible
from model_check.errors import NoGpuError, UsageError

TOTAL_MIB = 81559


def gpu(index: int, **fields: Any) -> Gpu:
    """An idle GPU, as a driver of today tells it."""
    idle: dict[str, Any] = {
        "uuid": f"GPU-{index}{index}{index}{index}aaaa-0000",
        "name": "NVIDIA H100",
        "total_mib": TOTAL_MIB,
        "reserved_mib": 551,
        "used_mib": 4,
        "utilization_percent": 0,
        "temperature_c": 31,
        "compute_mode": "default",
        "processes": (),
    }
    return Gpu(index, **(idle | fields))


FOUR = [gpu(index) for index in range(4)]


def chosen(selector: str, gpus: list[Gpu] = FOUR, mask: str | None = None) -> list[str]:
    return [g.label for g in choose(selector, visible(gpus, mask), gpus)]


@pytest.mark.parametrize(
    ("selector", "labels"),
    [
        ("all", ["GPU0", "GPU1", "GPU2", "GPU3"]),
        ("2", ["GPU2"]),
        ("2,0", ["GPU2", "GPU0"]),
        (" 2 , 0 ", ["GPU2", "GPU0"]),
        ("GPU-3333", ["GPU3"]),
        ("gpu-3333AAAA", ["GPU3"]),
        ("GPU-3333,1", ["GPU3", "GPU1"]),
        ("auto", ["GPU0"]),
        ("auto:3", ["GPU0", "GPU1", "GPU2"]),
    ],
)
def test_a_selector_takes_the_gpus_it_names(selector: str, labels: list[str]) -> None:
    assert chosen(selector) == labels


def test_all_keeps_to_what_the_mask_leaves_and_to_its_order() -> None:
    assert chosen("all", mask="2,0") == ["GPU2", "GPU0"]


def test_numbers_are_physical_whatever_the_mask_says() -> None:
    assert chosen("2", mask="3,2") == ["GPU2"]


@pytest.mark.parametrize(
    "selector",
    [
        "",
        "x",
        "-1",
        "1,,2",
        "0-3",
        "auto:",
        "auto:0",
        "auto:x",
        "auto:-1",
        "auto,1",
        "all,1",
        "1.5",
    ],
)
def test_a_selector_that_makes_no_sense_is_a_usage_error(selector: str) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        chosen(selector)


@pytest.mark.parametrize("selector", ["1,1", "1,GPU-1111", "GPU-11,GPU-1111"])
def test_a_gpu_given_twice_is_a_usage_error(selector: str) -> None:
    with pytest.raises(UsageError, match=r"GPU 1 \(GPU-1111aaaa\) is given twice"):
        chosen(selector)


def test_an_ambiguous_prefix_lists_what_it_could_be() -> None:
    twins = [replace(FOUR[0], uuid="GPU-ab12"), replace(FOUR[1], uuid="GPU-ab34")]
    with pytest.raises(UsageError, match="GPU-ab is ambiguous: 0: GPU-ab12, 1: GPU-ab34"):
        chosen("GPU-ab", twins)


@pytest.mark.parametrize("selector", ["7", "GPU-9", "MIG-1", "0,7"])
def test_a_gpu_that_is_not_there_is_told_with_what_there_is(selector: str) -> None:
    with pytest.raises(NoGpuError, match=r"there is no GPU .*; there are 0 \(GPU-0000aaaa\), 1 "):
        chosen(selector)


def test_a_hidden_gpu_is_told_with_what_is_visible() -> None:
    with pytest.raises(NoGpuError, match="hidden by CUDA_VISIBLE_DEVICES; there is 3 "):
        chosen("1", mask="3")


def test_a_mask_that_hides_all_is_said_to() -> None:
    with pytest.raises(NoGpuError, match="CUDA_VISIBLE_DEVICES hides every GPU; there are 0 "):
        chosen("all", mask="")


@pytest.mark.parametrize("selector", ["all", "1", "0,1"])
def test_a_prohibited_gpu_is_refused_rather_than_left_out(selector: str) -> None:
    gpus = [gpu(0), gpu(1, compute_mode="prohibited")]
    with pytest.raises(NoGpuError, match=r"GPU 1 .*'prohibited' \(nvidia-smi -i 1 -c DEFAULT"):
        chosen(selector, gpus)


def test_auto_leaves_unusable_gpus_out_and_tells_when_too_few_remain() -> None:
    gpus = [gpu(0, compute_mode="prohibited"), gpu(1), gpu(2, mig_enabled=True)]
    assert chosen("auto", gpus) == ["GPU1"]
    with pytest.raises(NoGpuError, match=r"2 wanted, 1 usable of 3 visible; GPU 0 .*prohibited"):
        chosen("auto:2", gpus)


def test_an_exclusive_gpu_is_usable_until_a_process_has_it() -> None:
    exclusive = gpu(0, compute_mode="exclusive_process")
    assert why_unusable(exclusive) is None
    taken = replace(exclusive, processes=(GpuProcess(4711, 100),))
    assert "taken by pid 4711" in str(why_unusable(taken))


def order(*gpus: Gpu) -> list[int]:
    return [g.index for g in rank_free(gpus)]


def test_thirty_gib_at_zero_percent_is_not_free() -> None:
    assert order(gpu(0, used_mib=30720), gpu(1, utilization_percent=3)) == [1, 0]


def test_a_gpu_with_a_process_comes_after_any_idle_one() -> None:
    occupied = gpu(0, processes=(GpuProcess(4711, 300),))
    assert order(occupied, gpu(1, total_mib=16384, utilization_percent=5)) == [1, 0]


def test_most_free_memory_comes_first_even_among_busy_ones() -> None:
    assert order(gpu(0, used_mib=60000), gpu(1, used_mib=20000), gpu(2, used_mib=40000)) == [
        1,
        2,
        0,
    ]
    assert order(gpu(0, total_mib=24576), gpu(1)) == [1, 0]


def test_utilisation_comes_before_memory() -> None:
    assert order(gpu(0, utilization_percent=9), gpu(1, total_mib=16384)) == [1, 0]
    busy = gpu(0, used_mib=4, utilization_percent=30), gpu(1, used_mib=61440)
    assert order(*busy) == [1, 0]


def test_a_few_mib_do_not_outweigh_heat() -> None:
    assert order(gpu(0, used_mib=1, temperature_c=60), gpu(1, used_mib=100)) == [1, 0]


def test_ties_go_to_the_cooler_then_to_the_lower_index() -> None:
    assert order(gpu(0, temperature_c=60), gpu(2), gpu(1)) == [1, 2, 0]


def test_what_is_not_told_counts_as_the_worst_of_its_kind() -> None:
    assert order(gpu(0, used_mib=None), gpu(1, utilization_percent=None), gpu(2)) == [2, 0, 1]


def told(gpu: Gpu, *others: Gpu) -> str:
    (line,) = describe_choices([gpu], [*others, gpu])
    return line


def test_the_choice_is_told_in_one_line() -> None:
    ordinary = "Using GPU 3 (lowest utilization): 0 % used, 79.1 GiB free"
    assert told(gpu(3)) == ordinary
    assert told(gpu(3), gpu(0), gpu(1, utilization_percent=5)) == ordinary
    assert told(gpu(3), gpu(0, utilization_percent=None)) == ordinary
    busy = gpu(3, used_mib=30720, utilization_percent=97, processes=(GpuProcess(4711, 30000),))
    assert told(busy, replace(busy, index=0, uuid="GPU-other")) == (
        "Using GPU 3 (lowest utilization): 97 % used, 49.1 GiB free; busy: pid 4711 holds 29.3 GiB"
    )
    silent = gpu(3, used_mib=None, utilization_percent=None)
    assert told(silent) == "Using GPU 3: N/A used, N/A free"


def test_a_choice_that_is_not_the_lowest_utilisation_is_not_told_as_that() -> None:
    full = gpu(0, used_mib=60_000)
    idle = gpu(1, utilization_percent=8)
    (best,) = choose("auto", [full, idle], [full, idle])
    assert told(best, full) == "Using GPU 1 (idle): 8 % used, 79.1 GiB free"
    # The other one is reserved by another launcher.
    busy = gpu(1, utilization_percent=50)
    assert told(busy, gpu(0)).startswith("Using GPU 1 (freest): 50 % used, ")
    pair = [gpu(1, utilization_percent=8), gpu(2)]
    lines = describe_choices(pair, [full, *pair])
    assert [line[:16] for line in lines] == ["Using GPU 1 (idl", "Using GPU 2 (low"]
    # Both of two are chosen: together they are the lowest.
    assert all("(lowest utilization)" in line for line in describe_choices(pair, pair))


def test_memory_without_a_process_is_somebody_we_do_not_see() -> None:
    assert (
        why_busy(gpu(0, used_mib=30720))
        == "30.0 GiB held by graphics or by processes not seen from here"
    )
    assert why_busy(gpu(0)) is None


def test_work_without_a_process_is_somebody_we_do_not_see() -> None:
    hidden = "by graphics or by processes not seen from here"
    assert why_busy(gpu(0, utilization_percent=97)) == f"97 % used {hidden}"
    assert why_busy(gpu(0, used_mib=600)) == f"0.6 GiB held {hidden}"
    assert why_busy(gpu(0, used_mib=600, reserved_mib=None)) is None  # the driver's own share
    assert why_busy(gpu(0, used_mib=100, utilization_percent=5)) is None
    assert order(gpu(0, utilization_percent=97), gpu(1, used_mib=100)) == [1, 0]


def test_a_gpu_that_does_not_tell_who_uses_it_is_not_known_to_be_idle() -> None:
    assert why_not_idle(gpu(0)) is None
    assert why_not_idle(gpu(0, processes=None)) is None
    assert why_not_idle(gpu(0, utilization_percent=None)) is None  # a MIG instance
    for untold in ("used_mib", "utilization_percent"):
        why = why_not_idle(gpu(0, processes=None, **{untold: None}))
        assert why == "GPU0 does not tell who uses it: whether it is idle is not known"
        assert why_busy(gpu(0, processes=None, **{untold: None})) is None


def mig_machine() -> list[Gpu]:
    instances = tuple(
        gpu(1, uuid=f"MIG-{slot}{slot}", mig_index=slot, total_mib=9984, utilization_percent=None)
        for slot in (0, 1)
    )
    return [gpu(0), gpu(1, mig_enabled=True, mig_devices=instances)]


@pytest.mark.parametrize(
    ("selector", "labels"),
    [
        ("all", ["GPU0", "GPU1.0", "GPU1.1"]),
        ("1", ["GPU1.0", "GPU1.1"]),
        ("GPU-1111", ["GPU1.0", "GPU1.1"]),
        ("MIG-1", ["GPU1.1"]),
        ("MIG-11,MIG-00", ["GPU1.1", "GPU1.0"]),
        ("auto:2", ["GPU0", "GPU1.0"]),
    ],
)
def test_mig_instances_are_taken_in_place_of_their_parent(selector: str, labels: list[str]) -> None:
    assert chosen(selector, mig_machine()) == labels


def test_a_parent_and_its_instance_are_the_same_gpu_twice() -> None:
    with pytest.raises(UsageError, match="given twice"):
        chosen("1,MIG-11", mig_machine())


def test_a_mig_parent_without_instances_is_refused() -> None:
    with pytest.raises(NoGpuError, match="MIG enabled and no instance"):
        chosen("all", [gpu(0, mig_enabled=True)])


def test_a_machine_without_gpus_is_told() -> None:
    with pytest.raises(NoGpuError, match="no GPU found"):
        chosen("all", [])


@pytest.mark.parametrize("selector", ["0,a", "abc", "auto:x", "auto:0", "0,,1", "all,0"])
def test_a_selector_that_means_nothing_is_refused_on_any_machine(selector: str) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        check_selector(selector)


@pytest.mark.parametrize("selector", ["all", "auto", "auto:2", "0", "0, 2,5", "gpu-8f", "MIG-1"])
def test_a_selector_that_means_something_somewhere_is_let_through(selector: str) -> None:
    check_selector(selector)


# -- broken GPUs

WORKING = (
    Gpu(0, "GPU-aa00", "H100"),
    Gpu(1, "GPU-bb11", "H100"),
    Gpu(2, "GPU-cc22", "H100", mig_enabled=True, mig_devices=(Gpu(2, "MIG-dd", "H100"),)),
)
WITH_TWO_BROKEN = Snapshot("570", gpus=WORKING, broken=(BrokenGpu(3, "lost"), BrokenGpu(5, "lost")))


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
    assert [gpu.index for gpu in broken_needed(selector, None, mask, WITH_TWO_BROKEN)] == needed


def test_a_sound_box_has_none() -> None:
    assert broken_needed("all", None, None, Snapshot("570", gpus=WORKING)) == []
