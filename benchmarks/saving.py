"""What a checkpoint that is written beside training costs on a CPU: how long training stands still,
and how much memory the copy takes; two names due after one step, too. Beside another checkout.

    python benchmarks/saving.py [--other CHECKOUT] [--hidden 512] [--saves 5] [--rounds 3]

Each checkout has processes of its own, in turns. A row: the median over the saves of all rounds,
with the spread. `stands still` is the time until the calls that save return, after training has
waited for the write before; the first save of a process takes fresh pages.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20


def main() -> int:
    options = parse(sys.argv[1:])
    if options.child:
        print(json.dumps(child(options)))
        return 0
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start")
    trees = {"ours": ROOT, **({"other": options.other.resolve()} if options.other else {})}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for number in range(options.rounds):
        for name in list(trees)[:: -1 if number % 2 else 1]:
            found[name].append(run(trees[name], options))
    for name, rounds in found.items():
        report(name, rounds)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--other", type=Path)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run(tree: Path, options: argparse.Namespace) -> dict[str, Any]:
    sizes = ("--hidden", str(options.hidden), "--saves", str(options.saves))
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--child", *sizes],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def report(name: str, rounds: list[dict[str, Any]]) -> None:
    state = rounds[0]["state_bytes"] / MIB
    print(f"\n{name}: a state of {state:,.0f} MiB")
    firsts = [each["one"][0] for each in rounds]
    later = [ms for each in rounds for ms in each["one"][1:]]
    print(f"  one name: stands still {spread(later)} ms, the first save {spread(firsts)} ms")
    two = [ms for each in rounds for ms in each["two"]]
    print(f"  two names after one step: stands still {spread(two)} ms")
    peaks = [each["peak_bytes"] / MIB for each in rounds]
    print(f"  peak memory above the state: {spread(peaks)} MiB")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def child(options: argparse.Namespace) -> dict[str, Any]:
    """In the checkout that PYTHONPATH names."""
    import torch

    from model_check.engine.saving.saver import Saver
    from model_check.forensics.fingerprint import fingerprint_for

    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(options.hidden, Path(directory))
        state = trainer.state
        saver = Saver(state.settings.training, state, fingerprint_for(torch.device("cpu")))
        tensors = [*state.model.parameters(), *state.optimizer.first_moments]
        for tensor in [*tensors, *state.optimizer.second_moments]:
            tensor.data.add_(1e-3)  # every page exists
        before = peak_bytes()
        ms: dict[str, list[float]] = {"one": [], "two": []}
        saver.begin()
        for kind, names in (("one", ["step_{}.pt"]), ("two", ["best.pt", "step_{}.pt"])):
            for number in range(1, options.saves + 1):
                saver.wait()
                step = number if kind == "one" else 100 + number
                started = time.perf_counter()
                for name in names:
                    saver.save(name.format(step), state.capture(step, 1.0))
                ms[kind].append(1000 * (time.perf_counter() - started))
        saver.close(None)
        size = 12 * sum(parameter.numel() for parameter in state.model.parameters())
        return {**ms, "peak_bytes": peak_bytes() - before, "state_bytes": size}


def make_trainer(hidden: int, directory: Path) -> Any:
    import torch

    from model_check.config.schema import ModelSettings, Settings, SystemSettings, TrainingSettings
    from model_check.engine.assembly import build_trainer
    from model_check.engine.metrics import Meter
    from model_check.engine.run_context import Channels, Claim, Identity, RunContext
    from model_check.engine.stop import StopSignal
    from model_check.events import EventSink

    settings = Settings(
        model=ModelSettings(
            num_layers=4,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_heads=8,
            num_kv_heads=4,
            vocab_size=8192,
        ),
        training=TrainingSettings(
            max_steps=1000,
            context_length=64,
            use_amp=False,
            save_interval=1,
            keep_last=1,
            async_save=True,
        ),
        system=SystemSettings(device="cpu", checkpoint_dir=str(directory)),
    )
    context = RunContext(
        identity=Identity("CPU0"),
        channels=Channels(lambda text: None, EventSink(None)),
        device=torch.device("cpu"),
        claim=Claim(directory),
        meter=Meter(),
        stop=StopSignal(),
    )
    return build_trainer(settings, None, 8192, context)  # type: ignore[arg-type]


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    raise SystemExit(main())
