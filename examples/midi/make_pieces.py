"""Makes SYNTHETIC pieces with a rule that a model can learn: a note is as loud as its place in the
bar and its pitch say. They are no music by anybody; the two "composers" are two rhythms.

    python -m examples.midi.make_pieces OUT --pieces 80
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from model_check.data.sources.midi import NOTE, TICKS_A_BEAT, Notes, write_notes

RHYTHMS = {"Even": (4, 4, 4, 4), "Dotted": (6, 2, 4, 4)}
"""Ticks from note to note."""
ACCENTS = {0: 40, 1: 0, 2: 24, 3: 0}
"""By the beat of the bar of four; a note between beats is `_OFFBEAT`."""
_OFFBEAT = -12
_SCALE = (0, 2, 4, 5, 7, 9, 11)
_LOWEST, _DEGREES = 48, 21
"""C3, and three octaves of a scale."""
_JITTER_SD = 2.0
"""Of the velocity: no player is exact. A token is 4 wide."""


def velocity_of(start: np.ndarray, pitch: np.ndarray) -> np.ndarray:
    """The rule, before the jitter."""
    beat, within = start // TICKS_A_BEAT % 4, start % TICKS_A_BEAT
    accent = np.where(within == 0, np.array(list(ACCENTS.values()))[beat], _OFFBEAT)
    return 43 + accent + (pitch - _LOWEST)


def make_piece(rng: np.random.Generator, composer: str, num_notes: int) -> Notes:
    """A walk on a scale, its velocities by the rule."""
    notes = np.empty(num_notes, NOTE)
    steps = np.resize(RHYTHMS[composer], num_notes)
    notes["start"] = np.cumsum(steps) - steps[0]
    notes["duration"] = steps
    walk = int(rng.integers(_DEGREES)) + np.cumsum(rng.integers(-3, 4, num_notes))
    # Mirrored at both ends of the range.
    degree = _DEGREES - 1 - np.abs(walk % (2 * _DEGREES - 2) - (_DEGREES - 1))
    notes["pitch"] = _LOWEST + degree // 7 * 12 + np.array(_SCALE)[degree % 7]
    exact = velocity_of(notes["start"], notes["pitch"])
    notes["velocity"] = np.clip(exact + rng.normal(0, _JITTER_SD, num_notes), 1, 127).round()
    return notes


def make_pieces(out: Path, num_pieces: int, num_notes: int, seed: int) -> None:
    """`out`/piece_NNN.mid and `out`/metadata.csv. Raises OSError, DataError."""
    out.mkdir(parents=True, exist_ok=True)
    rng, composers = np.random.default_rng(seed), list(RHYTHMS)
    with (out / "metadata.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("midi_filename", "composer", "note"))
        for number in range(num_pieces):
            name, composer = f"piece_{number:03}.mid", composers[number % len(composers)]
            write_notes(out / name, make_piece(rng, composer, num_notes))
            table.writerow((name, composer, "synthetic"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--pieces", type=int, default=80, metavar="N", help="files (80)")
    parser.add_argument("--notes", type=int, default=96, metavar="N", help="of a piece (96)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(0)")
    names = parser.parse_args(argv)
    make_pieces(names.out, names.pieces, names.notes, names.seed)
    print(f"{names.out}: {names.pieces} synthetic pieces of {names.notes} notes, metadata.csv")


if __name__ == "__main__":
    main()
