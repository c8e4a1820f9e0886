"""Music: MIDI files, their notes, and notes as the names of tokens. The only file that knows
symusic and miditok; both are loaded where music is read, since miditok loads torch.

A piece is what a piano would play of a file: the notes of all its instruments but drums, in beats.
Its names are those of miditok's TSD (arXiv 2002.00212's durations, and shifts of time):
`TimeShift_1.0.8 Pitch_60 Velocity_79 Duration_0.4.8`, where 1.4.8 is 1 beat and 4 eighths of one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_check.data.read.manifest import hash_of
from model_check.errors import DataError
from model_check.utils.files import read_whole
from model_check.utils.words import first_line

PIP_HINT = "MIDI needs the packages symusic and miditok: pip install 'symusic>=0.6' 'miditok>=3.1'"
GENAI = "GENAI"
"""Between what a task gives and what it asks for."""
TASKS = ("TASK_LOUD", "TASK_SOFT", "TASK_HIGH", "TASK_LOW", "TASK_VELOCITY", "TASK_PERFORMANCE")
NOTE = np.dtype([("start", "<i4"), ("duration", "<i4"), ("pitch", "<i4"), ("velocity", "<i4")])
"""Times in ticks."""
TICKS_A_BEAT = 8
Notes = NDArray[np.void]
"""[N] of NOTE."""
Score = Any
"""A score of symusic."""

_PITCHES = (21, 108)
"""The keys of a piano."""
_NUM_VELOCITIES = 32
_KINDS = ("Pitch", "Velocity", "Duration", "TimeShift")
_WRITTEN_TICKS = 480
"""A beat, in files that we write."""
_LONGEST_FILE = 1 << 26
"""Bytes."""
_LONGEST_BEATS = 1 << 17
"""18 hours at 120 beats a minute. Silence costs tokens, too, and a broken file may have years."""


class MidiError(Exception):
    """A file without a piece."""

    def __init__(self, kind: str, detail: str = "") -> None:
        self.kind = kind
        super().__init__(f"{kind}: {detail}" if detail else kind)


def vocabulary() -> list[str]:
    """Every name of a token but that of the end, in the order of their ids. Raises DataError."""
    names = [name for name in _tokenizer().vocab if name.partition("_")[0] in _KINDS]
    return [*names, GENAI, *TASKS]


def encoding() -> str:
    """A hash of the vocabulary, and of what the installed packages make of a piece: versions that
    encode alike have one. Raises DataError."""
    return hash_of([vocabulary(), _probe()])


def read_ids(path: Path) -> tuple[NDArray[np.int64], int]:
    """The tokens of the piece of a file, and how many of its notes they leave out. Raises MidiError
    where it has no piece, DataError."""
    score, num_lost = _piano(_whole(path))
    ids = _ids()
    return np.array([ids[name] for name in _names(score)], np.int64), num_lost


def read_notes(path: Path) -> Notes:
    """The piece of a file, its times and velocities as tokens have them. Raises DataError."""
    try:
        score, _ = _piano(_whole(path))
    except MidiError as error:
        raise DataError(f"{path}: {error}") from error
    return notes_of(_names(score))[0]


def write_notes(path: Path, notes: Notes, beats_a_minute: float = 120.0) -> None:
    """A MIDI file of them. Raises OSError, DataError where the packages are missing."""
    path.write_bytes(_content(notes, beats_a_minute))


def names_of(notes: Notes) -> list[str]:
    """The names of their tokens. Raises DataError."""
    return _names(_score(notes, TICKS_A_BEAT))


def notes_of(names: Sequence[str]) -> tuple[Notes, int]:
    """What the names of a vocabulary spell, and how many of them are no part of a note."""
    notes: list[tuple[int, int, int, int]] = []
    now = at = num_lost = 0
    while at < len(names):
        match [tuple(name.split("_", 1)) for name in names[at : at + 3]]:
            case [("Pitch", pitch), ("Velocity", velocity), ("Duration", beats)]:
                notes.append((now, _ticks(beats), int(pitch), int(velocity)))
                at += 3
                continue
            case [("TimeShift", beats), *_]:
                now += _ticks(beats)
            case _:
                num_lost += 1
        at += 1
    return np.array(notes, NOTE), num_lost


def _ticks(beats: str) -> int:
    whole, parts, parts_a_beat = map(int, beats.split("."))
    return (whole * parts_a_beat + parts) * TICKS_A_BEAT // parts_a_beat


def _whole(path: Path) -> bytes:
    """Raises MidiError, DataError."""
    try:
        if path.stat().st_size > _LONGEST_FILE:
            raise MidiError(f"it is larger than {_LONGEST_FILE >> 20} MiB")
        return read_whole(path, _LONGEST_FILE)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _piano(content: bytes) -> tuple[Score, int]:
    """What a piano plays of a file, and how many notes are left out. Raises MidiError, DataError
    where the packages are missing."""
    with _packages():
        import symusic
    try:
        score = symusic.Score.from_midi(content)
    # The package raises nothing more precise.
    except Exception as error:
        reason = first_line(error).removeprefix("MiniMidi: ")
        raise MidiError("not readable as MIDI", reason) from error
    tracks = [_notes_in(track) for track in score.tracks if not track.is_drum]
    notes = np.concatenate([np.empty(0, NOTE), *tracks])
    least, most = _PITCHES
    notes = notes[(notes["pitch"] >= least) & (notes["pitch"] <= most)]
    _check(notes, score.ticks_per_quarter)
    num_notes = sum(len(track.notes) for track in score.tracks)
    return _score(notes, score.ticks_per_quarter), num_notes - len(notes)


def _check(notes: Notes, ticks_a_beat: int) -> None:
    """Raises MidiError."""
    if not notes.size:
        raise MidiError("it has no notes for a piano")
    starts, durations = notes["start"].astype(np.int64), notes["duration"].astype(np.int64)
    if ticks_a_beat <= 0 or starts.min() < 0 or durations.min() < 0:
        raise MidiError("its times are no times")
    if (starts + durations).max() > _LONGEST_BEATS * ticks_a_beat:
        raise MidiError(f"it is longer than {_LONGEST_BEATS:,} beats")


def _notes_in(track: Any) -> Notes:
    columns = track.notes.numpy()
    notes = np.empty(len(columns["time"]), NOTE)
    notes["start"] = columns["time"]
    for name in ("duration", "pitch", "velocity"):
        notes[name] = columns[name]
    return notes


def _score(notes: Notes, ticks_a_beat: int) -> Score:
    with _packages():
        import symusic
    score, track = symusic.Score(ticks_a_beat), symusic.Track(name="piano")
    columns = (notes["start"], notes["duration"])
    small = (notes["pitch"].astype(np.int8), notes["velocity"].astype(np.int8))
    track.notes = symusic.Note.from_numpy(*map(np.ascontiguousarray, (*columns, *small)))
    score.tracks.append(track)
    return score


def _content(notes: Notes, beats_a_minute: float) -> bytes:
    with _packages():
        import symusic
    finer = notes.copy()
    for name in ("start", "duration"):
        finer[name] *= _WRITTEN_TICKS // TICKS_A_BEAT
    score = _score(finer, _WRITTEN_TICKS)
    score.tempos.append(symusic.Tempo(0, beats_a_minute))
    content: bytes = score.dumps_midi()
    return content


def _names(score: Score) -> list[str]:
    return [name for track in _tokenizer().encode(score) for name in track.tokens]


def _probe() -> list[str]:
    """Of a piece with all that is rounded, cut and ordered."""
    rows = [(n * n % 97 * 5, n * 7 % 130, 21 + n * 11 % 88, 1 + n * 13 % 127) for n in range(200)]
    score, _ = _piano(_content(np.array(rows, NOTE), 97.0))
    return _names(score)


@cache
def _ids() -> dict[str, int]:
    return {name: number for number, name in enumerate(vocabulary())}


@cache
def _tokenizer() -> Any:
    with _packages():
        from miditok import TSD, TokenizerConfig
    return TSD(
        TokenizerConfig(
            pitch_range=_PITCHES,
            beat_res={(0, 4): TICKS_A_BEAT, (4, 12): TICKS_A_BEAT // 2},
            num_velocities=_NUM_VELOCITIES,
            use_time_signatures=False,
            use_pitchdrum_tokens=False,
        )
    )


@contextmanager
def _packages() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise DataError(PIP_HINT) from error
