"""How many files and functions of model_check does training run through?

    python -m benchmarks.trips [--list]

Runs the real `pretrain_main.py` on the CPU, in this process, and notes every function of
model_check that is entered (sys.setprofile, the training thread):

- to the first backward: from where a step asks for its batch to its `.backward()`
- a whole step: from one `.backward()` to that of the next step
- a spoilt gradient: from the `.backward()` that meets it to the event that names the module
  after the step was computed again

`--list` prints the names, too.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
import torch

import pretrain_main
from benchmarks.guard import ROOT, TINY
from model_check.data.read.loader import BatchLoader
from model_check.events import EventSink, NonFinite

STEP = 5
"""An ordinary step: neither the first nor the last."""
SPOILT = f"debug.drill=nan@{STEP}:CPU0:layers.1.feed_forward.w2.weight:always"


@dataclass
class Trip:
    """What was entered between two moments."""

    name: str
    entered: dict[tuple[str, str], None] = field(default_factory=dict)
    """(file, function), in the order of the first call."""
    is_over: bool = False

    def begin(self) -> None:
        """The functions that called so far belong to it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            self._note(frame)
            frame = frame.f_back
        sys.setprofile(self._see)

    def end(self) -> None:
        sys.setprofile(None)
        self.is_over = True

    def _see(self, frame: FrameType, what: str, _argument: Any) -> None:
        if what == "call":
            self._note(frame)

    def _note(self, frame: FrameType) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "model_check"):
            name = str(path.relative_to(ROOT))
            self.entered[name, frame.f_code.co_qualname] = None


def to_backward() -> Trip:
    trip, usual = Trip("from the batch to the first .backward()"), BatchLoader.batches
    num_asked = 0

    def batches(self: BatchLoader, *arguments: Any) -> Generator[Any, None, None]:
        nonlocal num_asked
        stream = usual(self, *arguments)
        try:
            while True:
                num_asked += 1
                if num_asked == STEP:
                    trip.begin()
                yield next(stream)
        finally:
            stream.close()

    BatchLoader.batches = batches  # type: ignore[method-assign]
    on_backward(lambda: trip.end() if num_asked >= STEP else None)
    train("training.max_steps=8")
    return trip


def whole_step() -> Trip:
    trip, num_passes = Trip("a whole step"), 0

    def passes() -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes == STEP:
            trip.begin()
        elif num_passes == STEP + 1:
            trip.end()

    on_backward(passes)
    train("training.max_steps=8")
    return trip


def to_name() -> Trip:
    trip, emit, num_passes = Trip("a spoilt gradient to its module"), EventSink.emit, 0

    def passes() -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes == STEP + 2:  # the first step is computed once more
            trip.begin()

    def heard(self: EventSink, event: Any) -> None:
        if isinstance(event, NonFinite) and event.repeated is not None:
            trip.end()
        emit(self, event)

    EventSink.emit = heard  # type: ignore[method-assign]
    on_backward(passes)
    train(SPOILT)
    return trip


def on_backward(call: Callable[[], None]) -> None:
    usual = torch.Tensor.backward

    def backward(*arguments: Any, **options: Any) -> None:
        call()
        usual(*arguments, **options)

    torch.Tensor.backward = backward  # type: ignore[method-assign]


def train(*settings: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        places = f"data.cache_dir={directory}/data system.checkpoint_dir={directory}/saved"
        pretrain_main.main([*TINY.split(), *places.split(), *settings])


def show(make: Callable[[], Trip], *, with_names: bool) -> None:
    """Each trip sets its marks in a process of its own."""
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    sys.stdout.flush()
    kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    trip = make()
    sys.stdout.flush()
    os.dup2(kept, 1)
    assert trip.is_over, f"{trip.name}: its end never came"
    files = dict.fromkeys(file for file, _ in trip.entered)
    print(f"{trip.name:42} {len(files):5} {len(trip.entered):10}")
    for file in files if with_names else ():
        print(f"    {file}: {', '.join(name for own, name in trip.entered if own == file)}")
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="name files and functions, too")
    arguments = parser.parse_args()
    print(f"{'trip':42} files  functions", flush=True)
    for make in (to_backward, whole_step, to_name):
        show(make, with_names=arguments.list)


if __name__ == "__main__":
    main()
