"""Compares our trainer with transformers' Trainer and with a plain loop over the same model, on the
CPU: same weights, same tokens, same optimizer, same attention, each in its own process.

They step in turns within one run, so that noise hits them alike; what counts is the ratio within
one round, its median and spread, by wall time and by CPU time. No ratio is printed unless all
losses agree. `--checks` measures what the non-finite gate, the reading, event and line add to a
step.

    python benchmarks/trainer_cpu.py [--vocab 8192,32768] [--rounds 9] [--steps 2] [--threads N]
        [--peer-python PYTHON] [--checks]

PYTHON is one with transformers and accelerate (pip install accelerate); default: this one.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks" / "trainer_peers"
sys.path[:0] = [str(ROOT), str(PEERS)]

import ours as our_side  # noqa: E402
from workload import Part, Workload  # noqa: E402

from model_check.attention import sdpa  # noqa: E402
from model_check.config.shape import geometry  # noqa: E402
from model_check.init import build_model  # noqa: E402

WARM_UP_STEPS = 2
TOLERANCE = 1e-4
TARGETS = {"transformers.Trainer": 1.2, "plain loop": 1.1}


@dataclass
class Peer:
    """One trainer in its own process, and the results of its rounds."""

    name: str
    process: "subprocess.Popen[str]"
    parts: list[Part] = field(default_factory=list)

    def steps(self, count: int) -> Part | None:
        """Let it train `count` steps; None: it has died."""
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
    print(f"load {os.getloadavg()[0]:.1f} before the start")
    run = checks if options.checks else compare
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
        well &= run(work, options)
    return 0 if well else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--vocab", default="8192,32768")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--checks", action="store_true")
    return parser.parse_args(argv)


def compare(work: Workload, options: argparse.Namespace) -> bool:
    """Train them in turns and print the results; False: their losses disagree."""
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
    model = build_model(settings, shape, sdpa, torch.device("cpu"))
    torch.save(model.state_dict(), path)


def start(
    work: Workload, num_steps: int, weights: Path, options: argparse.Namespace, directory: Path
) -> list[Peer]:
    ours = [sys.executable, str(PEERS / "ours.py")]
    theirs = [options.peer_python, str(PEERS / "theirs.py")]
    commands = {"ours": ours, "transformers.Trainer": theirs, "plain loop": theirs}
    peers = []
    for name, command in commands.items():
        flags = ["--trainer"] if name == "transformers.Trainer" else []
        with (directory / f"{name}.txt").open("w") as log:
            process = subprocess.Popen(
                [*command, work.dump(), str(num_steps), str(weights), *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(work),
            )
        peers.append(Peer(name, process))
        if peers[-1].steps(WARM_UP_STEPS) is None:
            last = (directory / f"{name}.txt").read_text().strip().splitlines()[-1:]
            print(f"{name}: not compared: {''.join(last)}")
            peers.pop().end()
    return peers


def take_turns(peers: list[Peer], options: argparse.Namespace) -> list[Peer]:
    """The peers that stayed alive. Another one begins each round."""
    for number in range(options.rounds):
        shift = number % len(peers)
        for peer in [*peers[shift:], *peers[:shift]]:
            part = peer.steps(options.steps)
            if part is None:
                raise SystemExit(f"{peer.name} died in round {number}")
            peer.parts.append(part)
    return peers


def environment(work: Workload) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(work.num_threads)}


def report(work: Workload, peers: list[Peer], options: argparse.Namespace) -> bool:
    ours, others = peers[0], peers[1:]
    print(f"\n{describe(work)}; {options.rounds} rounds of {options.steps} steps")
    print(
        f"{'trainer':<22}{'ms/step':>9}{'spread':>16}{'CPU ms/step':>13}{'spread':>16}"
        f"{'tokens/s':>10}{'peak MiB':>10}{'of it':>7}"
    )
    for peer in peers:
        print_row(work, peer, options)
    print(f"(of it: above what the imports take); load {os.getloadavg()[0]:.1f} at the end")
    agreed = True
    for other in others:
        agreed &= print_ratio(ours, other)
    return agreed


def describe(work: Workload) -> str:
    return (
        f"vocabulary {work.vocab_size}, {work.num_layers} layers of {work.hidden_size}, context "
        f"{work.context_length}, batch {work.batch_size} x {work.num_micro_batches}, float32"
    )


def print_row(work: Workload, peer: Peer, options: argparse.Namespace) -> None:
    wall, cpu = (
        [1000 * seconds / options.steps for seconds in parts]
        for parts in ([p.wall_s for p in peer.parts], [p.cpu_s for p in peer.parts])
    )
    last = peer.parts[-1]
    own = (last.peak_bytes - last.before_bytes) / 2**20
    print(
        f"{peer.name:<22}{statistics.median(wall):>9.1f}{spread(wall):>16}"
        f"{statistics.median(cpu):>13.1f}{spread(cpu):>16}"
        f"{1000 * work.tokens_per_step / statistics.median(wall):>10,.0f}"
        f"{last.peak_bytes / 2**20:>10.0f}{own:>7.0f}"
    )


def spread(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"


def print_ratio(ours: Peer, other: Peer) -> bool:
    """Print the ratio if both trained the same; False: they did not."""
    pairs = list(zip(ours.parts, other.parts, strict=True))
    gap = max(
        abs(a - b) for mine, its in pairs for a, b in zip(mine.losses, its.losses, strict=True)
    )
    if gap > TOLERANCE:
        print(f"{other.name}: losses differ by up to {gap:.1e}: no ratio")
        return False
    wall = describe_ratios([its.wall_s / mine.wall_s for mine, its in pairs])
    cpu = describe_ratios([its.cpu_s / mine.cpu_s for mine, its in pairs])
    print(
        f"{other.name}: we are {wall} as fast, by CPU time {cpu}; n={len(pairs)}, "
        f"target {TARGETS[other.name]}x; losses agree within {gap:.1e}"
    )
    return True


def describe_ratios(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def checks(work: Workload, options: argparse.Namespace) -> bool:
    """The cost is the same number of milliseconds for any size of step. Small steps measure it
    exactly, full steps show that it is not larger there; both are printed as a share of the full
    step."""
    small = replace(work, vocab_size=512, num_layers=1, context_length=16, num_micro_batches=1)
    full = pairs_of(work, num_pairs=options.rounds * options.steps)
    step_ms = statistics.median(bare for _, bare in full["pairs"])
    print(f"\n{describe(work)}: {step_ms:.1f} ms of CPU a step without what watches it")
    sharp = pairs_of(small, num_pairs=1000)
    for name, found in (("small steps", sharp), ("full steps", full)):
        print_cost(name, [watched - bare for watched, bare in found["pairs"]], step_ms)
    direct = sharp["direct_ms"]
    print(f"gate, reading, event and line alone: {direct:.3f} ms, {direct / step_ms:.3%} of it")
    return True


def pairs_of(work: Workload, num_pairs: int) -> Any:
    """Milliseconds: `pairs` of (watched, bare), `direct_ms`."""
    command = [sys.executable, str(PEERS / "checks.py"), work.dump(), str(num_pairs)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        env=environment(work),
    )
    return json.loads(done.stdout)


def print_cost(name: str, extra_ms: list[float], step_ms: float) -> None:
    """The median with its 95 % interval by order statistics, which outliers do not move."""
    ordered, count = sorted(extra_ms), len(extra_ms)
    reach = 0.98 * math.sqrt(count)  # 1.96 standard deviations of the number below the median
    low, high = (ordered[min(count - 1, max(0, round(count / 2 + s * reach)))] for s in (-1, 1))
    median = statistics.median(ordered)
    print(
        f"{count} pairs of {name}: {median:+.3f} ms ({low:+.3f} to {high:+.3f}), "
        f"{median / step_ms:+.3%} of it ({low / step_ms:+.3%} to {high / step_ms:+.3%})"
    )


if __name__ == "__main__":
    raise SystemExit(main())
