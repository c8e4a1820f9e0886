"""What each worker said of itself, in bounded memory: of each kind of event the last, no step."""

from collections.abc import Mapping
from signal import SIGTERM

from msgspec import Struct, field

from launcher.verdict.slow import WARM_UP
from launcher.verdict.trace import Tracer
from model_check.errors import EXIT_PASS, EXIT_SIGNAL_BASE
from model_check.events import (
    Break,
    Done,
    Evaluation,
    Event,
    Evidence,
    Finished,
    NonFinite,
    Note,
    Phase,
    Saved,
    Scalar,
    Step,
)

UNREPEATABLE = (
    "the passes of its first step gave other bits when they were computed twice: its kernels vary, "
    "so no difference would prove anything"
)
_END_WORDS = {EXIT_PASS: "done", EXIT_SIGNAL_BASE + SIGTERM: "stopped"}


class WorkerFacts(Struct):
    """One worker's run as its events tell it."""

    phase: str | None = None
    detail: dict[str, Scalar] = field(default_factory=dict)
    """Device, versions, model: what the phases reported, the latest value of each name."""
    num_steps: int = 0
    num_losses: int = 0
    """Steps that told one."""
    loss_first: str | None = None
    loss_last: str | None = None
    tokens: int = 0
    steps_ms: float = 0.0
    """How long the steps of a rank took behind the first, in which it waits for ranks to start."""
    waits_ms: float = 0.0
    """How long it waited in them for other ranks."""
    last_step: int | None = None
    taken: str = ""
    """Of which tensors its last step told fingerprints: `2, 3 of 6`."""
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    """Validation split -> its latest evaluation."""
    nonfinite: NonFinite | None = None
    """The last word on the step."""
    first_nonfinite: NonFinite | None = None
    """The first: what that step itself has shown."""
    broken: Break | None = None
    repeated: bool | None = None
    """Whether the passes of its first step gave equal bits when they were computed twice; None: it
    did not compute them twice."""
    is_finished: bool = False
    """It did its last step."""
    evidence: list[Evidence] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unwatched: set[int] = field(default_factory=set)
    """The processes of a command that trained beside the one whose steps were told."""
    done: Done | None = None
    tracer: Tracer | None = field(default_factory=Tracer)
    """What of its steps is compared with other runs; None: nobody will."""

    @property
    def state(self) -> str | None:
        """Its phase; `NaN` until it trains on; how it ended. None: it told nothing."""
        if self.done is not None:
            code = self.done.exit_code
            return _END_WORDS.get(code, f"exit {code}")
        return self.phase if self.nonfinite is None else "NaN"

    @property
    def shard(self) -> str:
        """`1 of 2`: which part of the model this rank holds; empty: all of it."""
        return str(self.detail.get("shard", ""))

    @property
    def first_step(self) -> int:
        """The step that it began with: not 0 for a run that was resumed."""
        first = self.detail.get("first_step", 0)
        return first if isinstance(first, int) else 0

    @property
    def waiting(self) -> float | None:
        """The share of its steps in which it waited for other ranks; None: it had none."""
        return min(1.0, self.waits_ms / self.steps_ms) if self.steps_ms > 0 else None

    @property
    def turn(self) -> int | None:
        """In so many steps every tensor has its turn; None: none is fingerprinted."""
        number = self.taken.rpartition(" of ")[2]
        return int(number) if number.isdigit() else None

    def record(self, event: Event) -> None:
        if self.tracer is not None:
            self.tracer.record(event)
        match event:
            case Step():
                self._step(event)
            case Phase():
                self.phase = event.name
                self.detail |= event.detail
            case Evaluation():
                self.evaluations[event.split] = event
            case NonFinite():
                self._nonfinite(event)
            case Break():
                self.broken = self.broken or event
            case Evidence():
                self.evidence.append(event)
            case Saved():
                self.saved.append(event)
            case Note():
                self.notes.append(event.text)
                if event.unwatched is not None:
                    self.unwatched.add(event.unwatched)
            case Finished():
                self.is_finished = True
            case Done():
                self.done = event

    def _nonfinite(self, event: NonFinite) -> None:
        """Of the first step; its last word knows most."""
        self.first_nonfinite = self.first_nonfinite or event
        if self.nonfinite is None or self.nonfinite.step == event.step:
            self.nonfinite = event

    def _step(self, step: Step) -> None:
        self.num_steps += 1
        self.last_step = step.step
        self.taken = step.taken
        self.tokens += step.tokens
        if step.wait_ms is not None and self.num_steps > WARM_UP:
            self.steps_ms += step.ms
            self.waits_ms += step.wait_ms
        if step.loss is not None:
            self.num_losses += 1
            self.loss_last = step.loss
        if step.repeated is not None:
            self.repeated = step.repeated
        # It trained on after a NaN, so it does not end of that.
        self.nonfinite = self.first_nonfinite = None
        if self.loss_first is None:
            self.loss_first = step.loss


def changed_alike(all_facts: Mapping[str, WorkerFacts]) -> list[str]:
    """All workers, two or more, whose state changed in the same way at the same step: their program
    did that, no device."""
    breaks = [facts.broken for facts in all_facts.values()]
    found = {each and (each.step, each.kept_as, each.num_tensors, *each.found) for each in breaks}
    return list(all_facts) if len(breaks) > 1 and len(found) == 1 and None not in found else []
