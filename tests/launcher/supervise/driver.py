"""Run a supervisor as a program: the plan is the only argument, the exit code is the run's."""

import importlib
import json
import os
import signal
import sys
from pathlib import Path

import msgspec

from launcher.output.printer import Printer
from launcher.plan import WorkerSpec
from launcher.supervise.policy import Limits
from launcher.supervise.supervisor import Supervisor
from launcher.verdict.live import Watch
from model_check.utils.requests import REQUESTS


def main() -> int:
    plan = json.loads(sys.argv[1])
    for where, value in plan.get("constants", {}).items():
        module, name = where.split(".")
        setattr(importlib.import_module(f"launcher.supervise.{module}"), name, value)
    run_dir = Path(plan["dir"])
    printer = Printer(sys.stdout.fileno(), run_dir / "launcher.log")
    specs, limits = _specs(plan["commands"], run_dir), Limits(**plan["limits"])
    then = plan.get("then")
    # As launcher.run does: between two supervisors, and after the last one, signals wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    watch = (
        Watch({spec.name: "H100" for spec in specs}, max_lead=2) if plan.get("in_step") else None
    )
    outcome = Supervisor(specs, limits, printer, watch, keep_signals=bool(then)).run()
    if then:
        outcome = Supervisor(_specs(then, run_dir), limits, printer, after=outcome).run()
    told = msgspec.to_builtins(outcome)
    (run_dir / "outcome.json").write_text(json.dumps(told | told["end"]))
    printer.close(0.2)
    return outcome.end.exit_code


def _specs(commands: list[list[str]], run_dir: Path) -> list[WorkerSpec]:
    return [
        WorkerSpec(
            name=f"W{i}",
            argv=tuple(argv),
            env=dict(os.environ),
            log_path=run_dir / f"w{i}.log",
            events_path=run_dir / f"w{i}.events.jsonl",
            stacks_path=run_dir / f"w{i}.stacks.txt",
        )
        for i, argv in enumerate(commands)
    ]


if __name__ == "__main__":
    sys.exit(main())
