"""A process's place in a job, by the variables of torchrun and of srun."""

import pytest

from model_check.errors import ConfigError
from model_check.utils.worker_env import RankEnv, WorkerEnv, num_ranks

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
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
    assert RankEnv.from_environ(TORCHRUN) == RankEnv(5, 8, 1, 4, "node7", 29500)
    assert num_ranks(TORCHRUN) == 8


def test_srun_tells_it_by_names_of_its_own_and_all_tasks_take_one_port() -> None:
    place = RankEnv.from_environ(SRUN)
    other = RankEnv.from_environ(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert place is not None
    assert other is not None
    assert (place.rank, place.local_rank, place.world_size) == (2, 2, 4)
    assert place.address == "127.0.0.1"
    assert place.port == other.port == 20_000 + 4711


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


def test_tasks_on_several_machines_need_an_address() -> None:
    far = SRUN | {"SLURM_STEP_NUM_NODES": "2"}
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
