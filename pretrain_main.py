"""One worker: environment and settings -> a training run -> an exit code.

Runs alone (`CUDA_VISIBLE_DEVICES=3 GPU_RANK=3 python3 pretrain_main.py --debug`), under the
launcher, and under a profiler. The last event to its supervisor is always `done`, however it ends.
"""

import gc
import signal

if __name__ == "__main__":
    gc.disable()  # until `train` has imported torch: there is no garbage yet
    # A signal that comes during the imports below waits; unblocked, it would kill this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    try:
        from launcher.install.by_hand import become_ready
    except ImportError:  # without the launcher the packages are the caller's business
        pass
    else:
        become_ready()

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from model_check.config.arguments import (
    Parser,
    add_resume_option,
    add_settings_options,
    settings_request,
)
from model_check.config.drill import Drill, parse_drill
from model_check.config.load import Loaded, load, with_checkpoints
from model_check.config.memory import check_host_memory
from model_check.config.prompts import given_prompts
from model_check.config.ranks import JOBS, check_ranks, rank_timeout_s
from model_check.config.replay import check_replay, replayed, replayed_drill
from model_check.config.resume import check_resume
from model_check.config.schema import Settings
from model_check.config.wandb import check_wandb
from model_check.engine.console import Console
from model_check.engine.metrics import Meter, peak_memory_bytes
from model_check.engine.stacks import offer_stacks
from model_check.engine.stop import EndedEarly, StopSignal, Terminated
from model_check.errors import (
    EXIT_PASS,
    EXIT_SIGNAL_BASE,
    ConfigError,
    DataError,
    ModelCheckError,
    NoGpuError,
    PeerLost,
)
from model_check.events import Beat, Done, EventSink, Phase, Scalar
from model_check.utils.garbage import keep_imports, leave
from model_check.utils.host_memory import host_memory_bytes
from model_check.utils.secrets import mask_others, masked
from model_check.utils.standard_streams import open_missing_streams
from model_check.utils.wire import SCHEMA
from model_check.utils.words import Say
from model_check.utils.worker_env import TOKEN_CACHE, RankEnv, WorkerEnv

if TYPE_CHECKING:
    import torch  # noqa: TID251 (its name in a type)

    from model_check.data.read.loader import BatchLoader
    from model_check.data.read.token_cache import TokenCache
    from model_check.dist.world import World
    from model_check.engine.run_context import Claim, Prompts, RunContext, Splits

EXIT_UNEXPECTED = 1
FINISH_STEP_OF_RANK_S = 0.05
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of them exists where torch can use a GPU: NVIDIA, the same under WSL, AMD."""
NO_MORE_THREADS = "can't start new thread"
"""The text of Python's RuntimeError, which has no class of its own."""
THREADS_ADVICE = (
    "no further thread can be started: the limit of this user's processes (ulimit -u) or of the "
    "control group's (pids.max) is reached; raise it, or lower system.num_threads and "
    "training.num_workers"
)

EPILOG = """exit codes:
  0 trained to the end          2 usage or configuration
  1 unexpected failure          20 NaN or Inf
  69 no usable GPU              21 weights or moments changed by themselves
  128+N ended by signal N"""


@dataclass(frozen=True)
class Process:
    """What belongs to this process, and not to the settings."""

    env: WorkerEnv
    sink: EventSink
    console: Console
    stop: StopSignal
    meter: Meter
    started_at: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Ending:
    exit_code: int
    error: str | None = None
    early: str | None = None
    """Why it ended well before its last step."""
    peer_lost: bool = False
    """Another rank is the cause."""


@dataclass(frozen=True)
class Task:
    """What this process is asked to train."""

    settings: Settings
    drill: Drill | None
    device: str
    """`cuda` or `cpu`"""
    worker: str
    ranks: RankEnv | None
    """Its place in a job; None: it trains alone."""
    replay_to: int | None


def main(argv: Sequence[str]) -> int:
    open_missing_streams()
    faulthandler.enable()
    mask_others()
    env = WorkerEnv.from_environ()
    process = Process(
        env, EventSink(env.events_fd, is_held=env.is_held), Console(), StopSignal(), Meter()
    )
    if not env.supervised and env.gpu_rank is not None:
        process.console.prefix = f"[{env.name_for('cuda')}] "
    with process.stop.installed():
        failure: BaseException | None = None
        try:
            with process.stop.heeded():
                offered = offer_stacks(env.stacks_path)
                process.sink.emit(Phase(name="import", detail={"schema": SCHEMA, **offered}))
                train(task_of(argv, process), process)
        except SystemExit:  # --help
            raise
        except BaseException as error:
            failure = cause_of(error)
        ending = ending_of(failure, process)
        process.sink.emit(last_word(ending, process.meter))
    # A normal end would wait for threads, or for ranks that are gone, perhaps for ever. A rank that
    # has told its work gains nothing by it: torch's threads may outlive the interpreter (torchrun
    # on two nodes, once in 6 jobs: SIGABRT after the last step, "terminate called without an active
    # exception").
    if process.stop.cut_short or is_rank():
        sys.stdout.flush()
        os._exit(ending.exit_code)
    return ending.exit_code


def is_rank() -> bool:
    """Whether this process is one of several of a job."""
    with suppress(ConfigError):
        return RankEnv.from_environ() is not None
    return False


def cause_of(error: BaseException) -> BaseException:
    """The failure that was under way when a signal came, which says more than the signal."""
    earlier: BaseException | None = error
    while isinstance(earlier, Terminated):
        earlier = earlier.__context__
    return earlier if isinstance(earlier, ModelCheckError) else error


def ending_of(failure: BaseException | None, process: Process) -> Ending:
    """Print what happened; every way to end has an exit code and a message. No `match`: a Python
    that is too old must read this file as far as `become_ready`."""
    if failure is None:
        return Ending(EXIT_PASS)
    if isinstance(failure, EndedEarly):
        process.console.say_for_all(str(failure))
        return Ending(EXIT_PASS, early=str(failure))
    if isinstance(failure, Terminated):
        return stopped(failure.signum, process)
    if isinstance(failure, KeyboardInterrupt):
        return stopped(signal.SIGINT, process)
    if isinstance(failure, PeerLost) and failure.has_waited:
        tell_where_it_waited(failure, process)
    if isinstance(failure, ModelCheckError):
        process.console.complain(f"error: {failure}")
        return Ending(failure.exit_code, str(failure), peer_lost=isinstance(failure, PeerLost))
    if isinstance(failure, BrokenPipeError):  # `| head`: the reader is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Ending(EXIT_SIGNAL_BASE + signal.SIGPIPE, "standard output was closed")
    if process.stop.has_raised and process.stop.signum is not None:
        return stopped(process.stop.signum, process)
    if isinstance(failure, RuntimeError) and NO_MORE_THREADS in str(failure):
        process.console.complain(f"error: {THREADS_ADVICE}")
        return Ending(EXIT_UNEXPECTED, THREADS_ADVICE)
    process.console.complain("".join(traceback.format_exception(failure)).rstrip())
    return Ending(EXIT_UNEXPECTED, f"{type(failure).__name__}: {failure}")


def tell_where_it_waited(failure: PeerLost, process: Process) -> None:
    """For the supervisor, beside the stacks of the rank that did not come."""
    path = process.env.stacks_path
    with suppress(OSError):
        if path is not None and path.exists():
            with path.open("a") as file:
                file.write(masked("".join(traceback.format_exception(failure))))


def stopped(signum: int, process: Process) -> Ending:
    text = f"stopped by {signal.Signals(signum).name} after {process.meter.num_steps} steps"
    process.console.say(text)
    return Ending(EXIT_SIGNAL_BASE + signum, text)


def task_of(argv: Sequence[str], process: Process) -> Task:
    """The task, refused where it cannot be done. From here on signals mean what it says."""
    names = parser().read(argv)
    loaded = with_checkpoints(load(settings_request(names, os.environ), has_gpu), num_copies=1)
    settings, drill = what_to_train(loaded.settings, names.replay_to)
    refuse_missing_gpu(loaded, process)
    worker = name_worker(loaded, process)
    ranks = RankEnv.from_environ(os.environ)
    if ranks is not None and ranks.attempt > 0:
        # torchrun restarts with the same arguments: the fault would come each time.
        drill = replayed_drill(drill)
    refuse_impossible(settings, loaded.device, ranks)
    task = Task(settings, drill, loaded.device, worker, ranks, names.replay_to)
    is_further = ranks is not None and ranks.rank > 0
    process.console.is_quiet = is_further and not settings.logging.all_ranks
    for note in (*loaded.notes, *loaded.decisions):
        process.console.say_for_all(note)
    if ranks is None and settings.launch.mode == "fsdp":
        process.console.say_for_all("launch.mode=fsdp: one rank, which holds the whole model")
    if ranks is not None and process.env.supervised:
        # All ranks end together: none can finish a step without the others.
        process.stop.finish_step_s = FINISH_STEP_OF_RANK_S
    if settings.training.save_on_signal and not process.env.supervised:
        process.stop.take_as_notice(signal.SIGTERM)
    return task


def train(task: Task, process: Process) -> None:
    """Device, data, model, steps: what fails cheaply comes first."""
    from model_check.dist.job import joined
    from model_check.engine.assembly import build_trainer  # from here on: torch
    from model_check.engine.device import (
        keep_freed_memory,
        own_device_id,
        pick_device,
        set_up_process,
    )
    from model_check.engine.rng import seed_everything
    from model_check.engine.run_context import Claim
    from model_check.engine.saving.own_directory import Seeker, checkpoint_directory

    keep_imports()
    settings, ranks, worker = task.settings, task.ranks, task.worker
    say = process.console.say_for_all
    num_workers = process.env.num_workers if ranks is None else ranks.local_world_size
    if replaced := set_up_process(settings.system, num_workers, os.environ):
        say(replaced)
    seed_everything(settings.system.seed)
    device = pick_device(task.device, own_device_id(settings.system, ranks), process.env)
    is_isolated = process.env.is_isolated and settings.launch.mode not in JOBS
    seeker = Seeker(settings, worker, is_isolated, process.env.has_place)
    limit = partial(rank_timeout_s, settings.launch, process.env.supervised)
    with ExitStack() as stack:
        world = stack.enter_context(
            joined(ranks, device, limit, settings.launch, lambda: process.meter.num_steps)
        )
        if not world.is_alone:
            world.beat = partial(process.sink.emit, Beat())
        parent = Path(settings.system.checkpoint_dir)
        claim = Claim(parent)
        if task.replay_to is None:  # a replay writes nothing there
            claim = stack.enter_context(checkpoint_directory(seeker, say, world))
        cache = open_tokens(settings, process, say)
        context = run_context(task, process, cache, world, device, claim)
        if device.type == "cpu":
            keep_freed_memory()
        source = batch_source(cache, settings, world, pin=device.type == "cuda")
        build_trainer(settings, source, cache.vocab_size, context).run()


def run_context(
    task: Task,
    process: Process,
    cache: "TokenCache",
    world: "World",
    device: "torch.device",
    claim: "Claim",
) -> "RunContext":
    from model_check.data.read.manifest import read_tokenizer
    from model_check.data.sources.weights import weights_directory
    from model_check.engine.run_context import Channels, Identity, RunContext

    settings, env, console = task.settings, process.env, process.console
    tokenizer = read_tokenizer(cache.store.path)
    return RunContext(
        identity=Identity(task.worker, env.run_name, process.started_at, data_identity(cache)),
        channels=Channels(console.say, process.sink, is_quiet=console.is_quiet),
        device=device,
        claim=claim,
        meter=process.meter,
        stop=process.stop,
        drill=task.drill,
        splits=validation_splits(cache, settings, world, pin=device.type == "cuda"),
        weights=weights_directory(settings, console.say_for_all),
        run_dir=env.run_dir,
        chat=cache.tokens.chat,
        tokenizer=tokenizer,
        end_token=cache.tokens.end_token,
        prompts=asked_prompts(cache, settings, tokenizer, console.say_for_all),
        replay_to=task.replay_to,
        world=world,
    )


def what_to_train(settings: Settings, replay_to: int | None) -> tuple[Settings, Drill | None]:
    """The settings and the drill of this process. Raises ConfigError."""
    text = settings.debug.drill
    drill = parse_drill(text, settings.training.max_steps) if text else None
    if replay_to is None:
        return settings, drill
    check_replay(replay_to, settings)
    return replayed(settings), replayed_drill(drill)


def refuse_impossible(settings: Settings, device: str, ranks: RankEnv | None = None) -> None:
    """Raises ConfigError where there is nothing to resume, no wandb, too little memory
    here, or a step that the ranks cannot share."""
    num_ranks = 1 if ranks is None else ranks.world_size
    check_ranks(settings, num_ranks)
    check_resume(settings.training.resume)
    check_wandb(settings.logging)
    given_prompts(settings.training)
    if device == "cpu":
        num_here = 1 if ranks is None else ranks.local_world_size
        check_host_memory(settings, num_here, host_memory_bytes(), num_ranks)


def parser() -> Parser:
    parser = Parser(prog="pretrain_main.py", description="Train on one device.", epilog=EPILOG)
    add_settings_options(parser)
    add_resume_option(parser)
    replay = "compute the steps to K again, and nothing beside them: no evaluation, no checkpoint"
    parser.add_argument("--replay-to", metavar="K", type=int, help=replay)
    return parser


def has_gpu() -> bool:
    """Whether torch can use a GPU. Where no driver is loaded, torch is not imported for it."""
    if not any(Path(driver).exists() for driver in GPU_DRIVERS):
        return False
    from model_check.engine.device import cuda_usable

    return cuda_usable()


def refuse_missing_gpu(loaded: Loaded, process: Process) -> None:
    """Whoever names a GPU must not get a report that the CPU trained well. Raises NoGpuError."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if process.env.supervised or loaded.device == "cuda" or named in ("", "-1", "NoDevFiles"):
        return
    if loaded.sources["system.device"] == "default":
        raise NoGpuError(
            f"CUDA_VISIBLE_DEVICES={named} names a GPU, and torch can use none here "
            "(system.device=cpu trains without)"
        )


def name_worker(loaded: Loaded, process: Process) -> str:
    """`GPU3`. The lines of a worker that runs alone begin with it from now on; before, they did
    where the environment names the GPU."""
    worker = process.env.name_for(loaded.device)
    if not process.env.supervised:
        process.console.prefix = f"[{worker}] "
    return worker


def open_tokens(settings: Settings, process: Process, say: Say) -> "TokenCache":
    """The entry that the supervisor names, else one that is found or built now."""
    from model_check.data.read.token_cache import TokenCache

    path = process.env.token_cache
    if path is None:
        from model_check.data.build.prepare import prepare

        path = prepare(settings, say).path
    cache = TokenCache.open(path, settings.data.verify)
    context_length = settings.training.context_length
    if cache.context_length != context_length:
        raise ConfigError(
            f"{TOKEN_CACHE} = {path}: its sequences have {cache.context_length} tokens, "
            f"training.context_length is {context_length}"
        )
    if cache.tokens.has_targets is not (settings.training.stage == "prompt_target"):
        raise ConfigError(
            f"{TOKEN_CACHE} = {path}: was prepared for another training.stage than "
            f"{settings.training.stage}"
        )
    return cache


def data_identity(cache: "TokenCache") -> dict[str, Scalar]:
    """What a checkpoint keeps about its data."""
    from model_check.data.read.manifest import content_of, short

    view = cache.view
    return {
        "cache": short(view.hash),
        "content": short(content_of(view, cache.tokens)),
        "dataset": view.dataset,
        "tokenizer": view.tokenizer,
    }


def batch_source(
    cache: "TokenCache", settings: Settings, world: "World", *, pin: bool
) -> "BatchLoader":
    from model_check.data.read.loader import BatchLoader

    training = settings.training
    return BatchLoader(
        cache,
        training.batch_size,
        settings.system.seed,
        training.num_workers,
        pin=pin,
        documents=settings.data.document_masking,
        rank=world.rank,
        num_ranks=world.size,
    )


def validation_splits(
    cache: "TokenCache", settings: Settings, world: "World", *, pin: bool
) -> "Splits":
    """Name -> its batches, those of this rank; empty where evaluation is off."""
    from model_check.data.read.loader import evaluation_batches

    training = settings.training
    if training.eval_interval is None:
        return {}
    batches = partial(
        evaluation_batches,
        batch_size=training.batch_size,
        limit=training.eval_batches,
        pin=pin,
        documents=settings.data.document_masking,
        rank=world.rank,
        num_ranks=world.size,
    )
    return {name: partial(batches, cache.split(name)) for name in cache.splits[1:]}  # after train


def asked_prompts(
    cache: "TokenCache", settings: Settings, tokenizer: bytes, say: Say
) -> "Prompts | None":
    """What the model is asked; None where nobody samples, or where the data hold no text, which is
    said. Raises ConfigError."""
    if settings.training.sample_interval is None:
        return None
    from model_check.data.read.manifest import TOKENIZER
    from model_check.data.sources.chat import chat_of
    from model_check.engine.run_context import Prompts
    from model_check.generate.samples import Answers
    from model_check.generate.text_model import read_text_tokenizer

    try:
        place = cache.store.path / TOKENIZER
        end_token = cache.tokens.end_token
        known = read_text_tokenizer(tokenizer, place, cache.vocab_size, end_token)
        answers = Answers(known, settings, chat_of(cache.tokens.chat, cache.path))
    except DataError as error:
        say(f"No samples, for the tokens stand for no text: {error}")
        return None
    split = cache.split(cache.splits[:2][-1])
    prompts = given_prompts(settings.training) or answers.beginnings(split)
    if not prompts:
        say("No samples: the data have no prompts for them (training.sample_prompts=FILE has some)")
        return None
    answers.check(prompts)
    return Prompts(prompts, answers)


def last_word(ending: Ending, meter: Meter) -> Done:
    return Done(
        exit_code=ending.exit_code,
        error=None if ending.error is None else masked(ending.error),
        early=ending.early,
        steps=meter.num_steps,
        loss_first=None if meter.loss_first is None else meter.loss_first.hex(),
        loss_last=None if meter.loss_last is None else meter.loss_last.hex(),
        tokens_per_s=meter.tokens_per_s,
        peak_memory_bytes=peak_memory_bytes(),
        peer_lost=ending.peer_lost,
    )


def command() -> NoReturn:
    """The command `model-check-train`."""
    gc.disable()
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    leave(main(sys.argv[1:]))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
