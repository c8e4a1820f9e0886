"""How far off are the velocities that a model gives the notes of held-out examples? Beside it, the
same for the best constant, and for the velocities that the prompt has.

    python -m examples.midi.velocity_error CHECKPOINT tasks.jsonl --column composer --value Dotted
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from model_check.data.sources.midi import Notes, notes_of
from model_check.errors import ModelCheckError
from model_check.generate.generate import generate
from model_check.generate.sampling import Sampling
from model_check.generate.text_model import TextModel, read_text_model

Example = dict[str, str]
"""A row of make_tasks.py."""


class VelocityError(NamedTuple):
    """Mean absolute errors, of 127, over the notes of the targets."""

    model: float
    """A note that the answer lacks has the constant."""
    constant: float
    """The median of the targets themselves: no other constant is nearer."""
    source: float
    """The prompt's own velocities; NaN where it has not the notes."""
    found: float
    """Share of the notes that the answer has."""
    num_notes: int


def velocity_error(text_model: TextModel, examples: Sequence[Example]) -> VelocityError:
    """Of the likeliest answers. Raises ConfigError for a prompt that is too long."""
    targets = [notes_of(example["completion"].split())[0] for example in examples]
    answers = [notes_of(answer(text_model, example["prompt"]).split())[0] for example in examples]
    sources = [notes_of(example["prompt"].split())[0] for example in examples]
    right = np.concatenate([target["velocity"] for target in targets]).astype(float)
    constant = float(np.median(right))
    said = np.concatenate(list(map(_velocities, targets, answers)))
    given = np.concatenate(list(map(_velocities, targets, sources)))
    return VelocityError(
        model=float(np.abs(np.nan_to_num(said, nan=constant) - right).mean()),
        constant=float(np.abs(constant - right).mean()),
        source=float(np.abs(given - right).mean()),
        found=float(np.isfinite(said).mean()),
        num_notes=len(right),
    )


def answer(text_model: TextModel, prompt: str) -> str:
    """What the model says after a prompt, up to twice as long."""
    longest = 2 * len(prompt.split())
    pieces = generate(text_model, prompt, Sampling(temperature=0), max_tokens=longest)
    return "".join(piece.text for piece in pieces)


def _velocities(notes: Notes, others: Notes) -> np.ndarray:
    """Those of the notes in `others` with the same start and pitch; NaN where there is none."""
    known = {(int(n["start"]), int(n["pitch"])): float(n["velocity"]) for n in others}
    return np.array([known.get((int(n["start"]), int(n["pitch"])), np.nan) for n in notes])


def read_examples(path: Path, column: str | None, value: str | None, limit: int) -> list[Example]:
    """The first `limit` rows of the velocity task, of those with `value` in `column`."""
    rows = map(json.loads, path.read_text().splitlines())
    fitting = [
        row
        for row in rows
        if row["task"] == "velocity" and (column is None or row.get(column) == value)
    ]
    return fitting[:limit]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("examples", type=Path, metavar="TASKS.jsonl")
    parser.add_argument("--column", metavar="NAME", help="only the rows that have in it")
    parser.add_argument("--value", metavar="TEXT", help="this")
    parser.add_argument("--limit", type=int, default=40, metavar="N", help="examples (40)")
    names = parser.parse_args(argv)
    examples = read_examples(names.examples, names.column, names.value, names.limit)
    if not examples:
        parser.error(f"{names.examples}: no such example of the velocity task")
    try:
        text_model = read_text_model(names.checkpoint, torch.device("cpu"), None)
        error = velocity_error(text_model, examples)
    except ModelCheckError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return wrong.exit_code
    print(f"{error.num_notes} notes of {len(examples)} examples; {error.found:.0%} found")
    print(f"velocity error: the model {error.model:.1f}")
    print(f"                a constant, the targets' median {error.constant:.1f}")
    print(f"                as the prompt has it {error.source:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
