"""torch's profiler over some steps, on request."""

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from model_check.engine.checkpoint import set_earlier_aside, storing
from model_check.engine.results import StepData
from model_check.engine.run_context import RunContext
from model_check.errors import StorageError
from model_check.hooks.hook import RunObserver
from model_check.utils.held import make_unlinked


class Profiler(RunObserver):
    """Records `steps` and writes `profile/steps_3-5.json.gz`. A run that begins or ends among them
    leaves the steps that it has, and names the file by these. Profiled steps are slower."""

    def __init__(self, steps: range, context: RunContext) -> None:
        self._steps, self._context = steps, context
        self._activities = [ProfilerActivity.CPU]
        if context.device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: Any = None
        self._recorded: list[int] = []

    def before_step(self, data: StepData) -> None:
        if data.step not in self._steps:
            self._write()
            return
        if self._profile is None:
            self._start()
        self._recorded.append(data.step)

    def pause(self, paused: bool) -> None:
        if self._profile is not None:
            self._wait()  # sync
            self._profile.toggle_collection_dynamic(not paused, self._activities)

    def close(self, _error: BaseException | None) -> None:
        self._write()

    def _write(self) -> None:
        """A profile that cannot be written is reported; the training goes on."""
        if self._profile is None:
            return
        finished, self._profile = self._profile, None
        self._wait()  # sync
        finished.stop()
        first, last = self._recorded[0], self._recorded[-1]
        path = self._context.directory / "profile" / f"steps_{first}-{last}.json.gz"
        try:
            with storing(path):
                make_unlinked(path.parent)
                set_earlier_aside(path)
                finished.export_chrome_trace(str(path))
        except StorageError as failure:
            self._context.channels.note(f"Profile of steps {first} to {last} not saved: {failure}")
            return
        self._context.channels.note(
            f"Profile of steps {first} to {last}: {path} (drop the file on "
            "https://ui.perfetto.dev, or load it in chrome://tracing)"
        )

    def _start(self) -> None:
        self._wait()  # sync
        self._profile = profile(activities=self._activities, record_shapes=True)
        self._profile.start()

    def _wait(self) -> None:
        """Let the steps finish that are under way: they belong to what was before."""
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
