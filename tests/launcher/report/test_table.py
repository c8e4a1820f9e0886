"""The closing table lines up, whatever its cells hold."""

from launcher.report.table import table
from launcher.verdict.results import Verdict, WorkerResult


def worker(name: str, **more: object) -> WorkerResult:
    known = {
        "name": name,
        "verdict": Verdict.PASS,
        "cause": None,
        "steps": 10,
        "loss_first": 9.02832,
        "loss_last": 9.05411,
        "tokens_per_s": 3518.2,
        "peak_memory_bytes": 400 << 20,
        "duration_s": 5.71,
        "returncode": 0,
    }
    return WorkerResult(**{**known, **more})  # type: ignore[arg-type]


def test_words_stand_at_the_left_and_numbers_at_the_right() -> None:
    other = worker("GPU10", verdict=Verdict.INCONCLUSIVE, loss_last="nan", peak_memory_bytes=None)
    assert table([worker("GPU0"), other]) == [
        "worker   verdict        steps   loss first     last   tokens/s   peak memory    time",
        "────────────────────────────────────────────────────────────────────────────────────",
        "GPU0     PASS              10       9.0283   9.0541      3,518      0.39 GiB   5.7 s",
        "GPU10    INCONCLUSIVE      10       9.0283      nan      3,518           n/a   5.7 s",
    ]


def test_a_run_without_workers_has_the_head_alone() -> None:
    assert len(table([])) == 2
