"""Processes that tokenize in parallel, and what they made, in the order of the tasks.

Processes, not threads: each reads, parses, cleans and tokenizes with an interpreter of its own.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from model_check.data.build.encode import Done, Order, Task
from model_check.errors import InternalError, ModelCheckError, describe_exit

_AHEAD = 2
"""Tasks for each worker, those it works on included: what bounds the memory."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ROOT = Path(__file__).parents[3]


class Crew:
    """Workers that start when entered and are gone at the end, however it comes."""

    def __init__(self, num_workers: int, order: Order) -> None:
        self._num_workers = num_workers
        self._order = order
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Crew":
        self._threads = ThreadPoolExecutor(self._num_workers, thread_name_prefix="crew")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        try:
            with _signals_held():
                for _ in range(self._num_workers):
                    self._workers.append(_Worker(self._order))
                    self._idle.put(self._workers[-1])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)  # theirs now ends: nobody answers
        for worker in self._workers:
            worker.close()

    def results(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Done | None]]:
        """In order; None for what no worker may hold as a whole: the caller does it then. Raises
        what a worker met; InternalError when one died, saying how and at what."""
        ahead: deque[tuple[Task, Future[Done] | None]] = deque()
        for task in tasks:
            future = self._threads.submit(self._work, task) if task.bounded else None
            ahead.append((task, future))
            if len(ahead) >= _AHEAD * self._num_workers:
                yield _result(*ahead.popleft())
        while ahead:
            yield _result(*ahead.popleft())

    def _work(self, task: Task) -> Done:
        worker = self._idle.get()
        try:
            return worker.work(task)
        finally:
            self._idle.put(worker)


def _result(task: Task, future: Future[Done] | None) -> tuple[Task, Done | None]:
    return task, None if future is None else future.result()


@contextmanager
def _signals_held() -> Iterator[None]:
    """What asks us to end waits until every worker is on record. A worker keeps it held: a Ctrl-C
    goes to the whole group, and one that is still importing would die of it with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """One process and its two pipes."""

    def __init__(self, order: Order) -> None:
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            # -P: what lies in the current directory is text, whatever its name is.
            [sys.executable, "-P", "-m", "model_check.data.build.encode_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "RAYON_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        self._order: Order | None = order

    def work(self, task: Task) -> Done:
        """Raises DataError, InternalError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            if self._order is not None:  # by a thread: a pipe takes less than a tokenizer at once
                pickle.dump(self._order, stdin)
                self._order = None
            pickle.dump(task, stdin)
            stdin.flush()
            answer: Done | ModelCheckError = pickle.load(stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise InternalError(
                f"a tokenizing worker (pid {self._process.pid}) died: "
                f"{describe_exit(self._process.wait())}, at work on {task}; run again: finished "
                "work is kept"
            ) from error
        if isinstance(answer, ModelCheckError):
            raise answer
        return answer

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was never sent cannot be sent now
                    pipe.close()
