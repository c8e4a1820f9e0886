"""Out of memory is one line that names the settings to change."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model_check.config.schema import Settings, TrainingSettings
from model_check.engine.memory import OutOfMemory, explained


def settings_with(**training: Any) -> Settings:
    return Settings(training=TrainingSettings(**training))


def test_the_cpu_allocator_is_understood(tiny_run: Callable[..., Any]) -> None:
    context = tiny_run().trainer.state.context
    expected = r"needs about .* GiB: weights .*batch_size \(3\).*gradient_checkpointing=true"
    with (
        pytest.raises(OutOfMemory, match=expected) as caught,
        explained(settings_with(batch_size=3), context),
    ):
        torch.empty(2**60)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)


def test_a_setting_that_is_on_already_is_not_advised(tiny_run: Callable[..., Any]) -> None:
    settings = settings_with(gradient_checkpointing=True)
    with (
        pytest.raises(OutOfMemory) as caught,
        explained(settings, tiny_run().trainer.state.context),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12 GiB.\nmore")
    assert "gradient_checkpointing" not in str(caught.value)
    assert "out of memory on cpu, where this run needs about" in str(caught.value)
    assert "Tried to allocate 12 GiB." in str(caught.value)


def test_other_failures_pass_unchanged(tiny_run: Callable[..., Any]) -> None:
    context = tiny_run().trainer.state.context
    with pytest.raises(RuntimeError, match="shapes cannot"), explained(Settings(), context):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_a_snapshot_of_an_earlier_run_stays(
    tiny_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = dataclasses.replace(tiny_run().trainer.state.context, device=torch.device("cuda"))
    written = iter(("first", "second"))
    dump = "torch.cuda.memory._dump_snapshot"
    monkeypatch.setattr(dump, lambda path: Path(path).write_text(next(written)))
    for _ in range(2):
        with pytest.raises(OutOfMemory), explained(Settings(), context):
            raise MemoryError
    found = {path.name: path.read_text() for path in context.directory.iterdir()}
    assert found == {"oom_memory.earlier1.pickle": "first", "oom_memory.pickle": "second"}


@pytest.mark.gpu
def test_a_gpu_that_is_full_leaves_a_snapshot(tiny_run: Callable[..., Any]) -> None:
    context = dataclasses.replace(tiny_run().trainer.state.context, device=torch.device("cuda"))
    expected = r"Memory snapshot: .*oom_memory\.pickle"
    with pytest.raises(OutOfMemory, match=expected), explained(Settings(), context):
        torch.empty(2**50, device="cuda")
    assert (context.directory / "oom_memory.pickle").is_file()
