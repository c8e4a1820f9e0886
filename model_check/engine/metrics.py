"""Progress, speed and memory of a run. No torch: a run that never trained reports them, too."""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from model_check.events import Evaluation, Sample
from model_check.utils.words import printable

if TYPE_CHECKING:
    from model_check.engine.busy import Moment


def step_line(
    step: int, max_steps: int, loss: float, lr: float, grad_norm: float, eta_s: float
) -> str:
    """The step line; scripts match it (seed format, a contract)."""
    return (
        f"Step [{step}/{max_steps}] | Loss: {loss:.4f} | LR: {lr:.2e} | "
        f"Grad Norm: {grad_norm:.4f} | ETA: {clock(eta_s)}"
    )


def evaluation_line(evaluation: Evaluation) -> str:
    """`Eval [5] full | Loss: 2.1000 | Perplexity: 8.17 | 12,000 tokens/s | best`."""
    rate, perplexity = evaluation.tokens_per_s, evaluation.perplexity
    parts = [
        f"Eval [{evaluation.step}] {evaluation.split}",
        f"Loss: {float.fromhex(evaluation.loss):.4f}",
        f"Perplexity: {'n/a' if perplexity is None else f'{perplexity:.2f}'}",
        *_of_examples(evaluation),
        *([] if rate is None else [f"{rate:,.0f} tokens/s"]),
        *(["best"] if evaluation.best else []),
    ]
    return " | ".join(parts)


def _of_examples(evaluation: Evaluation) -> list[str]:
    """Of training.stage=prompt_target."""
    shares = {
        "Token Accuracy": evaluation.token_accuracy,
        "Exact Match": evaluation.exact_match,
    }
    return [f"{name}: {share:.4f}" for name, share in shares.items() if share is not None]


def sample_line(sample: Sample) -> str:
    """`Sample | step 100 | "Once" -> " upon a time"`, on one line."""
    texts = (printable(text) for text in (sample.prompt, sample.text))
    return f"Sample | step {sample.step} | " + " -> ".join(f'"{text}"' for text in texts)


def clock(seconds: float) -> str:
    """`5:30`, past an hour `1:05:30`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass
class Meter:
    """The progress of a run. The first step pays for warm-up, so no rate counts it. A step takes
    the time from the end of the one before to its own, on a GPU by the GPU's clock: the host looks
    late, and not always equally late."""

    num_steps: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    seconds: float = field(default=0.0, init=False)
    """The wall time of the latest step."""
    _since: "Moment" = field(default=0.0, init=False)
    _first_s: float = field(default=0.0, init=False)
    _seconds: float = field(default=0.0, init=False)
    """Of all steps but the first, like `_tokens`."""
    _tokens: int = field(default=0, init=False)

    def start(self, at: "Moment") -> None:
        """Steps begin, or go on after other work (a save), whose time counts for no step."""
        self._since = at

    def finish_step(self, loss: float, num_tokens: int, end: "Moment") -> None:
        """Count a finished step."""
        self.seconds, self._since = end - self._since, end
        if self.num_steps == 0:
            self.loss_first, self._first_s = loss, self.seconds
        else:
            self._seconds += self.seconds
            self._tokens += num_tokens
        self.loss_last = loss
        self.num_steps += 1

    @property
    def step_s(self) -> float:
        """Mean wall time of a step."""
        return self._seconds / (self.num_steps - 1) if self.num_steps > 1 else self._first_s

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > 0 else None


def peak_memory_bytes() -> int:
    """Peak of the device's allocator where this process uses a GPU, else of its resident set."""
    cuda = _cuda()
    # VmHWM, not ru_maxrss: a process inherits the latter from its parent.
    return _of_status("VmHWM:") if cuda is None else int(cuda.max_memory_allocated())


def current_memory_bytes() -> int:
    """Like peak_memory_bytes, at this moment."""
    cuda = _cuda()
    return _of_status("VmRSS:") if cuda is None else int(cuda.memory_allocated())


def _cuda() -> Any:
    """torch.cuda where this process uses a GPU, else None."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _of_status(name: str) -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(name))
    return int(line.split()[1]) * 1024
