"""Real runs, of which those of one worker cannot be compared alone: together they name the odd one,
and `--drain` the node that is to go."""

import json
import subprocess

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import Launcher

NODES = {
    "two": ("--workers", "2"),
    "odd": ("--workers", "1", "debug.drill=flip_gradient@2:CPU0"),
    "nan": ("--workers", "1", "debug.drill=nan@2:CPU0"),
}


def test_runs_are_each_others_peers(scripted: Launcher) -> None:
    holder, codes = scripted.cwd / "burnin", {}
    holder.mkdir()
    each = ("--device", "cpu", "system.num_threads=1", "launch.history_file=")
    for node, more in NODES.items():
        run = scripted(*each, *more, SLURMD_NODENAME=node)
        codes[node] = run.exit_code
        run.directory.rename(holder / node)
    assert codes == {"two": 0, "odd": 0, "nan": 20}
    (holder / "dead").mkdir()

    told = scripted.verb("report", str(holder))
    assert told.returncode == 20, told.stdout
    report = json.loads((holder / "fleet.json").read_text())
    found = {(f["node"] or f["directory"].rpartition("/")[2]): f for f in report["findings"]}
    assert found.keys() == {"odd", "nan", "dead"}
    assert (found["odd"]["seen"], found["odd"]["verdict"], found["odd"]["step"]) == (
        *("bits", "SUSPECT", 2),
    )
    assert found["odd"]["difference"]["quantity"] == "gradients"
    assert (found["nan"]["verdict"], found["nan"]["severity"]) == ("FAIL", "ISOLATE")
    assert (holder / report["runs"][found["odd"]["run"]]["page"]).is_file()

    drained = subprocess.run(
        [*scripted.arguments()[:3], "report", str(holder), "--drain"],
        cwd=scripted.cwd,
        env=scripted.env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    commands = [line for line in drained.stdout.splitlines() if not line.startswith("#")]
    assert len(commands) == 1
    assert commands[0].startswith("scontrol update NodeName=nan State=DRAIN 'Reason=")
    assert "[launcher]" not in drained.stdout
