"""The scripts of examples/own, watched: they train what they train alone."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from model_check.events import Break, Note, Step, Vectors
from tests.instrument.harness import ROOT, plain, script, watched

EXAMPLES = ROOT / "examples" / "own"
END = """
import hashlib
contents = b"".join(x.numpy().tobytes() for x in model.state_dict().values())
print("END", hashlib.sha256(contents).hexdigest())
"""


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"it needs {package}")


@pytest.mark.parametrize(
    ("name", "start", "num_steps", "weight"),
    [
        ("nano", [], 8, "h.1.fc.weight"),
        pytest.param("recipe", [], 6, "layers.1.w2.weight", marks=pytest.mark.slow),
        pytest.param(
            "trainer", [], 8, "model.layers.1.mlp.up_proj.weight", marks=needs("accelerate")
        ),
        pytest.param(
            "with_accelerate",
            ["-m", "accelerate.commands.launch", "--cpu"],
            8,
            "3.weight",
            marks=needs("accelerate"),
        ),
        pytest.param("with_lightning", [], 8, "net.3.weight", marks=needs("lightning")),
    ],
)
def test_an_example_trains_what_it_trains_alone(
    name: str, start: list[str], num_steps: int, weight: str, tmp_path: Path
) -> None:
    path = script(tmp_path, (EXAMPLES / f"{name}.py").read_text() + END)
    command = [sys.executable, *start, str(path)] if start else []
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ran = watched(path, tmp_path / "a", *command, env=env)
    alone = plain(path, tmp_path, *command, env=env)
    assert ran.exit_code == alone.exit_code == 0, ran.stderr
    assert ran.end == alone.end
    assert ran.of(Note) == ran.of(Break) == []
    assert len(ran.of(Step)) == num_steps
    assert weight in ran.of(Vectors)[-1].fp["weights"]
