"""The fake driver of the tests of GPU detection, and a supervisor with telemetry beside it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.gpus.conftest import Box, box, nvml_dir

__all__ = ["SUPERVISE", "Supervise", "box", "nvml_dir", "supervise"]

Supervise = Callable[..., dict[str, Any]]

# A worker for each GPU of argv[2] under a real supervisor, with telemetry. Prints what was said,
# then how it ended.
SUPERVISE = """
import json, os, sys
from pathlib import Path
from launcher.plan import WorkerSpec
from launcher.supervise.policy import Limits
from launcher.output.printer import Printer
from launcher.supervise.supervisor import Supervisor
from launcher.telemetry.monitor import Monitor
directory, uuids, deadline_s = Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
printer = Printer(1)
monitor = Monitor(uuids, directory, 0.02, printer.say, deadline_s=deadline_s)
env = {**os.environ, "RUN_DIR": str(directory)}
specs = [
    WorkerSpec(name=name, argv=("sh", "-c", sys.argv[4]), env=env, log_path=directory / name)
    for name in uuids
]
limits = Limits(grace_s=5.0, silence_s=0.0)
outcome = Supervisor(specs, limits, printer, companion=monitor).run()
printer.close(60)
from launcher.telemetry.health import symptoms
healths = {name: record.health() for name, record in monitor.records.items()}
print(json.dumps({
    "exit_code": outcome.end.exit_code,
    "leftovers": outcome.end.leftovers,
    "lost": [name for name, record in monitor.records.items() if record.is_lost],
    "samples": {name: health.samples if health else None for name, health in healths.items()},
    "symptoms": [
        f"{name}: {found}" for name, health in healths.items() if health
        for found in symptoms(name, health)
    ],
    "children": open(f"/proc/self/task/{os.getpid()}/children").read().split(),
}))
"""


@pytest.fixture
def supervise(tmp_path: Path) -> Supervise:
    """`supervise(box, uuids, script)`: what became of a run whose workers run a shell script
    ($RUN_DIR: where telemetry lands); "said": the lines of the launcher."""

    def run(box: Box, uuids: dict[str, str], script: str, deadline_s: float = 30) -> dict[str, Any]:
        arguments = (str(tmp_path), json.dumps(uuids), str(deadline_s), script)
        *said, last = box.python(SUPERVISE, *arguments).splitlines()
        answer: dict[str, Any] = json.loads(last)
        return answer | {"said": said}

    return run
