"""The cluster itself, and a run on each of its nodes."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
TINY = {
    "model": {"num_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
    "training": {"max_steps": 4, "batch_size": 2, "context_length": 32, "use_amp": False},
    "data": {"dataset": "embedded", "bpe_vocab_size": 512, "num_samples": 64},
    "debug": {"dump_tensors": False},
}


def test_a_step_runs_on_both_nodes(cluster: Cluster) -> None:
    assert sorted(cluster.told("srun", "-N2", "hostname").split()) == ["n1", "n2"]
    assert cluster.run("srun", "-N2", "false").returncode == 1


def test_every_node_has_a_verdict_of_its_own(
    cluster: Cluster, token_cache: Path, tmp_path: Path
) -> None:
    tiny = tmp_path / "tiny.json"
    tiny.write_text(json.dumps(TINY))
    run = (
        f'exec bash {ROOT}/run.sh --debug --workers 1 --config {tiny} --run-dir "$SLURMD_NODENAME"'
    )
    env = {"DATASET_CACHE_DIR": str(token_cache), "MODEL_CHECK_PYTHON": sys.executable}
    done = cluster.run("srun", "-N2", "--chdir", tmp_path, "bash", "-c", run, **env)
    assert done.returncode == 0, done.stdout
    for node in ("n1", "n2"):
        assert json.loads((tmp_path / node / "run.json").read_text())["host"] == node
        assert json.loads((tmp_path / node / "report.json").read_text())["verdict"] == "PASS"


def test_a_node_that_loses_its_power_is_down_and_comes_back(cluster: Cluster) -> None:
    before = cluster.pids("n2")
    cluster.stop("n2")
    assert not any(map(is_alive, before))
    cluster.start("n2")
    cluster.recover()
    assert cluster.told("srun", "-w", "n2", "hostname") == "n2"


def test_nobody_is_left_of_a_cluster_whose_owner_was_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\n"
        "from tests.slurm.cluster import CONTROL, Node, started\n"
        "with started(pathlib.Path(sys.argv[1]), [Node('n1')]) as cluster:\n"
        "    cluster.told('sbatch', '--output=/dev/null', '--wrap', 'setsid sleep 1000')\n"
        "    cluster.wait_for_state('n1', 'allocated', 'mixed')\n"
        "    print(*cluster.pids(CONTROL), *cluster.pids('n1'), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) >= 5  # munged, slurmctld, slurmd, and a bash each
        owner.kill()
    until = time.monotonic() + DEADLINE_S
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
