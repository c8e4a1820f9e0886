"""torch.compile by block: the same training, within its rounding; parameters keep their names."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model_check.engine.checkpoint import CheckpointError
from model_check.engine.compile import take_cache
from model_check.errors import ConfigError
from model_check.events import Phase
from tests.engine.conftest import FakeBatch, FakeSource, Run, Worker

MakeRun = Callable[..., Run]
HALF_AND_RECOMPUTED = {"training__use_amp": "true", "training__gradient_checkpointing": "true"}
DELTA = {
    "model__attention": "infini",
    "model__infini__segment_length": 4,
    "model__infini__update": "delta",
}
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [({}, 1e-4), (HALF_AND_RECOMPUTED, 2e-2), (DELTA, 1e-4)],
    ids=["float32", "bfloat16 and checkpointing", "infini"],
)
def test_compiled_blocks_train_as_eager_ones(
    tiny_run: MakeRun, changes: dict[str, Any], tolerance: float
) -> None:
    changes = changes | {"model__num_layers": 2}
    eager, compiled = tiny_run(**changes)(), tiny_run(**changes, training__compile="true")
    assert compiled.weights().keys() == eager.weights().keys()
    assert all(p.grad is None for p in compiled.trainer.state.model.parameters())
    compiled()
    for ours, theirs in zip(compiled.bits(), eager.bits(), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert float.fromhex(one) == pytest.approx(float.fromhex(other), rel=tolerance)
    phases = [event.name for event in compiled.kept.events if isinstance(event, Phase)]
    assert phases == ["build", "compile", "train"]


def with_documents(number: int) -> FakeBatch:
    batch = FakeSource().random(number)
    return FakeBatch(batch.inputs, batch.targets, torch.arange(16).repeat(2, 1) // 5)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(400)
def test_no_step_compiles_again_where_documents_are_masked(tiny_run: MakeRun) -> None:
    run = tiny_run(
        FakeSource(make=with_documents),
        data__document_masking="true",
        training__compile="true",
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        run()
    assert len(run.bits()) == 4


def test_a_checkpoint_that_cannot_be_resumed_is_refused_before_the_wait(
    tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")  # compiling would be refused
    (tmp_path / "torn.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="damaged"):
        tiny_run(training__compile="true", training__resume=tmp_path / "torn.pt")


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_a_signal_ends_the_compiling_at_once(start: Callable[..., Worker]) -> None:
    worker = start("training.compile=true", OMP_NUM_THREADS="1")
    assert any(isinstance(e, Phase) and e.name == "compile" for e in worker.listen())
    worker.process.send_signal(signal.SIGTERM)
    assert worker.finish() == 143, worker.output
    assert worker.output.splitlines()[-1] == "[CPU0] stopped by SIGTERM after 0 steps"
    assert "Traceback" not in worker.output


def test_without_a_compiler_the_hint_says_what_to_do(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler found .*training\.compile=false"):
        tiny_run(training__compile="true")


@pytest.mark.root
@pytest.mark.parametrize("taken_by", ["nobody", "directory", "link"])
def test_compiled_code_is_run_from_a_directory_of_ones_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_by: str
) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "named")
    take_cache()
    assert os.environ.pop("TORCHINDUCTOR_CACHE_DIR") == "named"
    directory = tmp_path / "torchinductor_uid0"
    if taken_by == "nobody":
        take_cache()
        take_cache()
        assert directory.stat().st_mode & 0o777 == 0o700
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(directory)
        return
    (tmp_path / "theirs").mkdir(0o777)
    if taken_by == "link":
        directory.symlink_to("theirs")
    else:
        directory.mkdir(0o777)
    os.chown(directory, 4711, 4711, follow_symlinks=False)
    with pytest.raises(ConfigError, match=r"another user.* set TORCHINDUCTOR_CACHE_DIR"):
        take_cache()
