"""The training run of one worker: assembly, and the loop."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from model_check.config.derived import Geometry, geometry, num_micro_batches
from model_check.config.drill import Drill
from model_check.config.schema import Settings
from model_check.engine.alarm import Alarm
from model_check.engine.batches import Batch, BatchSource, gather
from model_check.engine.checkpoint import save_checkpoint
from model_check.engine.device import describe_device
from model_check.engine.inject import Injector
from model_check.engine.memory import explained
from model_check.engine.metrics import Meter, peak_memory_bytes, step_line
from model_check.engine.optim import AdamW
from model_check.engine.precision import compute_dtype
from model_check.engine.reading import Reader, Reading
from model_check.engine.schedule import learning_rate
from model_check.engine.step import StepPlan, accumulate, train_step
from model_check.engine.stop import StopSignal
from model_check.errors import ConfigError
from model_check.events import EventSink, Phase, Scalar, Step
from model_check.models.attention import BACKENDS, resolve_backend
from model_check.models.build_model import build_model


@dataclass(frozen=True)
class Surroundings:
    """What a run has of its process."""

    worker: str
    """`GPU3`"""
    device: torch.device
    directory: Path
    """Of checkpoints and dumps."""
    drill: Drill | None
    say: Callable[[str], None]
    sink: EventSink
    stop: StopSignal
    meter: Meter


def build_trainer(
    settings: Settings,
    source: BatchSource,
    tokenizer_vocab_size: int,
    here: Surroundings,
    lag: int | None = None,
) -> "Trainer":
    """Build the model and all around it. Raises ConfigError for settings that cannot act here.

    `lag`: see Reader; None: 1 on a GPU, 0 on a CPU.
    """
    training = settings.training
    shape = geometry(settings.model, tokenizer_vocab_size)
    check_vocabulary(shape, tokenizer_vocab_size)
    dtype = compute_dtype(training.use_amp, here.device)
    backend, reason = resolve_backend(settings.model.attention_backend, here.device, dtype)
    detail = describe_device(here.device) | {
        "attention_backend": backend,
        "attention_reason": reason,
        "num_parameters": shape.num_parameters,
        "dtype": str(dtype).removeprefix("torch."),
    }
    here.sink.emit(Phase(name="build", detail=detail))
    here.say(_introduction(detail))
    with explained(training, here.device):
        model = build_model(settings, shape, BACKENDS[backend], here.device)
        optimizer = AdamW(model.parameters(), training)
    plan = StepPlan(here.device, dtype, training.max_grad_norm)
    reader = Reader((1 if here.device.type == "cuda" else 0) if lag is None else lag)
    return Trainer(settings, model, optimizer, source, plan, reader, here)


def check_vocabulary(shape: Geometry, tokenizer_vocab_size: int) -> None:
    if tokenizer_vocab_size > shape.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {shape.vocab_size} is smaller than the tokenizer's vocabulary "
            f"({tokenizer_vocab_size}); set model.vocab_size=null to take the tokenizer's"
        )


class Trainer:
    """Trains `model` for training.max_steps steps, reporting each."""

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        optimizer: AdamW,
        source: BatchSource,
        plan: StepPlan,
        reader: Reader,
        here: Surroundings,
    ) -> None:
        self.settings, self.training = settings, settings.training
        self.model, self.optimizer, self.source = model, optimizer, source
        self.plan, self.reader, self.here = plan, reader, here
        self.num_micro_batches = num_micro_batches(settings)
        self.injector = Injector(here.drill, here.worker, model)
        self.alarm = Alarm(
            worker=here.worker,
            model=model,
            directory=here.directory,
            dump=settings.debug.dump_tensors,
            say=here.say,
            sink=here.sink,
            recompute=self._recompute if reader.lag else None,
            save=lambda path, reading: self._save(path, reading.step, reading.loss),
        )

    def run(self) -> None:
        """Train to the end. Raises NonFiniteError, Terminated, OutOfMemory, StorageError."""
        here = self.here
        here.sink.emit(Phase(name="train"))
        with (
            here.stop.deferred(),
            explained(self.training, here.device),
            closing(self.source.batches(0)) as stream,
        ):
            here.meter.start()
            self._loop(stream)
        here.say(_conclusion(here.meter))

    def _loop(self, stream: Iterator[Batch]) -> None:
        for step in range(self.training.max_steps):
            data = gather(stream, step, self.num_micro_batches, self.plan.device)
            self.injector.before_step(step)
            lr = learning_rate(step, self.training)
            result = train_step(self.model, data, self.optimizer, lr, self.plan)
            self._take(self.reader.push(data, lr, result))
            self._save_if_due(num_done=step + 1)
            if self.here.stop.signum is not None:
                break
        self._take(self.reader.flush())
        self.here.stop.check()
        if self.training.save_last:
            self._save_state("last.pt", self.training.max_steps)

    def _take(self, readings: Iterable[Reading]) -> None:
        for reading in readings:
            if reading.bad:
                self.alarm.raise_for(reading)
            self._report(reading)

    def _report(self, reading: Reading) -> None:
        meter, max_steps = self.here.meter, self.training.max_steps
        seconds = meter.finish_step(reading.loss, reading.data.num_positions)
        event = Step(
            step=reading.step,
            loss=reading.loss.hex(),
            grad_norm=reading.grad_norm.hex(),
            lr=reading.lr,
            ms=round(seconds * 1000, 3),
            tokens=reading.data.num_positions,
        )
        self.here.sink.emit(event)
        num_left = max_steps - reading.step - 1
        if reading.step % self.settings.logging.log_interval == 0 or num_left == 0:
            eta_s = num_left * meter.step_s
            line = step_line(
                reading.step, max_steps, reading.loss, reading.lr, reading.grad_norm, eta_s
            )
            self.here.say(line)

    def _save_if_due(self, num_done: int) -> None:
        interval = self.training.save_interval
        if interval is not None and num_done % interval == 0:
            self._take(self.reader.flush())  # a checkpoint never holds a step nobody has looked at
            self._save_state(f"step_{num_done}.pt", num_done)

    def _save_state(self, name: str, num_done: int) -> None:
        path = self.here.directory / name
        self.here.sink.emit(Phase(name="save"))
        self._save(path, num_done, self.here.meter.loss_last)
        self.here.sink.emit(Phase(name="train"))
        self.here.meter.start()

    def _save(self, path: Path, num_done: int, loss: float | None) -> None:
        save_checkpoint(
            path,
            model=self.model,
            optimizer=self.optimizer,
            settings=self.settings,
            step=num_done,
            loader_position=num_done * self.num_micro_batches,
            loss=loss,
        )

    def _recompute(self, reading: Reading) -> None:
        self.injector.repeat(reading.step)
        accumulate(self.model, reading.data, self.optimizer, self.plan)


def _introduction(detail: dict[str, Scalar]) -> str:
    return (
        f"{detail['device_name']}, torch {detail['torch']}: {detail['num_parameters']:,} "
        f"parameters, {detail['dtype']}, attention {detail['attention_backend']} "
        f"({detail['attention_reason']})"
    )


def _conclusion(meter: Meter) -> str:
    rate = "n/a" if meter.tokens_per_s is None else f"{meter.tokens_per_s:,.0f}"
    return (
        f"Trained {meter.num_steps} steps: loss {meter.loss_first:.4f} -> {meter.loss_last:.4f}, "
        f"{rate} tokens/s, peak memory {peak_memory_bytes() / 2**30:.2f} GiB"
    )
