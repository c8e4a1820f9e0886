"""The last words of a worker begin with the title of its block, however long that is."""

import math
from pathlib import Path

import pytest

from launcher.plan import WorkerSpec
from launcher.report.closing import closing_lines
from launcher.supervise.worker import Worker
from launcher.verdict.last_lines import last_lines
from launcher.verdict.record import RunEnd
from model_check.forensics.report import BadStep, block
from model_check.forensics.scan import BadTensor
from tests.launcher.verdict.test_judge import ended, judgement, trained

NAN, INF = math.nan, math.inf
BAD = BadTensor("layers.0.attention.wq.weight", (4, 4), 16, 0, (NAN,) * 5)


def spoken(loss: float, norm: float, num_bad: int = 0) -> list[str]:
    """What a worker says around the block of its bad step."""
    bad = BadStep("GPU6", 3, loss, norm, [BAD] * num_bad, [])
    steps = [f"Step [{step}/9]" for step in range(3)]
    return [*steps, *block(bad).splitlines(), "", "Checkpoint saved: x", "error: step 3"]


@pytest.mark.parametrize(
    ("loss", "norm", "num_bad", "title"),
    [
        (2.0, NAN, 30, "NaN GRADIENT DETECTED [GPU 6]"),
        (NAN, NAN, 0, "NaN LOSS DETECTED [GPU 6]"),
        (-INF, NAN, 0, "-Inf LOSS DETECTED [GPU 6]"),
        (2.0, INF, 0, "Inf GRADIENT NORM DETECTED [GPU 6]"),
    ],
)
def test_the_title_of_a_long_block_comes_first(
    loss: float, norm: float, num_bad: int, title: str
) -> None:
    lines = spoken(loss, norm, num_bad)
    for num in (3, 8):
        assert last_lines(lines, num) == (title, "...", *lines[2 - num :])
    assert last_lines(last_lines(lines, 8), 5) == last_lines(lines, 5)
    assert last_lines(lines, 2) == tuple(lines[-2:])


def test_what_fits_or_has_no_block_is_as_it_was() -> None:
    lines = spoken(NAN, NAN)
    assert last_lines(lines, 100) == tuple(lines)
    assert last_lines(lines, len(lines) - 4) == tuple(lines[4:])
    plain = [f"line {number}" for number in range(9)]
    assert last_lines(plain, 4) == tuple(plain[-4:])


def test_a_worker_keeps_the_title_and_its_quote_begins_with_it() -> None:
    worker = Worker("GPU6", spec=WorkerSpec("GPU6", (), {}, Path("log")))
    lines = spoken(2.0, NAN, 80)
    for first in range(0, len(lines), 7):  # as they come out of a pipe
        worker.remember(lines[first : first + 7])
    end = RunEnd(exit_code=20, reason="r", culprits=["GPU6"])
    workers = [ended("GPU0"), ended("GPU6", 20, last_lines=list(worker.last_lines))]
    found = judgement(end, workers, dict.fromkeys(("GPU0", "GPU6"), trained()))
    quote = list(closing_lines(found, Path("/r"), tail_lines=20))[:22]
    assert quote[:3] == ["last lines of GPU6:", "  | NaN GRADIENT DETECTED [GPU 6]", "  | ..."]
    assert quote[20] == "  | error: step 3"
