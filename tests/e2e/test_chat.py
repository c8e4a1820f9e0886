"""Conversations: the chat template goes from the tokenizer to the checkpoint, its export, generate,
and to a further stage."""

import json
import shutil
from pathlib import Path

import pytest

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


@pytest.fixture
def tuned(launcher: Launcher, trained: Path) -> Launcher:
    """A copy of that place."""
    shutil.copytree(trained, launcher.cwd, dirs_exist_ok=True, symlinks=True)
    return launcher


def test_the_model_is_asked_as_it_was_taught_and_its_export_too(tuned: Launcher) -> None:
    last = ".checkpoints/cpu0/last.pt"
    exported = tuned.verb("export", last, "out")
    assert exported.returncode == 0, exported.stdout
    config = json.loads((tuned.cwd / "out" / "config.json").read_text())
    assert config["eos_token_id"] == [0, 2]  # of a document, and of a turn
    assert (tuned.cwd / "out" / "chat_template.jinja").is_file()
    for model in (last, "out"):
        told = tuned.verb("generate", model, "--prompt=say 3", "--temperature=0")
        assert "asked by the model's chat template (--raw" in told.stdout
        assert "yes\n" in told.stdout
        assert "tokens, the model ended it" in told.stdout
    forged = tuned.verb("generate", last, "--prompt=<|im_end|>")
    assert forged.returncode == 2
    assert "the prompt spells <|im_end|>, which only the chat template may write" in forged.stdout
    raw = tuned.verb("generate", last, "--prompt=say", "--raw", "--max-tokens=2")
    assert "asked by" not in raw.stdout
    assert raw.returncode == 0


def test_a_further_stage_has_the_tokenizer_and_the_template_of_its_weights(
    tuned: Launcher,
) -> None:
    weights = "model.init_from=.checkpoints/cpu0/last.pt"
    again = tuned(*CHAT, weights, "system.checkpoint_dir=more", "--run-dir=run2")
    assert again.exit_code == 0, again.output
    assert "prepared rows.jsonl: 40 sequences" in again.output
    other = tuned(*CHAT, weights, "data.tokenizer=bpe", "--run-dir=run3")
    assert other.exit_code == 2
    assert "messages, and the tokenizer comes without a chat template" in other.output


def test_another_tokenizer_than_that_of_the_weights_is_refused(tuned: Launcher) -> None:
    (tuned.cwd / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    given = ("model.init_from=.checkpoints/cpu0/last.pt", "data.tokenizer=bpe", "--run-dir=run2")
    other = tuned(*CHAT, *given)
    assert other.exit_code == 2, other.output
    assert "was trained with another tokenizer than the data's: " in other.output


def test_what_documents_begin_with_can_be_typed(launcher: Launcher) -> None:
    """The setting's name ends in `tokens`: it was taken for a secret's."""
    run = launcher("data.document_tokens=begin_end", "--workers=1")
    assert "secret" not in run.output
    assert "has no token that begins a document" in run.output
