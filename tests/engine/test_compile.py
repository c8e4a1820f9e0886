"""torch.compile by block: the same training, within its rounding; parameters keep their names."""

import shutil
from collections.abc import Callable

import pytest

from model_check.errors import ConfigError
from model_check.events import Phase
from tests.engine.conftest import Run

MakeRun = Callable[..., Run]
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.timeout(400)
def test_compiled_blocks_train_as_eager_ones(tiny_run: MakeRun) -> None:
    eager, compiled = (
        tiny_run(model__num_layers=2)(),
        tiny_run(model__num_layers=2, training__compile="true"),
    )
    assert compiled.weights().keys() == eager.weights().keys()
    assert all(p.grad is None for p in compiled.trainer.model.parameters())
    compiled()
    for ours, theirs in zip(compiled.bits(), eager.bits(), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert float.fromhex(one) == pytest.approx(float.fromhex(other), rel=1e-4)
    phases = [event.name for event in compiled.kept.events if isinstance(event, Phase)]
    assert phases == ["build", "compile", "train"]


def test_without_a_compiler_the_hint_says_what_to_do(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler found .*training\.compile=false"):
        tiny_run(training__compile="true")
