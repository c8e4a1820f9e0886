"""How far, how fast, how much longer: a bar on a terminal, else a line now and then."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from model_check.utils.words import Say

_MB = 1e6
_BAR_EVERY_S = 0.2
_REPORT_EVERY_S = 1.0
_FIRST_LINE_S = 2.0
_LONGEST_SILENCE_S = 30.0
_BAR_WIDTH = 12


@dataclass
class BuildProgress:
    """Of one build. Lines grow rarer the longer it takes: twenty in the first minute, then two."""

    size_bytes: int | None
    max_tokens: int | None
    say: Say
    bar: Say | None = None
    """Draws over what it drew before; an empty text removes it."""
    report: Say | None = None
    """Tells the processes that wait for this build."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._num_bytes = self._resumed_bytes = 0
        self._num_tokens = self._resumed_tokens = 0
        self._started = self._drawn = self._reported = self.clock()
        self._next_line = self._started + _FIRST_LINE_S

    def resume(self, num_bytes: int, num_tokens: int) -> None:
        """Another process did so much."""
        self._num_bytes = self._resumed_bytes = num_bytes
        self._num_tokens = self._resumed_tokens = num_tokens

    @property
    def fraction(self) -> float | None:
        """Of the text or of the tokens that are needed; None: neither is known."""
        return self._fraction(self._num_bytes, self._num_tokens)

    def advance(self, num_bytes: int, num_tokens: int) -> None:
        """In all."""
        self._num_bytes, self._num_tokens = num_bytes, num_tokens
        now = self.clock()
        if self.bar is not None and now - self._drawn >= _BAR_EVERY_S:
            self._drawn = now
            self.bar(self._drawing(now))
        if self.bar is None and now >= self._next_line:
            self._next_line = now + min(_LONGEST_SILENCE_S, max(2.0, (now - self._started) / 5))
            self.say(f"data: tokenizing, {self._line(now)}")
        if self.report is not None and now - self._reported >= _REPORT_EVERY_S:
            self._reported = now
            self.report(self._line(now))

    def finish(self) -> None:
        if self.bar is not None:
            self.bar("")
        stopped = self.max_tokens is not None and self._num_tokens >= self.max_tokens
        if self.size_bytes and not stopped:
            # Text without a document was read, too.
            self._num_bytes = self.size_bytes
        first = "the first " if self.size_bytes and stopped else ""
        self.say(f"data: tokenized, {first}{self._amounts()}, {self._speed(self.clock())}")

    def _drawing(self, now: float) -> str:
        """Fits 80 columns."""
        fraction = self.fraction
        if fraction is None:
            return f"data: {self._line(now)}"
        bar = ("#" * int(fraction * _BAR_WIDTH)).ljust(_BAR_WIDTH, "-")
        read = f"{self._num_bytes / _MB:,.1f} MB"
        eta = self._eta(fraction, now)
        return f"data: [{bar}] {fraction:.0%} {read}, {self._speed(now)}, {eta}"

    def _line(self, now: float) -> str:
        fraction = self.fraction
        speed = f"{self._amounts()}, {self._speed(now)}"
        return f"{fraction:.0%}, {speed}, {self._eta(fraction, now)}" if fraction else speed

    def _eta(self, fraction: float, now: float) -> str:
        """From what this process did alone."""
        here = fraction - (self._fraction(self._resumed_bytes, self._resumed_tokens) or 0.0)
        left_s = (now - self._started) * (1 - fraction) / here if here > 0 else 0.0
        return f"ETA {int(left_s) // 60}:{int(left_s) % 60:02}"

    def _amounts(self) -> str:
        partly = self.size_bytes and self._num_bytes != self.size_bytes
        of = f" of {self.size_bytes / _MB:,.1f}" if self.size_bytes and partly else ""
        return f"{self._num_bytes / _MB:,.1f}{of} MB, {self._num_tokens:,} tokens"

    def _speed(self, now: float) -> str:
        seconds = max(1e-9, now - self._started)
        read = (self._num_bytes - self._resumed_bytes) / _MB / seconds
        made = (self._num_tokens - self._resumed_tokens) / seconds
        return f"{read:.1f} MB/s, {made:,.0f} tokens/s"

    def _fraction(self, num_bytes: int, num_tokens: int) -> float | None:
        """None where neither the text's size nor the number of tokens is known."""
        pairs = ((num_bytes, self.size_bytes), (num_tokens, self.max_tokens))
        parts = [done / whole for done, whole in pairs if whole]
        return min(1.0, max(parts)) if parts else None
