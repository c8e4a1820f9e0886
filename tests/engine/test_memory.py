"""Out of memory is one line that names the settings to change."""

import pytest
import torch

from model_check.config.schema import TrainingSettings
from model_check.engine.memory import OutOfMemory, explained

CPU = torch.device("cpu")


def test_the_cpu_allocator_is_understood() -> None:
    expected = r"batch_size \(3\) or training\.context_length.*gradient_checkpointing=true"
    with (
        pytest.raises(OutOfMemory, match=expected) as caught,
        explained(TrainingSettings(batch_size=3), CPU),
    ):
        torch.empty(2**60)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)


def test_a_setting_that_is_on_already_is_not_advised() -> None:
    training = TrainingSettings(gradient_checkpointing=True)
    with pytest.raises(OutOfMemory) as caught, explained(training, CPU):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12 GiB.\nmore")
    assert "gradient_checkpointing" not in str(caught.value)
    assert "Tried to allocate 12 GiB." in str(caught.value)


def test_other_failures_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot"), explained(TrainingSettings(), CPU):
        torch.ones(2, 3) @ torch.ones(2, 3)
