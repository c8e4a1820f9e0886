"""Weights & Biases, where `logging.wandb` asks for it (`pip install wandb`)."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from model_check.config.schema import Settings
from model_check.config.wandb import API_KEY, check_wandb
from model_check.engine.results import StepData
from model_check.engine.run_context import Identity
from model_check.errors import ConfigError, StorageError
from model_check.events import Sample, Scalar
from model_check.hooks.hook import RunObserver
from model_check.utils.dotenv import take_from_dotenv
from model_check.utils.words import Say, first_line


class WandbRun(RunObserver):
    """A writer of scalars and samples. Its run begins with the first step: then it is known whether
    an earlier run goes on, whose id is in the checkpoint."""

    def __init__(self, settings: Settings, identity: Identity, say: Say) -> None:
        """Raises ConfigError where wandb is not installed or has no key."""
        self._mode = settings.logging.wandb
        check_wandb(settings.logging)
        take_from_dotenv(API_KEY)  # into the environment: wandb looks nowhere else
        self._settings, self._identity, self._say = settings, identity, say
        self._run: Any = None
        self._kept: dict[str, Scalar] = {}

    def before_step(self, _data: StepData) -> None:
        if self._run is None:
            self._begin()

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Raises StorageError."""
        self._log(step, lambda: scalars)

    def write_samples(self, samples: Sequence[Sample]) -> None:
        """Raises StorageError."""
        rows = [[sample.step, sample.prompt, sample.text] for sample in samples]
        columns = ["step", "prompt", "text"]
        table = importlib.import_module("wandb").Table
        self._log(samples[0].step, lambda: {"samples": table(columns=columns, data=rows)})

    def _log(self, step: int, values: Callable[[], Mapping[str, Any]]) -> None:
        """Raises StorageError, whatever wandb raises: only its log is lost."""
        try:
            self._run.log(values(), step=step)
        except Exception as error:
            raise StorageError(f"W&B: {first_line(error)}") from error

    def kept(self) -> dict[str, Scalar]:
        return self._kept

    def restore(self, kept: dict[str, Scalar]) -> None:
        self._kept = {n: kept[n] for n in ("wandb", "wandb_id") if n in kept}

    def close(self, _error: BaseException | None) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish()
        except Exception as error:  # the training is over: it keeps its own end
            self._say(f"W&B: not everything was sent: {first_line(error)}")

    def _begin(self) -> None:
        """Raises ConfigError where wandb cannot begin: no network, a key that is refused."""
        wandb: Any = importlib.import_module("wandb")  # 1 s, and not installed everywhere
        try:
            self._run = self._init(wandb)
        except Exception as error:
            raise ConfigError(
                f"logging.wandb = {self._mode}: {first_line(error)}; logging.wandb=offline "
                "keeps the run on disk, logging.wandb=off does without"
            ) from error
        self._kept = {"wandb": self._run.url or None, "wandb_id": self._run.id}
        self._say(f"W&B: {self._run.url or self._run.dir} ({self._mode})")

    def _init(self, wandb: Any) -> Any:
        return wandb.init(
            project=self._settings.logging.wandb_project,
            group=self._identity.run_name,
            name=self._identity.worker,
            mode=self._mode,
            dir=".",  # its files go into `wandb/` here
            config=msgspec.to_builtins(self._settings),
            id=self._kept.get("wandb_id"),
            resume="allow",
            # It sends what we log, and nothing else: no output, no source, no environment.
            settings=wandb.Settings(
                console="off", disable_git=True, save_code=False, x_disable_meta=True, silent=True
            ),
        )
