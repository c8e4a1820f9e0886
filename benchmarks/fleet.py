"""`run.sh report DIR` over fleets of 10 to 1,000 nodes: what it finds, seconds, memory, bytes.

    python -m benchmarks.fleet [--nodes 10 100 1000] [--keep DIR] [--without-traces]

The runs are SYNTHETIC, and each of their files says so: 8 GPUs and 100 steps each, events as
workers would have told them, reports made of these by our own code. Of a thousand nodes 10 have an
odd GPU each, 5 a slow one, 3 are dead: an empty directory, a run.json cut in the middle, a run
without an end. The exit status is 1 where another one is named, or one of these is not.
`--without-traces`: as an older version left them, so that all events are read. `--keep`: leave the
fleets in DIR.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from launcher import run_dir
from launcher.report.conclude import conclude, write
from launcher.report.read_run import read_record
from launcher.report.rebuild import as_it_ended, watched_again
from launcher.verdict.record import RunEnd, RunRecord, WorkerEnd
from model_check.events import Done, Event, Finished, Note, Phase, Step, encode

SYNTHETIC = "SYNTHETIC: written by benchmarks/fleet.py, no GPU ran"
NUM_GPUS, NUM_STEPS = 8, 100
QUANTITIES = (
    *("forward", "backward", "gradients", "before.weights", "before.exp_avg"),
    *("before.exp_avg_sq", "grad_norms", "weights", "exp_avg", "exp_avg_sq"),
)
STEP_NS = 100_000_000
DETAIL = {
    "device": "cuda",
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "cudnn": 91900,
    "device_name": "NVIDIA H100 80GB HBM3",
    "num_sms": 132,
    "deterministic": True,
    "attention_backend": "flash_attn",
    "dtype": "bfloat16",
    "settings": "90aa89c1ed0a7d0b",
    "data": "db4a43c7265525f6",
    "fingerprints": "full, schema 1",
}


class Planned(NamedTuple):
    """What is wrong in which node."""

    odd: dict[int, tuple[int, int]]
    """Node -> GPU, first step."""
    slow: dict[int, int]
    """Node -> GPU, which is so from its first step on: its own earlier steps don't tell it."""
    dead: list[int]


def planned(num_nodes: int, seed: int = 7) -> Planned:
    """10 odd, 5 slow and 3 dead of a thousand; one each of ten."""
    draw = random.Random(seed)
    counts = [max(1, num_nodes // 100), max(1, num_nodes // 200), max(1, num_nodes * 3 // 1000)]
    chosen = draw.sample(range(num_nodes), sum(counts))
    odd, slow = chosen[: counts[0]], chosen[counts[0] : counts[0] + counts[1]]
    return Planned(
        {node: (draw.randrange(NUM_GPUS), draw.randrange(1, NUM_STEPS)) for node in sorted(odd)},
        {node: draw.randrange(NUM_GPUS) for node in sorted(slow)},
        sorted(chosen[counts[0] + counts[1] :]),
    )


def name_of(node: int) -> str:
    return f"node{node:04}"


def uuid_of(node: int, gpu: int) -> str:
    return f"GPU-{node:08x}-5e7e-4a11-8000-{gpu:012x}"


def write_fleet(
    place: Path, num_nodes: int, plan: Planned, num_steps: int = NUM_STEPS, num_gpus: int = NUM_GPUS
) -> None:
    for node in range(num_nodes):
        directory = place / name_of(node)
        directory.mkdir(parents=True)
        if node in plan.dead and plan.dead.index(node) % 3 == 0:
            continue
        write_run(directory, node, plan, num_steps, num_gpus)


def write_run(directory: Path, node: int, plan: Planned, num_steps: int, num_gpus: int) -> None:
    """What a run leaves: run.json, events, report.json, report.html."""
    names = [f"GPU{gpu}" for gpu in range(num_gpus)]
    for gpu, name in enumerate(names):
        lines = b"".join(map(encode, events(node, gpu, plan, num_steps)))
        (directory / f"{name.lower()}.events.jsonl").write_bytes(lines)
    kind = plan.dead.index(node) % 3 if node in plan.dead else None
    ended = record(directory, node, names, num_steps)
    started = msgspec.structs.replace(ended, end=None, ended=None, duration_s=None)
    document = msgspec.to_builtins(started if kind == 2 else ended, str_keys=True)
    run_dir.write(directory / "run.json", document)
    if kind == 1:
        content = (directory / "run.json").read_bytes()
        (directory / "run.json").write_bytes(content[: len(content) // 2])
    if kind is None:
        write_report(directory)


def write_report(directory: Path) -> None:
    """By our own code, of the events; but as if nobody had compared the GPUs of a node with each
    other: what is odd or slow is left for the merge to find."""
    record = read_record(directory)
    alone = msgspec.structs.replace(record, groups={name: name for name in record.groups})
    watch = watched_again(alone, directory)
    result = conclude(as_it_ended(alone, directory, watch), watch, directory).result
    result = msgspec.structs.replace(result, run=result.run | {"groups": record.groups})
    write(result, record, watch, directory)


def record(directory: Path, node: int, names: Sequence[str], num_steps: int) -> RunRecord:
    began = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=node % 60)
    return RunRecord(
        command=["--gpus", "all"],
        started_at=began,
        started_ns=1_000_000_000_000 + node,
        pid=10_000 + node,
        cwd="/",
        host=name_of(node),
        scheduler="slurm",
        node=name_of(node),
        kernel="6.8",
        python="3.11",
        run_dir=str(directory),
        preset="production",
        device="cuda",
        mode="replicate",
        drill=None,
        steps=num_steps,
        workers=list(names),
        groups=dict.fromkeys(names, "NVIDIA H100 80GB HBM3 80 GiB"),
        not_compared=None,
        fail_on=["isolate", "reset"],
        telemetry_interval_s=0,
        versions={"torch": DETAIL["torch"], "driver": "580.65"},
        gpus={
            name: {
                "name": DETAIL["device_name"],
                "uuid": uuid_of(node, gpu),
                "pci_bus_id": f"0000:{gpu * 16 + 10:02x}:00.0",
                "serial": f"13{node:05}{gpu:03}",
            }
            for gpu, name in enumerate(names)
        },
        notes=[SYNTHETIC],
        duration_s=30.0,
        end=RunEnd(exit_code=0),
        ended=tuple(
            WorkerEnd(name=name, returncode=0, pid=20_000 + gpu, stopped_by_us=False, duration_s=28)
            for gpu, name in enumerate(names)
        ),
        healths={},
    )


def events(node: int, gpu: int, plan: Planned, num_steps: int) -> Iterator[Event]:
    odd_from = plan.odd[node][1] if plan.odd.get(node, (None,))[0] == gpu else num_steps
    is_slow = plan.slow.get(node) == gpu
    draw, began = random.Random(node * NUM_GPUS + gpu), 1_000_000_000_000
    is_dead = node in plan.dead
    yield Note(t=began, text=SYNTHETIC)
    yield Phase(t=began + 1, name="build", detail=DETAIL)
    yield Phase(t=began + 2, name="train")
    for number in range(num_steps // 2 if is_dead else num_steps):
        usual = 90 + 4 * draw.random() + (15 if draw.random() < 0.02 else 0)
        busy_ms = usual * (1.3 if is_slow else 1)
        salt = node + 1 if number >= odd_from else 0
        yield step(number, salt, busy_ms, began + (number + 1) * STEP_NS)
    if is_dead:
        return
    now = began + (num_steps + 1) * STEP_NS
    yield Finished(t=now)
    last = num_steps - 1
    yield Done(
        t=now + 1,
        exit_code=0,
        steps=num_steps,
        loss_first=loss_of(0, 0),
        loss_last=loss_of(last, node + 1 if last >= odd_from else 0),
        tokens_per_s=round(8192 / 0.095, 1),
        peak_memory_bytes=60 << 30,
    )


def loss_of(number: int, salt: int) -> str:
    return (12.0 / (1 + number / 40) + salt * 2.0**-40).hex()


def step(number: int, salt: int, busy_ms: float, now: int) -> Step:
    draw = random.Random(number * 100_003 + salt * 7)
    return Step(
        t=now,
        step=number,
        loss=loss_of(number, salt),
        grad_norm=(1 + draw.random()).hex(),
        lr=1e-5,
        ms=round(busy_ms + 5, 3),
        tokens=8192,
        busy_ms=round(busy_ms, 3),
        fp={name: f"{draw.getrandbits(64):016x}" for name in QUANTITIES},
        taken="all, all of 1",
        repeated=True if number == 0 else None,
    )


class Measured(NamedTuple):
    seconds: float
    cpu_s: float
    peak_mib: float
    page_bytes: int
    wrong: list[str]


def measure(place: Path, plan: Planned) -> Measured:
    """In a process of its own, as the verb runs."""
    command = [sys.executable, "-P", "-m", "launcher", "report", str(place)]
    began = time.monotonic()
    with open(place / "stdout.txt", "wb") as out:
        done = subprocess.Popen(command, stdout=out, env={**os.environ, "PYTHONPATH": os.getcwd()})
        _, status, usage = os.wait4(done.pid, 0)
    seconds = time.monotonic() - began
    report = json.loads((place / "fleet.json").read_bytes())
    wrong = list(faults(report, plan))
    if os.waitstatus_to_exitcode(status) != report["exit_code"]:
        wrong.append(f"exit code {os.waitstatus_to_exitcode(status)}")
    page_bytes = (place / "fleet.html").stat().st_size
    cpu_s = usage.ru_utime + usage.ru_stime
    return Measured(seconds, cpu_s, usage.ru_maxrss / 1024, page_bytes, wrong)


def faults(report: dict[str, Any], plan: Planned) -> Iterator[str]:
    """What is named and should not be, or is not named."""
    named = {
        (f["seen"], Path(f["directory"]).name, f["worker"], f["step"] if f["seen"] == "bits" else 0)
        for f in report["findings"]
    }
    asked = {("dead", name_of(node), None, 0) for node in plan.dead}
    asked |= {("slow", name_of(node), f"GPU{gpu}", 0) for node, gpu in plan.slow.items()}
    asked |= {("bits", name_of(n), f"GPU{gpu}", step) for n, (gpu, step) in plan.odd.items()}
    yield from (f"not named: {each}" for each in sorted(asked - named, key=str))
    yield from (f"named: {each}" for each in sorted(named - asked, key=str))


def without_traces(place: Path) -> None:
    for path in place.glob("*/report.json"):
        document = json.loads(path.read_bytes())
        for worker in document["workers"]:
            worker.pop("trace")
        path.write_bytes(json.dumps(document).encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--without-traces", action="store_true")
    names, is_wrong = parser.parse_args(), False
    print("| nodes | odd, slow, dead | wrong | seconds | of CPU | peak, MiB | fleet.html, KB |")
    print("|---|---|---|---|---|---|---|")
    for num in names.nodes:
        with tempfile.TemporaryDirectory() as scratch:
            place = (names.keep or Path(scratch)) / f"fleet{num}"
            plan = planned(num)
            if not place.exists():
                write_fleet(place, num, plan)
            if names.without_traces:
                without_traces(place)
            done = measure(place, plan)
            counts = f"{len(plan.odd)}, {len(plan.slow)}, {len(plan.dead)}"
            figures = f"{done.seconds:.2f} | {done.cpu_s:.2f} | {done.peak_mib:.0f}"
            figures += f" | {done.page_bytes / 1000:.0f}"
            print(f"| {num:,} | {counts} | {len(done.wrong)} | {figures} |", flush=True)
            print(*done.wrong, sep="\n", file=sys.stderr, end="\n" if done.wrong else "")
            is_wrong = is_wrong or bool(done.wrong)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
