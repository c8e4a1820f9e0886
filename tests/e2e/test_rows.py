"""The table of causes, row by row: a drill for each, and what the report then says of its worker.
Those of GPUs (health, heat, a slow link) are in test_telemetry.py and test_gpus.py."""

import json
import os
import signal
from typing import NamedTuple

import pytest

from tests.e2e.conftest import Launcher, Run
from tests.e2e.test_in_step import pid_of
from tests.e2e.test_replay import REPLAYS, row
from tests.e2e.test_run import read_until
from tests.e2e.test_verdict import NORM, env_of


class Row(NamedTuple):
    exit_code: int
    verdict: str
    cause_class: str | None
    repeat: str | None
    severity: str | None
    culprits: list[str]


FLIP = f"debug.drill=flip_gradient@2:CPU1:{NORM}:3"
NAN = "debug.drill=nan@2"
NOBODY: list[str] = []
WORKERS = ("CPU0", "CPU1")
OF_ALL = env_of(
    {},
    ENDS_AFTER=json.dumps(
        {w: [1, 1, f"out of memory: {n} MiB are free"] for n, w in enumerate(WORKERS)}
    ),
)
VARYING = env_of({}, VARYING="1.0 7")
MISMATCH = env_of({}, SETTINGS=json.dumps({"CPU1": "training.learning_rate=0.5"}))
REFUSED = [2, "training.learning_rate = x: no number"]
WRONG_SETTING = env_of({}, ENDS=json.dumps(dict.fromkeys(WORKERS, REFUSED)))
STRAYS = f"flip_gradient@1:all:{NORM}:4:always"
ONE_STRAYS = env_of({}, IN_REPLAY=json.dumps({"CPU0": STRAYS}))
TWO_STRAY = env_of({}, IN_REPLAY=json.dumps({"CPU0": STRAYS, "CPU2": STRAYS}))
FAILED = {"trial of attention kernel sdpa": "gave other bits of dq in 3 equal calls"}
FAILED |= {"attention_backend": "eager", "attention_kernel": "eager"}
TRIAL_OF_ONE = env_of({}, DETAILS=json.dumps({"CPU1": FAILED}))
TRIAL_NOT_AGAIN = TRIAL_OF_ONE | env_of({}, DETAILS_IN_REPLAY=json.dumps({"CPU1": {}}))
TRIAL_OF_ALL = TRIAL_OF_ONE | env_of(
    {}, DETAILS_IN_REPLAY=json.dumps(dict.fromkeys(("CPU0", "CPU1", "CPU2"), FAILED))
)
TRIAL_ELSEWHERE = TRIAL_OF_ONE | env_of(
    {}, DETAILS_IN_REPLAY=json.dumps({"CPU1": {"device_name": "Another CPU"}})
)
TRIAL_OF_BOTH = TRIAL_OF_ONE | env_of({}, DETAILS_IN_REPLAY=json.dumps({"CPU0": FAILED}))
OTHER_KIND = "system.num_threads=2"
"""Of the others, which take one thread each."""
OF_A_KIND = env_of(
    dict.fromkeys(("CPU1", "CPU2"), "nan@2:all"), SETTINGS=json.dumps({"CPU0": OTHER_KIND})
)
ALONE_OF_ITS_KIND = env_of({}, SETTINGS=json.dumps({"CPU1": OTHER_KIND}))
ROWS = {
    "odd, and again": (
        ("--workers=3", REPLAYS, f"{FLIP}:always"),
        {},
        Row(21, "FAIL", "hardware", "persistent", "ISOLATE", ["CPU1"]),
    ),
    "changed by itself, and again": (
        ("--workers=2", REPLAYS, f"debug.drill=flip@2:CPU1:{NORM}:3:always"),
        {},
        Row(21, "FAIL", "hardware", "persistent", "ISOLATE", ["CPU1"]),
    ),
    "changed by itself, and again, and nobody is beside it": (
        ("--workers=1", REPLAYS, f"debug.drill=flip@2:CPU0:{NORM}:3:always"),
        {},
        Row(21, "SUSPECT", "unknown", "unsettled", "MONITOR", ["CPU0"]),
    ),
    "odd, not again": (
        ("--workers=3", REPLAYS, FLIP),
        {},
        Row(21, "SUSPECT", "hardware", "transient", "MONITOR", ["CPU1"]),
    ),
    "odd, not replayed": (
        ("--workers=3", "launch.replay_s=0", FLIP),
        {},
        Row(21, "SUSPECT", "unknown", "not replayed", "MONITOR", ["CPU1"]),
    ),
    "differ, none can be named": (
        ("--workers=2", "launch.replay_s=0", FLIP),
        {},
        Row(23, "INCONCLUSIVE", "unknown", "not replayed", "MONITOR", NOBODY),
    ),
    "a healthy replay strays": (
        ("--workers=3", REPLAYS, FLIP),
        ONE_STRAYS,
        Row(23, "INCONCLUSIVE", "unknown", "not replayed", "MONITOR", NOBODY),
    ),
    "two healthy replays stray": (
        ("--workers=3", REPLAYS, FLIP),
        TWO_STRAY,
        Row(2, "INVALID", "software", None, "IGNORE", NOBODY),
    ),
    "a step does not repeat itself": (
        ("--workers=1",),
        VARYING,
        Row(2, "INVALID", "software", None, "IGNORE", NOBODY),
    ),
    "the first step of one alone does not repeat itself, nor in its replays": (
        ("--workers=2", REPLAYS),
        env_of({}, VARYING="1.0 7 CPU1"),
        Row(21, "FAIL", "hardware", "persistent", "ISOLATE", ["CPU1"]),
    ),
    "the first steps of two do not repeat themselves": (
        ("--workers=2", REPLAYS),
        VARYING,
        Row(2, "INVALID", "software", None, "IGNORE", NOBODY),
    ),
    "not comparable": (
        ("--workers=2",),
        MISMATCH,
        Row(2, "INVALID", "user", None, "IGNORE", NOBODY),
    ),
    "changed by itself, all alike": (
        ("--workers=3", REPLAYS, f"debug.drill=flip@2:all:{NORM}:3"),
        {},
        Row(2, "INVALID", "software", "not replayed", "IGNORE", NOBODY),
    ),
    "a kernel fails its trial on one of three, and again": (
        ("--workers=3", REPLAYS),
        TRIAL_OF_ONE,
        Row(21, "FAIL", "hardware", "persistent", "ISOLATE", ["CPU1"]),
    ),
    "the same of two": (
        ("--workers=2", REPLAYS),
        TRIAL_OF_ONE,
        Row(21, "FAIL", "hardware", "persistent", "ISOLATE", ["CPU1"]),
    ),
    "a kernel fails its trial on one of three, not again": (
        ("--workers=3", REPLAYS),
        TRIAL_NOT_AGAIN,
        Row(21, "SUSPECT", "hardware", "transient", "MONITOR", ["CPU1"]),
    ),
    "the same of two, not again": (
        ("--workers=2", REPLAYS),
        TRIAL_NOT_AGAIN,
        Row(23, "INCONCLUSIVE", "unknown", "transient", "MONITOR", NOBODY),
    ),
    "the same, and the other one fails it, too": (
        ("--workers=2", REPLAYS),
        TRIAL_OF_BOTH,
        Row(23, "INCONCLUSIVE", "unknown", "not replayed", "MONITOR", NOBODY),
    ),
    "the same, and two others fail it, too": (
        ("--workers=3", REPLAYS),
        TRIAL_OF_ALL,
        Row(2, "INVALID", "software", None, "IGNORE", NOBODY),
    ),
    "a kernel failed its trial, and is tried again on another device": (
        ("--workers=3", REPLAYS),
        TRIAL_ELSEWHERE,
        Row(21, "SUSPECT", "unknown", "not replayed", "MONITOR", ["CPU1"]),
    ),
    "non-finite here": (
        ("--workers=2", f"{NAN}:CPU1"),
        {},
        Row(20, "FAIL", "hardware", "transient", "ISOLATE", ["CPU1"]),
    ),
    "non-finite everywhere": (
        ("--workers=2", NAN),
        {},
        Row(20, "INCONCLUSIVE", "software", "transient", "IGNORE", NOBODY),
    ),
    "non-finite in all of one kind": (
        ("--workers=3", "system.num_threads=1"),
        OF_A_KIND,
        Row(20, "INCONCLUSIVE", "software", "transient", "IGNORE", NOBODY),
    ),
    "non-finite in the only one of its kind": (
        ("--workers=3", "system.num_threads=1", f"{NAN}:CPU1"),
        ALONE_OF_ITS_KIND,
        Row(20, "FAIL", "unknown", "transient", "MONITOR", ["CPU1"]),
    ),
    "non-finite in a run of one, and again": (
        ("--workers=1", f"{NAN}:always"),
        {},
        Row(20, "INCONCLUSIVE", "software", "persistent", "IGNORE", NOBODY),
    ),
    "non-finite in a run of one, not again": (
        ("--workers=1", NAN),
        {},
        Row(20, "SUSPECT", "unknown", "transient", "MONITOR", ["CPU0"]),
    ),
    "out of memory everywhere": (
        ("--workers=2",),
        OF_ALL,
        Row(1, "INCONCLUSIVE", "software", None, "IGNORE", NOBODY),
    ),
    "the same setting refused everywhere": (
        ("--workers=2",),
        WRONG_SETTING,
        Row(2, "INCONCLUSIVE", "user", None, "IGNORE", NOBODY),
    ),
    "slower than its equals": (
        ("--workers=3", "--max-steps=60", "debug.drill=slow@12:CPU1:4x"),
        {},
        Row(0, "WARN", "hardware", None, "MONITOR", NOBODY),
    ),
    "nothing": ((), {}, Row(0, "PASS", None, None, None, NOBODY)),
}


@pytest.mark.parametrize("seen", ROWS)
def test_each_row_has_its_verdict_class_severity_and_code(scripted: Launcher, seen: str) -> None:
    arguments, env, expected = ROWS[seen]
    assert found(scripted(*arguments, **env)) == expected


def test_a_run_that_the_user_stopped_has_its_row(scripted: Launcher) -> None:
    process = scripted.start("--max-steps=100000", RESTS="0.02")
    seen = read_until(process, "Step [1/")
    process.send_signal(signal.SIGINT)
    run = scripted.finish(process, seen)
    assert found(run) == Row(130, "STOPPED", "user", None, "IGNORE", NOBODY)
    assert run.report()["verdict"] == "INCONCLUSIVE"


def test_who_was_named_before_a_death_ends_the_run_is_named_and_may_be_replayed_later(
    scripted: Launcher,
) -> None:
    going_on = ("--workers=4", "--max-steps=100000", "launch.on_suspect=continue")
    process = scripted.start(*going_on, REPLAYS, FLIP, RESTS="0.02")
    seen = read_until(process, ": the others go on without CPU1")
    os.kill(pid_of("CPU2", scripted.cwd / "run"), signal.SIGKILL)
    run = scripted.finish(process, seen)
    assert found(run) == Row(137, "SUSPECT", "unknown", "not replayed", "MONITOR", ["CPU2", "CPU1"])
    assert "not replayed, since something else ended the run: `run.sh replay" in run.output
    assert scripted.verb("replay", str(run.directory)).returncode == 137
    of_bits = Row(137, "SUSPECT", "hardware", "transient", "MONITOR", ["CPU2", "CPU1"])
    assert found(run) == of_bits
    assert "not replayed" not in run.report()["summary"]


def found(run: Run) -> Row:
    """Of the last worker, but where a drill says which."""
    workers = [worker["name"] for worker in run.report()["workers"]]
    worker = "CPU1" if "CPU1" in workers else "CPU0"
    return Row(run.exit_code, *row(run, worker), run.report()["culprits"])
