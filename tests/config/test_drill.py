"""The grammar of debug.drill."""

import pytest

from model_check.config.drill import KINDS, Drill, parse_drill
from model_check.errors import ConfigError


@pytest.mark.parametrize("kind", KINDS)
def test_every_documented_kind_is_understood(kind: str) -> None:
    assert parse_drill(f"{kind}@3", max_steps=4) == Drill(kind, 3, None, None)


def test_worker_and_parameter_follow() -> None:
    text = "nan@3:gpu1:layers.0.attention.wq.weight"
    assert parse_drill(text, 4) == Drill("nan", 3, "GPU1", "layers.0.attention.wq.weight")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nan", "not a drill"),
        ("nun@3", r"not a drill.*KIND@STEP\[:WORKER\[:PARAMETER\]\]"),
        ("nan@-1", "not a drill"),
        ("nan@1:layers.0.wq", "not a drill"),
        ("nan@10", r"step 10 is never reached \(training.max_steps = 10"),
        ("kill@1:GPU0:norm.weight", "kill takes no parameter"),
    ],
)
def test_nonsense_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_drill(text, max_steps=10)
