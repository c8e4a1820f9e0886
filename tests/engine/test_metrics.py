"""The step line to the letter; rates that leave out what is not training."""

import pytest

from model_check.engine.metrics import Meter, clock, peak_memory_bytes, step_line


def test_the_step_line_is_the_documented_one() -> None:
    assert step_line(0, 100, 12.234, 1e-5, 2.75654, 330.2) == (
        "Step [0/100] | Loss: 12.2340 | LR: 1.00e-05 | Grad Norm: 2.7565 | ETA: 5:30"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (330, "5:30"), (3599.6, "1:00:00"), (36610, "10:10:10")],
)
def test_times_are_minutes_and_past_an_hour_hours(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_rates_leave_out_the_first_step_and_what_is_not_a_step() -> None:
    meter = Meter()
    meter.start(100.0)
    meter.finish_step(9.0, 1000, 150.0)
    assert meter.seconds == 50  # warm-up
    assert (meter.step_s, meter.tokens_per_s) == (50, None)
    for loss, end in ((8.0, 152.0), (7.0, 154.0)):
        meter.finish_step(loss, 1000, end)
    meter.start(654.0)  # a checkpoint was saved
    meter.finish_step(6.0, 1000, 656.0)
    assert (meter.step_s, meter.tokens_per_s) == (2, 500)
    assert (meter.num_steps, meter.loss_first, meter.loss_last) == (4, 9.0, 6.0)


def test_peak_memory_is_that_of_this_process() -> None:
    before = peak_memory_bytes()
    block = bytearray(200 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_memory_bytes() >= before
    assert peak_memory_bytes() > 200 * 2**20
