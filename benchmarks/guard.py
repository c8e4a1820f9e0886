"""Does this tree still train to the bit as an earlier one?

    python -m benchmarks.guard --before TREE [--only NAME ...]

Each configuration trains 20 tiny steps on the CPU, with the real `pretrain_main.py` of this tree
and with that of TREE, a checkout of the earlier state. Compared are the loss and the gradient norm
of every step and every evaluation (as `float.hex()`), the fingerprints of every step, and the
tensors of all checkpoints (weights, moments, random states). Ends with 1 where they differ.
"""

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parents[1]
NUM_AT_ONCE = 2
TIMEOUT_S = 200
NUM_STEPS = 20
TINY = (
    "--preset=cpu model.num_layers=2 model.hidden_size=64 model.intermediate_size=128 "
    "model.num_heads=4 model.num_kv_heads=2 training.context_length=32 training.batch_size=2 "
    f"training.max_steps={NUM_STEPS} data.dataset=embedded "
    "data.tokenizer=bpe data.bpe_vocab_size=512 system.num_threads=1 system.device=cpu"
)
MIXED = "training.use_amp=true data.document_masking=true training.grad_accum_nums=2"
OVERFLOWING = (
    "training.use_amp=true training.precision=fp16 training.batch_size=1 training.context_length=2"
)
SEGMENTS = "model.infini.segment_length=8"
BESIDE = "training.eval_interval=4 training.eval_batches=3 training.sample_interval=7"
SAVES = f"training.save_interval=10 data.validation=auto {BESIDE}"


@dataclass(frozen=True)
class Configuration:
    """One way to train, by its settings on the command line."""

    settings: str
    num_ranks: int = 1
    resumed: bool = False
    """The training goes on in a second process, from the checkpoint of step 10."""
    must_say: str = ""
    """A text that shows that the setting took effect."""


CONFIGURATIONS = {
    "float32": Configuration(""),
    "bf16, masks, accumulation": Configuration(MIXED),
    "fp16": Configuration(OVERFLOWING, must_say="an overflow; repeated at"),
    "infini linear": Configuration(f"model.attention=infini {SEGMENTS} model.infini.update=linear"),
    "infini delta": Configuration(f"model.attention=infini {SEGMENTS} model.infini.update=delta"),
    "local": Configuration(f"model.attention=local {SEGMENTS} {MIXED}"),
    "tied head": Configuration("model.tie_word_embeddings=true"),
    "gradient checkpointing": Configuration("training.gradient_checkpointing=true"),
    "ddp": Configuration("launch.mode=ddp launch.audit_interval=5", num_ranks=2),
    "fsdp": Configuration("launch.mode=fsdp", num_ranks=2),
    "compiled": Configuration("training.compile=true", must_say="Compiled in"),
    "resumed": Configuration(SAVES, resumed=True),
}


@dataclass
class Result:
    """What one tree made of one configuration."""

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    """(kind, step, loss, gradient norm) of each process's steps and evaluations, in their order."""
    fingerprints: list[Any] = field(default_factory=list)
    tensors: str = ""
    """A digest of those of all checkpoints."""
    failure: str = ""
    """Why there is nothing to compare."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--before", type=Path, required=True, metavar="TREE")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, metavar="NAME", default=None)
    arguments = parser.parse_args()
    names = arguments.only or list(CONFIGURATIONS)
    trees = [arguments.before.resolve(), ROOT]
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        work = Path(directory)
        both = pool.map(lambda name: [train(tree, name, work) for tree in trees], names)
        print(f"{'configuration':27} {'steps':12} {'fingerprints':14} checkpoints")
        are_equal = [report(name, *results) for name, results in zip(names, both, strict=True)]
    return 0 if all(are_equal) else 1


def report(name: str, before: Result, now: Result) -> bool:
    """Prints a row; whether all of it is equal."""
    if failure := before.failure or now.failure:
        print(f"{name:27} FAILED\n{failure}", flush=True)
        return False
    pairs = list(zip(before.steps, now.steps, strict=False))
    num_equal = sum(one == other for one, other in pairs)
    num_steps = max(len(before.steps), len(now.steps))
    fingerprints = before.fingerprints == now.fingerprints
    tensors = before.tensors == now.tensors
    words = {True: "equal", False: "DIFFERENT"}
    steps = f"{num_equal} of {num_steps}"
    print(f"{name:27} {steps:12} {words[fingerprints]:14} {words[tensors]}", flush=True)
    if first := next((f"{a} -> {b}" for a, b in pairs if a != b), None):
        print(f"    first difference: {first}")
    return num_equal == num_steps and fingerprints and tensors


def train(tree: Path, name: str, work: Path) -> Result:
    """Both trees share the compiler's cache, and no tokens."""
    chosen = CONFIGURATIONS[name]
    tree_name = "now" if tree == ROOT else "before"
    own = work / f"{name} {tree_name}"
    settings = [*TINY.split(), *chosen.settings.split(), f"data.cache_dir={work}/{tree_name}"]
    result = Result()
    places = [own / "first", own / "resumed"] if chosen.resumed else [own]
    for place in places:
        further = [] if place is places[0] else [f"--resume={places[0]}/step_10.pt"]
        command = [*settings, f"system.checkpoint_dir={place}", *further]
        for events, text in run(tree, command, chosen.num_ranks, work / "compiled"):
            if not events or events[-1].get("exit_code") != 0 or chosen.must_say not in text:
                result.failure = f"{tree}, missing {chosen.must_say!r}, or failed:\n{text}"
                return result
            add(result, events)
    result.tensors = digest(own)
    return result


def run(
    tree: Path, settings: Sequence[str], num_ranks: int, compiled: Path
) -> list[tuple[list[dict[str, Any]], str]]:
    """The events and the output of each rank."""
    usual = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "WORLD_SIZE")}
    usual |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    port = free_port()
    environments = [usual | place_of(rank, num_ranks, port) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(lambda environ: run_rank(tree, settings, environ), environments))


def place_of(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """As torchrun tells it."""
    if num_ranks == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
    numbers |= {"LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def run_rank(
    tree: Path, settings: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[dict[str, Any]], str]:
    ours, theirs = socket.socketpair()
    with closing(ours), tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "pretrain_main.py", *settings],
            cwd=tree,
            env={**environ, "MODEL_CHECK_EVENTS_FD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        ours.settimeout(TIMEOUT_S)
        try:
            with ours.makefile() as stream:
                events = [json.loads(line) for line in stream]
            process.wait(TIMEOUT_S)
        finally:
            process.kill()
        output.seek(0)
        return events, output.read()


def add(result: Result, events: Sequence[Mapping[str, Any]]) -> None:
    for event in events:
        if event["kind"] in ("step", "eval"):
            numbers = (event["loss"], event.get("grad_norm"), event.get("own_loss"))
            result.steps.append((event["kind"], event["step"], *numbers))
        if event["kind"] in ("step", "vectors"):
            result.fingerprints.append((event.get("fp"), event.get("taken"), event.get("repeated")))


def digest(place: Path) -> str:
    """Of all tensors of the checkpoints: files, or directories of shards."""
    total = hashlib.sha256()
    files = [file for file in sorted(place.rglob("*")) if file.suffix in (".pt", ".safetensors")]
    assert files, f"{place}: no checkpoint"
    for file in files:
        is_shard = file.suffix == ".safetensors"
        held = load_file(file) if is_shard else torch.load(file, weights_only=True)
        for name, tensor in tensors_of(held, ""):
            total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def tensors_of(held: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(held, Tensor):
        yield name, held.reshape(1) if held.ndim == 0 else held
    elif isinstance(held, dict):
        for key in sorted(held, key=str):
            yield from tensors_of(held[key], f"{name}/{key}")
    elif isinstance(held, list | tuple):
        for number, part in enumerate(held):
            yield from tensors_of(part, f"{name}/{number}")


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
