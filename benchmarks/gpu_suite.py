"""Runs whole training runs on a real GPU and reports each in a row, with a table at the end. Then
it runs the tests that are marked `gpu`, and benchmarks/trainer_gpu.py: the default workload,
variant by variant. Its last lines say what could not run on this machine, and why.

Each row is a real `python -m launcher` (detection, pinning, supervision included). The suite claims
only what it measured: tokens/s over all steps but the first, peak memory of the allocator, and
whether two runs of the same settings on the same GPU gave the same bits. `--self-test` takes the
same way on a CPU with tiny models: its numbers mean nothing. `--only debug` and `--only compiled`
run parts of the suite, for a machine that is lent by the minute.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.install.requirements import lacking, required

ROOT = Path(__file__).resolve().parents[1]
RUN_LIMIT_S = 240
TEST_LIMIT_S = 300
GPU_TESTS = "tests marked gpu"
NO_PYTEST = "No module named pytest"
NOT_RUN = ": not run: "
"""The words between a variant and the reason in trainer_gpu's lines."""


@dataclass(frozen=True)
class Case:
    """One run: a name for the table, and the launcher's arguments."""

    name: str
    preset: str
    settings: dict[str, str] = field(default_factory=dict)
    exit_code: int = 0
    num_gpus: int = 1


NUM_STEPS = {"production": "20", "debug": "10"}
# The debug preset has a narrow model for CPUs.
SELF_TEST = ("--preset", "debug", "--device", "cpu", "--max-steps", "4")
TWO_RANKS = {"launch.mode": "ddp"}
CASES = [
    Case("debug", "debug"),
    Case("debug again", "debug"),
    Case("production", "production"),
    Case("production again", "production"),
    Case("production, any kernel", "production", {"system.deterministic": "false"}),
    Case("production, batch 2", "production", {"training.batch_size": "2"}),
    Case("production, 4 micro-batches", "production", {"training.grad_accum_nums": "4"}),
    Case("production, checkpointing", "production", {"training.gradient_checkpointing": "true"}),
    Case("production, fp16", "production", {"training.precision": "fp16"}),
    Case("production, compiled", "production", {"training.compile": "true"}),
    Case(
        "context 2048, eager",
        "production",
        {"training.context_length": "2048", "model.attention_backend": "eager"},
    ),
    Case(
        "context 2048, sdpa",
        "production",
        {"training.context_length": "2048", "model.attention_backend": "sdpa"},
    ),
    Case("debug, NaN drill", "debug", {"debug.drill": "nan@3"}, exit_code=20),
    Case("two_gpus: debug", "debug", TWO_RANKS, num_gpus=2),
    Case("two_gpus: debug again", "debug", TWO_RANKS, num_gpus=2),
    Case("two_gpus: production", "production", TWO_RANKS, num_gpus=2),
    Case("two_gpus: kill", "debug", TWO_RANKS | {"debug.drill": "kill@3"}, 137, num_gpus=2),
    Case("two_gpus: NaN", "debug", TWO_RANKS | {"debug.drill": "nan@3"}, 20, num_gpus=2),
]
SAME_BITS = [
    ("debug", "debug again"),
    ("production", "production again"),
    ("two_gpus: debug", "two_gpus: debug again"),
]


def main() -> int:
    options = parse()
    if missing := lacking(required()):
        names = ", ".join(map(str, missing))
        print(f"{sys.executable} lacks {names}: put their unpacked wheels on PYTHONPATH")
        return 2
    out, self_test = options.out, options.self_test
    out.mkdir(parents=True, exist_ok=True)
    record_nvml(out / "nvml.json")
    num_gpus = 2 if self_test else count_gpus(out / "nvml.json")
    asked = [case for case in CASES if options.only in case.name]
    cases = [case for case in asked if case.num_gpus <= num_gpus]
    if len(cases) < len(asked):
        print(f"{len(asked) - len(cases)} cases left out: they need 2 GPUs, here are {num_gpus}")
    rows = [run_case(case, out, self_test=self_test) for case in cases]
    print_versions()
    print_table(rows)
    well = all(row["exit"] == case.exit_code for row, case in zip(rows, cases, strict=True))
    names = {case.name for case in cases}
    for first, second in SAME_BITS:
        if names >= {first, second}:
            same = step_bits(out, first) == step_bits(out, second) != []
            print(f"{first!r} twice on one device: {'equal bit for bit' if same else 'DIFFERENT'}")
            well &= same
    tests, variants = out / "tests.txt", out / "trainer_gpu.txt"
    tests.unlink(missing_ok=True)
    if options.only in GPU_TESTS:
        well &= run_gpu_tests(tests)
    well &= run_trainer_benchmark(options, variants)
    print_left_out(variants, tests)
    print("all as expected" if well else "NOT AS EXPECTED: see above")
    return 0 if well else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, help="directory of logs, reports and the tables")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--only", default="", help="only what has this in its name")
    return parser.parse_args()


def record_nvml(path: Path) -> None:
    """The answers of the real NVML to our probe: the fake library must give the same shapes."""
    code = (
        "import msgspec, sys; from launcher.gpus.probe import NvmlProbe;"
        "sys.stdout.buffer.write(msgspec.json.encode(NvmlProbe().snapshot()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    path.write_bytes(done.stdout or done.stderr)


def count_gpus(snapshot: Path) -> int:
    """By what `record_nvml` left."""
    try:
        return len(json.loads(snapshot.read_bytes())["gpus"])
    except (ValueError, KeyError):
        return 1


def arguments(case: Case, *, self_test: bool) -> list[str]:
    settings = case.settings
    if self_test:
        settings = settings | {"training.context_length": "128"}
        workers = ["--workers", str(case.num_gpus)]
        return [*SELF_TEST, *workers, *(f"{name}={value}" for name, value in settings.items())]
    which = f"auto:{case.num_gpus}"
    device = ["--preset", case.preset, "--gpus", which, "--max-steps", NUM_STEPS[case.preset]]
    return [*device, *(f"{name}={value}" for name, value in settings.items())]


def run_gpu_tests(log: Path) -> bool:
    """Run the tests that are marked `gpu`. True, too, where pytest is missing: they are left
    out."""
    # These folders hold all of them. Collecting other folders would need their packages.
    command = [sys.executable, "-m", "pytest", "tests/engine", "tests/models"]
    command += ["-m", "gpu", "--timeout", str(TEST_LIMIT_S)]
    with log.open("w") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output).returncode
    text = log.read_text()
    print(f"{GPU_TESTS}: {(text.splitlines() or ['no output'])[-1].strip('= ')}", flush=True)
    return code == 0 or NO_PYTEST in text


def print_left_out(variants: Path, tests: Path) -> None:
    """Variants and tests for which this machine lacks a package, a kernel or memory, with
    reasons."""
    lines = variants.read_text().splitlines()
    rows = [line.replace(NOT_RUN, ": ") for line in lines if NOT_RUN in line]
    said = tests.read_text() if tests.exists() else ""
    rows += re.findall(rf"^SKIPPED .+|{NO_PYTEST}", said, re.MULTILINE)
    print("\n".join(["left out on this machine:", *(f"  {row}" for row in rows or ["nothing"])]))


def run_trainer_benchmark(options: argparse.Namespace, text: Path) -> bool:
    """Run the default workload, variant by variant; its table is printed last."""
    command = [sys.executable, str(ROOT / "benchmarks" / "trainer_gpu.py"), "--only", options.only]
    command += ["--self-test", "--steps", "2"] if options.self_test else []
    with text.open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    print(text.read_text())
    return code == 0


def run_case(case: Case, out: Path, *, self_test: bool) -> dict[str, Any]:
    directory = out / slug(case.name)
    command = [sys.executable, "-m", "launcher", "--run-dir", str(directory)]
    command += arguments(case, self_test=self_test)
    command += [f"system.checkpoint_dir={directory}/checkpoints"]
    started = time.monotonic()
    with (out / f"{slug(case.name)}.txt").open("wb") as log:
        try:
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=RUN_LIMIT_S
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    row = {"case": case.name, "exit": code, "wall_s": round(time.monotonic() - started, 1)}
    report = directory / "report.json"
    worker = json.loads(report.read_text())["workers"][0] if report.exists() else {}
    print(f"{case.name}: exit {code} after {row['wall_s']} s", flush=True)
    return row | {"worker": worker, "step_ms": median_step_ms(directory)}


def median_step_ms(directory: Path) -> float | None:
    times = sorted(step["ms"] for step in steps_of(directory)[1:])
    return times[len(times) // 2] if times else None


def steps_of(directory: Path) -> list[dict[str, Any]]:
    lines = [line for path in directory.glob("[cg]pu*.events.jsonl") for line in path.open()]
    events = [json.loads(line) for line in lines]
    return [event for event in events if event["kind"] == "step"]


def step_bits(out: Path, name: str) -> list[tuple[str, str]]:
    return [(step["loss"], step["grad_norm"]) for step in steps_of(out / slug(name))]


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def print_versions() -> None:
    query = "name,driver_version,power.limit,clocks.max.sm,memory.total"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    if shutil.which("nvidia-smi"):
        print(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    code = "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda)"
    print(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    )


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'case':<30}{'exit':>5}{'wall s':>8}{'step ms':>9}{'tokens/s':>10}{'GiB':>7}  attention"
    )
    for row in rows:
        worker = row["worker"]
        cells = (
            f"{row['case']:<30}{row['exit']:>5}{row['wall_s']:>8}",
            f"{cell(row['step_ms'], '.1f'):>9}{cell(worker.get('tokens_per_s'), '.0f'):>10}",
            f"{cell(gib(worker.get('peak_memory_bytes')), '.1f'):>7}",
            f"  {worker.get('detail', {}).get('attention_backend', 'n/a')}",
        )
        print("".join(cells))


def gib(count: float | None) -> float | None:
    return None if count is None else count / 2**30


def cell(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


if __name__ == "__main__":
    raise SystemExit(main())
