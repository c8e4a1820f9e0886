"""What a scheduler calls this machine."""

import pytest

from launcher.nodes.scheduler import started_by

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, (None, None)),
        ({"NODE_NAME": "jenkins"}, (None, None)),
        ({"SLURMD_NODENAME": "gpu-a01"}, ("slurm", "gpu-a01")),
        (POD, ("kubernetes", None)),
        ({**POD, "NODE_NAME": "ip-10-0-0-7"}, ("kubernetes", "ip-10-0-0-7")),
        ({**POD, "NODE_NAME": ""}, ("kubernetes", None)),
    ],
)
def test_the_scheduler_is_known_by_what_it_sets(
    environ: dict[str, str], told: tuple[str | None, str | None]
) -> None:
    assert started_by(environ) == told
