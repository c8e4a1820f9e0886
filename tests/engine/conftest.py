"""A tiny training run in this process, and a real `pretrain_main.py` in another."""

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import pretrain_main
from model_check.config.drill import parse_drill
from model_check.config.load import Request, load
from model_check.config.schema import Settings
from model_check.data.sources.weights import weights_directory
from model_check.engine import compile as compile_module
from model_check.engine.assembly import build_trainer
from model_check.engine.metrics import Meter
from model_check.engine.run_context import Channels, Claim, Identity, Prompts, RunContext, Splits
from model_check.engine.stop import StopSignal
from model_check.engine.training_run import TrainingRun
from model_check.events import (
    Command,
    Event,
    EventSink,
    Scalar,
    Step,
    decode,
    encode,
    encode_command,
)
from model_check.hooks.hook import Hook, RunObserver
from model_check.train import StepContext
from model_check.utils.wire import HELD
from tests.deadline import DEADLINE_S

H = TypeVar("H", bound=Hook)
ROOT = Path(__file__).parents[2]
VOCABULARY = 31
COMPILER = shutil.which("g++") or shutil.which("clang++")

TINY: dict[str, Any] = {
    "model.num_layers": 1,
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.vocab_size": "null",
    "training.max_steps": 4,
    "training.batch_size": 2,
    "training.context_length": 16,
    "training.use_amp": "false",
    "system.device": "cpu",
}

OTHER_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "num_heads": {"model__num_heads": 4, "model__num_kv_heads": 2},
    "head_dim": {"model__head_dim": 8, "model__num_heads": 4, "model__num_kv_heads": 2},
    "rope_theta": {"model__rope_theta": 20000.0},
    "rope_scaling": {"model__rope_scaling__factor": 4.0},
    "rms_norm_eps": {"model__rms_norm_eps": 1e-3},
}
"""Every tensor has the shape that it has in TINY, but the model computes something else."""


def make_settings(**changes: Any) -> Settings:
    """TINY with changes; `training__max_steps=3`."""
    values = TINY | {name.replace("__", "."): value for name, value in changes.items()}
    overrides = tuple(f"{name}={value}" for name, value in values.items())
    return load(Request(preset="cpu", overrides=overrides), lambda: False).settings


@dataclass(frozen=True)
class FakeBatch:
    inputs: Tensor
    targets: Tensor
    documents: Tensor | None = None


@dataclass
class FakeSource:
    """Random tokens, each sequence from its number, or whatever `make(number)` of a batch gives."""

    batch_size: int = 2
    length: int = 16
    make: Callable[[int], FakeBatch] | None = None
    closed: bool = False

    def batches(self, start: int = 0) -> Generator[FakeBatch, None, None]:
        try:
            for first in itertools.count(start, self.batch_size):
                yield self.make(first // self.batch_size) if self.make else self.at(first)
        finally:
            self.closed = True

    def random(self, number: int) -> FakeBatch:
        return self.at(number * self.batch_size)

    def at(self, first: int) -> FakeBatch:
        tokens = torch.stack([self._sequence(first + row) for row in range(self.batch_size)])
        return FakeBatch(tokens[:, :-1], tokens[:, 1:])

    def _sequence(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randint(0, VOCABULARY, (self.length + 1,), generator=generator)


@dataclass
class Kept(EventSink):
    """An event sink and a console that keep what they get."""

    events: list[Event] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(None)

    def emit(self, event: Event) -> None:
        self.events.append(decode(encode(event)))  # as it arrives elsewhere

    def say(self, text: str) -> None:
        self.lines += text.split("\n")

    def steps(self) -> list[Step]:
        return [event for event in self.events if isinstance(event, Step)]


def bare_context(kept: Kept, directory: Path = Path("nowhere"), worker: str = "CPU0") -> RunContext:
    """Of a trainer in this process, on the CPU."""
    return RunContext(
        identity=Identity(worker),
        channels=Channels(kept.say, kept),
        device=torch.device("cpu"),
        claim=Claim(directory),
        meter=Meter(),
        stop=StopSignal(),
    )


@dataclass
class Run:
    """A trainer that is built and not yet run."""

    trainer: TrainingRun
    kept: Kept
    source: FakeSource
    meter: Meter
    stop: StopSignal

    def __call__(self) -> "Run":
        self.trainer.run()
        return self

    @property
    def step_context(self) -> StepContext:
        return self.trainer.trainer.context

    def hook(self, kind: type[H]) -> H:
        """The first of its kind."""
        return next(hook for hook in self.trainer.trainer.hooks if isinstance(hook, kind))

    def bits(self) -> list[tuple[str, str]]:
        return [(step.loss, step.grad_norm) for step in self.kept.steps()]

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.trainer.state.model.named_parameters()}


def make_run(
    usual: Path,
    source: FakeSource | None = None,
    lag: int | None = None,
    worker: str = "GPU6",
    directory: Path | None = None,
    claim: Claim | None = None,
    launch: str | None = None,
    splits: Splits | None = None,
    data: Mapping[str, Scalar] | None = None,
    observers: tuple[RunObserver, ...] = (),
    sink: EventSink | None = None,
    prompts: Prompts | None = None,
    **changes: Any,
) -> Run:
    """A run whose checkpoints go to `usual`, or to `directory` or `place`."""
    if splits:
        changes["data__validation"] = ",".join(f"{name}=0.1" for name in splits)
    settings = make_settings(**changes)
    training, drill = settings.training, settings.debug.drill
    source = source or FakeSource(training.batch_size, training.context_length)
    kept = Kept()
    context = replace(
        bare_context(kept),
        claim=claim or Claim(directory or usual),
        identity=Identity(worker, launch, data=data or {}),
        channels=Channels(kept.say, sink or kept, observers),
        drill=parse_drill(drill, training.max_steps) if drill else None,
        splits=splits or {},
        prompts=prompts,
        weights=weights_directory(settings, kept.say),
    )
    trainer = build_trainer(settings, source, VOCABULARY, context, lag)
    return Run(trainer, kept, source, context.meter, context.stop)


@pytest.fixture
def tiny_run(tmp_path: Path) -> Callable[..., Run]:
    return partial(make_run, tmp_path / "checkpoints")


@dataclass
class Worker:
    """A `pretrain_main.py` in its own process, with our end of its event socket."""

    process: subprocess.Popen[str]
    stream: BinaryIO
    """Lines both ways."""
    events: list[Event] = field(default_factory=list)
    output: str = ""

    def listen(self) -> Iterator[Event]:
        """Its events as they come, to the last."""
        for line in self.stream:
            self.events.append(decode(line))
            yield self.events[-1]

    def say(self, *commands: Command) -> None:
        self.stream.write(b"".join(map(encode_command, commands)))
        self.stream.flush()

    def finish(self) -> int:
        for _ in self.listen():
            pass
        self.output += self.process.communicate(timeout=DEADLINE_S)[0]
        return self.process.returncode

    def clear_away(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
        self.stream.close()


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token cache for all processes: built by the first, found by the others."""
    return tmp_path_factory.mktemp("token_cache")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So short that a tokenizer is trained on it at once."""
    file = tmp_path_factory.mktemp("data") / "numbers.txt"
    file.write_text("\n".join(f"{n} is odd, {n + 1} is not." for n in range(1, 10_000, 2)))
    return file


@pytest.fixture
def arguments(tmp_path: Path, text: Path) -> tuple[str, ...]:
    """The tiny model, and data for it."""
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(nested(TINY | {"training.context_length": 32})))
    data = (f"data.dataset={text}", "data.bpe_vocab_size=512", "data.num_samples=64")
    return ("--config", str(config), *data)


@pytest.fixture
def start(
    tmp_path: Path, cache_dir: Path, arguments: tuple[str, ...]
) -> Iterator[Callable[..., Worker]]:
    """Start a worker in an empty directory: `start("debug.drill=nan@1", GPU_RANK="3")`."""
    started: list[Worker] = []

    def run(
        *further: str,
        prefix: tuple[str, ...] = (),
        redirect: str = "",
        commands: Sequence[Command] = (),
        **environ: str,
    ) -> Worker:
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [
                *("sh", "-c", f'exec "$@" {redirect}', "sh"),
                sys.executable,
                *prefix,
                str(ROOT / "pretrain_main.py"),
                *arguments,
                *further,
            ],
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if "CUDA" not in name}
            | {"DATASET_CACHE_DIR": str(cache_dir), "MODEL_CHECK_EVENTS_FD": str(theirs.fileno())}
            | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        ours.settimeout(DEADLINE_S)
        started.append(Worker(process, ours.makefile("rwb")))
        ours.close()
        started[-1].say(*commands)
        return started[-1]

    yield run
    for worker in started:
        worker.clear_away()


@dataclass(frozen=True)
class Trained:
    """What `pretrain_main.main` did in this process."""

    exit_code: int
    events: list[Event]
    output: str
    """Standard output, and behind it standard error."""


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    """A worker sets up its process, which the tests go on with."""
    mode, num_threads = torch.get_deterministic_debug_mode(), torch.get_num_threads()
    yield
    torch.set_deterministic_debug_mode(mode)
    torch.set_num_threads(num_threads)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


OnEvent = Callable[[Event, socket.socket], object]
"""Gets each event as it comes, in a thread, and our end of the socket."""


def at_first(kind: type[Event], act: Callable[[socket.socket], object]) -> OnEvent:
    """Acts once, at the first event of the kind."""
    is_done = False

    def on_event(event: Event, ours: socket.socket) -> None:
        nonlocal is_done
        if isinstance(event, kind) and not is_done:
            is_done = True
            act(ours)

    return on_event


def signalled(kind: type[Event], signum: int) -> OnEvent:
    """Sends this process a signal at the first event of the kind."""
    return at_first(kind, lambda _: os.kill(os.getpid(), signum))


@pytest.fixture
def train(
    tmp_path: Path,
    cache_dir: Path,
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    torch_as_it_was: None,
) -> Callable[..., Trained]:
    """As `start`, but in this process, and to the end."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if "CUDA" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # it would stay set
    monkeypatch.setenv("DATASET_CACHE_DIR", str(cache_dir))
    for name in ("mask_others", "faulthandler"):  # they change what the tests' process prints
        monkeypatch.setattr(pretrain_main, name, Mock())

    def run(
        *further: str,
        commands: Sequence[Command] = (),
        on_event: OnEvent = lambda event, ours: None,
        **environ: str,
    ) -> Trained:
        ours, theirs = socket.socketpair()
        ours.settimeout(DEADLINE_S)
        ours.sendall(b"".join(map(encode_command, commands)))
        sink = EventSink(theirs.detach(), is_held=bool(environ.get(HELD)))
        events: list[Event] = []

        def listen() -> None:
            with ours, ours.makefile("rb") as lines:
                for line in lines:
                    events.append(decode(line))
                    on_event(events[-1], ours)

        listener = threading.Thread(target=listen)
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(pretrain_main, "EventSink", Mock(return_value=sink))
            for name, value in environ.items():
                patch.setenv(name, value)
            listener.start()
            try:
                exit_code = pretrain_main.main([*arguments, *further])
            finally:
                sink.close()
                listener.join()
        return Trained(exit_code, events, "".join(capfd.readouterr()))

    return run


def trace_alone(patch: Callable[[object, str, object], None]) -> None:
    """torch.compile traces and guards as always, and runs what it traced as it is: nothing is
    compiled, which takes seconds and a C++ compiler."""
    real = torch.compile

    def compile_with(function: Any, *, fullgraph: bool) -> Any:
        return real(function, fullgraph=fullgraph, backend="eager")

    patch(torch, "compile", compile_with)
    for name in ("_refuse_without_compiler", "_make_compiler_deterministic"):
        patch(compile_module, name, lambda: None)


@pytest.fixture(params=["traced", pytest.param("compiled", marks=pytest.mark.slow)])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    torch._dynamo.reset()
    if request.param == "traced":
        trace_alone(monkeypatch.setattr)
    elif COMPILER is None:
        pytest.skip("needs a C++ compiler")
    return str(request.param)


def nested(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        section, key = name.split(".")
        tree.setdefault(section, {})[key] = {"null": None, "false": False}.get(value, value)
    return tree
