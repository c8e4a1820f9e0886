"""One thing that was looked at: its status, what was found, what to do."""

from typing import Literal, NamedTuple

from model_check.errors import EXIT_USAGE

GIB = 1 << 30
DASH = "-"
"""Stands for what a device or a driver does not report."""
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


def told(value: float | str | None, form: str = "{}") -> str:
    """The value in this form; a dash where there is none."""
    return DASH if value is None else form.format(value)


def told_both(one: float | None, other: float | None, form: str = "{}", between: str = "/") -> str:
    """Two values that belong together; one dash where neither is there."""
    if one is None and other is None:
        return DASH
    return f"{told(one, form)}{between}{told(other, form)}"


def ok(name: str, found: str) -> Finding:
    return Finding("ok", name, found)


def warn(name: str, found: str, advice: str) -> Finding:
    return Finding("warn", name, found, advice)


def warn_if(is_low: bool, name: str, found: str, advice: str) -> Finding:
    """The advice is told only when it is needed."""
    return warn(name, found, advice) if is_low else ok(name, found)


def fail(name: str, found: str, advice: str, exit_code: int = EXIT_USAGE) -> Finding:
    return Finding("FAIL", name, found, advice, exit_code)
