"""One of several equal workers of a benchmark: `worker.py DIR NUM_WORKERS MODE [AMOUNT ...]`.

Stamps (CLOCK_MONOTONIC nanoseconds) go to files in DIR, so that launchers are compared by what
happens to their workers and not by their reports. Standard library only: it starts in milliseconds.
"""

import os
import signal
import sys
import time

LINE = b"Step [123/1000] | Loss: 12.2340 | LR: 1.00e-05 | Grad Norm: 2.7565\n"


class Worker:
    """The actions of one worker; all workers share `directory`."""

    def __init__(self, directory: str, num_workers: int) -> None:
        self._dir = directory
        self._num_workers = num_workers

    def stamp(self, what: str) -> None:
        """Write down the time of an event; the first stamp of a kind counts."""
        path = f"{self._dir}/{what}.{os.getpid()}"
        with open(path + ".new", "w") as file:
            file.write(str(time.monotonic_ns()))
        os.rename(path + ".new", path)

    def meet(self, what: str) -> None:
        """Wait until every worker has written this stamp."""
        self.stamp(what)
        while self._count(what) < self._num_workers:
            time.sleep(0.01)

    def hello(self) -> None:
        os.write(1, b"hello\n")
        time.sleep(1000)

    def one_fails(self, obeys: str, floods: str) -> None:
        """When all are up, one exits with code 7; the others obey SIGTERM or ignore it."""
        signal.signal(signal.SIGTERM, self._obey if obeys == "obedient" else self._refuse)
        self.meet("up")
        try:
            os.mkdir(f"{self._dir}/culprit")
        except FileExistsError:
            self._go_on(floods == "flood")
        if floods == "flood":
            self._flood_for(0.3)
        self.stamp("failed")
        os._exit(7)

    def lines(self, count: int) -> None:
        """Print `count` lines as fast as possible; no worker ends before all have printed
        theirs."""
        self.meet("up")
        for _ in range(count):
            os.write(1, LINE)
        self.meet("written")

    def rate(self, lines_per_s: int, seconds: int) -> None:
        """A steady rate, in bursts every 20 ms."""
        self.meet("up")
        started = time.monotonic()
        for tick in range(1, seconds * 50 + 1):
            for _ in range(lines_per_s // 50):
                os.write(1, LINE)
            time.sleep(max(0, started + tick / 50 - time.monotonic()))
        self.meet("written")

    def _obey(self, signum: int, frame: object) -> None:
        self.stamp("told")
        os._exit(0)

    def _refuse(self, signum: int, frame: object) -> None:
        self.stamp("told")

    def _go_on(self, floods: bool) -> None:
        while True:
            if floods:
                os.write(1, LINE)
            else:
                time.sleep(1000)

    def _flood_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            os.write(1, LINE)

    def _count(self, what: str) -> int:
        names = os.listdir(self._dir)
        return sum(name.startswith(what + ".") and not name.endswith(".new") for name in names)


def main() -> None:
    directory, num_workers, mode, *rest = sys.argv[1:]
    worker = Worker(directory, int(num_workers))
    match mode:
        case "hello":
            worker.hello()
        case "one-fails":
            worker.one_fails(*rest)
        case "lines":
            worker.lines(int(rest[0]))
        case "rate":
            worker.rate(int(rest[0]), int(rest[1]))


if __name__ == "__main__":
    main()
