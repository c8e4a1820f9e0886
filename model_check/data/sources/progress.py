"""How far, how fast, how much longer: a bar on a terminal, else a line now and then."""

import time
from collections.abc import Callable

_MB = 1e6
_BAR_EVERY_S = 0.2
_TELL_EVERY_S = 1.0
_FIRST_LINE_S = 2.0
_LONGEST_SILENCE_S = 30.0
_BAR_WIDTH = 12

Say = Callable[[str], None]


class Progress:
    """Of one build. Lines grow rarer the longer it takes: twenty in the first minute, then two."""

    def __init__(
        self,
        size_bytes: int | None,
        max_tokens: int | None,
        say: Say,
        bar: Say | None = None,
        tell: Say | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bar` draws over what it drew before, an empty text removes it; `tell` reaches those who
        wait for this build."""
        self._size_bytes = size_bytes
        self._max_tokens = max_tokens
        self._say = say
        self._bar = bar
        self._tell = tell
        self._clock = clock
        self._num_bytes = self._resumed_bytes = 0
        self._num_tokens = self._resumed_tokens = 0
        self._started = self._drawn = self._told = clock()
        self._next_line = self._started + _FIRST_LINE_S

    def resume(self, num_bytes: int, num_tokens: int) -> None:
        """Another process did so much."""
        self._num_bytes = self._resumed_bytes = num_bytes
        self._num_tokens = self._resumed_tokens = num_tokens

    def advance(self, num_bytes: int, num_tokens: int) -> None:
        """`num_bytes` more; `num_tokens` in all."""
        self._num_bytes += num_bytes
        self._num_tokens = num_tokens
        now = self._clock()
        if self._bar is not None and now - self._drawn >= _BAR_EVERY_S:
            self._drawn = now
            self._bar(self._drawing(now))
        if self._bar is None and now >= self._next_line:
            self._next_line = now + min(_LONGEST_SILENCE_S, max(2.0, (now - self._started) / 5))
            self._say(f"data: tokenizing, {self._line(now)}")
        if self._tell is not None and now - self._told >= _TELL_EVERY_S:
            self._told = now
            self._tell(self._line(now))

    def finish(self) -> None:
        if self._bar is not None:
            self._bar("")
        stopped = self._max_tokens is not None and self._num_tokens >= self._max_tokens
        if self._size_bytes and not stopped:
            self._num_bytes = self._size_bytes  # what held no document was read, too
        read = f"the first {self._amounts()}" if self._size_bytes and stopped else self._amounts()
        self._say(f"data: tokenized, {read}, {self._speed(self._clock())}")

    def _drawing(self, now: float) -> str:
        """Fits 80 columns."""
        fraction = self._fraction()
        if fraction is None:
            return f"data: {self._line(now)}"
        full = int(fraction * _BAR_WIDTH)
        bar = "#" * full + "-" * (_BAR_WIDTH - full)
        read = f"{self._num_bytes / _MB:,.1f} MB"
        return (
            f"data: [{bar}] {fraction:.0%} {read}, {self._speed(now)}, {self._eta(fraction, now)}"
        )

    def _line(self, now: float) -> str:
        fraction = self._fraction()
        speed = f"{self._amounts()}, {self._speed(now)}"
        return f"{fraction:.0%}, {speed}, {self._eta(fraction, now)}" if fraction else speed

    def _eta(self, fraction: float, now: float) -> str:
        here = fraction - self._resumed_fraction()
        left_s = (now - self._started) * (1 - fraction) / here if here > 0 else 0.0
        return f"ETA {int(left_s) // 60}:{int(left_s) % 60:02}"

    def _amounts(self) -> str:
        partly = self._size_bytes and self._num_bytes != self._size_bytes
        of = f" of {self._size_bytes / _MB:,.1f}" if self._size_bytes and partly else ""
        return f"{self._num_bytes / _MB:,.1f}{of} MB, {self._num_tokens:,} tokens"

    def _speed(self, now: float) -> str:
        seconds = max(1e-9, now - self._started)
        read = (self._num_bytes - self._resumed_bytes) / _MB / seconds
        made = (self._num_tokens - self._resumed_tokens) / seconds
        return f"{read:.1f} MB/s, {made:,.0f} tokens/s"

    def _fraction(self) -> float | None:
        return self._fraction_of(self._num_bytes, self._num_tokens)

    def _resumed_fraction(self) -> float:
        return self._fraction_of(self._resumed_bytes, self._resumed_tokens) or 0.0

    def _fraction_of(self, num_bytes: int, num_tokens: int) -> float | None:
        """None where neither the text's size nor the number of tokens is known."""
        parts = []
        if self._size_bytes:
            parts.append(num_bytes / self._size_bytes)
        if self._max_tokens:
            parts.append(num_tokens / self._max_tokens)
        return min(1.0, max(parts)) if parts else None
