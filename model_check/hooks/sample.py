"""What the model says to a few prompts. It leaves the training state as it was."""

from collections.abc import Iterator

from model_check.engine.run_context import Prompts
from model_check.engine.state import TrainingState
from model_check.engine.uncompiled import uncompiled, untouched
from model_check.events import Sample
from model_check.hooks.hook import Periodic
from model_check.hooks.lockstep import SupervisorClient


class MakeSamples(Periodic):
    """Makes a sample for each prompt."""

    def __init__(
        self, state: TrainingState, prompts: Prompts | None, client: SupervisorClient
    ) -> None:
        super().__init__(state.settings.training.sample_interval if prompts else None)
        self._state, self._prompts, self._client = state, prompts, client

    def between_steps(self, num_done: int) -> None:
        with self._state.phase("eval"):
            samples = list(self.samples(num_done))
            for observer in self._state.observers:
                observer.on_samples(samples)

    def samples(self, num_done: int) -> Iterator[Sample]:
        """Yields those of the first rank, for which all of them wait, a prompt at a time."""
        assert self._prompts is not None
        world = self._state.context.world
        for prompt in self._prompts.prompts:
            if world.is_first:
                yield self._sample(self._prompts, prompt, num_done)
            world.meet(self._client.check_in)

    def _sample(self, prompts: Prompts, prompt: str, num_done: int) -> Sample:
        model = self._state.model
        with untouched(model), uncompiled(model):  # each token has a shape of its own
            text = prompts.answer(model, prompt, self._client.check_in)
        return Sample(step=num_done, prompt=prompt, text=text)
