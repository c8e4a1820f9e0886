"""What Slurm tells of a step."""

import pytest

from model_check.errors import ConfigError
from model_check.utils.slurm import SlurmStep, expand

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[08,11]",
}


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("n1", ["n1"]),
        ("gpu[08-10],login", ["gpu08", "gpu09", "gpu10", "login"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("a-1[7-8]-x,b", ["a-17-x", "a-18-x", "b"]),
        ("", []),
    ],
)
def test_a_list_of_nodes_is_expanded(nodelist: str, names: list[str]) -> None:
    assert [*expand(nodelist)] == names


@pytest.mark.parametrize("nodelist", ["n[1-", "n[x]", "n[1-9999999]"])
def test_no_list_of_nodes_is_one_line(nodelist: str) -> None:
    with pytest.raises(ConfigError):
        [*expand(nodelist)]


def test_a_task_knows_its_node_and_its_step() -> None:
    step = SlurmStep.from_environ(STEP)
    assert step is not None
    assert (step.key, step.node, step.names) == ("4711.3", 1, ("gpu08", "gpu11"))
    again = SlurmStep.from_environ(STEP | {"SLURM_RESTART_COUNT": "1"})
    assert again is not None
    assert again.key != step.key, "a requeued job does not meet its ghosts"


def test_the_script_of_a_job_is_no_task() -> None:
    assert SlurmStep.from_environ({"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2"}) is None


def test_the_only_task_of_a_step_is_alone_whatever_the_job_has() -> None:
    """The shell of `salloc --nodes=2`, whose Slurm tells the nodes of the job alone."""
    shell = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}
    assert SlurmStep.from_environ(shell | {"SLURM_JOB_NODELIST": "n[1-2]"}) is None


def test_what_contradicts_itself_is_one_line() -> None:
    with pytest.raises(ConfigError, match="contradict each other"):
        SlurmStep.from_environ(STEP | {"SLURM_STEP_NUM_NODES": "3"})
