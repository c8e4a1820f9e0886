"""Speed, waiting, memory: measured over the steps since the last report, and told everywhere."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from model_check.config.flops import FlopsPerToken
from model_check.config.schema import LoggingSettings
from model_check.engine.metrics import Meter
from model_check.engine.results import StepData, StepMetrics, StepResult
from model_check.engine.run_context import Channels
from model_check.errors import StorageError
from model_check.events import Evaluation, Metrics, Note, Sample, Telemetry, encode
from model_check.hooks.observe.mfu import Utilisation
from model_check.hooks.observe.scalars import ScalarLog
from tests.engine.conftest import Kept, Run


@dataclass
class Written:
    """A writer that keeps what it gets."""

    scalars: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    samples: list[Sample] = field(default_factory=list)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self.scalars.append((step, scalars))

    def write_samples(self, samples: Sequence[Sample]) -> None:
        self.samples += samples


def reading(step: int, wait_s: float = 0.0) -> StepMetrics:
    data = StepData(step, [], num_positions=1000, num_targets=1000, wait_s=wait_s)
    one = torch.ones(())
    return StepMetrics(data, 0.5, StepResult(2 * one, one, one < 0, one[None]), done=0.0)


def metrics(kept: Kept) -> list[Metrics]:
    return [event for event in kept.events if isinstance(event, Metrics)]


def make(
    kept: Kept,
    written: Written,
    log_interval: int = 2,
    speed_interval: int | None = None,
    peak: float | None = 1e9,
    telemetry: Path | None = None,
) -> ScalarLog:
    utilisation = Utilisation(FlopsPerToken(full=1e6, causal=5e5), peak)
    channels = Channels(kept.say, kept)
    logging = LoggingSettings(log_interval=log_interval, speed_interval=speed_interval)
    return ScalarLog(5, logging, utilisation, channels, Meter(), [written], telemetry)


def hear(log: ScalarLog, metrics: StepMetrics, seconds: float) -> None:
    """Of a step that took so long."""
    log._meter.seconds = seconds
    log.on_result(metrics)


def test_each_report_covers_the_steps_since_the_last_and_never_the_first() -> None:
    kept, written = Kept(), Written()
    log = make(kept, written)
    for step, seconds in enumerate([60.0, 4.0, 6.0, 5.0, 5.0]):
        hear(log, reading(step, wait_s=1.0), seconds)
    first, second, last = metrics(kept)
    assert (first.step, first.tokens_per_s, first.mfu_full, first.data_wait) == (
        0,
        None,
        None,
        None,
    )
    assert (second.step, second.tokens_per_s, second.data_wait) == (2, 200.0, 0.2)
    assert second.mfu_full == pytest.approx(0.2)
    assert second.mfu_causal == pytest.approx(0.1)
    assert (last.step, last.tokens_per_s) == (4, 200.0)
    assert 0 < last.memory_bytes <= last.peak_memory_bytes
    assert kept.lines == [
        "MFU 20.0% (full attention), 10.0% (causal); waited for data: 20.0% of the time"
    ]


def test_a_line_of_speed_covers_the_steps_since_the_last_one() -> None:
    kept = Kept()
    log = make(kept, Written(), log_interval=1, speed_interval=2)
    for step, seconds in enumerate([60.0, 4.0, 6.0, 1.0]):
        hear(log, reading(step), seconds)
    (line,) = kept.lines
    memory = r"Memory: \d+\.\d\d GiB, peak \d+\.\d\d"
    mfu = re.escape("MFU: 20.0% (full attention), 10.0% (causal)")
    assert re.fullmatch(rf"Speed \[2/5\] \| Tokens/s: 200 \| {mfu} \| {memory}", line)


def test_where_no_peak_is_known_the_last_line_says_nothing_of_it() -> None:
    kept = Kept()
    hear(make(kept, Written(), peak=None), reading(4), 1.0)
    assert kept.lines == ["Waited for data: n/a"]


def test_writers_get_what_is_known_and_nothing_else() -> None:
    kept, written = Kept(), Written()
    log = make(kept, written)
    hear(log, reading(0), 1.0)
    log.on_evaluation(
        Evaluation(step=1, split="held_out", loss=(1.5).hex(), perplexity=4.5, tokens=10)
    )
    (step, scalars), evaluation = written.scalars
    assert step == 0
    assert scalars.keys() == {
        *("train/loss", "train/perplexity", "train/grad_norm", "train/learning_rate"),
        *("memory/allocated_gib", "memory/peak_gib"),
    }
    assert evaluation == (1, {"eval/held_out/loss": 1.5, "eval/held_out/perplexity": 4.5})


def test_writers_get_each_step_and_the_newest_figures_of_the_gpu(tmp_path: Path) -> None:
    kept, written, telemetry = Kept(), Written(), tmp_path / "gpu6.telemetry.jsonl"
    log = make(kept, written, log_interval=2, telemetry=telemetry)
    hear(log, reading(0), 1.0)  # the launcher has written nothing yet
    with telemetry.open("wb") as file:
        for celsius, watt in ((61, 300.5), (64, None)):
            file.write(encode(Telemetry(temperature_c=celsius, power_w=watt)))
        file.write(b'{"kind": "telemetry", "t": 1, "tempera')
    for step in range(1, 4):
        hear(log, reading(step), 1.0)
    assert [step for step, _ in written.scalars] == [0, 1, 2, 3]
    of_gpu = [{n: v for n, v in s.items() if n.startswith("gpu/")} for _, s in written.scalars]
    assert of_gpu == [{}, {}, {"gpu/temperature_c": 64}, {}]
    assert all("train/loss" in scalars for _, scalars in written.scalars)


def test_writers_get_samples_unless_there_are_none() -> None:
    written = Written()
    log, sample = make(Kept(), written), Sample(step=3, prompt="a", text="b")
    log.on_samples([])
    log.on_samples([sample])
    assert written.samples == [sample]


class Failing(Written):
    """Writes so often, and then its disk is full."""

    num_good = 1

    def write(self, step: int, scalars: dict[str, float]) -> None:
        if len(self.scalars) == self.num_good:
            raise StorageError("log: cannot be written: No space left on device")
        super().write(step, scalars)


def test_a_log_that_fails_later_is_told_once_and_left_out() -> None:
    kept, written, failing = Kept(), Written(), Failing()
    log = make(kept, written, log_interval=1)
    log._writers.append(failing)
    for step in range(4):
        hear(log, reading(step), 1.0)
    assert [step for step, _ in failing.scalars] == [0]
    assert [step for step, _ in written.scalars] == [0, 1, 2, 3]
    notes = [event.text for event in kept.events if isinstance(event, Note)]
    assert notes == [line for line in kept.lines if "no longer logged" in line]
    assert notes == [
        "from step 1 on no longer logged: log: cannot be written: No space left on device"
    ]


def test_a_log_that_cannot_begin_ends_the_run(tiny_run: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StorageError, match=r"cannot be written: .* or set logging\.tensorboard_dir$"
    ):
        tiny_run(logging__tensorboard_dir=str(tmp_path / "file" / "logs"))


def test_a_run_tells_its_speed_in_events(tiny_run: Callable[..., Run]) -> None:
    run = tiny_run()()
    told = metrics(run.kept)
    assert [event.step for event in told] == [0, 1, 2, 3]
    assert told[0].tokens_per_s is None
    assert all(event.tokens_per_s and event.data_wait is not None for event in told[1:])
    assert told[-1].mfu_full is None
