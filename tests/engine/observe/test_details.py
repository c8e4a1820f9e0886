"""The line of details beside a step line: speed, memory, and where the gradient is."""

import math
import re
from collections.abc import Callable

import pytest

from tests.engine.conftest import Run

DETAILS = re.compile(
    r"Details \[(?P<step>\d)/4\] \| Tokens/s: [\d,]+ \| Memory: [\d.]+ GiB, peak [\d.]+ \| "
    r"Grad Norm by part: (?P<norms>.+)"
)


def test_details_tell_where_the_gradient_is(tiny_run: Callable[..., Run]) -> None:
    run = tiny_run(logging__details="true", logging__log_interval=3)()
    steps = [line for line in run.kept.lines if line.startswith("Step [")]
    details = [line for line in run.kept.lines if line.startswith("Details [")]
    for number, step, line in zip((0, 3), steps, details, strict=True):
        assert step.startswith(f"Step [{number}/4]")
        found = DETAILS.fullmatch(line)
        assert found, line
        norms = dict(part.split() for part in found["norms"].split(", "))
        assert list(norms) == ["tok_embed", "layers.0", "norm", "output"]
        total = math.sqrt(sum(float(norm) ** 2 for norm in norms.values()))
        assert total == pytest.approx(float(step.split("Grad Norm: ")[1].split()[0]), abs=1e-3)
