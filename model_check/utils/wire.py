"""What a supervisor and its workers have agreed on: the version of the lines, and the names by
which a worker finds its place. Standard library alone: a command of a person's own reads it."""

SCHEMA = 1
"""The version of the lines; a worker's first event carries it."""
BEAT_S = 0.25
"""Seconds from one sign of life to the next, within a long wait."""

EVENTS_FD = "MODEL_CHECK_EVENTS_FD"
RUN_DIR = "MODEL_CHECK_RUN_DIR"
WORKER = "MODEL_CHECK_WORKER"
HELD = "MODEL_CHECK_HELD"
INSTRUMENT = "MODEL_CHECK_INSTRUMENT"
"""The root of this project: the worker is a command of a person's own, whose steps are watched."""
NOT_WATCHED = "not watched"
"""Begins a note that says why such a command was not watched, or not to its end."""
SEED = "MODEL_CHECK_SEED"
"""With which such a command's random numbers begin."""
DETERMINISTIC = "MODEL_CHECK_DETERMINISTIC"
"""torch takes deterministic operations for it, where it has them."""
REPLAY = "MODEL_CHECK_REPLAY"
"""The steps of such a command are computed again, and what its last one called several times."""
CALLS_BITS = "calls bits"
"""What came of that: all bits of so many times."""
STOP_AFTER = "MODEL_CHECK_STOP_AFTER"
"""The step, counted from 0, behind which such a command ends."""
