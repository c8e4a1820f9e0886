"""report.html of big runs: its bytes, and the seconds that it takes, alone and with all else that
`run.sh report` does.

    python -m benchmarks.page [--keep DIR]

The runs are written, not run: events and telemetry of so many GPUs and steps as workers and monitor
would have left them. `--keep`: leave them there, to be looked at.
"""

import argparse
import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from launcher import run_dir
from launcher.report.conclude import conclude
from launcher.report.page.document import page
from launcher.report.page.story import story_of
from launcher.report.read_run import read_record
from launcher.report.rebuild import as_it_ended, watched_again
from launcher.verdict.live import Watch
from launcher.verdict.record import RunEnd, RunRecord, WorkerEnd
from model_check.events import (
    Counters,
    Done,
    Event,
    Finished,
    GpuEvent,
    Phase,
    Step,
    Telemetry,
    Watched,
    Xid,
    encode,
)
from model_check.utils.worker_env import telemetry_path

BEGAN_NS = 1_000_000_000_000
STEP_NS = 300_000_000
START_NS = 20_000_000_000


class Case(msgspec.Struct, frozen=True):
    name: str
    num_gpus: int
    num_steps: int
    odd_step: int | None = None
    """GPU 3 has other gradients from here on: the run ends there."""
    slow_step: int | None = None
    """GPU 5 is slower from here on, hot, and held back."""
    xid: int | None = None
    """GPU 6 tells it in the middle of the run."""


CASES = (
    Case("8 x 10,000, clean", 8, 10_000),
    Case("8, odd GPU", 8, 4_321, odd_step=4_320),
    Case("8, slow GPU", 8, 2_000, slow_step=900),
    Case("8, Xid 79", 8, 2_000, xid=79),
    Case("64 x 1,000, clean", 64, 1_000),
    Case("8 x 0 steps", 8, 0),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path)
    keep = parser.parse_args(argv).keep
    print("| run | events, MB | page, KB | page, s | report, s |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(CASES):
            directory = (keep or Path(scratch)) / f"run{number}"
            write_run(case, directory)
            print(row(case, directory), flush=True)


def row(case: Case, directory: Path) -> str:
    began = time.monotonic()
    record = read_record(directory)
    watch = watched_again(record, directory)
    record = ended(as_it_ended(record, directory, watch), watch)
    result = conclude(record, watch, directory).result
    before = time.monotonic()
    text = page(result, story_of(record, watch, result, directory))
    now = time.monotonic()
    (directory / "report.html").write_text(text)
    events = sum(path.stat().st_size for path in directory.glob("*.jsonl"))
    times = f"{now - before:.2f} | {now - began:.2f}"
    return (
        f"| {case.name}: {result.verdict} | {events / 1e6:.1f} | {len(text) / 1e3:.0f} | {times} |"
    )


def ended(record: RunRecord, watch: Watch) -> RunRecord:
    """As the supervisor would have ended it."""
    if not (found := watch.disagreements):
        return record
    end = RunEnd(exit_code=21, culprits=found[0].odd, disagreement=found[0], reason=str(found[0]))
    return msgspec.structs.replace(record, end=end)


def write_run(case: Case, directory: Path) -> None:
    directory.mkdir(parents=True)
    names = [f"GPU{at}" for at in range(case.num_gpus)]
    run_dir.write(
        directory / "run.json", msgspec.to_builtins(record_of(case, names), str_keys=True)
    )
    for at, name in enumerate(names):
        lines = b"".join(map(encode, events(case, at)))
        (directory / f"{name.lower()}.events.jsonl").write_bytes(lines)
        told = b"".join(map(encode, telemetry(case, at)))
        telemetry_path(directory, name).write_bytes(told)


def record_of(case: Case, names: Sequence[str]) -> RunRecord:
    is_odd = case.odd_step is not None
    return RunRecord(
        command=["--max-steps", str(case.num_steps)],
        started_at=datetime(2026, 11, 23, 5, tzinfo=UTC),
        started_ns=BEGAN_NS,
        pid=1,
        cwd="/root",
        host="node17",
        kernel="6.1",
        python="3.12.3",
        preset="production",
        device="cuda",
        mode="replicate",
        drill=None,
        steps=case.num_steps,
        workers=list(names),
        groups=dict.fromkeys(names, "NVIDIA H100"),
        not_compared=None,
        telemetry_interval_s=1.0,
        versions={"torch": "2.13.0"},
        gpus={name: gpu(at) for at, name in enumerate(names)},
        duration_s=(START_NS + case.num_steps * STEP_NS) / 1e9 + 1,
        end=RunEnd(exit_code=0),
        ended=tuple(
            WorkerEnd(
                name=name,
                pid=100 + at,
                returncode=143 if is_odd else 0,
                stopped_by_us=is_odd,
                duration_s=(START_NS + case.num_steps * STEP_NS) / 1e9,
            )
            for at, name in enumerate(names)
        ),
    )


def gpu(at: int) -> dict[str, object]:
    return {
        "index": at,
        "uuid": f"GPU-{random.Random(at).getrandbits(128):032x}",
        "name": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": f"00000000:{0x1B + at:02X}:00.0",
        "serial": str(1_650_000_000_000 + at),
    }


def events(case: Case, at: int) -> Iterator[Event]:
    now = BEGAN_NS + 1_000_000
    detail = {"device_name": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16", "torch": "2.13.0"}
    for phase, ns in (("import", 0), ("build", 9), ("compile", 14), ("train", 19)):
        yield Phase(name=phase, t=now + ns * 1_000_000_000, detail=detail if ns == 9 else {})
    draw = random.Random(1)
    for number in range(case.num_steps):
        yield step(case, at, number, draw)
    end = BEGAN_NS + START_NS + case.num_steps * STEP_NS
    if case.odd_step is None:
        yield Finished(t=end)
        yield Done(exit_code=0, t=end + 1, steps=case.num_steps, tokens_per_s=98_000.0)


def step(case: Case, at: int, number: int, draw: random.Random) -> Step:
    loss = 12 * math.exp(-number / 3000) + draw.random() / 4
    norm = 1 + draw.random() + (30 if number % 2777 == 2776 else 0)
    is_odd = at == 3 and case.odd_step is not None and number >= case.odd_step
    is_slow = at == 5 and case.slow_step is not None and number >= case.slow_step
    noise = random.Random(number * 64 + at).random()
    sums = {name: f"{draw.getrandbits(64) ^ is_odd:016x}" for name in ("gradients", "weights")}
    return Step(
        t=BEGAN_NS + START_NS + number * STEP_NS + at,
        step=number,
        loss=loss.hex(),
        grad_norm=norm.hex(),
        lr=1e-4,
        ms=300.0,
        busy_ms=280 * (1.32 if is_slow else 1) + noise,
        tokens=32768,
        fp=sums,
        taken="all, all of 1",
    )


def telemetry(case: Case, at: int) -> Iterator[GpuEvent]:
    num_s = (START_NS + case.num_steps * STEP_NS) // 1_000_000_000
    yield Watched(t=BEGAN_NS, uuid=f"GPU-{at}", interval_s=1.0, schema=1)
    slow_s = None if case.slow_step is None else 20 + case.slow_step * STEP_NS / 1e9
    draw = random.Random(at)
    for second in range(num_s):
        now = BEGAN_NS + second * 1_000_000_000
        is_hot = at == 5 and slow_s is not None and second >= slow_s
        if second % 10 == 0:
            yield Counters(t=now, ecc_uncorrected=0, ecc_corrected=0, watches_xids=True)
        if at == 6 and case.xid and second == num_s // 2:
            yield Xid(t=now, xid=case.xid)
        yield sample(now, second, is_hot, draw)


def sample(now: int, second: int, is_hot: bool, draw: random.Random) -> Telemetry:
    return Telemetry(
        t=now,
        temperature_c=round(40 + 25 * (1 - math.exp(-second / 60)) + 22 * is_hot + draw.random()),
        power_w=round(650 - 200 * is_hot + 20 * draw.random(), 1),
        power_limit_w=700,
        sm_mhz=1980 - 500 * is_hot - draw.randrange(3) * 15,
        sm_max_mhz=1980,
        utilization_percent=100,
        memory_used_mib=60_000,
        clocks_event_reasons=0x40 if is_hot else 0,
        pcie_gen=5,
        pcie_width=16,
    )


if __name__ == "__main__":
    main()
