"""Conversations: the chat template goes from the tokenizer to the checkpoint, its export, generate,
and to a further stage."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from model_check import export
from model_check.generate.__main__ import main as generate
from tests.data.trl.make_labels import TOKENIZER
from tests.e2e.conftest import Launcher, launcher_in

CHAT = (
    "training.stage=prompt_target",
    "data.num_samples=null",
    "data.dataset=rows.jsonl",
    "training.max_steps=30",
    "training.learning_rate=0.01",
    "training.context_length=48",
    "training.save_last=true",
    "--workers=1",
)
WEIGHTS = "model.init_from=.checkpoints/cpu0/last.pt"


def write_rows(directory: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for number in range(40)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Path:
    """Where a chat model was trained; its tokenizer is gone."""
    launcher = launcher_in(tmp_path_factory.mktemp("chat"), token_cache)
    write_rows(launcher.cwd)
    shutil.copytree(TOKENIZER, launcher.cwd / "tokenizer")
    run = launcher(*CHAT, "data.tokenizer=tokenizer")
    assert run.exit_code == 0, run.output
    shutil.rmtree(launcher.cwd / "tokenizer")
    return launcher.cwd


def test_the_model_is_asked_as_it_was_taught_and_its_export_too(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(trained)
    last, out = ".checkpoints/cpu0/last.pt", str(tmp_path / "out")
    assert export.main([last, out]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == [0, 2]  # of a document, and of a turn
    assert (tmp_path / "out" / "chat_template.jinja").is_file()

    def say(*arguments: str, code: int = 0) -> str:
        assert generate(arguments) == code
        return "".join(capfd.readouterr())

    for model in (last, out):
        told = say(model, "--prompt=say 3", "--temperature=0")
        assert "asked by the model's chat template (--raw" in told
        assert "yes\n" in told
        assert "tokens, the model ended it" in told
    forged = say(last, "--prompt=<|im_end|>", code=2)
    assert "the prompt spells <|im_end|>, which only the chat template may write" in forged
    assert "asked by" not in say(last, "--prompt=say", "--raw", "--max-tokens=2")


@pytest.fixture
def tuned(launcher: Launcher, trained: Path) -> Launcher:
    """A copy of that place, where preparations are made alone."""
    shutil.copytree(trained, launcher.cwd, dirs_exist_ok=True, symlinks=True)
    return launcher


def prepare(launcher: Launcher, *settings: str) -> "subprocess.CompletedProcess[str]":
    """As far as a further stage hangs on what is prepared for it."""
    ours = (setting for setting in CHAT if not setting.startswith("--"))
    return launcher.verb("prepare", "--config", str(launcher.config), *ours, *settings)


def test_a_further_stage_has_the_tokenizer_and_the_template_of_its_weights(
    tuned: Launcher,
) -> None:
    again = prepare(tuned, WEIGHTS)
    assert again.returncode == 0, again.stdout
    assert "rows.jsonl: 40 sequences" in again.stdout
    other = prepare(tuned, WEIGHTS, "data.tokenizer=bpe")
    assert other.returncode == 0, other.stdout
    assert "data: the tokenizer has no chat template: ChatML is used" in other.stdout


def test_another_tokenizer_than_that_of_the_weights_is_refused(tuned: Launcher) -> None:
    (tuned.cwd / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    other = tuned(*CHAT, WEIGHTS, "data.tokenizer=bpe", "--run-dir=run2")
    assert other.exit_code == 2, other.output
    assert "was trained with another tokenizer than the data's: " in other.output


def test_what_documents_begin_with_can_be_typed(launcher: Launcher) -> None:
    """The setting's name ends in `tokens`: it was taken for a secret's."""
    (launcher.cwd / "a.txt").write_text("some words of a text " * 500)
    ours = ("data.dataset=a.txt", "data.tokenizer=bpe", "data.document_tokens=begin_end")
    told = launcher.verb("prepare", "--config", str(launcher.config), *ours).stdout
    assert "secret" not in told
    assert "has no token that begins a document" in told
