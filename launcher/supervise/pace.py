"""How long output may gather before it is read again. Pure: time is passed in.

To read every line as it comes costs a wake-up a line. When there are many, nobody's eyes follow,
and the pipes hold what gathers: only one that fills up must be emptied at once, for its worker
would wait.
"""

MAX_REST_S = 0.05
MIN_REST_S = 0.002
"""Less is not worth another wait: the selector counts in whole milliseconds."""
_MAY_GATHER_BYTES = 1 << 14
"""In the busiest pipe: a quarter of what it holds."""
_MANY_READS = 20
"""Of late: below that, output is read as it comes."""
_HALF_LIFE_S = 0.1
"""Of a read, in the count of late ones."""


class Pace:
    """What was read, and how fast it came."""

    def __init__(self) -> None:
        self._read_at = float("-inf")
        self._late_reads = 0.0
        self._num_reads = 0
        self._most_bytes = 0

    def took(self, num_bytes: int) -> None:
        """So much was found in one pipe."""
        self._num_reads += 1
        self._most_bytes = max(self._most_bytes, num_bytes)

    def rest_s(self, now: float) -> float:
        """For how long, from `now`, all output may be left where it is; 0 when none was read."""
        if self._num_reads == 0:
            return 0.0
        passed_s, self._read_at = now - self._read_at, now
        self._late_reads = self._late_reads * 0.5 ** (passed_s / _HALF_LIFE_S) + self._num_reads
        rest_s = passed_s * _MAY_GATHER_BYTES / max(1, self._most_bytes)
        self._num_reads = self._most_bytes = 0
        if self._late_reads < _MANY_READS or rest_s < MIN_REST_S:
            return 0.0
        return min(rest_s, MAX_REST_S)
