"""The table of verdicts. For each kind of finding: the worker's verdict, the exit code that it
gives the run, its class and severity, what is said of it and what to do. Values only.

`python -m launcher.verdict.rules > docs/findings.md` writes it for people.
"""

from enum import Enum, unique
from typing import NamedTuple

from launcher.verdict.results import Verdict
from launcher.verdict.severity import CauseClass, Severity
from model_check.errors import (
    EXIT_DISAGREEMENT,
    EXIT_HANG,
    EXIT_HEALTH,
    EXIT_INTERNAL,
    EXIT_NON_FINITE,
    EXIT_PASS,
    EXIT_UNNAMED,
    EXIT_UNPROVEN,
    EXIT_USAGE,
)

_HARDWARE = CauseClass.HARDWARE, Severity.ISOLATE
_SUSPICIOUS = CauseClass.HARDWARE, Severity.MONITOR
_SOFTWARE = CauseClass.SOFTWARE, Severity.IGNORE
_USER = CauseClass.USER, Severity.IGNORE
_HOST = CauseClass.HOST, Severity.IGNORE
_UNKNOWN = CauseClass.UNKNOWN, Severity.MONITOR
_UNPROVEN = CauseClass.UNKNOWN, Severity.IGNORE
_NOT_CLASSED = None, None

_REPLACE = "Take {who} out of service. Keep {directory} as evidence."
REPLAY = "Compute the steps again: {program} replay {directory}"
_REPLAY = f"{REPLAY} {{first}}"
_NAME_ONE = f"{REPLAY}; or run with three workers or more."
NOT_AGAIN = (
    "These steps cannot be computed again. Run the same with --mode replicate, with three workers "
    "of one kind or more: each is compared with the others."
)
"""In place of REPLAY, for a job of ranks, and where bits prove nothing."""
_NAN_AGAIN = (
    "Run again, with three workers of one kind or more. If {who} alone is not finite again, take "
    "it out of service."
)
_WATCH = "Keep {who} in service and run again, longer: a second time means out of service."
_TRY_AGAIN = (
    "Run again, with three workers or more: kernels are tried anew. A GPU that fails again where "
    "its equals pass goes out of service; if another one fails, the kernel varies."
)
_LOOK_AT_SOFTWARE = (
    "No GPU is to blame: the same went wrong in more than one. Look at the settings, the data and "
    "the software."
)
_MAKE_REPEATABLE = "No GPU is to blame: change what the message names, then run again."
RULE_OPERATIONS_OUT = (
    "An operation that varies now and then looks the same as a GPU that errs now and then. Run "
    "again with --deterministic: if {who} is named again, suspect it."
)
"""Also where replays of a command settled nothing."""
_MAKE_DETERMINISTIC = (
    "Run the same again with --deterministic: torch then takes operations that repeat their bits. "
    "If one worker alone varies again and again, suspect it."
)
STILL_VARIES = (
    "--deterministic was not enough. torch warns of each operation that it has in no deterministic "
    "form: see the output of {who}, and take another one there. If one worker alone varies again "
    "and again, suspect it."
)
"""In place of that, where it was given."""
COMMAND_AGAIN = (
    "Run the same again, with three workers of one kind or more. If one worker differs from the "
    "others twice, take it out of service; if another one does, an operation of the command varies."
)
"""In place of NOT_AGAIN, for a command of a person's own."""
_WATCH_LONGER = (
    "A command is compared where it steps an optimizer of torch, in a Python that runs without -I, "
    "-E and -S; elsewhere let it call `watch` of model_check (docs/own-script.md). The notes of "
    "{who} in the report may tell more."
)
_CHANGE_SETTING = "No GPU is to blame: change the setting that the message names."
_LOOK_AT_HOST = "No GPU is to blame. Look at this host's limits: {program} doctor"
_READ_LINES = "Read the last lines of {who}; {program} doctor looks at this machine."
_RUN_AGAIN = "Run again: too little was compared to tell anything."
_NOT_SEEN = "Run again: nobody saw how it ended."
_STOPPED = "Run again: it was stopped, and nothing is known against any worker."
_NOTHING = "Nothing. A longer run finds rarer faults."
_SEE_STACKS = (
    "See in the report where {who} stood, then run again: what hangs twice goes out of service."
)
_SEE_ALL_STACKS = (
    "No GPU is to blame: all fell silent together. See in the report where each stood; a command "
    "that says nothing for long needs a longer --hang-timeout."
)
_MORE_TIME = "Run again with more time (--deadline): too little was compared to tell anything."
_GO_ON = "Nothing. To train further: --resume auto, and a higher --max-steps."
_NEW_GOLDEN = (
    "Make a golden file of such a device with this software: run three workers or more, then "
    "{program} report RUN_DIR --write-golden FILE"
)
_BORN = "non-finite {where} at step {step}{born}"
_ODD = "differs from {whom} at {place}"
_VARIED = "the two passes of its first step gave other bits when they were computed twice"


class Rule(NamedTuple):
    verdict: Verdict
    """Of the worker. A FAIL becomes INCONCLUSIVE where it is unknown whether it failed by itself.
    """
    exit_code: int | None
    """Of a run that this decides; None: that of the process."""
    classed: tuple[CauseClass | None, Severity | None]
    sentence: str
    advice: str
    of_run: Verdict | None = None
    """The verdict of a run that this decides, where it is not the worker's."""


@unique
class Kind(Enum):
    """What was found of a worker. Of several findings that decide a run the first in this order
    does."""

    NON_FINITE_EVERYWHERE = Rule(
        Verdict.INCONCLUSIVE, EXIT_NON_FINITE, _SOFTWARE, _BORN, _LOOK_AT_SOFTWARE, Verdict.FAIL
    )
    """Or in all of its kind; or at the only worker, and again when the step was computed again."""
    FAILED_ALIKE = Rule(
        Verdict.INCONCLUSIVE, None, _SOFTWARE, "{how}{said}", _LOOK_AT_SOFTWARE, Verdict.FAIL
    )
    """Every worker ended so, or every one of its kind, and said the same."""
    REFUSED_ALIKE = Rule(
        Verdict.INCONCLUSIVE, EXIT_USAGE, _USER, "{how}{said}", _CHANGE_SETTING, Verdict.FAIL
    )
    """The same, for what somebody has set."""
    HANG_ALIKE = Rule(
        Verdict.INCONCLUSIVE, EXIT_HANG, _SOFTWARE, "{reason}", _SEE_ALL_STACKS, Verdict.FAIL
    )
    """All workers fell silent together."""
    STATE_CHANGED_ALIKE = Rule(
        Verdict.INVALID, EXIT_USAGE, _SOFTWARE, "{what}, as in all workers", _LOOK_AT_SOFTWARE
    )
    UNLIKE_GOLDEN = Rule(
        Verdict.INVALID, EXIT_USAGE, _SOFTWARE, f"{_ODD}, as all do", _LOOK_AT_SOFTWARE
    )
    NOT_COMPARABLE = Rule(Verdict.INVALID, EXIT_USAGE, _USER, "{mismatch}", _CHANGE_SETTING)
    UNREPEATABLE = Rule(
        Verdict.INVALID,
        EXIT_USAGE,
        _SOFTWARE,
        f"{_VARIED}: its kernels vary, so no difference would prove anything",
        _LOOK_AT_SOFTWARE,
    )
    STARTS_DIFFER = Rule(Verdict.INVALID, EXIT_USAGE, _USER, "{mismatch}", _MAKE_REPEATABLE)
    """A command of a person's own gave its workers other weights, batches or random numbers."""
    COMMAND_VARIES = Rule(Verdict.INVALID, EXIT_USAGE, _SOFTWARE, "{said}", _MAKE_DETERMINISTIC)
    """The same as `varies`, of a command."""
    GPU_FAULT = Rule(Verdict.FAIL, EXIT_HEALTH, _HARDWARE, "{symptoms}", "{symptoms}")
    """What NVML or the kernel log tells; severity and advice are the symptom's."""
    NON_FINITE = Rule(Verdict.FAIL, EXIT_NON_FINITE, _HARDWARE, _BORN, _REPLACE)
    """Here, and finite at another worker of its kind."""
    NON_FINITE_IN_MOST = Rule(
        Verdict.FAIL,
        EXIT_NON_FINITE,
        _UNKNOWN,
        f"{_BORN}; so has most of its kind: the others may err",
        _NAN_AGAIN,
    )
    NON_FINITE_UNSETTLED = Rule(Verdict.FAIL, EXIT_NON_FINITE, _UNKNOWN, _BORN, _NAN_AGAIN)
    """No other of its kind came so far, or it is the only one, or their bits may differ."""
    NON_FINITE_ONCE = Rule(Verdict.SUSPECT, EXIT_NON_FINITE, _UNKNOWN, _BORN, _NAN_AGAIN)
    """At the only worker, and not again."""
    HANG = Rule(Verdict.FAIL, EXIT_HANG, _UNKNOWN, "{reason}", _SEE_STACKS)
    NOT_STARTED = Rule(
        Verdict.FAIL, None, _NOT_CLASSED, "could not be started: {spawn_error}", _READ_LINES
    )
    REFUSED = Rule(Verdict.FAIL, EXIT_USAGE, _NOT_CLASSED, "{how}{said}{oom}", _CHANGE_SETTING)
    """It is alone, or prepares the data, and a setting is wrong."""
    FAILED = Rule(Verdict.FAIL, None, _NOT_CLASSED, "{how}{said}{oom}", _READ_LINES)
    """It ended with an exit code of failure, or announced one before our signal reached it."""
    NO_PROCESS = Rule(
        Verdict.INCONCLUSIVE,
        EXIT_INTERNAL,
        _HOST,
        "could not be started: {spawn_error}{whose}",
        _LOOK_AT_HOST,
    )
    """The host had no process or no descriptor for it."""
    NO_HOST_MEMORY = Rule(Verdict.INCONCLUSIVE, None, _HOST, "{how}{oom}{whose}", _LOOK_AT_HOST)
    """The kernel killed it for want of memory: of the host, or of the limit that the host set."""
    STATE_CHANGED_AGAIN = Rule(
        Verdict.FAIL, EXIT_DISAGREEMENT, _HARDWARE, "{what}, {again}", _REPLACE
    )
    ODD_AGAIN = Rule(Verdict.FAIL, EXIT_DISAGREEMENT, _HARDWARE, f"{_ODD}, {{again}}", _REPLACE)
    FAILED_TRIAL_AGAIN = Rule(
        Verdict.FAIL, EXIT_DISAGREEMENT, _HARDWARE, "{shown}; {again}", _REPLACE
    )
    STATE_CHANGED = Rule(Verdict.SUSPECT, EXIT_DISAGREEMENT, _UNKNOWN, "{what}", _REPLAY)
    """What it keeps from one update to the next has changed by itself."""
    STATE_CHANGED_ONCE = Rule(
        Verdict.SUSPECT, EXIT_DISAGREEMENT, _SUSPICIOUS, "{what}, {right}", _WATCH
    )
    STATE_CHANGED_UNSETTLED = Rule(
        Verdict.SUSPECT, EXIT_DISAGREEMENT, _UNKNOWN, "{what}, {again}", _REPLAY
    )
    ODD = Rule(Verdict.SUSPECT, EXIT_DISAGREEMENT, _UNKNOWN, _ODD, _REPLAY)
    """From the majority of its equals, or from a golden file."""
    ODD_ONCE = Rule(Verdict.SUSPECT, EXIT_DISAGREEMENT, _SUSPICIOUS, f"{_ODD}, {{right}}", _WATCH)
    ODD_ONCE_OF_COMMAND = Rule(
        Verdict.SUSPECT, EXIT_DISAGREEMENT, _UNKNOWN, f"{_ODD}, {{right}}", RULE_OPERATIONS_OUT
    )
    """The same, of a command without --deterministic: no fault that a GPU's history counts."""
    ODD_UNSETTLED = Rule(
        Verdict.SUSPECT, EXIT_DISAGREEMENT, _UNKNOWN, f"{_ODD}, {{again}}", _REPLAY
    )
    FAILED_TRIAL = Rule(Verdict.SUSPECT, EXIT_DISAGREEMENT, _UNKNOWN, "{shown}", _TRY_AGAIN)
    """A kernel, before the first step, that a strict majority of its equals found right."""
    FAILED_TRIAL_ONCE = Rule(
        Verdict.SUSPECT, EXIT_DISAGREEMENT, _SUSPICIOUS, "{shown}; {right}", _TRY_AGAIN
    )
    FAILED_TRIAL_UNSETTLED = Rule(
        Verdict.SUSPECT, EXIT_DISAGREEMENT, _UNKNOWN, "{shown}; {again}", _TRY_AGAIN
    )
    SEEN_BEFORE = Rule(
        Verdict.SUSPECT, EXIT_DISAGREEMENT, _HARDWARE, "{cause}; {earlier}", _REPLACE
    )
    """A transient fault, and the history of its GPU holds another one."""
    VARIES = Rule(Verdict.INVALID, EXIT_USAGE, _SOFTWARE, "{said}", _LOOK_AT_SOFTWARE)
    """Healthy workers gave other bits when their steps were computed again."""
    STATE_CHANGED_BESIDE = Rule(Verdict.INCONCLUSIVE, EXIT_UNNAMED, _UNKNOWN, "{what}", _NAME_ONE)
    """The same, and a healthy worker gave other bits in its replay."""
    STRAYED = Rule(Verdict.INCONCLUSIVE, EXIT_UNNAMED, _UNKNOWN, "{said}", _NAME_ONE)
    """It was a healthy one beside a suspect, and gave other bits in its replay."""
    TRIALS_DIFFER = Rule(Verdict.INCONCLUSIVE, EXIT_UNNAMED, _UNKNOWN, "{shown}", _TRY_AGAIN)
    """A kernel's trial failed, and there is no majority that passed."""
    DIFFERS = Rule(
        Verdict.INCONCLUSIVE,
        EXIT_UNNAMED,
        _UNKNOWN,
        "differs from its peer at {place}{of_two}",
        _NAME_ONE,
    )
    """Workers differ, and there is no majority; or a golden file contradicts it."""
    NOT_REPEATED = Rule(Verdict.INCONCLUSIVE, None, _UNKNOWN, _VARIED, _NAME_ONE)
    """And nobody has told whether its equals repeat theirs."""
    TOO_FEW_STEPS = Rule(
        Verdict.INCONCLUSIVE,
        EXIT_INTERNAL,
        _NOT_CLASSED,
        "ended with exit code 0 after {done} of {to_do} steps",
        _READ_LINES,
    )
    END_UNSEEN = Rule(
        Verdict.INCONCLUSIVE, EXIT_INTERNAL, _NOT_CLASSED, "its end was not seen", _NOT_SEEN
    )
    TOO_SOON = Rule(
        Verdict.INCONCLUSIVE,
        EXIT_UNPROVEN,
        _UNPROVEN,
        "{what}",
        _MORE_TIME,
    )
    NOT_WATCHED = Rule(
        Verdict.INCONCLUSIVE,
        EXIT_UNPROVEN,
        _UNPROVEN,
        "showed no step of a torch optimizer{why}",
        _WATCH_LONGER,
    )
    """A checked command; it ended with exit code 0."""
    NOT_WATCHED_TO_END = Rule(
        Verdict.INCONCLUSIVE,
        EXIT_UNPROVEN,
        _UNPROVEN,
        "was watched for {done} steps only{why}",
        _WATCH_LONGER,
    )
    """A checked command: it went on unwatched, or its equals did more steps."""
    NO_GOLDEN = Rule(
        Verdict.INCONCLUSIVE,
        EXIT_UNPROVEN,
        _UNPROVEN,
        "could not be compared with {whom}: {reasons}",
        _NEW_GOLDEN,
    )
    """It passed otherwise, and what was asked for could not be answered."""
    PEER_LOST = Rule(
        Verdict.STOPPED, None, _NOT_CLASSED, "a rank without the others: {said}", _READ_LINES
    )
    """It lost another rank of its job, and could not go on."""
    STOPPED_BY_SIGNAL = Rule(Verdict.STOPPED, None, _USER, "ended by {signal}", _STOPPED)
    """It ended by a signal that we got, too."""
    STOPPED_ON_REQUEST = Rule(Verdict.STOPPED, None, _USER, "stopped by us", _STOPPED)
    """We were asked to end."""
    NEVER_STARTED = Rule(Verdict.STOPPED, EXIT_PASS, _NOT_CLASSED, "never started", _RUN_AGAIN)
    """The run was stopped before its turn came."""
    STOPPED = Rule(Verdict.STOPPED, EXIT_PASS, _NOT_CLASSED, "stopped by us", _RUN_AGAIN)
    CLEARED = Rule(
        Verdict.STOPPED,
        EXIT_PASS,
        _NOT_CLASSED,
        "differs from {odd}, whose health tells that it is the odd one",
        _RUN_AGAIN,
    )
    ENDED_EARLY = Rule(Verdict.STOPPED, EXIT_PASS, _NOT_CLASSED, "{why}", _GO_ON)
    """It was asked to end early, or had nothing left to do."""
    GPU_WARNING = Rule(Verdict.WARN, EXIT_PASS, _SUSPICIOUS, "", "{symptoms}")
    """Severity and advice are the symptom's."""
    PASSED = Rule(Verdict.PASS, EXIT_PASS, _NOT_CLASSED, "", _NOTHING)

    @property
    def rule(self) -> Rule:
        rule: Rule = self.value
        return rule


_ABOUT = """\
# Kinds of findings

For everybody who reads `report.json` or the lines at the end of a run. Each worker has one finding
that decides its row; `kind` in `report.json` names it. Where several could decide a run, the one
that stands first here does. A run that a worker's process ended has the exit code of that process;
one in which bits differ has 21 where a worker is named, otherwise 23. This page is made of the
table that the launcher itself uses (`launcher/verdict/rules.py`). [What a verdict
means](verdicts.md) explains the words.

`bash run.sh report RUN_DIR` prints the finding of each worker again.

| kind | worker | run | exit code | class, severity | what is said | what to do |
|---|---|---|---|---|---|---|
"""


def document() -> str:
    """The table as a page of docs/. Values that a run fills in stand as `<name>`."""
    return _ABOUT + "".join(_row(kind) for kind in Kind)


def _row(kind: Kind) -> str:
    rule = kind.rule
    code = "that of the process" if rule.exit_code is None else str(rule.exit_code)
    classed = ", ".join(filter(None, rule.classed)) or "-"
    texts = (text.replace("{", "<").replace("}", ">") for text in (rule.sentence, rule.advice))
    said, advice = (f"`{text}`" if text else "-" for text in texts)
    of_run = rule.of_run or rule.verdict
    if of_run is Verdict.STOPPED:
        of_run = Verdict.INCONCLUSIVE
    cells = (kind.name.lower(), rule.verdict, of_run, code, classed, said, advice)
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    print(document(), end="")
