"""Tasks on the notes of a piece: what a model is given of them, and what it is to answer.

A task is a function (notes, rng) -> (source, target), all of them arrays of `NOTE` in the order of
the piece. It may draw from `rng`, and from nothing else.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from model_check.data.sources.midi import TICKS_A_BEAT, Notes

VELOCITY_NOISE_SD = 30.0
"""Of 127, as in the piano tasks of the project that this follows."""
FLAT_VELOCITY = 79
Rule = Callable[[Notes, np.random.Generator], tuple[Notes, Notes]]


class Task(NamedTuple):
    """A rule, and the token that asks for it."""

    token: str
    rule: Rule


def loud(notes: Notes, rng: np.random.Generator) -> tuple[Notes, Notes]:
    """The loudest quarter is asked for, the others are given."""
    return _divided(notes, notes["velocity"] >= np.quantile(notes["velocity"], 0.75))


def soft(notes: Notes, rng: np.random.Generator) -> tuple[Notes, Notes]:
    """The softest quarter."""
    return _divided(notes, notes["velocity"] <= np.quantile(notes["velocity"], 0.25))


def above_median(notes: Notes, rng: np.random.Generator) -> tuple[Notes, Notes]:
    """The notes above the median pitch."""
    return _divided(notes, notes["pitch"] > np.median(notes["pitch"]))


def below_median(notes: Notes, rng: np.random.Generator) -> tuple[Notes, Notes]:
    """The notes below the median pitch."""
    return _divided(notes, notes["pitch"] < np.median(notes["pitch"]))


def velocity_denoising(notes: Notes, rng: np.random.Generator) -> tuple[Notes, Notes]:
    """All notes, whose velocities are given with noise."""
    source = notes.copy()
    noisy = source["velocity"] + rng.normal(0.0, VELOCITY_NOISE_SD, len(notes))
    source["velocity"] = np.clip(np.rint(noisy), 1, 127)
    return source, notes


def performance(notes: Notes, rng: np.random.Generator) -> tuple[Notes, Notes]:
    """All notes, which are given as a flat score: on half beats, of one velocity."""
    half = TICKS_A_BEAT // 2
    source = notes.copy()
    source["start"] = (notes["start"] + half // 2) // half * half
    source["duration"] = np.maximum((notes["duration"] + half // 2) // half, 1) * half
    source["velocity"] = FLAT_VELOCITY
    return np.sort(source, order=["start", "pitch"]), notes


TASKS = {
    "loud": Task("TASK_LOUD", loud),
    "soft": Task("TASK_SOFT", soft),
    "above_median": Task("TASK_HIGH", above_median),
    "below_median": Task("TASK_LOW", below_median),
    "velocity": Task("TASK_VELOCITY", velocity_denoising),
    "performance": Task("TASK_PERFORMANCE", performance),
}


def _divided(notes: Notes, is_target: np.ndarray) -> tuple[Notes, Notes]:
    return notes[~is_target], notes[is_target]
