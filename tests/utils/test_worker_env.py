"""A worker's name: given by its supervisor, or derived from the variables that a person set."""

import pytest

from model_check.utils.worker_env import WorkerEnv


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3", "GPU_RANK": "3"}, "GPU3"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "GPU2"),
        ({"CUDA_VISIBLE_DEVICES": "5,1"}, "GPU5"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f3a"}, "GPU0"),
        ({"GPU_RANK": "nonsense"}, "GPU0"),
        ({}, "GPU0"),
        ({"MODEL_CHECK_WORKER": "GPU7", "GPU_RANK": "7"}, "GPU7"),
    ],
)
def test_a_worker_by_hand_is_named_by_the_device_that_it_sees(
    environ: dict[str, str], name: str
) -> None:
    assert WorkerEnv.from_environ(environ).name_for("cuda") == name


def test_alone_nothing_is_needed() -> None:
    env = WorkerEnv.from_environ({})
    assert (env.supervised, env.num_workers, env.events_fd, env.run_dir) == (False, 1, None, None)
    assert env.name_for("cpu") == "CPU0"


def test_nonsense_is_as_if_it_were_not_there() -> None:
    env = WorkerEnv.from_environ(
        {"MODEL_CHECK_EVENTS_FD": "x", "MODEL_CHECK_NUM_WORKERS": "-3", "MODEL_CHECK_RUN_DIR": ""}
    )
    assert (env.events_fd, env.num_workers, env.run_dir) == (None, 1, None)
