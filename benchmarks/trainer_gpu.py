"""The default workload on one GPU: tokens/s, MFU by both conventions and peak memory, variant by
variant, compared with transformers' LlamaForCausalLM with the same weights and tokens.

Each variant runs in its own process; the baseline runs first and last, so that a drift of clocks
shows. It writes nothing but the table. `--self-test` runs the whole path on a CPU with a tiny
model: its numbers mean nothing.

    python benchmarks/trainer_gpu.py [--self-test] [--steps 12] [--only WORD] [--limit-s 200]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from model_check.attention import sdpa  # noqa: E402
from model_check.config.derived import num_micro_batches  # noqa: E402
from model_check.config.flops import flops_per_token  # noqa: E402
from model_check.config.load import Request, load  # noqa: E402
from model_check.config.schema import Settings  # noqa: E402
from model_check.config.shape import (  # noqa: E402
    Geometry,
    geometry,
    hf_name,
)
from model_check.engine.assembly import build_trainer  # noqa: E402
from model_check.engine.device import device_name, set_up_process  # noqa: E402
from model_check.engine.metrics import Meter, peak_memory_bytes  # noqa: E402
from model_check.engine.results import StepMetrics  # noqa: E402
from model_check.engine.run_context import Channels, Claim, Identity, RunContext  # noqa: E402
from model_check.engine.stop import StopSignal  # noqa: E402
from model_check.errors import ModelCheckError  # noqa: E402
from model_check.events import Event, EventSink, Phase  # noqa: E402
from model_check.hooks.hook import RunObserver  # noqa: E402
from model_check.hooks.observe.mfu import Utilisation, peak_flops  # noqa: E402
from model_check.init import build_model  # noqa: E402
from model_check.utils.worker_env import ALLOCATOR, ALLOCATOR_VARIABLES  # noqa: E402

WARM_UP_STEPS = 3
LOSS_TOLERANCE = 0.03
"""Allowed difference between bfloat16 kernels of the same model, over the first steps."""

WORKLOAD = {
    "training.grad_accum_nums": "4",
    "training.learning_rate": "1e-5",
    "system.deterministic": "false",
}
TINY = {
    "model.num_layers": "2",
    "model.hidden_size": "64",
    "model.intermediate_size": "172",
    "model.num_heads": "4",
    "model.num_kv_heads": "2",
    "model.vocab_size": "512",
    "training.context_length": "64",
}


@dataclass(frozen=True)
class Variant:
    """A name for the table, and the settings that differ from the workload."""

    name: str
    changes: dict[str, str] = field(default_factory=dict)
    transformers: bool = False


BASELINE = Variant("transformers, sdpa", transformers=True)
COMPILE = {"training.compile": "true"}
VARIANTS = [
    BASELINE,
    Variant("transformers, compiled", COMPILE, transformers=True),
    Variant("eager"),
    Variant("compiled", COMPILE),
    Variant("deterministic", {"system.deterministic": "true"}),
    *(
        Variant(f"compiled, {name}", COMPILE | {"model.attention_backend": name})
        for name in ("sdpa", "cudnn", "flash_attn")
    ),
    *(
        Variant(f"compiled, {rows} rows", COMPILE | {"training.loss_chunk_rows": str(rows)})
        for rows in (1024, 4096, 8192)
    ),
    *(
        Variant(f"compiled, batch {size}", COMPILE | {"training.batch_size": str(size)})
        for size in (2, 4)
    ),
    Variant("compiled, batch 8 x 1, checkpointing", COMPILE | {
        "training.batch_size": "8",
        "training.grad_accum_nums": "1",
        "training.gradient_checkpointing": "true",
    }),
    Variant("compiled, fp16", COMPILE | {"training.precision": "fp16"}),
    Variant("transformers, sdpa, again", transformers=True),
]  # fmt: skip


COMPILED_IN_SELF_TEST = "compiled"


@dataclass(frozen=True)
class Outcome:
    """The results of a variant's process."""

    attention: str
    step_ms: float
    spread_ms: tuple[float, float]
    tokens_per_s: float
    mfu_full: float | None
    mfu_causal: float | None
    peak_bytes: int
    losses: list[float]


def main() -> int:
    options = parse()
    if options.variant:
        return run_child(options)
    if not options.self_test and not torch.cuda.is_available():
        print("no usable GPU: nothing was measured (--self-test tries the path on the CPU)")
        return 69
    print_machine(options)
    rows = [(v, measure(v, options)) for v in VARIANTS if options.only in v.name]
    print_table(rows)
    return 0 if all(isinstance(o, Outcome) for v, o in rows if must_run(v)) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="", help="only variants whose name has this in it")
    parser.add_argument("--limit-s", type=float, default=200)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    return parser.parse_args()


def must_run(variant: Variant) -> bool:
    """Whether the variant must run. Others may lack a package for a kernel, or memory for a
    batch."""
    return variant.name in ("eager", BASELINE.name)


def measure(variant: Variant, options: argparse.Namespace) -> Outcome | str:
    """Run the variant in a process of its own and print the result, or the reason why it could not
    run."""
    outcome = outcome_or_reason(variant, options)
    told = f"not run: {outcome}" if isinstance(outcome, str) else f"{outcome.step_ms:.1f} ms/step"
    print(f"{variant.name}: {told}", flush=True)
    return outcome


def outcome_or_reason(variant: Variant, options: argparse.Namespace) -> Outcome | str:
    command = [sys.executable, __file__, "--variant", variant.name, "--steps", str(options.steps)]
    command += ["--self-test"] if options.self_test else []
    # As the launcher gives it to workers.
    environ = {**({} if ALLOCATOR_VARIABLES & os.environ.keys() else ALLOCATOR), **os.environ}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.limit_s, env=environ
        )
    except subprocess.TimeoutExpired:
        return f"not done after {options.limit_s:.0f} s"
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and answers:
        return Outcome(**json.loads(answers[-1]))
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def run_child(options: argparse.Namespace) -> int:
    variant = next(v for v in VARIANTS if v.name == options.variant)
    device = torch.device("cpu" if options.self_test else "cuda")
    run = run_theirs if variant.transformers else run_ours
    try:
        outcome = run(settings_of(variant, options), device)
    except ModelCheckError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(asdict(outcome)))
    return 0


def settings_of(variant: Variant, options: argparse.Namespace) -> Settings:
    values = WORKLOAD | {"training.max_steps": str(WARM_UP_STEPS + options.steps)}
    values |= (TINY if options.self_test else {}) | variant.changes
    if options.self_test and variant.name != COMPILED_IN_SELF_TEST:
        values.pop("training.compile", None)  # a minute each, and all the same path
    overrides = tuple(f"{name}={value}" for name, value in values.items())
    device = "cpu" if options.self_test else "cuda"
    request = Request(preset="production", overrides=(*overrides, f"system.device={device}"))
    return load(request, lambda: not options.self_test).settings


@dataclass(frozen=True)
class RandomBatch:
    inputs: Tensor
    targets: Tensor
    documents: None = None


@dataclass(frozen=True)
class RandomTokens:
    """The same tokens for every variant: a sequence is a function of its number."""

    settings: Settings
    vocab_size: int

    def batches(self, start: int = 0) -> Generator[RandomBatch, None, None]:
        size, length = self.settings.training.batch_size, self.settings.training.context_length
        number = start
        while True:
            rows = torch.stack([self._sequence(number + row, length) for row in range(size)])
            yield RandomBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            number += size

    def _sequence(self, number: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randint(0, self.vocab_size, (length + 1,), generator=generator)


class Listener(EventSink):
    """Records which attention the run chose."""

    attention = ""

    def emit(self, event: Event) -> None:
        if isinstance(event, Phase) and event.name == "build":
            self.attention = str(event.detail["attention_backend"])


@dataclass
class Clock(RunObserver):
    """Records step times and losses as the trainer reads them."""

    meter: Meter
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def on_result(self, reading: StepMetrics) -> None:
        self.seconds.append(self.meter.seconds)
        self.losses.append(reading.loss)


def run_ours(settings: Settings, device: torch.device) -> Outcome:
    set_up_process(settings.system, 1, os.environ)
    shape = geometry(settings.model, 0)
    meter = Meter()
    clock, sink = Clock(meter), Listener(None)
    context = RunContext(
        identity=Identity("GPU0"),
        channels=Channels(lambda text: print(text, file=sys.stderr), sink, (clock,)),
        device=device,
        claim=Claim(Path()),
        meter=meter,
        stop=StopSignal(),
    )
    build_trainer(settings, RandomTokens(settings, shape.vocab_size), 0, context).run()
    return outcome_of(settings, shape, device, clock, sink.attention)


def run_theirs(settings: Settings, device: torch.device) -> Outcome:
    """As an expert of transformers would write it: autocast to bfloat16, fused AdamW."""
    set_up_process(settings.system, 1, os.environ)
    shape = geometry(settings.model, 0)
    model = their_model(settings, shape, device)
    if settings.training.compile:
        model.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.training.learning_rate, betas=(0.9, 0.95), fused=True
    )
    stream = RandomTokens(settings, shape.vocab_size).batches()
    clock = Clock()
    for _ in range(settings.training.max_steps):
        started = perf_counter()
        loss = their_step(model, optimizer, stream, settings, device)
        clock.losses.append(loss.item())  # sync
        clock.seconds.append(perf_counter() - started)
    return outcome_of(settings, shape, device, clock, "sdpa")


def their_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stream: Iterator[RandomBatch],
    settings: Settings,
    device: torch.device,
) -> Tensor:
    num_micro_batches, losses = settings.training.grad_accum_nums, []
    for _ in range(num_micro_batches):
        batch = next(stream)
        inputs, targets = batch.inputs.to(device), batch.targets.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=inputs, labels=targets, shift_labels=targets).loss
        (loss / num_micro_batches).backward()
        losses.append(loss.detach() / num_micro_batches)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).sum()


def their_model(settings: Settings, shape: Geometry, device: torch.device) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model, scaling = settings.model, settings.model.rope_scaling
    assert scaling is not None
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=131072,
        rms_norm_eps=model.rms_norm_eps,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": model.rope_theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_length,
        },
        attn_implementation="sdpa",
        use_cache=False,
    )
    ours = build_model(settings, shape, sdpa, device)
    state = {hf_name(name): value for name, value in ours.state_dict().items()}
    del ours
    with device:
        theirs: nn.Module = LlamaForCausalLM(config)
    theirs.load_state_dict(state)
    return theirs.train()


def outcome_of(
    settings: Settings, shape: Geometry, device: torch.device, clock: Clock, attention: str
) -> Outcome:
    times = clock.seconds[WARM_UP_STEPS:]
    median = statistics.median(times)
    training, context = settings.training, settings.training.context_length
    rate = num_micro_batches(settings) * training.batch_size * context / median
    utilisation = Utilisation(
        flops_per_token(settings, shape), peak_flops(device_name(device), torch.bfloat16)
    )
    return Outcome(
        attention=attention,
        step_ms=1000 * median,
        spread_ms=(1000 * min(times), 1000 * max(times)),
        tokens_per_s=rate,
        mfu_full=utilisation.full(rate),
        mfu_causal=utilisation.causal(rate),
        peak_bytes=peak_memory_bytes(),
        losses=clock.losses,
    )


def print_machine(options: argparse.Namespace) -> None:
    import transformers

    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}", end=", ")
    print(f"transformers {transformers.__version__}, Python {sys.version.split()[0]}")
    if options.self_test:
        print("SELF-TEST on a CPU with a tiny model: the numbers mean nothing")
        return
    query = "name,driver_version,power.limit,clocks.sm,clocks.max.sm,clocks.mem,memory.total"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
    print(subprocess.run(command, capture_output=True, text=True).stdout.strip())


def print_table(rows: list[tuple[Variant, Outcome | str]]) -> None:
    found = {variant.name: outcome for variant, outcome in rows}
    base = found.get(BASELINE.name)
    print(
        f"\n{'variant':<38}{'attention':>13}{'ms/step':>9}{'spread':>19}{'tokens/s':>10}"
        f"{'MFU full':>10}{'causal':>8}{'GiB':>7}{'x HF':>7}"
    )
    for variant, outcome in rows:
        if isinstance(outcome, str):
            print(f"{variant.name:<38}not run: {outcome}")
            continue
        low, high = outcome.spread_ms
        print(
            f"{variant.name:<38}{outcome.attention:>13}{outcome.step_ms:>9.1f}"
            f"{f'{low:.1f} to {high:.1f}':>19}{outcome.tokens_per_s:>10,.0f}"
            f"{percent(outcome.mfu_full):>10}{percent(outcome.mfu_causal):>8}"
            f"{outcome.peak_bytes / 2**30:>7.1f}{ratio(outcome, base):>7}"
        )
    print("x HF: tokens/s over those of the first row; a dash where the first losses disagree")


def ratio(outcome: Outcome, base: Outcome | str | None) -> str:
    if not isinstance(base, Outcome):
        return "-"
    gap = abs(outcome.losses[0] - base.losses[0])
    same_batch = gap <= LOSS_TOLERANCE * max(1.0, base.losses[0])
    return f"{outcome.tokens_per_s / base.tokens_per_s:.2f}" if same_batch else "-"


def percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.1f} %"


if __name__ == "__main__":
    raise SystemExit(main())
