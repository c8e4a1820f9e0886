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
        "worker  verdict       steps  1st loss    last  tokens/s   GiB   time",
        "────────────────────────────────────────────────────────────────────",
        "GPU0    PASS             10    9.0283  9.0541     3,518  0.39  5.7 s",
        "GPU10   INCONCLUSIVE     10    9.0283     nan     3,518   n/a  5.7 s",
    ]


def test_the_widest_row_fits_a_terminal_of_80_columns() -> None:
    widest = worker(
        "GPU7.10",
        verdict=Verdict.INCONCLUSIVE,
        steps=999_999,
        loss_first=12.34567,
        loss_last=12.34567,
        tokens_per_s=1_234_567.0,
        peak_memory_bytes=192 << 30,
        duration_s=999.9,
    )
    assert max(map(len, table([widest]))) <= 80 - len("[launcher] ")
    assert "27.78 h" in table([worker("GPU0", duration_s=100_000.0)])[-1]


def test_a_foreign_command_has_no_columns_of_a_training() -> None:
    nothing = dict.fromkeys(("loss_first", "loss_last", "tokens_per_s", "peak_memory_bytes"))
    rows = [worker(name, steps=0, **nothing) for name in ("CPU0", "CPU1")]
    assert table(rows) == [
        "worker   verdict    time",
        "────────────────────────",
        "CPU0     PASS      5.7 s",
        "CPU1     PASS      5.7 s",
    ]
