"""Counts finite steps and their time."""

from model_check.engine.busy import moment
from model_check.engine.results import StepMetrics
from model_check.engine.run_context import RunContext
from model_check.hooks.hook import Hook


class Progress(Hook):
    """Behind the search for NaN: a step that is not finite counts for nothing."""

    def __init__(self, context: RunContext) -> None:
        self._context = context

    def begin(self) -> None:
        self.start_timing()

    def start_timing(self) -> None:
        """A step begins, after work that is none."""
        self._context.meter.start(moment(self._context.device))

    def on_result(self, metrics: StepMetrics) -> None:
        meter = self._context.meter
        meter.finish_step(metrics.loss, metrics.data.num_positions, metrics.done)
        self._context.world.expect(meter.step_s)

    def on_last_step(self, *, early: bool) -> None:
        self._context.stop.check()
