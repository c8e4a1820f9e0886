"""A process that tokenizes: pickled tasks come in at stdin, ids go out at the former stdout.

It ends when its stdin does, so it never outlives who started it for longer than one task.
"""

import os
import pickle
import signal
import sys
from typing import BinaryIO

from model_check.data.build.encode import Coding, Done, Order, Task, encoded, merged
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.backends import checked, choose_backend
from model_check.errors import ModelCheckError


def main() -> None:
    # They go to the whole group; who started us decides, and is not to take us for dead first.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    try:
        _serve(requests, answers)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # nobody is left to answer to, and a flush at exit would fail again


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    order: Order = pickle.load(requests)
    coding = coding_of(order)
    while True:
        task: Task = pickle.load(requests)
        pickle.dump(_answer(task, coding, order.limit), answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


def coding_of(order: Order) -> Coding:
    """Raises DataError."""
    from tokenizers import Tokenizer

    from model_check.data.tokenizers.tokenizer import TextTokenizer

    tokenizer = TextTokenizer(Tokenizer.from_str(order.tokenizer_json), order.tokenizer_name)
    encode = checked(choose_backend(order.backend, tokenizer), tokenizer, _say)
    return Coding(encode, tokenizer.end_id, order.dtype)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _answer(task: Task, coding: Coding, limit: int | None) -> Done | ModelCheckError:
    repairs = Repairs()
    try:
        batches = list(encoded(task, repairs, coding, limit=limit))
    except ModelCheckError as error:
        return error
    return Done(merged(batches, coding.dtype), repairs)


if __name__ == "__main__":
    main()
