"""Every way in which a run fails, and the exit code of each.

The codes are a contract (the table in README.md): schedulers act on them. A message says where,
what value, what next.
"""

import signal

EXIT_PASS = 0
EXIT_PEER_LOST = 1
EXIT_USAGE = 2
EXIT_NON_FINITE = 20
EXIT_DISAGREEMENT = 21
EXIT_HEALTH = 22
EXIT_UNNAMED = 23
EXIT_NO_GPU = 69
EXIT_INTERNAL = 70
EXIT_UNPROVEN = 75
EXIT_HANG = 124
EXIT_SIGNAL_BASE = 128


class ModelCheckError(Exception):
    """A failure that a person can act on. Its text is the whole message, its class holds the exit
    code."""

    exit_code = EXIT_INTERNAL


class UsageError(ModelCheckError):
    """The command line cannot be understood, or names something that does not exist."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A setting is unknown, of the wrong type, out of range, or can have no effect here."""


class DataError(UsageError):
    """The training text or its tokenizer is not available as configured."""


class StorageError(UsageError):
    """A directory that the settings name cannot be written, or the disk is full."""


class CheckpointError(UsageError):
    """A checkpoint cannot be resumed from."""


class NonFiniteError(ModelCheckError):
    """A loss or a gradient is NaN or infinite."""

    exit_code = EXIT_NON_FINITE


class BrokenStateError(ModelCheckError):
    """Weights or moments have changed while nothing here changed them."""

    exit_code = EXIT_DISAGREEMENT


class NoGpuError(ModelCheckError):
    """There is no usable GPU, a GPU that was named is missing, or GPUs were asked for and NVML
    cannot answer."""

    exit_code = EXIT_NO_GPU


class PeerLost(ModelCheckError):
    """Another rank of the job is gone, or does not come: this one cannot go on, and is not the
    cause."""

    exit_code = EXIT_PEER_LOST

    def __init__(self, text: str, *, has_waited: bool = False, waited_s: float = 0.0) -> None:
        """`has_waited`: for a rank that did not come in time, and may still be there; so long, as
        far as that is known."""
        super().__init__(text)
        self.has_waited, self.waited_s = has_waited, waited_s


class InternalError(ModelCheckError):
    """A fault in Model Check itself."""


def exit_code_of(returncode: int) -> int:
    """The exit code that a shell reports for `Popen.returncode`: signal N is -N there, 128+N
    here."""
    return EXIT_SIGNAL_BASE - returncode if returncode < 0 else returncode


CRASHES = frozenset(
    EXIT_SIGNAL_BASE + getattr(signal, f"SIG{name}")
    for name in ("ILL", "TRAP", "ABRT", "BUS", "FPE", "SEGV", "SYS")
)
"""Exit codes of a program that ends by a signal which nobody sent: it crashed."""


def is_of_its_own(exit_code: int) -> bool:
    """Whether a program ends so by what it does itself, as each copy of it may: nobody killed it,
    or ended its silence."""
    return (0 < exit_code < EXIT_SIGNAL_BASE and exit_code != EXIT_HANG) or exit_code in CRASHES


def describe_exit(returncode: int) -> str:
    """`exit code 7`, `killed by SIGKILL (9)`. A negative `returncode` is a signal, as in
    `subprocess.Popen`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "signal"
    return f"killed by {name} ({-returncode})"
