"""One Slurm of two nodes for all tests of this directory (in each process that runs some)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Node, started


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Nodes n1 and n2, idle; a test that changes them brings them back (`Cluster.recover`)."""
    with started(tmp_path_factory.mktemp("slurm"), [Node("n1"), Node("n2")]) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests: built by the first run, found by the others."""
    return tmp_path_factory.mktemp("token_cache")
