"""Asks a real GPU what matters, most telling first: which attention kernels pass their trial, whole
training runs, the tests that are marked `gpu`, benchmarks/trainer_gpu.py with the default workload
variant by variant, then further runs. A table at the end holds each run against what was expected;
the last lines say what could not run on this machine, and why.

Each row is a real `python -m launcher` (detection, pinning, supervision included). The suite claims
only what it measured: tokens/s over all steps but the first, peak memory of the allocator, and
whether two runs of the same settings on the same GPU gave the same bits. What is expected is
computed (model_check/config/roofline.py) and was never measured. `--self-test` takes the same way
on a CPU with tiny models: its numbers mean nothing. `--only debug` and `--only compiled` run parts
of the suite, for a machine that is lent by the minute.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.install.requirements import lacking, required
from model_check.config.gpu_models import gpu_model
from model_check.config.load import Request, load
from model_check.config.memory import estimate_memory, expected_geometry
from model_check.config.roofline import plan_step
from model_check.errors import UsageError

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
    settles: str = ""
    """What is known when it has run."""


NUM_STEPS = {"production": "20", "debug": "10"}
# The debug preset has a narrow model for CPUs.
SELF_TEST = ("--preset", "debug", "--device", "cpu", "--max-steps", "4")
TWO_RANKS = {"launch.mode": "ddp"}
SHARED = {"launch.mode": "fsdp"}
SAVED = {"training.save_last": "true"}
# The first ten minutes: does it run at all, does it repeat its bits, is it as fast and as large as
# computed, with and without determinism, compiled, and does the alarm ring.
FIRST = [
    Case("debug", "debug", settles="it trains on a GPU"),
    Case("debug again", "debug", settles="the same bits twice: cuBLAS, attention, AdamW"),
    Case("production", "production", settles="speed, memory, the trial's choice of attention"),
    Case("production again", "production", settles="the same bits twice at full size"),
    Case("debug, NaN drill", "debug", {"debug.drill": "nan@3"}, 20, settles="the alarm, exit 20"),
    Case(
        "production, any kernel",
        "production",
        {"system.deterministic": "false"},
        settles="the price of determinism: attention 30 -> 14 ms on an H100",
    ),
    Case(
        "production, compiled",
        "production",
        {"training.compile": "true"},
        settles="what lies between products: 17 -> 6 ms on an H100",
    ),
]
# Also where a self-test has none of it.
FOUR = {"training.grad_accum_nums": "4", "training.use_amp": "true"}
COMPILED = {"training.compile": "true", "system.deterministic": "false"}
LATER = [
    Case("production, 4 micro-batches", "production", FOUR),
    Case("4 micro-batches, compiled", "production", FOUR | COMPILED),
    Case("production, batch 2", "production", {"training.batch_size": "2"}),
    Case("production, checkpointing", "production", {"training.gradient_checkpointing": "true"}),
    Case("production, fp16", "production", {"training.precision": "fp16"}),
    Case(
        "production, documents",
        "production",
        {"data.document_masking": "true"},
        settles="the masked kernel is not cuDNN's, and nothing is NaN",
    ),
    Case(
        "context 2048, float32",
        "production",
        {"training.context_length": "2048", "training.precision": "fp32"},
        settles="grouped heads in float32 do not take the math kernel",
    ),
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
    Case("two_gpus: debug", "debug", TWO_RANKS, num_gpus=2, settles="NCCL, ranks"),
    Case("two_gpus: debug again", "debug", TWO_RANKS, num_gpus=2, settles="the same bits twice"),
    Case("two_gpus: production", "production", TWO_RANKS, num_gpus=2),
    Case(
        "two_gpus: debug, shared", "debug", SHARED | SAVED, num_gpus=2, settles="a checkpoint, too"
    ),
    Case("two_gpus: debug, shared again", "debug", SHARED, num_gpus=2),
    Case("two_gpus: production, shared", "production", SHARED, num_gpus=2),
    Case(
        "two_gpus: production, shared, offloaded",
        "production",
        SHARED | {"launch.fsdp.cpu_offload": "true"},
        num_gpus=2,
    ),
    Case(
        "two_gpus: production, shared, compiled",
        "production",
        SHARED | {"training.compile": "true"},
        num_gpus=2,
    ),
    Case(
        "two_gpus: debug, shared, NaN drill",
        "debug",
        SHARED | {"debug.drill": "nan@3:GPU1"},
        exit_code=20,
        num_gpus=2,
    ),
    Case("two_gpus: kill", "debug", TWO_RANKS | {"debug.drill": "kill@3"}, 137, num_gpus=2),
    Case("two_gpus: NaN", "debug", TWO_RANKS | {"debug.drill": "nan@3"}, 20, num_gpus=2),
]
CASES = [*FIRST, *LATER]
SAME_BITS = [
    ("debug", "debug again"),
    ("production", "production again"),
    ("production, 4 micro-batches", "4 micro-batches, cast once"),
    ("two_gpus: debug", "two_gpus: debug again"),
    ("two_gpus: debug, shared", "two_gpus: debug, shared again"),
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
    print_versions()
    trial, tests, variants = (out / f"{name}.txt" for name in ("trial", "tests", "trainer_gpu"))
    tests.unlink(missing_ok=True)
    well = run_attention_trial(options, trial)
    gpu = None if self_test else name_of_gpu(out / "nvml.json")
    first = [case for case in cases if case in FIRST]
    rows = [run_case(case, out, gpu, self_test=self_test) for case in first]
    print_table(rows)
    if options.only in GPU_TESTS:
        well &= run_gpu_tests(tests)
    well &= run_trainer_benchmark(options, variants)
    later = [case for case in cases if case not in FIRST]
    rows += [run_case(case, out, gpu, self_test=self_test) for case in later]
    print_table(rows)
    well &= all(row["exit"] == row["exits"] for row in rows)
    well &= are_same_bits(out, {case.name for case in cases})
    print_left_out(variants, tests)
    print("all as expected" if well else "NOT AS EXPECTED: see above")
    return 0 if well else 1


def are_same_bits(out: Path, names: set[str]) -> bool:
    well = True
    for first, second in SAME_BITS:
        if names >= {first, second}:
            same = step_bits(out, first) == step_bits(out, second) != []
            verdict = "equal bit for bit" if same else "DIFFERENT"
            print(f"{first!r} and {second!r} on one device: {verdict}")
            well &= same
    return well


def run_attention_trial(options: argparse.Namespace, log: Path) -> bool:
    """Expected: sdpa passes with the same bits; FlashAttention 2, where it is installed, passes or
    is told; cudnn passes with any bits; none takes a second."""
    if options.only not in "attention trial":
        return True
    command = [sys.executable, "-m", "benchmarks.attention_trial"]
    command += ["--self-test"] if options.self_test else []
    with log.open("w") as output:
        code = subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=RUN_LIMIT_S
        ).returncode
    print(log.read_text(), flush=True)
    return code == 0


def name_of_gpu(snapshot: Path) -> str | None:
    """Of the first one, by what `record_nvml` left."""
    try:
        return str(json.loads(snapshot.read_bytes())["gpus"][0]["name"])
    except (ValueError, KeyError, IndexError):
        return None


def expected(case: Case, gpu_name: str | None) -> dict[str, float | None]:
    """Milliseconds of a step and GiB at its peak, computed for a GPU of that name; None: the
    launcher plans no time for it."""
    overrides = tuple(f"{name}={value}" for name, value in case.settings.items())
    settings = load(Request(preset=case.preset, overrides=overrides), lambda: True).settings
    found = None
    with suppress(UsageError):
        shape = expected_geometry(settings)
        found = plan_step(settings, shape, gpu_model(gpu_name or "none"))
    total = estimate_memory(settings, "cuda").total
    return {"ms": None if found is None else found.step_ms, "gib": gib(total)}


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
        named = (f"{name}={value.replace('GPU', 'CPU')}" for name, value in settings.items())
        return [*SELF_TEST, *workers, *named]
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


def run_case(case: Case, out: Path, gpu: str | None, *, self_test: bool) -> dict[str, Any]:
    """`gpu`: its driver's name; None: nothing is expected of its speed."""
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
    wanted = {} if self_test else expected(case, gpu)
    told = {"exits": case.exit_code, "settles": case.settles, "expected": wanted}
    return row | told | {"worker": worker, "step_ms": median_step_ms(directory)}


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
    """In brackets what was expected."""
    print(
        f"{'case':<28}{'exit':>10}{'wall s':>8}{'step ms':>15}{'tokens/s':>10}{'GiB':>13}"
        "  attention, what it settles"
    )
    for row in rows:
        worker, wanted = row["worker"], row["expected"]
        step = f"{cell(row['step_ms'], '.1f')} ({cell(wanted.get('ms'), '.0f')})"
        memory = cell(gib(worker.get("peak_memory_bytes")), ".1f")
        memory = f"{memory} ({cell(wanted.get('gib'), '.1f')})"
        code = f"{row['exit']} ({row['exits']})"
        detail = worker.get("detail", {})
        cells = (
            f"{row['case']:<28}{code:>10}{row['wall_s']:>8}",
            f"{step:>15}{cell(worker.get('tokens_per_s'), '.0f'):>10}{memory:>13}",
            f"  {detail.get('attention_backend', 'n/a')}"
            f" {detail.get('attention_kernel', '')}, {row['settles'] or '-'}",
        )
        print("".join(cells))


def gib(count: float | None) -> float | None:
    return None if count is None else count / 2**30


def cell(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


if __name__ == "__main__":
    raise SystemExit(main())
