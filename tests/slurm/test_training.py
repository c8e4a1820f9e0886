"""One training job on both nodes of a real Slurm, by the recipes of docs/nodes.md."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deadline import DEADLINE_S
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
RECIPES = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/nodes.md").read_text(), re.DOTALL)
TINY = {
    "model": {"num_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
    "training": {"max_steps": 4, "batch_size": 2, "context_length": 32, "use_amp": False},
    "data": {"dataset": "embedded", "bpe_vocab_size": 512, "num_samples": 64},
    "system": {"device": "cpu"},
    "launch": {"workers": 1, "replay_s": 0, "rank_timeout_s": 5},
}
Reports = Callable[[], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


class Place:
    """A working directory with the project's programs, and settings that last a second."""

    def __init__(self, cluster: Cluster, directory: Path, cache: Path) -> None:
        self.cluster, self.directory = cluster, directory
        for name in ("run.sh", "pretrain_main.py"):
            (directory / name).symlink_to(ROOT / name)
        (directory / "my.json").write_text(json.dumps(TINY))
        python = Path(sys.executable).parent
        self.env = {
            "DATASET_CACHE_DIR": str(cache),
            "MODEL_CHECK_HISTORY_FILE": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "MODEL_CHECK_VENV": str(python.parent),
            "PATH": f"{python}:{os.environ['PATH']}",
        }

    def bash(self, recipe: str, **env: str) -> "subprocess.CompletedProcess[str]":
        command = ("bash", "-c", f"cd {self.directory} && {recipe}")
        return self.cluster.run(*command, deadline_s=DEADLINE_S, **self.env | env)

    def start(self, recipe: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", "-c", f"exec {recipe}"],
            cwd=self.directory,
            env={**os.environ, **self.cluster.environ, **self.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def reports(self, run: str = "run") -> list[dict[str, Any]]:
        found = sorted((self.directory / run).glob("node_*/report.json"))
        return [json.loads(path.read_text()) for path in found]

    def wait_for_step(self, step: int, run: str = "run") -> None:
        path = self.directory / run / "node_0" / "cpu0.log"
        until = time.monotonic() + DEADLINE_S
        while not (path.exists() and f"Step [{step}/" in path.read_text()):
            assert time.monotonic() < until, "no training"
            time.sleep(0.05)


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path, cache: Path) -> Iterator[Place]:
    yield Place(cluster, tmp_path, cache)
    cluster.recover()


def test_srun_starts_one_job_on_both_nodes(place: Place) -> None:
    done = place.bash(f"{RECIPES[0].strip()} --run-dir run")
    assert done.returncode == 0, done.stdout
    reports = place.reports()
    assert [report["verdict"] for report in reports] == ["PASS", "PASS"]
    nodes = [report["run"]["part"] for report in reports]
    assert [(node["name"], node["ranks"]) for node in nodes] == [
        ("n1", {"CPU0": 0}),
        ("n2", {"CPU0": 1}),
    ]
    assert nodes[0]["hosts"] == {"n1": "n1", "n2": "n2"}
    assert "nodes equal bit for bit at 4 steps" in reports[0]["summary"]


def test_the_batch_recipe_ends_well_and_goes_on_when_it_is_submitted_again(place: Place) -> None:
    script = place.directory / "job.sh"
    script.write_text(RECIPES[1].replace("save_interval=100", "save_interval=2"))
    for steps in (4, 6):
        settings = TINY | {"training": TINY["training"] | {"max_steps": steps}}
        (place.directory / "my.json").write_text(json.dumps(settings))
        done = place.bash("sbatch --wait --output=out job.sh")
        output = (place.directory / "out").read_text()
        assert done.returncode == 0, output
    assert "Resumed from .checkpoints/step_4.pt" in output
    assert "[CPU0] Step [5/6]" in output


@pytest.mark.parametrize("recipe", [2, 3])
def test_ranks_without_a_launcher_meet_by_what_slurm_tells(place: Place, recipe: int) -> None:
    command = RECIPES[recipe].strip()
    if recipe == 2:  # by their names torchrun's agents find each other: here none can be resolved
        mine = "torchrun --local-addr=127.0.0.$((SLURM_NODEID + 1)) --"
        command = command.replace("torchrun --", mine)
        command = command.replace("$(scontrol show hostnames | head -n1)", "127.0.0.1")
    done = place.bash(command)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("Step [3/4]") == 1, done.stdout


def test_a_plan_under_srun_shows_each_nodes_share(place: Place) -> None:
    done = place.bash(f"{RECIPES[0].strip()} --dry-run")
    assert done.returncode == 0, done.stdout
    assert "node n1, 1 of the 2 of Slurm step" in done.stdout
    assert "node n2, 2 of the 2 of Slurm step" in done.stdout
    assert "RANK=1" in done.stdout


def test_two_steps_at_once_are_two_jobs(place: Place) -> None:
    """Of one allocation, on the same nodes."""
    one = "srun --overlap bash run.sh --mode ddp --config my.json --run-dir"
    lines = [f"{one} {run} system.checkpoint_dir={run}_checkpoints &" for run in ("one", "two")]
    script = "\n".join(["#!/bin/bash", *lines, "wait -n && wait -n"])
    (place.directory / "job.sh").write_text(script)
    done = place.bash("sbatch --wait --nodes=2 --ntasks-per-node=1 --output=out job.sh")
    assert done.returncode == 0, (place.directory / "out").read_text()
    for run in ("one", "two"):
        assert [report["verdict"] for report in place.reports(run)] == ["PASS", "PASS"]


def test_a_failed_rank_is_named_on_both_nodes_and_srun_ends_with_its_code(place: Place) -> None:
    drill = "run.sh debug.drill=$([ $SLURM_NODEID = 1 ] && echo kill@2:CPU0 || echo null)"
    recipe = RECIPES[0].strip().replace("bash run.sh", f"bash -c 'exec bash {drill} $0 $@'")
    done = place.bash(f"{recipe} --run-dir run")
    assert done.returncode == 137, done.stdout
    for report in place.reports():
        assert "CPU0 on n2 (rank 1) failed first" in report["summary"]
        assert report["exit_code"] == 137


def test_a_launcher_that_is_refused_ends_the_job_on_both_nodes(place: Place) -> None:
    refused = "$( ((SLURM_PROCID)) && echo training.batch_size=0)"
    command = RECIPES[0].strip().replace("bash run.sh", "bash -c 'bash run.sh")
    done = place.bash(f"{command} --run-dir run {refused}'")
    assert done.returncode == 2, done.stdout
    (report,) = place.reports()
    assert report["summary"].startswith("n2: command line: training.batch_size")


def test_scancel_ends_all_and_blames_none(place: Place) -> None:
    process = place.start(f"{RECIPES[0].strip()} --run-dir run training.max_steps=100000")
    place.wait_for_step(3)
    place.cluster.told("scancel", "--user=root")
    process.communicate(timeout=DEADLINE_S)
    reports = place.reports()
    assert len(reports) == 2
    for report in reports:
        assert report["culprits"] == []
        assert {worker["verdict"] for worker in report["workers"]} == {"STOPPED"}


def test_a_node_that_loses_its_power_ends_the_job(place: Place) -> None:
    long = f"{RECIPES[0].strip()} --run-dir run training.max_steps=100000"
    process = place.start(long.replace("srun", "srun --no-kill"))
    place.wait_for_step(3)
    place.cluster.stop("n2")
    left = place.directory / "run/node_0/report.json"
    until = time.monotonic() + DEADLINE_S
    while not left.exists():
        assert time.monotonic() < until, "n1 goes on"
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    report = json.loads(left.read_text())
    assert report["verdict"] == "INCONCLUSIVE"
    assert report["summary"].startswith("node n2 ")
    place.cluster.start("n2")


def test_each_rank_counts_those_of_its_own_node(place: Place) -> None:
    """Also where their numbers differ, and where srun tells what it could not honour."""
    code = (
        "from model_check.utils.worker_env import RankEnv; e = RankEnv.from_environ(); "
        "print(e.rank, e.node_number, e.local_rank, e.local_world_size)"
    )
    asked = "srun --nodes=2 --ntasks=3 --ntasks-per-node=2"
    done = place.bash(f'MASTER_ADDR=127.0.0.1 {asked} python -c "{code}"')
    assert done.returncode == 0, done.stdout
    told = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert sorted(told) == ["0 0 0 2", "1 0 1 2", "2 1 0 1"]
