"""torch.compile between the products: the same training, within its rounding; parameters keep their
names; what fails its trial is not taken."""

import itertools
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_check.engine import compile as compile_module
from model_check.engine.compile import check_steps, digest, take_cache
from model_check.engine.results import StepData
from model_check.engine.uncompiled import uncompiled
from model_check.errors import CheckpointError, ConfigError
from model_check.events import Evaluation, Phase
from model_check.kernels import Outputs
from model_check.model import ChunkedCrossEntropy, Llama
from tests.engine.conftest import COMPILER, FakeBatch, FakeSource, Run, Worker

MakeRun = Callable[..., Run]
OfChunk = Callable[[Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor | None]]
HALF_AND_RECOMPUTED = {"training__use_amp": "true", "training__gradient_checkpointing": "true"}
DELTA = {
    "model__attention": "infini",
    "model__infini__segment_length": 4,
    "model__infini__update": "delta",
}


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [(HALF_AND_RECOMPUTED, 2e-2), (DELTA, 1e-4)],
    ids=["bfloat16 and checkpointing", "infini"],
)
def test_blocks_train_compiled_as_eager_ones(
    tiny_run: MakeRun, compiler: str, changes: dict[str, Any], tolerance: float
) -> None:
    assert_same_training(tiny_run, changes, tolerance)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_what_the_compiler_makes_trains_as_eager_code_does(tiny_run: MakeRun) -> None:
    assert_same_training(tiny_run, {}, 1e-4)


def assert_same_training(tiny_run: MakeRun, changes: dict[str, Any], tolerance: float) -> None:
    changes = changes | {"model__num_layers": 2}
    eager, compiled = tiny_run(**changes)(), tiny_run(**changes, training__compile="true")
    assert compiled.trainer.state.model.loss.is_compiled, compiled.kept.lines
    assert compiled.weights().keys() == eager.weights().keys()
    assert all(p.grad is None for p in compiled.trainer.state.model.parameters())
    compiled()
    for ours, theirs in zip(compiled.bits(), eager.bits(), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert float.fromhex(one) == pytest.approx(float.fromhex(other), rel=tolerance)
    phases = [event.name for event in compiled.kept.events if isinstance(event, Phase)]
    assert phases == ["build", "compile", "train"]


def losses_of(run: Run) -> list[float]:
    """Of its evaluations."""
    events = [event for event in run.kept.events if isinstance(event, Evaluation)]
    return [float.fromhex(event.loss) for event in events]


def with_documents(number: int) -> FakeBatch:
    batch = FakeSource().random(number)
    return FakeBatch(batch.inputs, batch.targets, torch.arange(16).repeat(2, 1) // 5)


def batches_of(*sizes: int) -> Iterator[FakeBatch]:
    """A split whose last batch is smaller."""
    for number, size in enumerate(sizes):
        batch = with_documents(100 + number)
        assert batch.documents is not None
        yield FakeBatch(batch.inputs[:size], batch.targets[:size], batch.documents[:size])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_nothing_breaks_or_compiles_again_in_50_steps_and_a_resumed_run_has_their_bits(
    tiny_run: MakeRun, tmp_path: Path, compiler: str
) -> None:
    """With accumulation, documents, evaluation with a smaller last batch, samples and saves."""
    from torch._dynamo.utils import counters

    def run(**changes: Any) -> Run:
        return tiny_run(
            FakeSource(make=with_documents),
            splits={"val": lambda: batches_of(2, 2, 1)},
            data__document_masking="true",
            training__grad_accum_nums=2,
            training__loss_chunk_rows=24,
            training__eval_interval=10,
            training__save_interval=25,
            training__max_steps=50,
            **{"training__compile": "true"} | changes,
        )

    whole = run()
    assert whole.trainer.state.model.loss.is_compiled, whole.kept.lines
    before = counters["stats"]["unique_graphs"]
    assert before >= 5  # block, norm and loss, with and without gradients
    with torch._dynamo.config.patch(error_on_recompile=True):
        whole()
        assert counters["stats"]["unique_graphs"] == before
        assert not counters["graph_break"]
    assert len(whole.bits()) == 50
    resumed = run(training__resume=tmp_path / "checkpoints" / "step_25.pt")
    assert resumed.trainer.state.model.loss.is_compiled
    assert resumed().bits() == whole.bits()[25:]
    eager = run(training__compile="false")()
    assert losses_of(whole) == pytest.approx(losses_of(eager), rel=1e-3)


def wrap(of_chunk: OfChunk, model: Llama) -> None:
    """Has `of_chunk` stand in for compiled code."""
    vars(model.loss)["of_chunk"] = of_chunk


def test_trials_in_eager_code_take_the_chunks_that_it_has_memory_for(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled head has larger ones: in eager code 10 GiB at the default vocabulary."""
    monkeypatch.setattr(compile_module, "_wrap", partial(wrap, ChunkedCrossEntropy.of_chunk))
    monkeypatch.setattr(compile_module, "_refuse_without_compiler", lambda: None)
    for rows, eager in ((8192, 2048), (100, 100)):
        run = tiny_run(training__compile="true", training__loss_chunk_rows=rows)
        loss = run.trainer.state.model.loss
        with uncompiled(run.trainer.state.model):
            assert loss.chunk_rows == eager
        assert loss.chunk_rows == rows


def spoilt(kind: str) -> OfChunk:
    """Compiled code that is not to be trusted."""
    calls = itertools.count(1)

    def call(
        logits: Tensor, targets: Tensor, grad_scale: Tensor | None, with_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        loss, gradient = ChunkedCrossEntropy.of_chunk(logits, targets, grad_scale, with_gradient)
        if gradient is not None and kind == "varies":
            gradient[0, 0] += 1e-6 * next(calls)
        if gradient is not None and kind == "wrong":
            gradient *= 1.2
        if gradient is not None and kind == "nan":
            gradient[0, 0] = float("nan")
        if kind == "raises" and with_gradient:
            raise AssertionError("no plan")
        return loss * 1.1 if kind == "other loss" else loss, gradient

    return call


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("varies", r"3 equal steps give other bits of the gradient of tok_embed\.weight"),
        ("wrong", r"the gradient of tok_embed\.weight is off by 0\.2 of its size"),
        ("nan", r"the gradient of tok_embed\.weight is off by nan of its size"),
        ("raises", "AssertionError: no plan"),
        ("other loss", r"its loss is 3\.\d+, and 3\.\d+ by eager code"),
    ],
)
def test_compiled_code_that_fails_its_trial_is_not_taken(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, kind: str, said: str
) -> None:
    monkeypatch.setattr(compile_module, "_wrap", partial(wrap, spoilt(kind)))
    monkeypatch.setattr(compile_module, "_refuse_without_compiler", lambda: None)
    eager = tiny_run()()
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        run = tiny_run(training__compile="true")()
    finally:
        torch.set_deterministic_debug_mode(mode)
    assert not run.trainer.state.model.loss.is_compiled
    (told,) = [line for line in run.kept.lines if "not taken" in line]
    assert re.fullmatch(rf"training\.compile = true: not taken, this run is eager: {said}.*", told)
    assert run.bits() == eager.bits()
    train = next(e for e in run.kept.events if isinstance(e, Phase) and e.name == "train")
    assert train.detail["compiled"] is False


@pytest.mark.parametrize(("value", "is_rounding"), [(3e-8, True), (0.0, True), (1e-3, False)])
def test_a_gradient_of_nothing_but_rounding_is_held_against_all_of_them(
    value: float, is_rounding: bool
) -> None:
    """Where each position sees itself alone, that of a query's weights."""

    def passes(of_query: float) -> Callable[[StepData], Outputs]:
        gradients = {"a": torch.ones(8), "wq": torch.full((8,), of_query)}
        return lambda _: digest(torch.ones(()), gradients)

    data = StepData(0, [], 1, 1)
    found = check_steps(passes(value), passes(1e-8), [data], torch.float32)
    assert (found is None) is is_rounding, found


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
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
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


@pytest.mark.parametrize(
    ("named", "refusal"),
    [
        ("new/deep", None),
        ("", None),
        ("file/below", "Not a directory"),
        ("file", "Not a directory"),
    ],
)
def test_a_directory_that_the_environment_names_is_made_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, refusal: str | None
) -> None:
    """torch makes it while it is imported, and would raise there."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = str(tmp_path / named) if named else ""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", directory)
    if refusal is not None:
        with pytest.raises(ConfigError, match=rf"{directory}: {refusal}.* set TORCHINDUCTOR_CACHE"):
            take_cache()
        return
    take_cache()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_dir()
    assert not named or os.environ["TORCHINDUCTOR_CACHE_DIR"] == directory
