"""Processes that tokenize in parallel, and their results in the order of the tasks.

Processes, not threads: each reads, parses, cleans and tokenizes with an interpreter of its own.
`python -m model_check.data.build.workers` is such a process: pickled tasks come in at stdin, ids go
out at what was stdout. It ends when its stdin does, so it outlives its parent for one task at most.
"""

import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import BinaryIO

from model_check.data.build.encode import Encoder, EncoderSpec, Task, TaskResult
from model_check.data.sources.text import Repairs
from model_check.errors import InternalError, ModelCheckError, describe_exit
from model_check.utils.project_files import PACKAGES
from model_check.utils.requests import ignore_requests, requests_held

_TASKS_AHEAD = 2
"""Tasks for each worker, the one at work included: this bounds the memory."""


class WorkerPool:
    """Workers that start when it is entered and are gone when it is left, for whatever reason."""

    def __init__(self, num_workers: int, spec: EncoderSpec) -> None:
        self._num_workers = num_workers
        self._spec = spec
        self._workers: list[_Worker] = []

    def __enter__(self) -> "WorkerPool":
        self._threads = ThreadPoolExecutor(self._num_workers, thread_name_prefix="pool")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        try:
            # A Ctrl-C goes to the whole group, and would end a worker that still imports.
            with requests_held():
                for _ in range(self._num_workers):
                    self._workers.append(_Worker(self._spec))
                    self._idle.put(self._workers[-1])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
        # A thread that waits for an answer ends now, since its worker is dead.
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def results(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, TaskResult | None]]:
        """In order; None for a task that is not bounded: the caller must do it. Raises the
        ModelCheckError of a worker; InternalError when one died, with its end and its task."""
        ahead: deque[tuple[Task, Future[TaskResult] | None]] = deque()
        for task in tasks:
            future = self._threads.submit(self._work, task) if task.bounded else None
            ahead.append((task, future))
            if len(ahead) >= _TASKS_AHEAD * self._num_workers:
                yield _result(*ahead.popleft())
        while ahead:
            yield _result(*ahead.popleft())

    def _work(self, task: Task) -> TaskResult:
        worker = self._idle.get()
        try:
            return worker.work(task)
        finally:
            self._idle.put(worker)


def _result(task: Task, future: Future[TaskResult] | None) -> tuple[Task, TaskResult | None]:
    return task, None if future is None else future.result()


class _Worker:
    """One process and its two pipes."""

    def __init__(self, spec: EncoderSpec) -> None:
        path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            # -P: files of the current directory are text, even if they are named like modules.
            [sys.executable, "-P", "-m", "model_check.data.build.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "RAYON_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._spec: EncoderSpec | None = spec

    def work(self, task: Task) -> TaskResult:
        """Raises DataError, InternalError."""
        try:
            # Sent here, in a thread: a tokenizer is larger than a pipe's buffer.
            if self._spec is not None:
                pickle.dump(self._spec, self._stdin)
                self._spec = None
            pickle.dump(task, self._stdin)
            self._stdin.flush()
            answer: TaskResult | ModelCheckError = pickle.load(self._stdout)
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
        for pipe in (self._stdin, self._stdout):
            # Closing flushes, and the worker that would read is dead.
            with suppress(OSError):
                pipe.close()


def main() -> None:
    """A worker."""
    # The parent decides, and must not take us for dead first.
    ignore_requests()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What a library prints is not an answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        _serve(sys.stdin.buffer, answers)
    except (EOFError, BrokenPipeError):
        # The parent is gone, so a flush at exit would fail again.
        os._exit(0)


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    spec: EncoderSpec = pickle.load(requests)
    encoder = Encoder.of(spec)
    while True:
        task: Task = pickle.load(requests)
        repairs = Repairs()
        answer: TaskResult | ModelCheckError
        try:
            answer = repairs, encoder.whole(task, repairs, spec.limit)
        except ModelCheckError as error:
            answer = error
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    main()
