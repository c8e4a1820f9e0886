"""torch's profiler over some steps, on request."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from model_check.engine.checkpoint import storing
from model_check.engine.observer import Observer
from model_check.events import EventSink, Note


class Profiler(Observer):
    """Records `steps` and writes `profile/steps_3-5.json.gz`; a run that ends earlier leaves what
    it has. The profiled steps are slower than others."""

    def __init__(
        self,
        steps: range,
        directory: Path,
        device: torch.device,
        say: Callable[[str], None],
        sink: EventSink,
    ) -> None:
        self._steps, self._directory, self._device = steps, directory, device
        self._say, self._sink = say, sink
        self._profile: Any = None

    def before_step(self, step: int) -> None:
        if step == self._steps.start:
            self._start()
        elif step == self._steps.stop:
            self.close()

    def close(self) -> None:
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        self._wait()  # sync
        recorded.stop()
        path = self._directory / "profile" / f"steps_{self._steps[0]}-{self._steps[-1]}.json.gz"
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
        text = (
            f"Profile of steps {self._steps[0]} to {self._steps[-1]}: {path} (drop the file on "
            "https://ui.perfetto.dev, or load it in chrome://tracing)"
        )
        self._say(text)
        self._sink.emit(Note(text=text))

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._wait()  # sync
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def _wait(self) -> None:
        """Steps that are still under way belong to what was before."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
