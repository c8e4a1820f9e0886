"""200 steps of one small model on a CPU, over three seeds, by several ways to hold its weights:
float32; float32 under autocast; float32 with bf16 copies, cast once a step (training.bf16_copies);
both compiled; and transformers' LlamaForCausalLM wholly in bf16, with AdamW in bf16.

    python benchmarks/bf16_copies.py [--steps 200] [--seeds 3] [--hidden 128] [--micro-batches 4]
        [--only WORD,WORD]

All ways of a seed have the same first weights, the same text (bytes of Python's documentation) and
the same rates; each has its own process, and they take turns of 20 steps. Printed for each way:
the loss (mean of the last 20 steps) over the seeds, how far it is from that of float32 with the
same seed, the largest distance of a step's loss from that under autocast (of compiled copies: of
compiled autocast), bytes a parameter that weights, gradients, moments and copies take, the peak of
the process above its imports (compiled: with the compiler), and the CPU time of a turn beside the
same.
"""

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks" / "trainer_peers"
sys.path[:0] = [str(ROOT), str(PEERS)]

import ours as our_side  # noqa: E402
from workload import BETAS, EPS, MAX_GRAD_NORM, WEIGHT_DECAY, Part, Turn, Workload  # noqa: E402

from model_check.config.schema import Settings, TrainingSettings  # noqa: E402
from model_check.config.shape import geometry  # noqa: E402
from model_check.data.sources.embedded import EmbeddedSource  # noqa: E402
from model_check.data.sources.text import Repairs  # noqa: E402
from model_check.engine.schedule import learning_rate  # noqa: E402
from model_check.models.attention import sdpa  # noqa: E402
from model_check.models.build_model import build_model  # noqa: E402

TURN = 20
"""Steps."""
LAST = 20
MIB = 2**20
FLOAT32, AUTOCAST, COPIES, HF = "float32", "autocast", "copies", "transformers bf16"
COMPILED, COPIES_COMPILED = "autocast, compiled", "copies, compiled"
WAYS: dict[str, dict[str, bool]] = {
    FLOAT32: {"use_amp": False},
    AUTOCAST: {},
    COPIES: {"bf16_copies": True},
    COMPILED: {"compile": True},
    COPIES_COMPILED: {"compile": True, "bf16_copies": True},
    HF: {},
}
"""Name -> its settings; the last one is not ours."""
BESIDE = {COPIES_COMPILED: COMPILED}
"""What a way is held against; others: AUTOCAST."""


@dataclass(frozen=True)
class Case:
    """What all ways of a seed share."""

    seed: int
    num_steps: int
    work: Workload

    def tokens(self) -> Tensor:
        """int64 [sequences, T]: pieces of a text, in an order of this seed."""
        text = "".join(islice(EmbeddedSource().documents(Repairs()), 2000))
        of_text = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        rows = of_text[: len(of_text) // self.work.context_length * self.work.context_length]
        rows = rows.view(-1, self.work.context_length)
        num = self.num_steps * self.work.num_micro_batches * self.work.batch_size
        generator = torch.Generator().manual_seed(self.seed)
        return rows[torch.randperm(len(rows), generator=generator)[:num]].long()

    def settings(self, way: str) -> Settings:
        base = our_side.settings_of(self.work, self.num_steps)
        changes = {
            **{"use_amp": True, "learning_rate": 1e-3, "min_lr": 1e-5, "lr_schedule": "cosine"},
            **{"warmup_steps": min(20, self.num_steps // 2), **WAYS[way]},
        }
        training = replace(base.training, **changes)
        return replace(base, training=training, system=replace(base.system, seed=self.seed))

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> "Case":
        values = json.loads(text)
        return Case(**values | {"work": Workload(**values["work"])})


@dataclass
class Found:
    """What one way has shown with one seed."""

    losses: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Of each turn."""
    peak_bytes: int = 0
    bytes_per_parameter: float = math.nan
    note: str = ""


def main() -> int:
    options = parse(sys.argv[1:])
    if options.serve is not None:
        serve(options.serve, Case.parse(options.case))
        return 0
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    ways = [w for w in WAYS if any(word in w for word in options.only.split(","))]
    found: dict[str, list[Found]] = {way: [] for way in ways}
    for seed in range(options.seeds):
        for way, one in train(Case(seed, options.steps, workload(options)), ways).items():
            found[way].append(one)
    print_table({way: seeds for way, seeds in found.items() if all(s.losses for s in seeds)})
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument(
        "--only", default="", help="ways that have one of these words in their name"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def workload(options: argparse.Namespace) -> Workload:
    return Workload(
        vocab_size=256,
        num_layers=2,
        hidden_size=options.hidden,
        intermediate_size=8 * options.hidden // 3 // 8 * 8,
        num_heads=4,
        num_kv_heads=2,
        context_length=128,
        batch_size=2,
        num_micro_batches=options.micro_batches,
        num_threads=1,
    )


def train(case: Case, ways: list[str]) -> dict[str, Found]:
    """All ways with one seed, in turns; another one begins each round."""
    with tempfile.TemporaryDirectory() as directory:
        peers = {way: start(way, case, Path(directory, f"{way}.txt")) for way in ways}
        found = {way: Found() for way in ways}
        try:
            for number in range(case.num_steps // TURN):
                shift = number % len(ways)
                for way in [*ways[shift:], *ways[:shift]]:
                    take_turn(peers[way], found[way])
        finally:
            for way, peer in peers.items():
                end(peer, found[way])
        for way, one in found.items():
            said = Path(directory, f"{way}.txt").read_text().splitlines()
            one.note = next((line for line in said if "not taken" in line), "")
            if not one.losses or math.isnan(one.bytes_per_parameter):
                print(f"{way}: it did not run: {''.join(said[-1:])}")
    return found


def start(way: str, case: Case, log: Path) -> "subprocess.Popen[str]":
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, __file__, "--serve", way, "--case", case.dump()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def take_turn(peer: "subprocess.Popen[str]", found: Found) -> None:
    assert peer.stdin is not None
    assert peer.stdout is not None
    try:
        peer.stdin.write(f"{TURN}\n")
        peer.stdin.flush()
    except BrokenPipeError:
        return
    if line := peer.stdout.readline():
        part = Part(**json.loads(line))
        found.losses += part.losses
        found.cpu_s.append(part.cpu_s)
        found.peak_bytes = part.peak_bytes - part.before_bytes


def end(peer: "subprocess.Popen[str]", found: Found) -> None:
    """Its last line tells the bytes of a parameter."""
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.close()
    if line := peer.stdout.readline():  # it may have been read with the line before it
        found.bytes_per_parameter = float(line)
    peer.wait(timeout=100)


def print_table(found: Mapping[str, list[Found]]) -> None:
    print(
        f"{'weights':<20}{'loss, seeds':>28}{'from float32':>22}{'step from':>14}"
        f"{'B/param':>9}{'peak MiB':>10}  CPU time beside"
    )
    for way, seeds in found.items():
        beside = BESIDE.get(way, AUTOCAST)
        cells = (
            f"{way:<20}{spread([ended(one) for one in seeds], '.4f'):>28}",
            f"{distance(seeds, found.get(FLOAT32)):>22}{furthest(seeds, found.get(beside)):>14}",
            f"{seeds[-1].bytes_per_parameter:>9.2f}",
            f"{statistics.median(one.peak_bytes for one in seeds) / MIB:>10.1f}",
            f"  {beside}: {ratio(seeds, found.get(beside))}",
        )
        print("".join(cells) + "".join(f"\n    {one.note}" for one in seeds if one.note))


def ended(found: Found) -> float:
    return statistics.mean(found.losses[-LAST:])


def spread(values: list[float], form: str) -> str:
    return f"{statistics.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def distance(seeds: list[Found], others: list[Found] | None) -> str:
    """Of the end, seed by seed."""
    if others is None:
        return "n/a"
    gaps = [ended(one) - ended(other) for one, other in zip(seeds, others, strict=True)]
    return f"{min(gaps):+.4f} to {max(gaps):+.4f}"


def furthest(seeds: list[Found], others: list[Found] | None) -> str:
    """The largest distance of a step's loss."""
    if others is None:
        return "n/a"
    pairs = [
        pair
        for one, other in zip(seeds, others, strict=True)
        for pair in zip(one.losses, other.losses, strict=True)
    ]
    gap = max(abs(mine - theirs) for mine, theirs in pairs)
    return f"{gap:.1e}" if gap else "0, every bit"


def ratio(seeds: list[Found], others: list[Found] | None) -> str:
    """Of turns that followed each other; the first of a seed is left out."""
    if others is None:
        return "n/a"
    ratios = [
        mine / theirs
        for one, other in zip(seeds, others, strict=True)
        for mine, theirs in zip(one.cpu_s[1:], other.cpu_s[1:], strict=True)
    ]
    ms = statistics.median(1000 * s / TURN for one in seeds for s in one.cpu_s[1:])
    return f"{statistics.median(ratios):.3f} ({spread_of(ratios)}), {ms:.1f} ms a step"


def spread_of(values: list[float]) -> str:
    """Of all but the highest and lowest twentieth."""
    ordered = sorted(values)
    cut = len(ordered) // 20
    return f"{ordered[cut]:.2f} to {ordered[-1 - cut]:.2f}, n {len(ordered)}"


def serve(way: str, case: Case) -> None:
    """In its own process: a turn for each line that comes."""
    answers = sys.stdout  # libraries print elsewhere, from the turn on
    if way == HF:
        importlib.import_module("theirs")  # what it imports is no part of the peak
    turn = Turn()
    held = serve_theirs(case, turn) if way == HF else serve_ours(way, case, turn)
    print(held, file=answers, flush=True)


def serve_ours(way: str, case: Case, turn: Turn) -> float:
    """Bytes a parameter."""
    source = our_side.TokenSource(case.tokens(), case.work.batch_size)
    settings = case.settings(way)
    trainer = our_side.build_from(settings, source, case.work.vocab_size, our_side.Pace(turn))
    trainer.run()
    state, optimizer = trainer.state, trainer.state.optimizer
    tensors = [*optimizer.weights, *optimizer.gradients()]
    tensors += [moment for moments in optimizer.moments.values() for moment in moments]
    num_copied = sum(weight.numel() for _, weight in state.model.multiplied)
    copies = 0 if way == FLOAT32 else 2 * num_copied
    return (sum(t.nbytes for t in tensors) + copies) / state.shape.num_parameters


def serve_theirs(case: Case, turn: Turn) -> float:
    """Bytes a parameter. The loop that an expert of transformers would write."""
    from theirs import decay_groups, their_model

    settings = case.settings(HF)
    with tempfile.NamedTemporaryFile() as weights:
        torch.save(first_weights(settings), weights.name)
        model = their_model(case.work, Path(weights.name)).to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(decay_groups(model), betas=BETAS, eps=EPS, fused=True)
    assert settings.training.weight_decay == WEIGHT_DECAY
    batches = iter(case.tokens().split(case.work.batch_size))
    for step in range(case.num_steps):
        if not turn.begin_step():
            break
        loss = their_step(model, optimizer, batches, step, settings.training)
        turn.end_step(loss.item)
    held = [
        tensor for p in model.parameters() for tensor in (p, p.grad, *optimizer.state[p].values())
    ]
    sizes = [tensor.nbytes for tensor in held if tensor is not None and tensor.dim()]
    return sum(sizes) / sum(p.numel() for p in model.parameters())


def their_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Tensor],
    step: int,
    training: TrainingSettings,
) -> Tensor:
    from theirs import accumulate

    optimizer.zero_grad(set_to_none=True)
    loss = accumulate(model, batches, training.grad_accum_nums)
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, training)
    optimizer.step()
    return loss


def first_weights(settings: Settings) -> dict[str, Tensor]:
    shape = geometry(settings.model, settings.model.vocab_size or 0)
    return build_model(settings, shape, sdpa, torch.device("cpu")).state_dict()


if __name__ == "__main__":
    raise SystemExit(main())
