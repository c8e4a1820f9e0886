"""What is known to fail, or may, before anything starts."""

import importlib.util
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launcher.contain.memory import Membership
from launcher.doctor.machine import LOW_SHM_BYTES, check_open_files, check_shared_memory
from launcher.doctor.preflight import (
    check_checkpoint_dir,
    check_copies,
    check_gpu_memory,
    check_memory,
    check_training,
)
from launcher.gpus.probe import Gpu
from launcher.plan import cpu_places, gpu_places
from model_check.config.schema import Settings
from model_check.errors import ConfigError, StorageError

GIB = 1 << 30
TINY = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "vocab_size": 512}


def settings(**sections: dict[str, Any]) -> Settings:
    return msgspec.convert(sections, Settings)


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path) -> Iterator[Path]:
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def limited(tmp_path: Path, limit: int, used: int) -> Membership:
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(str(limit))
    (tmp_path / "memory.current").write_text(str(used))
    return Membership(tmp_path / "cgroup", tmp_path)


def test_cpu_workers_that_fit_the_host_but_not_their_cgroup_are_refused(tmp_path: Path) -> None:
    small = settings(model=TINY)
    assert check_memory([small] * 2) == []
    words = r"are available below this control group's limit of 1\.0 GiB"
    with pytest.raises(ConfigError, match=words):
        check_memory([small] * 20_000, limited(tmp_path, GIB, GIB - 2**20))


def test_what_fits_without_activations_only_is_a_note_with_what_to_change(tmp_path: Path) -> None:
    (note,) = check_memory([settings(model=TINY)] * 2, limited(tmp_path, GIB, GIB - 2**26))
    assert note.startswith("memory may not suffice: 2 CPU workers take about ")
    assert "this control group's limit of 1.0 GiB; lower training.context_length" in note


def test_a_batch_that_no_machine_holds_is_refused_before_its_workers_start() -> None:
    with pytest.raises(ConfigError, match=r"cannot fit: .* lower training\.batch_size \(100000000"):
        check_memory([settings(model=TINY, training={"batch_size": 100_000_000})] * 2)


def gpu(free_mib: int | None) -> Gpu:
    total = None if free_mib is None else 81559
    return Gpu(0, "GPU-0123456789", "H100", total_mib=total, used_mib=81559 - (free_mib or 0))


def test_a_gpu_without_room_for_the_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"GPU 0 \(GPU-01234567\) has 19.5 GiB free; weights"):
        check_gpu_memory(settings(), gpu_places([gpu(20_000)]))


def test_a_gpu_that_may_be_too_small_is_a_note_and_an_unknown_one_is_not_judged() -> None:
    (note,) = check_gpu_memory(settings(), gpu_places([gpu(30_000)]))
    assert re.match(r"GPU 0 \(GPU-01234567\) has 29.3 GiB free, and this run takes about \d+", note)
    assert "training.gradient_checkpointing=true" in note
    assert check_gpu_memory(settings(), gpu_places([gpu(80_000), gpu(None)])) == []


def test_a_shard_is_that_of_a_rank_among_those_of_all_nodes() -> None:
    shared, two = settings(launch={"mode": "fsdp"}), gpu_places([gpu(4_000)] * 2)
    for note in check_gpu_memory(shared, two, num_ranks=64):
        assert "this run takes about" in note
    with pytest.raises(ConfigError, match=r"parameters \(a shard of 2\) alone need"):
        check_gpu_memory(shared, two)


def test_copies_to_save_from_that_the_host_cannot_hold_are_a_note() -> None:
    saving = settings(training={"save_interval": 5})
    (note,) = check_copies(saving, 1000)
    assert note.startswith("host memory may not suffice: 1000 copies of weights and moments")
    wanted = 1000 * 12 * 1_923_125_248 / 2**30
    assert f"take {wanted:.1f} GiB" in note
    assert note.endswith("training.async_save=false needs none")
    for others in ({}, {"save_last": True}, {"save_interval": 5, "async_save": False}):
        assert check_copies(settings(training=others), 1000) == []
    assert check_copies(settings(model=TINY, training={"save_best": True}), 2) == []
    job = settings(training={"save_interval": 5}, launch={"mode": "ddp"})
    assert all("1 copies" in note for note in check_copies(job, 8))


SAVES = [
    {"training": {"save_last": True}},
    {"training": {"save_interval": 5}},
    {"debug": {"dump_tensors": True}},
]


@pytest.mark.parametrize("saves", SAVES)
def test_a_checkpoint_directory_that_cannot_be_is_refused_when_it_is_needed(
    cwd: Path, saves: dict[str, Any]
) -> None:
    (cwd / "taken").write_text("a file")
    wanted = settings(system={"checkpoint_dir": "taken/here"}, **saves)
    name = next(f"{section}.{key}" for section, keys in saves.items() for key in keys)
    with pytest.raises(
        StorageError, match=f"taken/here: cannot be written: Not a directory; {name}"
    ):
        check_checkpoint_dir(wanted, ["CPU0"])


def test_a_workers_own_directory_counts(cwd: Path) -> None:
    (cwd / ".checkpoints").mkdir()
    (cwd / ".checkpoints" / "gpu3").write_text("a file")
    wanted = settings(training={"save_last": True})
    check_checkpoint_dir(wanted, ["GPU1"])
    with pytest.raises(StorageError, match=r"gpu3: cannot be written"):
        check_checkpoint_dir(wanted, ["GPU1", "GPU3"])
    check_checkpoint_dir(settings(), ["GPU3"])  # nothing is to be saved


def test_looking_makes_no_directory(cwd: Path) -> None:
    assert check_training(settings(model=TINY), cpu_places(2)) == []
    assert list(cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("drill", "why"),
    [
        ("nan@1:CPU0:layers.0.attention.wr.weight", "did you mean layers.0.attention.w"),
        ("nan@1:CPU0:layers.1.attention.wq.weight", "no parameter"),  # there is one layer
        ("nan@1:CPU7", "this run has no worker CPU7"),
        ("nan@100", "step 100 is never reached"),
        ("flip_moment@1:CPU0:exp_avg_sq.layers.0.attention.wr.weight", "did you mean layers.0"),
        ("flip_activation@1:CPU0:layers.0.attention.wr", "did you mean layers.0.attention.w"),
        ("flip_gradient@1:CPU0:rope_cos", "no parameter"),
        ("burst@1:CPU0:rope_cis", "did you mean rope_cos"),
        ("burst@1:CPU0:rope_cos:65", "burst takes 2 to 64 values"),
        ("slow@1:CPU0:0.5x", "above 1x"),
    ],
)
def test_a_drill_that_cannot_act_is_refused(drill: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_training(settings(model=TINY, debug={"drill": drill}), cpu_places(2))


def test_a_small_or_missing_dev_shm_is_a_note() -> None:
    assert check_shared_memory(LOW_SHM_BYTES) == []
    assert check_shared_memory(64 << 20)[0].startswith("/dev/shm has 64 MiB: ")
    assert check_shared_memory(None)[0].startswith("/dev/shm is missing: ")


def test_more_workers_than_open_files_are_allowed_is_a_note() -> None:
    assert check_open_files(1) == []
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY:
        assert f"{hard} open files are allowed" in check_open_files(hard)[0]


def test_a_flip_that_nobody_can_notice_is_told() -> None:
    drills = {
        ("flip_gradient@1:CPU0", 1, "auto"): 1,
        ("flip_activation@1:all", 2, "auto"): 1,
        ("flip_gradient@1:CPU0", 2, "auto"): 0,
        ("flip@1:CPU0", 1, "off"): 1,
        ("burst@1:all", 2, "off"): 1,
        # State that changed by itself is noticed by its worker.
        ("flip@1:CPU0", 1, "auto"): 0,
        ("flip_moment@1", 2, "full"): 0,
    }
    for (drill, num_workers, fingerprints), expected in drills.items():
        made = settings(model=TINY, debug={"drill": drill, "fingerprints": fingerprints})
        notes = check_training(made, cpu_places(num_workers))
        assert sum("nobody can notice it" in note for note in notes) == expected, drill


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_log_that_cannot_be_had_is_told_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="wandb is not installed"):
        check_training(settings(model=TINY, logging={"wandb": "offline"}), cpu_places(1))
