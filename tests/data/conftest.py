"""A lab, and a hub that is not there by default: no test of data talks to the real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.lab import FakeHub, Lab, end_builders


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    end_builders()


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    yield hub
    hub.stop()
