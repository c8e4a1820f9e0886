"""One thing that was looked at: its status, what was found, what to do."""

from typing import Literal, NamedTuple

from model_check.errors import EXIT_USAGE

GIB = 1 << 30
Status = Literal["ok", "warn", "FAIL"]


class Finding(NamedTuple):
    """A line of the doctor's answer."""

    status: Status
    name: str
    found: str
    advice: str = ""
    exit_code: int = 0
    """What a run would likely end with; 0 unless it is a FAIL."""

    def __str__(self) -> str:
        advice = f" -> {self.advice}" if self.advice else ""
        return f"{self.status:<4}  {self.name:<18}  {self.found}{advice}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def ok(name: str, found: str) -> Finding:
    return Finding("ok", name, found)


def warn(name: str, found: str, advice: str) -> Finding:
    return Finding("warn", name, found, advice)


def warn_if(is_low: bool, name: str, found: str, advice: str) -> Finding:
    """The advice is told only when it is needed."""
    return warn(name, found, advice) if is_low else ok(name, found)


def fail(name: str, found: str, advice: str, exit_code: int = EXIT_USAGE) -> Finding:
    return Finding("FAIL", name, found, advice, exit_code)
