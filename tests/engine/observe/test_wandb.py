"""W&B: refused with a way out where it cannot be had; offline runs."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model_check.engine.run_context import Prompts
from model_check.errors import ConfigError, NonFiniteError
from tests.engine.conftest import Run

INSTALLED = importlib.util.find_spec("wandb") is not None


@pytest.mark.skipif(INSTALLED, reason="wandb is installed")
def test_without_the_package_the_hint_says_what_to_install(tiny_run: Callable[..., Run]) -> None:
    with pytest.raises(ConfigError, match=r"wandb is not installed \(.*-m pip install wandb\)"):
        tiny_run(logging__wandb="offline")


@pytest.mark.skipif(not INSTALLED, reason="needs wandb")
def test_an_offline_run_is_kept_on_disk_and_its_id_in_checkpoints(
    tiny_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    run = tiny_run(logging__wandb="offline")()
    (directory,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(directory.glob("*.wandb"))
    kept = next(o.kept() for o in run.trainer.state.observers if "wandb_id" in o.kept())
    assert directory.name.endswith(str(kept["wandb_id"]))
    written = b"".join(p.read_bytes() for p in (tmp_path / "wandb").rglob("*") if p.is_file())
    assert b"train/loss" in written
    assert b"a" * 40 not in written


FAKE = """
class Settings:
    def __init__(self, **options):
        pass

class Table:
    def __init__(self, columns, data):
        self.columns, self.data = columns, data

class Run:
    url, id = "https://example.org/run", "x1"

    def log(self, scalars, step):
        if step >= {fails_from}:
            raise RuntimeError("the service is gone\\nits own trace")
        for name, value in scalars.items():
            if isinstance(value, Table):
                print(name, step, value.columns, value.data)

    def finish(self):
        {finish}

def init(**options):
    {init}
    return Run()
"""
"""A package of that name that fails where it is told to."""


@pytest.fixture
def fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    def write(fails_from: int = 99, finish: str = "pass", init: str = "pass") -> None:
        package = tmp_path / "packages" / "wandb"
        package.mkdir(parents=True)
        text = FAKE.format(fails_from=fails_from, finish=finish, init=init)
        (package / "__init__.py").write_text(text)
        monkeypatch.syspath_prepend(str(package.parent))

    before = sys.modules.pop("wandb", None)
    yield write
    sys.modules.pop("wandb", None)
    if before is not None:
        sys.modules["wandb"] = before


def test_a_run_that_wandb_refuses_ends_before_its_first_step(
    fake_wandb: Callable[..., None], tiny_run: Callable[..., Run]
) -> None:
    fake_wandb(init="raise RuntimeError('no network\\nmore')")
    run = tiny_run(logging__wandb="offline")
    with pytest.raises(ConfigError, match=r"wandb = offline: no network; logging\.wandb=offline "):
        run()
    assert run.kept.steps() == []


def test_a_log_that_breaks_off_is_told_and_training_goes_on(
    fake_wandb: Callable[..., None], tiny_run: Callable[..., Run]
) -> None:
    fake_wandb(fails_from=2, finish="raise RuntimeError('not sent')")
    run = tiny_run(logging__wandb="offline")()
    assert len(run.kept.steps()) == 4
    told = [line for line in run.kept.lines if "no longer logged" in line]
    assert told == ["from step 2 on no longer logged: W&B: the service is gone"]
    assert "W&B: not everything was sent: not sent" in run.kept.lines


def test_samples_are_a_table(
    fake_wandb: Callable[..., None],
    tiny_run: Callable[..., Run],
    capfd: pytest.CaptureFixture[str],
) -> None:
    fake_wandb()
    asked = Prompts(["a", "b"], lambda _model, prompt, _between: f"{prompt}!")
    tiny_run(logging__wandb="offline", training__sample_interval=3, prompts=asked)()
    columns = "['step', 'prompt', 'text']"
    assert capfd.readouterr().out.splitlines() == [
        f"samples {step} {columns} {[[step, 'a', 'a!'], [step, 'b', 'b!']]}" for step in (3, 4)
    ]


def test_a_log_that_cannot_be_finished_hides_no_nan(
    fake_wandb: Callable[..., None], tiny_run: Callable[..., Run]
) -> None:
    fake_wandb(finish="raise RuntimeError('not sent')")
    with pytest.raises(NonFiniteError):
        tiny_run(logging__wandb="offline", debug__drill="nan@2")()
