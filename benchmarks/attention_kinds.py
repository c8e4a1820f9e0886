"""What do local and Infini-attention cost beside full attention?

    python -m benchmarks.attention_kinds [--rounds N] [--lengths 1024,4096,16384] [--segment N]

Every model trains steps of one sequence in a process of its own, one after the other, in turns; a
round compares its own times. Told are tokens/s and peak memory as ratios to full attention, with
their least and most, and the FLOPs of a step by the model's own count (causal).
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from model_check.config.load import Request, load
from model_check.config.schema import Settings
from model_check.config.shape import geometry

KINDS = {
    "full": (),
    "local": ("model.attention=local",),
    "infini": ("model.attention=infini",),
    "infini-delta": ("model.attention=infini", "model.infini.update=delta"),
}
VOCABULARY = 8192
MODEL = (
    *("model.num_layers=4", "model.hidden_size=256", "model.num_heads=4", "model.num_kv_heads=2"),
    *("model.intermediate_size=null", f"model.vocab_size={VOCABULARY}"),
    *("training.use_amp=false", "training.batch_size=1", "debug.fingerprints=off"),
)
NUM_WARM_UP = 1


def settings_of(kind: str, length: int, segment: int, num_steps: int) -> Settings:
    segments = () if kind == "full" else (f"model.infini.segment_length={segment}",)
    given = (*MODEL, *KINDS[kind], *segments, f"training.context_length={length}")
    given += (f"training.max_steps={num_steps}",)
    return load(Request(preset="cpu", overrides=given), lambda: False).settings


def measure(kind: str, length: int, segment: int, num_steps: int) -> dict[str, float]:
    """In this process: seconds of a step, peak memory, FLOPs of a step."""
    import torch

    from model_check.config.flops import flops_per_token
    from model_check.engine.assembly import build_trainer
    from model_check.engine.metrics import peak_memory_bytes
    from model_check.train import gather, train_step
    from tests.engine.conftest import FakeSource, Kept, bare_context

    torch.set_num_threads(1)
    settings = settings_of(kind, length, segment, num_steps)
    source = FakeSource(1, length)
    made = build_trainer(settings, source, VOCABULARY, bare_context(Kept())).trainer
    context, hooks = made.context, made.hooks
    times = []
    for step in range(NUM_WARM_UP + num_steps):
        data = gather(source.batches(), step, 1, context.device)
        began = time.perf_counter()
        train_step(context, data, 1e-4, hooks)
        times.append(time.perf_counter() - began)
    flops = flops_per_token(settings, geometry(settings.model, VOCABULARY)).causal * length
    seconds = statistics.median(times[NUM_WARM_UP:])
    return {"seconds": seconds, "bytes": float(peak_memory_bytes()), "flops": flops}


def in_process(kind: str, length: int, segment: int, num_steps: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.attention_kinds", "--one", kind]
    command += ["--lengths", str(length), "--segment", str(segment), "--steps", str(num_steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    names = parser.parse_args()
    lengths = [int(text) for text in names.lengths.split(",")]
    if names.one:
        print(json.dumps(measure(names.one, lengths[0], names.segment, names.steps)))
        return
    print(f"{names.rounds} rounds, segments of {names.segment}, one thread")
    print(f"{'tokens':>7}{'attention':>14}{'GFLOP':>8}{'tokens/s':>10}{'x full':>20}{'memory':>20}")
    for length in lengths:
        found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        for _ in range(names.rounds):
            for kind in random.sample(list(KINDS), len(KINDS)):
                found[kind].append(in_process(kind, length, names.segment, names.steps))
        for kind, own in found.items():
            pairs = list(zip(own, found["full"], strict=True))
            rate = statistics.median(length / one["seconds"] for one in own)
            faster = spread([full["seconds"] / one["seconds"] for one, full in pairs])
            memory = spread([one["bytes"] / full["bytes"] for one, full in pairs])
            gflop = own[0]["flops"] / 1e9
            print(
                f"{length:7}{kind:>14}{gflop:8.0f}{rate:10,.0f}{faster:>20}{memory:>20}", flush=True
            )


if __name__ == "__main__":
    main()
