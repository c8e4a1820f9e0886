"""The models of a passkey run, trained side by side: a process a core."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process

from model_check.errors import InternalError
from model_check.passkey.task import Result, train_and_test


def results_of(
    arms: Sequence[str], seeds: Sequence[int], overrides: Sequence[str], num_rows: int, jobs: int
) -> Iterator[Result]:
    """As they end. Raises what one of them raised."""
    wanted = [(arm, seed) for seed in seeds for arm in arms]
    context, size = get_context("spawn"), min(jobs, len(wanted))
    with ProcessPoolExecutor(size, mp_context=context, initializer=_die_with_parent) as pool:
        done = [pool.submit(train_and_test, *each, overrides, num_rows) for each in wanted]
        try:
            for future in as_completed(done):
                yield future.result()
        except BrokenProcessPool as error:
            raise InternalError("a process that trained was killed") from error
        except BaseException:
            for process in (pool._processes or {}).values():
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _die_with_parent() -> None:
    """However it ends; and a Ctrl-C, which comes to all, is answered there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
