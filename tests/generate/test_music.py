"""`run.sh generate --midi`: music into a model and out of it."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from model_check.attention import sdpa
from model_check.config.schema import ModelSettings, Settings, TrainingSettings
from model_check.config.shape import geometry
from model_check.data.sources.midi import NOTE, names_of, read_notes, write_notes
from model_check.data.tokenizers.midi_tokenizer import midi_tokenizer
from model_check.engine.checkpoint import packed
from model_check.generate.__main__ import main
from model_check.generate.music import prompt_with, write_music
from model_check.init import build_model

NOTES = np.array([(0, 8, 60, 79), (8, 4, 64, 31), (12, 4, 67, 127)], NOTE)

pytestmark = pytest.mark.midi


@pytest.fixture
def trained(tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint with its tokenizer; its weights are random, and large enough for an opinion."""

    def make(tokenizer: str) -> Path:
        shape = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
        model = ModelSettings(**shape, num_kv_heads=2, vocab_size=300, init_std=0.2)
        settings = Settings(model=model, training=TrainingSettings(context_length=128))
        made = build_model(settings, geometry(model, 300), sdpa, torch.device("cpu"))
        state = {
            "schema": 2,
            "model": made.state_dict(),
            "settings": msgspec.to_builtins(settings),
            "tokenizer": packed(tokenizer.encode()),
        }
        torch.save(state, tmp_path / "last.pt")
        return tmp_path / "last.pt"

    return make


@pytest.fixture
def music(trained: Callable[[str], Path]) -> Path:
    return trained(midi_tokenizer().to_json())


def test_what_a_model_says_is_a_midi_file(
    music: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of random weights: mostly tokens that are no notes."""
    import symusic

    write_notes(tmp_path / "in.mid", NOTES)
    out = tmp_path / "out.mid"
    code = main([str(music), "--prompt-midi", str(tmp_path / "in.mid"), "--midi", str(out)])
    told = capsys.readouterr().err
    assert code == 0
    assert "tokens that are no notes left out" in told
    assert symusic.Score(out).tracks[0].notes[0].pitch == 60
    assert np.array_equal(read_notes(out)[:3], NOTES)


def test_a_task_is_asked_of_a_piece_and_its_answer_alone_is_written(tmp_path: Path) -> None:
    write_notes(tmp_path / "in.mid", NOTES)
    names = names_of(NOTES[:2])
    prompt = prompt_with("TASK_LOUD", tmp_path / "in.mid", 2)
    assert prompt.split() == ["TASK_LOUD", *names, "GENAI"]
    answer = " ".join([*names_of(NOTES[2:]), "GENAI"])
    line = write_music(tmp_path / "out.mid", prompt, answer)
    assert line.endswith("out.mid: 1 notes, 1 tokens that are no notes left out")
    assert np.array_equal(read_notes(tmp_path / "out.mid"), NOTES[2:])


def test_a_piece_alone_asks_for_nothing(tmp_path: Path) -> None:
    write_notes(tmp_path / "in.mid", NOTES)
    assert prompt_with("", tmp_path / "in.mid").split() == names_of(NOTES)


def test_without_notes_the_file_is_whole_and_empty(tmp_path: Path) -> None:
    import symusic

    assert write_music(tmp_path / "out.mid", "GENAI", "").endswith("out.mid: 0 notes")
    assert symusic.Score(tmp_path / "out.mid").note_num() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "Pitch_60 loud"], "error: the prompt has 'loud', which is no token"),
        (["--prompt-midi", "{}/none.mid"], "none.mid: cannot be read"),
        (["--prompt-midi", "{}/last.pt"], "last.pt: not readable as MIDI"),
        (["--prompt-midi", "x.mid", "--prompt-notes", "0"], "--prompt-notes 0: out of range"),
        (["--prompts", "x", "--prompt-midi", "x.mid"], "--prompts FILE"),
        (["--prompts", "x", "--midi", "x.mid"], "--midi: is one file"),
        (["--prompt", "GENAI", "--midi", "{}/none/x.mid", "--max-tokens=1"], "cannot be written"),
    ],
)
def test_bad_input_is_one_clear_line(
    music: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main([str(music), *(each.format(tmp_path) for each in arguments)]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_model_of_text_writes_no_music(
    trained: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = Tokenizer(models.WordLevel({"one": 0, "two": 1, "<|endoftext|>": 2}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<|endoftext|>"])
    checkpoint = trained(words.to_str())
    assert main([str(checkpoint), "--prompt", "one", "--midi", "x.mid"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "it must be trained with data.tokenizer=midi" in line
