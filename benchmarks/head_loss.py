"""The head and its loss: forward and backward pass alone, beside that of another checkout and
beside torch's own ways, on this device. Each has its own process; they take turns.

    python benchmarks/head_loss.py [--other CHECKOUT] [--vocab 8192,32768] [--rounds 7]
        [--tokens 1024] [--hidden 256] [--dtype float32|bfloat16] [--device cpu|cuda] [--compiled]
    python benchmarks/head_loss.py --bytes      what a GPU moves for a token, by arithmetic

Each row: the median time of a call over the rounds with its spread (CPU time on a CPU), the ratio
to `plain` within a round, and how much memory the call adds at its peak. No ratio is printed unless
the losses agree.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-3}
CALLS = 3
"""In a round."""
MIB = 2**20
Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden_NH, weight_VH, targets_N) -> mean loss"""


def main() -> int:
    options = parse(sys.argv[1:])
    if options.bytes:
        print_bytes()
        return 0
    if options.serve is not None:
        serve(options)
        return 0
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    return 0 if all([compare(int(vocab), options) for vocab in options.vocab.split(",")]) else 1


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--other", type=Path, help="a checkout of another state of this project")
    parser.add_argument("--vocab", default="8192,32768")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compiled", action="store_true", help="a row of compiled code")
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def compare(vocab_size: int, options: argparse.Namespace) -> bool:
    """Print a row for each way; False: a loss is off."""
    names = ["plain", "torch", "ours", *(["compiled"] if options.compiled else [])]
    names += ["other"] if options.other else []
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    peers = {name: start(name, vocab_size, options) for name in names}
    try:
        for number in range(options.rounds + 1):
            shift = number % len(names)
            for name in [*names[shift:], *names[:shift]]:
                if (answer := ask(peers[name])) is not None:
                    rounds[name].append(answer)
    finally:
        for peer in peers.values():
            peer.stdin.close()  # type: ignore[union-attr]
            peer.wait(timeout=60)
    print(
        f"\nvocabulary {vocab_size}, {options.tokens} tokens of {options.hidden}, {options.dtype}"
    )
    return report({name: found[1:] for name, found in rounds.items()}, options)


def start(name: str, vocab_size: int, options: argparse.Namespace) -> "subprocess.Popen[str]":
    arguments = [*("--serve", name), *("--vocab", str(vocab_size)), *("--tokens", options.tokens)]
    arguments += [*("--hidden", options.hidden), *("--dtype", options.dtype)]
    arguments += [*("--device", options.device)]
    arguments += ["--other", options.other] if options.other else []
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )


def ask(peer: "subprocess.Popen[str]") -> dict[str, float] | None:
    """One round; None: it cannot run here, and has told why."""
    assert peer.stdin is not None
    assert peer.stdout is not None
    try:
        peer.stdin.write("\n")
        peer.stdin.flush()
    except BrokenPipeError:
        return None
    line = peer.stdout.readline()
    return json.loads(line) if line else None


def report(rounds: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> bool:
    agreed, plain = True, rounds["plain"]
    for name, found in rounds.items():
        if not found:
            print(f"{name:<10} cannot run here")
            continue
        gap = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(found, plain, strict=True))
        if gap > TOLERANCE[options.dtype]:
            agreed = False
            print(f"{name:<10} its loss is off by {gap:.1e}")
            continue
        ms = [1000 * each["seconds"] for each in found]
        ratios = [b["seconds"] / a["seconds"] for a, b in zip(found, plain, strict=True)]
        print(
            f"{name:<10}{statistics.median(ms):>9.1f} ms ({min(ms):.1f} to {max(ms):.1f}), "
            f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}) of plain's "
            f"speed, {found[-1]['peak_bytes'] / MIB:,.0f} MiB, loss within {gap:.0e}"
        )
    return agreed


def serve(options: argparse.Namespace) -> None:
    """In its own process: a round for each line that comes."""
    try:
        head = heads(options.other)[options.serve]()
    except (AttributeError, KeyError, FileNotFoundError) as error:
        print(f"{options.serve}: {error}", file=sys.stderr)
        return
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    generator = torch.Generator().manual_seed(7)
    shape = int(options.vocab), options.hidden
    weight = torch.randn(shape, generator=generator).mul_(0.02).to(device).requires_grad_()
    hidden = torch.randn(options.tokens, options.hidden, generator=generator).to(device)
    targets = torch.randint(shape[0], (options.tokens,), generator=generator).to(device)
    hidden.requires_grad_()

    def call() -> float:
        weight.grad = hidden.grad = None
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = head(hidden, weight, targets)
        loss.backward()
        return float(loss.detach())

    before = peak_bytes(device)
    for _ in sys.stdin:
        loss, started = 0.0, now(device)
        for _ in range(CALLS):
            loss = call()
        seconds = (now(device) - started) / CALLS
        found = {"seconds": seconds, "loss": loss, "peak_bytes": peak_bytes(device) - before}
        print(json.dumps(found), flush=True)


def now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def heads(other: Path | None) -> dict[str, Callable[[], Head]]:
    return {
        "plain": lambda: plain,
        "torch": torchs_own,
        "ours": lambda: of_checkout(ROOT),
        "compiled": compiled,
        "other": lambda: of_checkout(other or ROOT),
    }


def plain(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy((hidden_NH @ weight_VH.T).float(), targets_N)


def torchs_own() -> Head:
    """torch 2.13's; it knows no autocast."""
    function = F.linear_cross_entropy

    def run(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype(hidden_NH.device.type)
        is_on = torch.is_autocast_enabled(hidden_NH.device.type)
        cast = [x.to(dtype) if is_on else x for x in (hidden_NH, weight_VH)]
        loss: Tensor = function(*cast, targets_N)
        return loss.float()

    return run


def of_checkout(root: Path, *, is_compiled: bool = False) -> Head:
    """The head of that checkout, as its own trainer calls it. In a process of its own."""
    sys.path[:0] = [str(root)]
    from model_check.model import ChunkedCrossEntropy

    def run(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> Tensor:
        on_cpu = hidden_NH.device.type == "cpu"
        rows = max(128, min(2048, 2**21 // len(weight_VH))) if on_cpu else 2048
        head = ChunkedCrossEntropy(rows, rows)
        if is_compiled:
            vars(head)["of_chunk"] = compiled_chunk
        grad_scale = torch.ones((), device=hidden_NH.device) / len(targets_N)
        total: Tensor = head(hidden_NH, weight_VH, targets_N, grad_scale=grad_scale)
        return total * grad_scale

    compiled_chunk = torch.compile(ChunkedCrossEntropy.of_chunk) if is_compiled else None
    return run


def compiled() -> Head:
    return of_checkout(ROOT, is_compiled=True)


class Pass:
    """Bytes read and written per number of the logits, or of the weight."""

    def __init__(self, what: str, logits: float = 0, weight: float = 0) -> None:
        self.what, self.logits, self.weight = what, logits, weight


def eager_before(rows: int, tokens: int) -> Iterator[Pass]:
    chunks = tokens / rows
    yield Pass("logits written by the product, read by two", logits=2 + 2 + 2)
    yield Pass("to float32", logits=2 + 4)
    yield Pass("log_softmax: three reads of a row", logits=3 * 4 + 4)
    yield Pass("exp in place", logits=4 + 4)
    yield Pass("to 16 bits", logits=4 + 2)
    yield Pass("weight to 16 bits", weight=4 + 2)
    yield Pass("weight read by two products a chunk", weight=chunks * 2 * 2)
    yield Pass("16-bit product a chunk", weight=chunks * 2)
    yield Pass("the first cast, others added", weight=2 + 4 + (chunks - 1) * (2 + 4 + 4))
    yield Pass("scaled in backward", weight=4 + 4)


def eager_now(rows: int, tokens: int) -> Iterator[Pass]:
    chunks = tokens / rows
    yield from list(eager_before(rows, tokens))[:4]
    yield Pass("scaled, to 16 bits, in the logits' memory", logits=4 + 2)
    yield Pass("weight to 16 bits", weight=4 + 2)
    yield Pass("weight read by two products a chunk", weight=chunks * 2 * 2)
    yield Pass("the sum in float32, by the product itself", weight=4 + (chunks - 1) * (4 + 4))


def compiled_now(rows: int, tokens: int) -> Iterator[Pass]:
    chunks = tokens / rows
    yield Pass("logits written by the product, read by two", logits=2 + 2 + 2)
    yield Pass("row maximum and sum: one or two reads", logits=2 * 2)
    yield Pass("gradient in the logits' memory", logits=2 + 2)
    yield Pass("weight to 16 bits", weight=4 + 2)
    yield Pass("weight read by two products a chunk", weight=chunks * 2 * 2)
    yield Pass("the sum in float32, by the product itself", weight=4 + (chunks - 1) * (4 + 4))


def print_bytes(
    tokens: int = 8192, hidden: int = 4096, vocab_size: int = 128_256, bytes_per_s: float = 3.35e12
) -> None:
    """Computed, for an H100 (3.35 TB/s), bfloat16 products; what autograd adds to `.grad` is the
    same for all."""
    ways = [
        ("eager, before, 2048 rows", eager_before(2048, tokens)),
        ("eager, 2048 rows", eager_now(2048, tokens)),
        ("compiled, 2048 rows", compiled_now(2048, tokens)),
        ("compiled, 8192 rows", compiled_now(8192, tokens)),
    ]
    print(f"computed: {tokens} tokens, hidden {hidden}, vocabulary {vocab_size}")
    for name, way in ways:
        passes = list(way)
        total = sum(vocab_size * (each.logits * tokens + each.weight * hidden) for each in passes)
        print(
            f"{name:<26}{total / tokens / MIB:6.2f} MiB a token, {total / 1e9:6.1f} GB a "
            f"micro-batch, {1000 * total / bytes_per_s:5.1f} ms at the peak rate"
        )
        for each in passes:
            part = vocab_size * (each.logits * tokens + each.weight * hidden)
            print(f"    {each.what:<48}{part / 1e9:6.1f} GB")


if __name__ == "__main__":
    raise SystemExit(main())
