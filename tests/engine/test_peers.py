"""A rank that waits for its device, in which a sum waits for the others: it beats, and gives up."""

import time
from dataclasses import replace
from typing import cast

import pytest
import torch

from model_check.dist import peers
from model_check.dist.peers import wait_until
from model_check.dist.ranks import Ranks
from model_check.engine.busy import GpuMoment
from model_check.engine.results import AsyncMetrics, StepData, StepResult
from model_check.errors import PeerLost


class Event:
    """Of a device that comes so far at a look, or never."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks <= 0


def rank(limit_s: float) -> tuple[Ranks, list[float]]:
    """One that has met nobody; when it beat."""
    found, beats = Ranks.__new__(Ranks), list[float]()
    found._timeout_s, found._device, found._run_dir = limit_s, torch.device("cpu"), None
    found.beat = lambda: beats.append(time.monotonic())
    return found, beats


def test_who_waits_for_its_device_beats_and_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BEAT_S", 0.01)
    waiting, beats = rank(limit_s=0.1)
    with pytest.raises(PeerLost, match=r"another rank did not come in 0\.1 s") as raised:
        waiting.wait_for_event(cast(torch.cuda.Event, Event(float("inf"))))
    assert raised.value.has_waited
    assert len(beats) > 1


def test_a_step_is_read_when_its_device_has_come_so_far() -> None:
    """The reader asks its rank, which looks: it never waits where no signal and no limit counts."""
    waiting, _ = rank(limit_s=100.0)
    event = Event(looks=3)
    reader = AsyncMetrics(lag=1, world=waiting)
    for number in range(2):
        data = StepData(number, [], num_positions=1, num_targets=1)
        norm = torch.tensor(1.0)
        result = StepResult(torch.tensor(0.5), norm, torch.tensor(False), norm[None])
        reader.push(data, 0.1, result)
    done = GpuMoment(cast(torch.cuda.Event, event))
    reader._pending[0] = replace(reader._pending[0], done=done)
    assert [metrics.step for metrics in reader.flush()] == [1]
    assert event.looks == 0


def test_nobody_is_waited_for_who_is_there() -> None:
    wait_until(lambda: True, 0.0, pytest.fail)
