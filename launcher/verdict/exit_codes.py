"""How a run ends: the table of exit codes, which `--help` and README.md print. Values only."""

from typing import NamedTuple

from model_check.errors import (
    EXIT_DISAGREEMENT,
    EXIT_HANG,
    EXIT_HEALTH,
    EXIT_INTERNAL,
    EXIT_NO_GPU,
    EXIT_NON_FINITE,
    EXIT_PASS,
    EXIT_SIGNAL_BASE,
    EXIT_UNNAMED,
    EXIT_UNPROVEN,
    EXIT_USAGE,
)


class Row(NamedTuple):
    code: str
    brief: str
    """What it means, in `--help`."""
    meaning: str
    do: str


TABLE = (
    Row(
        f"{EXIT_PASS}",
        "every worker passed",
        "every worker passed; the verdict of a worker may still be WARN",
        "read the `warning:` lines",
    ),
    Row(
        f"{EXIT_USAGE}",
        "usage, configuration, or the workers cannot be compared",
        "a wrong command or setting, or the workers cannot be compared (INVALID)",
        "read the line that begins `error:`",
    ),
    Row(
        f"{EXIT_NON_FINITE}",
        "NaN or Inf",
        "NaN or Inf",
        "one GPU alone: suspect it; all GPUs: lower the learning rate, look at the data",
    ),
    Row(
        f"{EXIT_DISAGREEMENT}",
        "one worker is named: it differs, or its state changed",
        "one worker is named: it differs from the majority, or its weights changed by themselves",
        "if the report says ISOLATE, take the GPU out of service; otherwise run "
        "`bash run.sh replay`",
    ),
    Row(
        f"{EXIT_HEALTH}",
        "NVML condemns a GPU (launch.fail_on)",
        "NVML condemns a GPU: memory errors, failed or pending remap, Xid, lost GPU",
        "drain it, then reset or replace it",
    ),
    Row(
        f"{EXIT_UNNAMED}",
        "workers differ, and none can be named",
        "workers differ, and none can be named",
        "add a third GPU, or test each together with a good GPU",
    ),
    Row(
        f"{EXIT_NO_GPU}",
        "no usable GPU, or an expected one is missing",
        "no usable GPU, or an expected one is missing",
        "`bash run.sh doctor`, `launch.expect_gpus=8`",
    ),
    Row(
        f"{EXIT_INTERNAL}",
        "a fault of Model Check or of the host",
        "a fault of Model Check or of the host",
        "report the traceback, if there is one",
    ),
    Row(
        f"{EXIT_UNPROVEN}",
        "too little was compared (--deadline)",
        "too little was compared to decide",
        "give the check more time",
    ),
    Row(f"{EXIT_HANG}", "a worker hung", "a worker hung", "read the worker's stacks in the report"),
    Row(
        f"{EXIT_SIGNAL_BASE}+N",
        "signal N ended the run, or a worker",
        "signal N ended the run or a worker (130 Ctrl-C, 143 SIGTERM, 137 SIGKILL)",
        "137: did the host run out of memory?",
    ),
)


def for_help() -> str:
    rows = "".join(f"  {row.code:<7} {row.brief}\n" for row in TABLE)
    return f"exit codes:\n{rows}  else    that of the worker that failed first"


def for_readme() -> str:
    rows = "".join(f"| {row.code} | {row.meaning} | {row.do} |\n" for row in TABLE)
    return f"| exit code | it means | do |\n|---|---|---|\n{rows}"
