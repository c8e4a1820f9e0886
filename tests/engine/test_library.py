"""`import model_check` in a program of one's own."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import model_check
from model_check.errors import CheckpointError
from model_check.utils.project_files import version
from tests.deadline import DEADLINE_S
from tests.engine.conftest import ROOT, VOCABULARY, Run

MakeRun = Callable[..., Run]


def test_it_has_a_version_and_costs_nothing() -> None:
    assert model_check.__version__ == version()
    code = "import sys, model_check; print(model_check.__version__, 'torch' in sys.modules)"
    command = (sys.executable, "-c", code)
    out = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    ).stdout
    assert out.split() == [version(), "False"]
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        model_check.nonsense  # noqa: B018


@pytest.mark.parametrize("tied", ["true", "false"])
def test_the_model_of_a_checkpoint_gives_the_same_logits(
    tiny_run: MakeRun, tmp_path: Path, tied: str
) -> None:
    run = tiny_run(training__save_last="true", model__tie_word_embeddings=tied)()
    model = model_check.load_model(tmp_path / "checkpoints" / "last.pt")
    tokens = torch.arange(12).reshape(2, 6) % VOCABULARY
    with torch.no_grad():
        expected = run.trainer.state.model.eval()(tokens)
        assert torch.equal(model(tokens), expected)
    assert not model.training


def test_what_is_no_checkpoint_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match=str(path)):
        model_check.load_model(path)
