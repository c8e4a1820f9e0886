"""Why a worker ended as it did, and what follows: the table of verdicts. Values only."""

from enum import Enum, unique

from launcher.verdict.results import Verdict
from launcher.verdict.severity import CauseClass, Severity

_HARDWARE = CauseClass.HARDWARE, Severity.ISOLATE
_SOFTWARE = CauseClass.SOFTWARE, Severity.IGNORE
_USER = CauseClass.USER, Severity.IGNORE
_HOST = CauseClass.HOST, Severity.IGNORE
_UNKNOWN = CauseClass.UNKNOWN, Severity.MONITOR
_SUSPICIOUS = CauseClass.HARDWARE, Severity.MONITOR


@unique
class Cause(Enum):
    """What decides a worker's row: its verdict, its sentence; how it is classed, and how grave it
    is, where that is known. Of several causes the first decides.

    A FAIL becomes INCONCLUSIVE where it is unknown whether the worker failed by itself.
    """

    NOT_STARTED = Verdict.FAIL, "could not be started: {spawn_error}"
    NO_PROCESS = Verdict.INCONCLUSIVE, "could not be started: {spawn_error}{whose}", *_HOST
    """The host had no process or no descriptor for it."""
    NO_HOST_MEMORY = Verdict.INCONCLUSIVE, "{how}{oom}{whose}", *_HOST
    """The kernel killed it for want of memory: of the host, or of the limit that the host set."""
    HANG = Verdict.FAIL, "{reason}", *_UNKNOWN
    NON_FINITE = Verdict.FAIL, "non-finite {where} at step {step}{born}", *_HARDWARE
    """Here, and finite at another worker of its kind."""
    NON_FINITE_IN_MOST = (
        Verdict.FAIL,
        "non-finite {where} at step {step}{born}; so has most of its kind: the others may err",
        *_UNKNOWN,
    )
    NON_FINITE_EVERYWHERE = (
        Verdict.INCONCLUSIVE,
        "non-finite {where} at step {step}{born}",
        *_SOFTWARE,
    )
    """Or in all of its kind; or at the only worker, and again when the step was computed again."""
    NON_FINITE_ONCE = Verdict.SUSPECT, "non-finite {where} at step {step}{born}", *_UNKNOWN
    """At the only worker, and not again."""
    NON_FINITE_UNSETTLED = Verdict.FAIL, "non-finite {where} at step {step}{born}", *_UNKNOWN
    """No other of its kind came so far, or it is the only one, or their bits may differ."""
    FAILED_ALIKE = Verdict.INCONCLUSIVE, "{how}{said}", *_SOFTWARE
    """Every worker ended so, or every one of its kind, and said the same."""
    REFUSED_ALIKE = Verdict.INCONCLUSIVE, "{how}{said}", *_USER
    """The same, for what somebody has set."""
    FOLLOWED = Verdict.STOPPED, "a rank without the others: {said}"
    """It lost another rank of its job, and could not go on."""
    FAILED = Verdict.FAIL, "{how}{said}{oom}"
    """It ended with an exit code of failure, or announced one before our signal reached it."""
    BROKEN = Verdict.SUSPECT, "{what}", *_UNKNOWN
    """What it keeps from one update to the next has changed by itself."""
    BROKEN_ONCE = Verdict.SUSPECT, "{what}, {right}", *_SUSPICIOUS
    BROKEN_UNSETTLED = Verdict.SUSPECT, "{what}, {again}", *_UNKNOWN
    BROKEN_AGAIN = Verdict.FAIL, "{what}, {again}", *_HARDWARE
    BROKEN_ALIKE = Verdict.INVALID, "{what}, as in all workers", *_SOFTWARE
    BROKEN_BESIDE = Verdict.INCONCLUSIVE, "{what}", *_UNKNOWN
    """The same, and a healthy worker gave other bits in its replay."""
    NOT_REPEATED = (
        Verdict.INCONCLUSIVE,
        "the two passes of its first step gave other bits when they were computed twice",
        *_UNKNOWN,
    )
    """And nobody has told whether its equals repeat theirs."""
    UNREPEATABLE = (
        Verdict.INVALID,
        (
            "the two passes of its first step gave other bits when they were computed twice: its "
            "kernels vary, so no difference would prove anything"
        ),
        *_SOFTWARE,
    )
    NOT_COMPARABLE = Verdict.INVALID, "{mismatch}", *_USER
    VARIES = Verdict.INVALID, "{said}", *_SOFTWARE
    """Healthy workers gave other bits when their steps were computed again."""
    STRAYED = Verdict.INCONCLUSIVE, "{said}", *_UNKNOWN
    """It was a healthy one beside a suspect, and gave other bits in its replay."""
    ODD = Verdict.SUSPECT, "differs from {whom} at {place}", *_UNKNOWN
    """From the majority of its equals, or from a golden file."""
    ODD_ONCE = (
        Verdict.SUSPECT,
        "differs from {whom} at {place}, {right}",
        *_SUSPICIOUS,
    )
    ODD_UNSETTLED = (
        Verdict.SUSPECT,
        "differs from {whom} at {place}, {again}",
        *_UNKNOWN,
    )
    ODD_AGAIN = (
        Verdict.FAIL,
        "differs from {whom} at {place}, {again}",
        *_HARDWARE,
    )
    FAILED_TRIAL = Verdict.SUSPECT, "{shown}", *_UNKNOWN
    """A kernel, before the first step, that a strict majority of its equals found right."""
    FAILED_TRIAL_ONCE = Verdict.SUSPECT, "{shown}; {right}", *_SUSPICIOUS
    FAILED_TRIAL_UNSETTLED = Verdict.SUSPECT, "{shown}; {again}", *_UNKNOWN
    FAILED_TRIAL_AGAIN = Verdict.FAIL, "{shown}; {again}", *_HARDWARE
    TRIALS_DIFFER = Verdict.INCONCLUSIVE, "{shown}", *_UNKNOWN
    """The same, and there is no majority that passed."""
    DIFFERS = Verdict.INCONCLUSIVE, "differs from its peer at {place}{of_two}", *_UNKNOWN
    """Workers differ, and there is no majority; or a golden file contradicts it."""
    UNLIKE_GOLDEN = Verdict.INVALID, "differs from {whom} at {place}, as all do", *_SOFTWARE
    NEVER_STARTED = Verdict.STOPPED, "never started"
    """The run was stopped before its turn came."""
    END_UNSEEN = Verdict.INCONCLUSIVE, "its end was not seen"
    REQUESTED = Verdict.STOPPED, "ended by {signal}", *_USER
    """It ended by a signal that we got, too."""
    STOPPED_ON_REQUEST = Verdict.STOPPED, "stopped by us", *_USER
    """We were asked to end."""
    STOPPED = Verdict.STOPPED, "stopped by us"
    ENDED_EARLY = Verdict.STOPPED, "{why}"
    """It was asked to end early, or had nothing left to do."""
    TOO_SOON = (
        Verdict.INCONCLUSIVE,
        "{done} steps compared, {enough} are enough",
        CauseClass.UNKNOWN,
        Severity.IGNORE,
    )
    NO_GOLDEN = (
        Verdict.INCONCLUSIVE,
        "could not be compared with {whom}: {reasons}",
        CauseClass.UNKNOWN,
        Severity.IGNORE,
    )
    """It passed else, and what was asked for could not be answered."""
    TOO_FEW_STEPS = Verdict.INCONCLUSIVE, "ended with exit code 0 after {done} of {to_do} steps"
    NONE = Verdict.PASS, ""
