"""Makes examples for the second stage out of a folder of MIDI files: a row of JSONL a window and
task, in names of tokens.

    python -m examples.midi.make_tasks PIECES tasks.jsonl --notes 16

    {"prompt": "TASK_LOUD Pitch_60 ... GENAI", "completion": "Pitch_64 ...", "task": "loud",
     "composer": "Even", "file": "piece_000.mid"}
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from examples.midi.tasks import TASKS
from model_check.data.sources.midi import GENAI, NOTE, Notes, names_of, read_notes
from model_check.data.sources.midi_files import SUFFIXES
from model_check.data.sources.midi_table import MidiTable, read_table
from model_check.errors import DataError

Row = dict[str, str]


def windows(notes: Notes, num_notes: int) -> Iterator[Notes]:
    """Neighbouring notes, `num_notes` at a time; each window begins at the bar of its first."""
    for first in range(0, len(notes) - num_notes + 1, num_notes):
        window = notes[first : first + num_notes].copy()
        # Four beats: what is loud on the first of them would be lost with their place.
        window["start"] -= window["start"][0] // 32 * 32
        yield window


def example(notes: Notes, task: str, rng: np.random.Generator) -> Row | None:
    """None: the task asks for nothing here, or gives nothing."""
    source, target = TASKS[task].rule(notes, rng)
    if not (len(source) and len(target)):
        return None
    prompt = [TASKS[task].token, *names_of(source), GENAI]
    return {"prompt": " ".join(prompt), "completion": " ".join(names_of(target)), "task": task}


def rows_of(
    folder: Path, tasks: Sequence[str], num_notes: int, seed: int, column: str | None
) -> Iterator[Row]:
    """The rows of all files that have notes; the others are named on standard error. Raises
    DataError, also where no file is long enough."""
    files = sorted(file for file in folder.rglob("*") if file.name.lower().endswith(SUFFIXES))
    names = [file.relative_to(folder).as_posix() for file in files]
    table = _table(folder, names, column)
    rng = np.random.default_rng(seed)
    most = 0
    for file, name in zip(files, names, strict=True):
        about = {"file": name}
        if column is not None and table is not None:
            about[column] = table.row(name).get(column, "")
        notes = _notes(file)
        most = max(most, len(notes))
        for window in windows(notes, num_notes):
            for task in tasks:
                if (row := example(window, task, rng)) is not None:
                    yield row | about
    if most < num_notes:
        raise DataError(
            f"{folder}: the longest MIDI file has {most} notes, fewer than --notes {num_notes}"
        )


def _notes(file: Path) -> Notes:
    try:
        return read_notes(file)
    except DataError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return np.empty(0, NOTE)


def _table(folder: Path, names: Sequence[str], column: str | None) -> MidiTable | None:
    if column is None:
        return None
    table = read_table(folder, names)
    table.check([column])
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--tasks", default=",".join(TASKS), metavar="A,B", help=", ".join(TASKS))
    parser.add_argument("--notes", type=int, default=16, metavar="N", help="of a window (16)")
    parser.add_argument("--column", metavar="NAME", help="of the table of the files, into each row")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the noise (0)")
    names = parser.parse_args(argv)
    tasks = names.tasks.split(",")
    if unknown := [task for task in tasks if task not in TASKS]:
        parser.error(f"--tasks: no {unknown[0]!r}; there are {', '.join(TASKS)}")
    try:
        rows = list(rows_of(names.folder, tasks, names.notes, names.seed, names.column))
    except DataError as error:
        parser.error(str(error))
    if not rows:
        parser.error(f"{names.folder}: its notes give no example of {', '.join(tasks)}")
    names.out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{names.out}: {len(rows)} examples of {', '.join(tasks)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
