"""How grave a symptom of a GPU is, in the words that operators use. Values only."""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct


class Severity(StrEnum):
    """From the gravest to the least."""

    ISOLATE = "ISOLATE"
    """Take the GPU out of service: its results cannot be trusted, or it is gone."""
    RESET = "RESET"
    """Usable again after a reset."""
    MONITOR = "MONITOR"
    """Usable; watch it."""
    IGNORE = "IGNORE"
    """Nothing is known against it."""


class CauseClass(StrEnum):
    HARDWARE = "hardware"
    SOFTWARE = "software"
    HOST = "host"
    USER = "user"
    UNKNOWN = "unknown"


class Repeat(StrEnum):
    """Whether a fault came again when the same was computed again."""

    TRANSIENT = "transient"
    """It did not."""
    PERSISTENT = "persistent"
    """Each time."""
    INTERMITTENT = "intermittent"
    """Not each time, and so often that it is its device's."""
    UNSETTLED = "unsettled"
    """It did, and not so often beside healthy workers that it must be its device's."""
    NOT_REPLAYED = "not replayed"


_TO_DO = {
    Severity.ISOLATE: "take it out of service",
    Severity.RESET: "reset it",
    Severity.MONITOR: "keep it in service, and watch it",
    Severity.IGNORE: "not to blame",
}
_CAUSES = {
    CauseClass.HARDWARE: "hardware fault",
    CauseClass.SOFTWARE: "software fault",
    CauseClass.HOST: "fault of this host",
    CauseClass.USER: "a setting or a request",
    CauseClass.UNKNOWN: "cause not known",
}
_REPEATS = {
    Repeat.TRANSIENT: "did not repeat",
    Repeat.PERSISTENT: "repeats",
    Repeat.INTERMITTENT: "repeats at times",
    Repeat.UNSETTLED: "repeated, too rarely to prove it",
    Repeat.NOT_REPLAYED: "not replayed",
}


def in_words(severity: Severity, cause_class: CauseClass | None, repeat: Repeat | None) -> str:
    """`take it out of service: hardware fault, repeats (ISOLATE)`"""
    cause = _CAUSES[cause_class] if cause_class else ""
    if severity is Severity.MONITOR and repeat is None:  # a warning is no fault
        cause = cause.removesuffix(" fault")
    known = ", ".join(filter(None, [cause, _REPEATS[repeat] if repeat else ""]))
    return f"{_TO_DO[severity]}: {known} ({severity})"


class Symptom(Struct, frozen=True):
    """One thing that is wrong with a GPU, or that NVML could not tell of it."""

    severity: Severity
    figure: str
    cure: str = ""
    cause_class: CauseClass = CauseClass.HARDWARE
    word: str = ""
    """What launch.fail_on calls it; empty: by its severity."""

    @property
    def is_hard(self) -> bool:
        """Whether it condemns the GPU."""
        return self.severity in (Severity.ISOLATE, Severity.RESET)

    def __str__(self) -> str:
        return f"{self.figure}: {self.cure}" if self.cure else self.figure


def worst(symptoms: Sequence[Symptom]) -> Symptom:
    """The gravest symptom; of several as grave, the first."""
    return min(symptoms, key=lambda symptom: list(Severity).index(symptom.severity))
