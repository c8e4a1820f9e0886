"""A process's place in a job, by the variables of torchrun and of srun."""

import platform

import pytest

from model_check.errors import ConfigError
from model_check.utils.worker_env import RankEnv, WorkerEnv, num_ranks

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "2",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


def test_torchrun_tells_the_whole_place() -> None:
    here = f"1 ({platform.node()})"
    assert RankEnv.from_environ(TORCHRUN) == RankEnv(
        5, 8, 1, 4, "node7", 29500, node=here, node_number=1
    )
    assert num_ranks(TORCHRUN) == 8


def test_srun_tells_it_by_names_of_its_own_and_all_tasks_take_one_port() -> None:
    place = RankEnv.from_environ(SRUN)
    other = RankEnv.from_environ(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert place is not None
    assert other is not None
    assert (place.rank, place.local_rank, place.world_size) == (2, 2, 4)
    assert place.address == "127.0.0.1"
    assert place.port == other.port == 20_000 + 4711


@pytest.mark.parametrize(
    ("tasks", "node", "local"),
    [
        ("2(x2)", 1, 2),
        ("3,1", 0, 3),
        ("3,1", 1, 1),
        ("1(x2),2", 2, 2),
        ("1,2(x3)", 0, 1),
        ("", 1, 4),
    ],
)
def test_ranks_of_other_nodes_are_not_local(tasks: str, node: int, local: int) -> None:
    """Their number divides the cores and the memory of a machine."""
    far = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "localhost,n2"}
    told = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    place = RankEnv.from_environ(SRUN | far | told | {"SLURM_NTASKS_PER_NODE": "7"})
    assert place is not None
    assert place.local_world_size == local


def test_tasks_that_slurm_would_not_write_are_refused() -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE"):
        RankEnv.from_environ(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2x3"})


def test_data_without_end_suffice_for_all_tasks_of_srun() -> None:
    assert num_ranks(SRUN) == 4
    assert num_ranks(SRUN | {"MODEL_CHECK_RUN_DIR": "/run"}) == 1, "its launcher is the task"


def test_steps_of_slurm_that_run_at_once_have_a_port_each() -> None:
    """Of one job, and of jobs with numbers close to each other."""
    steps = [
        RankEnv.from_environ(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        for job in range(4711, 4811)
        for step in range(20)
    ]
    places = [place for place in steps if place is not None]
    assert len({place.port for place in places}) == len({place.job for place in places}) == 2000
    assert all(1024 < place.port < 32_768 for place in places)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
        SRUN | {"MODEL_CHECK_EVENTS_FD": "5"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    ],
)
def test_a_process_alone_has_no_place(environ: dict[str, str]) -> None:
    """Also a worker that our launcher started as one of its own within a step of Slurm, and the
    script of a batch job."""
    assert RankEnv.from_environ(environ) is None


def test_tasks_on_several_machines_meet_on_the_first_node_or_where_a_person_says() -> None:
    far = SRUN | {"SLURM_STEP_NUM_NODES": "2"}
    listed = RankEnv.from_environ(far | {"SLURM_STEP_NODELIST": "localhost,n[2-3]"})
    assert listed is not None
    assert listed.address == "localhost"
    with pytest.raises(ConfigError, match="set MASTER_ADDR"):
        RankEnv.from_environ(far | {"SLURM_STEP_NODELIST": "no-such-node[7-9].invalid"})
    with pytest.raises(ConfigError, match="need MASTER_ADDR"):
        RankEnv.from_environ(far)
    place = RankEnv.from_environ(far | {"MASTER_ADDR": "node7"})
    assert place is not None
    assert place.address == "node7"


@pytest.mark.parametrize(
    ("visible", "local_rank", "name"),
    [
        ("", "1", "GPU1"),
        ("4,6", "1", "GPU6"),
        ("6", "1", "GPU6"),
        ("GPU-77aa,GPU-88bb", "1", "GPU1"),
    ],
)
def test_a_rank_is_named_by_its_gpu(visible: str, local_rank: str, name: str) -> None:
    environ = TORCHRUN | {"LOCAL_RANK": local_rank, "CUDA_VISIBLE_DEVICES": visible}
    assert WorkerEnv.from_environ(environ).name_for("cuda") == name
    assert WorkerEnv.from_environ(environ).name_for("cpu") == "CPU1"
