"""A job on two nodes whose directories are not shared: each has its own `disk`. Its ranks go on
from one checkpoint, or are told that they cannot. What ranks find of it together is in
tests/engine/saving/test_unshared.py."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT, Launcher, launcher_in
from tests.e2e.nodes import Job, Node
from tests.ports import free_port

pytestmark = pytest.mark.root


@dataclass(frozen=True)
class NodeWithDisk(Node):
    def inside(self, *command: str) -> list[str]:
        """`disk` is its own."""
        own = f'mount --bind disk_{self.number} disk && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", own, "sh", *super().inside(*command)]


NODES = (NodeWithDisk(0), NodeWithDisk(1))
RESTART = ("--max-restarts", "1", "training.save_interval=2", "training.max_steps=6")


@pytest.fixture
def job(launcher: Launcher) -> Job:
    for name in ("disk", "disk_0", "disk_1"):
        (launcher.cwd / name).mkdir()
    return Job(launcher, NODES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Path:
    """step_2.pt and step_4.pt of one training, and of one with another seed other_4.pt; of both
    fours a directory of safetensors, too."""
    launcher = launcher_in(tmp_path_factory.mktemp("made"), token_cache)
    asked = ("--mode=ddp", "--workers=1", "training.save_interval=2")
    for name, seed in (("made", "42"), ("other", "43")):
        run = launcher(*asked, f"system.checkpoint_dir={name}", f"system.seed={seed}")
        assert run.exit_code == 0, run.output
        shutil.rmtree(launcher.cwd / "run")
    directory = launcher.cwd / "made"
    shutil.copy(launcher.cwd / "other" / "step_4.pt", directory / "other_4.pt")
    for name in ("step_4", "other_4"):
        exported = launcher.verb("export", f"made/{name}.pt", f"made/{name}")
        assert exported.returncode == 0, exported.stdout
    return directory


def lay(disk: Path, files: dict[str, str], made: Path) -> None:
    """`files`: their names -> which of those that were made."""
    for name, of in files.items():
        target = disk / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(made / f"{of}.pt", target)


def ranks(job: Job, program: Path, *arguments: str) -> list[tuple[int, str]]:
    """Exit code and output of each: one on each node, without a launcher."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = []
    for node in job.nodes:
        process = subprocess.Popen(
            node.inside(sys.executable, str(program), *arguments),
            cwd=job.launcher.cwd,
            env=job.launcher.env | place | meeting | {"RANK": str(node.number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        job.launcher.started.append(process)
        processes.append(process)
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    return [(p.returncode, output) for p, output in zip(processes, outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("has_launcher", [False, True])
def test_a_job_does_not_begin_at_step_0_where_one_node_has_checkpoints(
    job: Job, made: Path, has_launcher: bool
) -> None:
    lay(job.launcher.cwd / "disk_1", {"step_2.pt": "step_2"}, made)
    options = ("--resume", "auto", "system.checkpoint_dir=disk")
    if has_launcher:
        found = [(run.exit_code, run.output) for run in job(*options)]
    else:
        config = ("--config", str(job.launcher.config))
        found = ranks(job, ROOT / "pretrain_main.py", *config, *options)
    assert [code for code, _ in found] == [2, 2], found
    for _, output in found:
        assert "disk/step_2.pt: rank 0 does not see it, others do: system.checkpoint_dir" in output


FIRST_WEIGHTS = "other first weights than rank 0: model.init_from must"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["model.init_from=disk/first.pt"], FIRST_WEIGHTS),
        (["model.init_from=disk/first"], FIRST_WEIGHTS),
        (["model.init_from=disk/first", "launch.mode=fsdp"], FIRST_WEIGHTS),
        (["data.dataset=disk/text.txt"], "other data than rank 0: share data.cache_dir"),
    ],
)
def test_ranks_that_begin_with_different_things_are_refused(
    job: Job, made: Path, asked: list[str], words: str
) -> None:
    for node, of in enumerate(("step_4", "other_4")):
        disk = job.launcher.cwd / f"disk_{node}"
        lay(disk, {"first.pt": of}, made)
        shutil.copytree(made / of, disk / "first")
        (disk / "text.txt").write_text(
            "".join(f"{node} {number} words\n" for number in range(3000))
        )
    config = ("--config", str(job.launcher.config), f"data.cache_dir={job.launcher.cwd}/disk")
    found = ranks(job, ROOT / "pretrain_main.py", *config, *asked)
    assert [code for code, _ in found] == [2, 2], found
    for _, output in found:
        assert f"rank 1 begins with {words}" in output


def test_a_restart_where_only_the_first_node_has_the_checkpoint_says_so(
    scripted: Launcher,
) -> None:
    for name in ("disk", "disk_0", "disk_1"):
        (scripted.cwd / name).mkdir()
    job = Job(scripted, NODES)
    options = (*RESTART, "system.checkpoint_dir=disk")
    processes = [
        *job.start(*options, only=NODES[0]),
        *job.start(*options, "debug.drill=kill@3:CPU0", only=NODES[1]),
    ]
    runs = job.finish(processes)
    assert [run.exit_code for run in runs] == [2, 2], [run.output for run in runs]
    path = job.launcher.cwd / "disk" / "step_2.pt"
    words = f"this node does not see {path}, from which n1 goes on: system.checkpoint_dir"
    assert f": n2: {words}" in runs[0].output
    assert f": {words}" in runs[1].output
