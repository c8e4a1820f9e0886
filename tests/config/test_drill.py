"""The grammar of debug.drill."""

import re

import pytest

from model_check.config.drill import KINDS, Drill, check_name, parse_drill
from model_check.config.fields import all_fields
from model_check.config.schema import ModelSettings
from model_check.config.shape import parameters
from model_check.errors import ConfigError

TWO_LAYERS = [row.name for row in parameters(ModelSettings(num_layers=2))]


@pytest.mark.parametrize("kind", KINDS)
def test_every_documented_kind_is_understood(kind: str) -> None:
    assert parse_drill(f"{kind}@3", max_steps=4) == Drill(kind, 3)


def test_worker_and_parameter_follow() -> None:
    text = "nan@3:gpu1:layers.0.attention.wq.weight"
    assert parse_drill(text, 4) == Drill("nan", 3, "GPU1", "layers.0.attention.wq.weight")


def test_a_factor_and_a_second_moment_follow() -> None:
    slow = parse_drill("slow@3:gpu1:1.3x", 4)
    assert slow == Drill("slow", 3, "GPU1", factor=1.3)
    assert parse_drill("slow@3", 4).factor == 1.5
    second = parse_drill("flip_moment@1:all:exp_avg_sq.norm.weight:3", 4)
    assert (second.moment, second.target, second.bit(32)) == ("exp_avg_sq", "norm.weight", 3)
    first = parse_drill("flip_moment@1:all:exp_avg.norm.weight", 4)
    assert (first.moment, first.target, first.bit(32)) == ("exp_avg", "norm.weight", 16)
    assert parse_drill("nan_moment@1", 4).moment == "exp_avg"


def test_a_flip_turns_one_value_and_a_burst_a_warp_of_them() -> None:
    counts = [
        parse_drill(text, 4).num_values for text in ("flip@1:all:a:3", "burst@1", "burst@1:all:a:5")
    ]
    assert counts == [1, 32, 5]
    assert parse_drill("burst@1:all:a:5", 4).bit(32) == 16
    assert parse_drill("flip_activation@1", 4).bit(16) == 0


def test_all_bits_and_always() -> None:
    assert parse_drill("flip@3:all:norm.weight:31", 4) == Drill("flip", 3, None, "norm.weight", 31)
    forward = Drill("inf_forward", 3, "CPU0", "layers.1", always=True)
    assert parse_drill("inf_forward@3:cpu0:layers.1:always", 4) == forward
    assert parse_drill("nan@3:always", 4) == Drill("nan", 3, always=True)
    assert parse_drill("nan@3:all:always", 4) == Drill("nan", 3, always=True)
    assert parse_drill("loss_nan@3:gpu3.1:always", 4) == Drill("loss_nan", 3, "GPU3.1", always=True)


@pytest.mark.parametrize(
    ("kind", "name", "is_there"),
    [
        ("nan_forward", "layers.1.attention", True),
        ("nan_forward", "loss", True),
        ("nan_forward", "output", False),
        ("nan_backward", "layers", False),
        ("nan_backward", "layers.2", False),
        ("nan_backward", "norm.weight", False),
        ("nan_weight", "rope_cos", True),
        ("flip", "output.weight", True),
        ("nan_moment", "rope_cos", False),
        ("burst", "rope_cos", True),
        ("flip_gradient", "rope_cos", False),
        ("flip_moment", "exp_avg_sq.norm.weight", True),
        ("flip_moment", "exp_avg_sq.rope_cos", False),
        ("flip", "exp_avg_sq.norm.weight", False),
        ("flip_activation", "norm", True),
        ("flip_activation", "norm.weight", False),
        ("nan", "layers.1.attention", False),
    ],
)
def test_a_name_that_its_kind_cannot_act_on_is_refused(
    kind: str, name: str, is_there: bool
) -> None:
    drill = parse_drill(f"{kind}@1:all:{name}", 4)
    if is_there:
        check_name(drill, TWO_LAYERS)
    else:
        with pytest.raises(ConfigError, match=f"the model has no .* '.*{drill.target}'"):
            check_name(drill, TWO_LAYERS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nan", "not a drill"),
        ("nun@3", r"not a drill.*KIND@STEP\[:WORKER\[:NAME\[:NUMBER\]\]\]\[:always\]"),
        ("nan@-1", "not a drill"),
        ("nan@1:layers.0.wq", "not a drill"),
        ("nan@10", r"step 10 is never reached \(training.max_steps = 10"),
        ("nan@1:GPU0:norm.weight:3", "only flip, .* take a bit"),
        ("flip@1:GPU0:norm.weight:32", "only flip, .* take a bit, from 0 to 31"),
        ("flip_activation@1:GPU0:norm:32", "only flip, .* take a bit, from 0 to 31"),
        ("burst@1:GPU0:norm.weight:1", "burst takes 2 to 64 values"),
        ("burst@1:GPU0:norm.weight:0", "burst takes 2 to 64 values"),
        ("burst@1:GPU0:norm.weight:65", "burst takes 2 to 64 values"),
        ("slow@1:GPU0:1x", "only slow takes a factor, above 1x and at most 100x"),
        ("slow@1:GPU0:101x", "only slow takes a factor"),
        ("flip@1:GPU0:1.5x", "only slow takes a factor"),
        ("slow@1:GPU0:norm.weight", "slow takes no name"),
        ("slow@1:GPU0:1.3", "not a drill"),
        ("kill@1:GPU0:norm.weight", "kill takes no name"),
    ],
)
def test_nonsense_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_drill(text, max_steps=10)


def test_the_text_of_the_setting_lists_every_kind_and_no_other() -> None:
    text = all_fields()["debug.drill"].doc
    listed = re.search(r"KIND one of (.*?)\. A flip", text)
    assert listed is not None
    words = re.sub(r"\([^)]*\)", "", listed[1]).split(",")
    assert {word.strip() for word in words} == {*KINDS}, (
        "debug.drill in model_check/config/schema.py"
    )
