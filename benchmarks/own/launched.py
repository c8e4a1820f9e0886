"""Commands of a person's own, checked by the real launcher."""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "own"
NEEDS = {
    "nano.py": (),
    "trainer.py": ("transformers", "accelerate"),
    "with_accelerate.py": ("accelerate",),
    "with_lightning.py": ("lightning",),
    "recipe.py": (),
}
TIMEOUT_S = 600


class Checked(NamedTuple):
    exit_code: int
    said: str
    """The last line."""
    named: tuple[str, ...] = ()
    advice: str = ""
    """Of a worker that is to be taken out of service."""


def checked(script: Path, env: Mapping[str, str]) -> Checked:
    """By three CPU workers of one thread."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-P", "-m", "launcher", "check", "--device=cpu", "--workers=3"]
        command += [f"--run-dir={directory}/run", "launch.history_file="]
        path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        done = subprocess.run(
            [*command, "--", sys.executable, str(script)],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        said = done.stdout.splitlines()[-1].removeprefix("[launcher] ")
        report = Path(directory) / "run" / "report.json"
        if not report.exists():
            return Checked(done.returncode, said)
        told = json.loads(report.read_text())
        isolated = "ISOLATE" if "(ISOLATE)" in done.stdout else ""
        return Checked(done.returncode, said, tuple(told["culprits"]), isolated)


def varies(how_likely: float, where: str, num_runs: int) -> int:
    """A command whose operation varies by itself: nobody may be accused."""
    env = {"OWN_VARIES": str(how_likely), "OWN_WHERE": where}
    runs = []
    for number in range(num_runs):
        run = checked(Path(__file__).with_name("gpt.py"), env)
        runs.append(run)
        print(f"{number + 1:3}: {run.said}", flush=True)
    codes = Counter(run.exit_code for run in runs)
    verdicts = Counter(run.said.partition(":")[0] for run in runs)
    num_named = sum(bool(run.named) for run in runs)
    num_isolated = sum(bool(run.advice) for run in runs)
    print(f"p = {how_likely:g}, {where}, {num_runs} runs: exit codes {shown(codes)}")
    print(f"verdicts {shown(verdicts)}; a worker named {num_named}, ISOLATE {num_isolated}")
    if how_likely >= 0.5:
        return int(codes[2] < num_runs or num_named > 0)
    enough = codes[2] + codes[23] >= 0.85 * num_runs
    return int(not enough or verdicts["FAIL"] > 0 or num_isolated > 0)


def clean(num_runs: int, num_busy: int) -> int:
    """Healthy workers, beside processes that compute: each exit code but 0 is a false alarm."""
    num_alarms = 0
    for name, packages in NEEDS.items():
        if missing := [package for package in packages if find_spec(package) is None]:
            print(f"{name:20} left out: no {', '.join(missing)}")
            continue
        with busy(num_busy):
            runs = [checked(EXAMPLES / name, {}) for _ in range(num_runs)]
        alarms = [run for run in runs if run.exit_code]
        num_alarms += len(alarms)
        codes = shown(Counter(run.exit_code for run in runs))
        print(f"{name:20} {num_runs} runs, alarms {len(alarms)}; exit codes {codes}", flush=True)
        for said in {run.said for run in alarms}:
            print(f"    {said}")
    return int(num_alarms > 0)


@contextmanager
def busy(num: int) -> Iterator[None]:
    loops: Sequence[subprocess.Popen[bytes]] = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def shown(counted: Counter[int] | Counter[str]) -> str:
    return ", ".join(f"{key}: {num}" for key, num in sorted(counted.items())) or "none"
