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


def prompt_with(text: str, piece: Path, num_notes: int | None = None) -> str:
    """`text`, then the first notes of the piece (None: all) in names of tokens; after the piece of
    a task, what asks for its answer. Raises DataError."""
    before = text.split()
    asked = [GENAI] if set(TASKS) & set(before) else []
    return " ".join([*before, *names_of(read_notes(piece)[:num_notes]), *asked])


def write_music(path: Path, prompt: str, text: str) -> str:
    """The notes of both, or those after the prompt's GENAI, as a MIDI file; a line that says how
    many. Raises StorageError."""
    begun = prompt.split()
    if GENAI in begun:
        begun = begun[len(begun) - begun[::-1].index(GENAI) :]
    notes, num_lost = notes_of([*begun, *text.split()])
    try:
        write_notes(path, notes)
    except OSError as error:
        raise StorageError(f"--midi {path}: cannot be written: {error.strerror}") from error
    lost = f", {num_lost} tokens that are no notes left out" if num_lost else ""
    return f"{path}: {len(notes)} notes{lost}"
