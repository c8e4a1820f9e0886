"""Music into a model and out of it: a piece as a prompt, and what a model says as a MIDI file."""

from pathlib import Path

from model_check.data.sources.midi import (
    GENAI,
    TASKS,
    names_of,
    notes_of,
    read_notes,
    vocabulary,
    write_notes,
)
from model_check.errors import ConfigError, StorageError
from model_check.generate.text_model import TextModel


def check_music(text_model: TextModel) -> None:
    """Raises ConfigError for a model that knows no notes, DataError without the packages."""
    if not set(vocabulary()) <= (text_model.tokenizer.words or frozenset()):
        raise ConfigError(
            f"{text_model.tokenizer.name}: not the tokenizer of music, so no MIDI file comes of "
            "this model: it must be trained with data.tokenizer=midi"
        )


def prompt_with(text: str, piece: Path) -> str:
    """`text`, then the piece in names of tokens; after the piece of a task, what asks for its
    answer. Raises DataError."""
    before = text.split()
    asked = [GENAI] if set(TASKS) & set(before) else []
    return " ".join([*before, *names_of(read_notes(piece)), *asked])


def write_music(path: Path, prompt: str, text: str) -> str:
    """The notes of both, or those after GENAI, as a MIDI file; a line that says how many. Raises
    StorageError."""
    names = [*prompt.split(), *text.split()]
    asked = [number for number, name in enumerate(names, 1) if name == GENAI]
    notes, num_lost = notes_of(names[asked[-1] if asked else 0 :])
    try:
        write_notes(path, notes)
    except OSError as error:
        raise StorageError(f"--midi {path}: cannot be written: {error.strerror}") from error
    lost = f", {num_lost} tokens that are no notes left out" if num_lost else ""
    return f"{path}: {len(notes)} notes{lost}"
