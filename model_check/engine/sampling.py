"""What the model says to a few prompts. It leaves the training state as it was."""

from collections.abc import Callable, Iterator

from model_check.engine.evaluation import untouched
from model_check.engine.state import TrainingState
from model_check.engine.uncompiled import uncompiled
from model_check.events import BEAT_S, Beat, Sample


class SampleMaker:
    """Makes a sample for each prompt."""

    def __init__(self, state: TrainingState) -> None:
        self._state, self._prompts = state, state.context.prompts
        self._interval = state.settings.training.sample_interval if self._prompts else None

    def due(self, num_done: int) -> bool:
        return self._interval is not None and num_done % self._interval == 0

    def due_at_end(self, num_done: int) -> bool:
        """Whether the end of the run needs samples of its own."""
        return self._interval is not None and not self.due(num_done)

    def samples(self, num_done: int, between: Callable[[], None]) -> Iterator[Sample]:
        """Of the first rank, which all of them wait for, a prompt at a time. `between` is called
        between tokens, and may raise."""
        assert self._prompts is not None
        world = self._state.context.world
        for prompt in self._prompts.prompts:
            if world.is_first:
                yield self._sample(prompt, num_done, between)
            world.meet(self._beating(between))

    def _sample(self, prompt: str, num_done: int, between: Callable[[], None]) -> Sample:
        assert self._prompts is not None
        model = self._state.model
        with untouched(model), uncompiled(model):  # each token has a shape of its own
            text = self._prompts.answer(model, prompt, self._beating(between))
        return Sample(step=num_done, prompt=prompt, text=text)

    def _beating(self, between: Callable[[], None]) -> Callable[[], None]:
        """`between`, which shows from time to time that this worker is alive."""
        now = self._state.context.meter.now
        beaten = now()

        def call() -> None:
            nonlocal beaten
            between()
            if now() - beaten >= BEAT_S:
                self._state.context.channels.sink.emit(Beat())
                beaten = now()

        return call
