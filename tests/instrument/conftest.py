from collections.abc import Iterator

import pytest

from tests.instrument import harness


@pytest.fixture(scope="package", autouse=True)
def forks() -> Iterator[None]:
    """The Python whose forks run the scripts of these tests; the first one starts it."""
    yield
    if harness.forks.cache_info().currsize:
        harness.forks().close()
