"""Our trainer side by side with transformers' Trainer and with a plain loop over the same model, on
the CPU: same weights, same tokens, same optimizer, same attention, each in its own process.

They step in turns within one run, so that noise hits them alike; what counts is the ratio within
one round, its median and spread. No ratio is printed unless all losses agree. `--checks` compares
our trainer with its own step without the non-finite gate, readings, events and log; the cost is
the same number of milliseconds for any size, so that a small --context shows it best.

    python benchmarks/trainer_cpu.py [--vocab 8192,32768] [--rounds 7] [--steps 3] [--threads N]
        [--peer-python PYTHON] [--clock wall|cpu] [--checks]

PYTHON is one with transformers and accelerate (pip install accelerate); default: this one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks" / "trainer_peers"
sys.path[:0] = [str(ROOT), str(PEERS)]

import ours as our_side  # noqa: E402
from workload import Part, Workload  # noqa: E402

from model_check.config.derived import geometry  # noqa: E402
from model_check.models.attention import BACKENDS  # noqa: E402
from model_check.models.build_model import build_model  # noqa: E402

WARM_UP_STEPS = 2
TOLERANCE = 1e-4
TARGETS = {"transformers.Trainer": 1.2, "plain loop": 1.1}


@dataclass
class Peer:
    """One trainer in its own process, and what its rounds showed."""

    name: str
    process: "subprocess.Popen[str]"
    parts: list[Part] = field(default_factory=list)

    def steps(self, count: int) -> Part | None:
        """Let it train so many steps; None: it has died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{count}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self.process.stdout.readline()
        return Part(**json.loads(line)) if line else None

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def main() -> int:
    options = parse(sys.argv[1:])
    print(f"torch {torch.__version__}, {options.threads} thread(s), {os.cpu_count()} cores")
    print(f"load {os.getloadavg()[0]:.1f} before the start; {options.clock} time counts")
    well = True
    for vocab_size in (int(word) for word in options.vocab.split(",")):
        work = Workload(
            vocab_size=vocab_size,
            num_layers=4,
            hidden_size=256,
            intermediate_size=688,
            num_heads=8,
            num_kv_heads=2,
            context_length=options.context,
            batch_size=2,
            num_micro_batches=2,
            num_threads=options.threads,
        )
        well &= compare(work, options)
    return 0 if well else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--vocab", default="8192,32768")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--checks", action="store_true")
    return parser.parse_args(argv)


def compare(work: Workload, options: argparse.Namespace) -> bool:
    """Train them in turns and print what came of it; False: their losses disagree."""
    num_steps = WARM_UP_STEPS + options.rounds * options.steps
    with tempfile.TemporaryDirectory() as directory:
        weights = Path(directory) / "weights.pt"
        save_weights(work, weights)
        peers = start(work, num_steps, weights, options, Path(directory))
        try:
            peers = take_turns(peers, options)
        finally:
            for peer in peers:
                peer.end()
    return report(work, peers, options)


def save_weights(work: Workload, path: Path) -> None:
    settings = our_side.settings_of(work, num_steps=1)
    shape = geometry(settings.model, work.vocab_size)
    model = build_model(settings, shape, BACKENDS["sdpa"], torch.device("cpu"))
    torch.save(model.state_dict(), path)


def start(
    work: Workload, num_steps: int, weights: Path, options: argparse.Namespace, directory: Path
) -> list[Peer]:
    ours = [sys.executable, str(PEERS / "ours.py")]
    theirs = [options.peer_python, str(PEERS / "theirs.py")]
    commands = {"ours": (ours, [])}
    if options.checks:
        commands["unwatched"] = (ours, ["--bare"])
    else:
        commands["transformers.Trainer"] = (theirs, ["--trainer"])
        commands["plain loop"] = (theirs, [])
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(work.num_threads)}
    peers = []
    for name, (command, flags) in commands.items():
        with (directory / f"{name}.txt").open("w") as log:
            process = subprocess.Popen(
                [*command, work.dump(), str(num_steps), str(weights), *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environ,
            )
        peers.append(Peer(name, process))
        if peers[-1].steps(WARM_UP_STEPS) is None:
            last = (directory / f"{name}.txt").read_text().strip().splitlines()[-1:]
            print(f"{name}: not compared: {''.join(last)}")
            peers.pop().end()
    return peers


def take_turns(peers: list[Peer], options: argparse.Namespace) -> list[Peer]:
    """Those who stayed alive; who begins changes from round to round."""
    for number in range(options.rounds):
        shift = number % len(peers)
        for peer in [*peers[shift:], *peers[:shift]]:
            part = peer.steps(options.steps)
            if part is None:
                raise SystemExit(f"{peer.name} died in round {number}")
            peer.parts.append(part)
    return peers


def report(work: Workload, peers: list[Peer], options: argparse.Namespace) -> bool:
    ours, others = peers[0], peers[1:]
    print(
        f"\nvocabulary {work.vocab_size}, {work.num_layers} layers of {work.hidden_size}, context "
        f"{work.context_length}, batch {work.batch_size} x {work.num_micro_batches}, float32; "
        f"{options.rounds} rounds of {options.steps} steps"
    )
    print(
        f"{'trainer':<22}{'ms/step':>9}{'spread':>16}{'tokens/s':>10}{'peak MiB':>10}{'of it':>8}"
    )
    for peer in peers:
        print_row(work, peer, options)
    agreed = True
    for other in others:
        agreed &= print_ratio(ours, other, options)
    return agreed


def seconds(part: Part, options: argparse.Namespace) -> float:
    return (part.cpu_s if options.clock == "cpu" else part.wall_s) / options.steps


def print_row(work: Workload, peer: Peer, options: argparse.Namespace) -> None:
    times = [1000 * seconds(part, options) for part in peer.parts]
    median, last = statistics.median(times), peer.parts[-1]
    own = (last.peak_bytes - last.before_bytes) / 2**20
    print(
        f"{peer.name:<22}{median:>9.1f}{f'{min(times):.0f} to {max(times):.0f}':>16}"
        f"{1000 * work.tokens_per_step / median:>10,.0f}{last.peak_bytes / 2**20:>10.0f}{own:>8.0f}"
    )


def print_ratio(ours: Peer, other: Peer, options: argparse.Namespace) -> bool:
    """Only where both trained the same; False where they did not."""
    pairs = list(zip(ours.parts, other.parts, strict=True))
    gap = max(
        abs(a - b) for mine, its in pairs for a, b in zip(mine.losses, its.losses, strict=True)
    )
    if gap > TOLERANCE:
        print(f"{other.name}: losses differ by up to {gap:.1e}: no ratio")
        return False
    ratios = [seconds(its, options) / seconds(mine, options) for mine, its in pairs]
    median = statistics.median(ratios)
    if options.checks:
        extra = [1000 * (seconds(a, options) - seconds(b, options)) for a, b in pairs]
        print(
            f"what watches a step costs {1 / median - 1:+.2%} of it "
            f"({1 / max(ratios) - 1:+.2%} to {1 / min(ratios) - 1:+.2%}, n={len(ratios)}): "
            f"{statistics.median(extra):+.2f} ms ({min(extra):+.2f} to {max(extra):+.2f})"
        )
        return True
    print(
        f"{median:.3f} x as fast as {other.name} ({min(ratios):.3f} to {max(ratios):.3f}, "
        f"n={len(ratios)}; target {TARGETS[other.name]}); losses agree within {gap:.1e}"
    )
    return True


if __name__ == "__main__":
    raise SystemExit(main())
