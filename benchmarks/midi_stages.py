"""Does the second stage gain from the first? On SYNTHETIC pieces (`examples/midi/make_pieces.py`) a
small model learns to take the noise off velocities, from a model of the pieces or from random
weights, for equal numbers of steps: loss and velocity error on held-out pieces, over seeds.

    python -m benchmarks.midi_stages --seeds 3 --steps 50,100,200

Needs the extra midi. Every training is a process with one thread; two at a time.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from examples.midi.make_pieces import make_pieces
from examples.midi.make_tasks import main as make_tasks
from examples.midi.velocity_error import VelocityError, read_examples, velocity_error
from model_check.generate.text_model import read_text_model

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "midi" / "small.json"
SETTINGS = (
    *("data.tokenizer=midi", "training.eval_interval=100000", "system.device=cpu"),
    *("system.num_threads=1", "debug.fingerprints=off"),
)
_LOSS = re.compile(r"Eval \[\d+\] held \| Loss: ([0-9.]+)")


class Trained(NamedTuple):
    """One stage of one seed."""

    checkpoint: Path
    held_out_loss: float


class Outcome(NamedTuple):
    """Of a second stage."""

    loss: float
    error: VelocityError


def train(place: Path, name: str, seed: int, steps: int, *overrides: str) -> Trained:
    """In a process of its own."""
    checkpoints = place / f"{name}-{seed}-{steps}"
    command = [sys.executable, str(ROOT / "pretrain_main.py"), "--preset", "cpu"]
    command += [
        "--config",
        str(CONFIG),
        *SETTINGS,
        f"training.max_steps={steps}",
        f"system.seed={seed}",
        *overrides,
    ]
    command += [f"system.checkpoint_dir={checkpoints}", f"data.cache_dir={place / 'cache'}"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return Trained(checkpoints / "last.pt", float(_LOSS.findall(done.stdout)[-1]))


def both_stages(
    place: Path, first_steps: int, steps: Sequence[int], seed: int
) -> dict[tuple[str, int], Outcome]:
    """(from what, steps of the second stage) -> how it ended."""
    pieces = (f"data.dataset={place / 'pieces'}", f"data.validation=held={place / 'held'}")
    first = train(place, "first", seed, first_steps, *pieces)
    tasks = (f"data.dataset={place / 'tasks.jsonl'}", "training.stage=prompt_target")
    tasks += (f"data.validation=held={place / 'held.jsonl'}",)
    begun = {"scratch": (), "stage one": (f"model.init_from={first.checkpoint}",)}
    found = {}
    for count in steps:
        for start, more in begun.items():
            ended = train(place, start.replace(" ", "_"), seed, count, *tasks, *more)
            found[start, count] = Outcome(ended.held_out_loss, error_of(ended.checkpoint, place))
    return found


def error_of(checkpoint: Path, place: Path) -> VelocityError:
    text_model = read_text_model(checkpoint, torch.device("cpu"), None)
    return velocity_error(text_model, read_examples(place / "held.jsonl", None, None, 36))


def make_data(place: Path) -> None:
    """Pieces to train on and others to test on; examples of both."""
    for name, number, seed in (("pieces", 160, 0), ("held", 12, 1)):
        make_pieces(place / name, number, 96, seed)
        out = place / f"{'tasks' if name == 'pieces' else name}.jsonl"
        make_tasks([str(place / name), str(out), "--tasks", "velocity", "--notes", "16"])


def table(found: Sequence[dict[tuple[str, int], Outcome]]) -> list[str]:
    """Means over the seeds, the least and the most in brackets."""
    lines = ["| second stage | begins with | held-out loss | velocity error | notes found |"]
    lines.append("|---|---|---|---|---|")
    for start, steps in sorted(found[0], key=lambda key: key[1]):
        own = [each[start, steps] for each in found]
        losses, errors = [o.loss for o in own], [o.error.model for o in own]
        share = statistics.fmean(outcome.error.found for outcome in own)
        cells = [f"{steps} steps", start, spread(losses, 3), spread(errors, 2), f"{share:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    error = next(iter(found[0].values())).error
    lines.append(
        f"constant median: {error.constant:.2f}; the prompt's own, noisy velocities: "
        f"{error.source:.2f}; {error.num_notes} notes, velocities of 127"
    )
    return lines


def spread(values: Sequence[float], digits: int) -> str:
    least, most = min(values), max(values)
    return f"{statistics.fmean(values):.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-steps", type=int, default=300)
    parser.add_argument("--steps", default="50,100,200", help="of the second stage")
    names = parser.parse_args()
    steps = [int(text) for text in names.steps.split(",")]
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        make_data(place)
        with ThreadPoolExecutor(2) as pool:
            run = partial(both_stages, place, names.first_steps, steps)
            print("\n".join(table(list(pool.map(run, range(names.seeds))))))


if __name__ == "__main__":
    main()
