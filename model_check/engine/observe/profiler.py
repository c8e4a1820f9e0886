"""torch's profiler over some steps, on request."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from model_check.engine.checkpoint import storing
from model_check.engine.observer import Observer
from model_check.errors import StorageError
from model_check.events import EventSink, Note


class Profiler(Observer):
    """Records `steps` and writes `profile/steps_3-5.json.gz`; a run that begins among them, or ends
    there, leaves what it has, named by it. The profiled steps are slower than others."""

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
        self._recorded: list[int] = []

    def before_step(self, step: int) -> None:
        if step not in self._steps:
            self.close()
            return
        if self._profile is None:
            self._start()
        self._recorded.append(step)

    def close(self) -> None:
        """A profile that cannot be written is told: the training does not end for it."""
        if self._profile is None:
            return
        finished, self._profile = self._profile, None
        self._wait()  # sync
        finished.stop()
        first, last = self._recorded[0], self._recorded[-1]
        path = self._directory / "profile" / f"steps_{first}-{last}.json.gz"
        try:
            with storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                finished.export_chrome_trace(str(path))
        except StorageError as failure:
            self._tell(f"Profile of steps {first} to {last} not saved: {failure}")
            return
        self._tell(
            f"Profile of steps {first} to {last}: {path} (drop the file on "
            "https://ui.perfetto.dev, or load it in chrome://tracing)"
        )

    def _tell(self, text: str) -> None:
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
