"""debug.profile_steps: the steps that it gives, or the reason of a refusal."""

import pytest

from model_check.config.profile import parse_steps
from model_check.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "steps"), [("3-5", [3, 4, 5]), ("0", [0]), (" 2 - 2 ", [2]), ("8-9", [8, 9])]
)
def test_first_and_last_both_count(text: str, steps: list[int]) -> None:
    assert list(parse_steps(text, max_steps=10)) == steps


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("5-3", "ends before it begins"),
        ("3-10", "step 10 is never reached"),
        ("3..5", "FIRST-LAST"),
    ],
)
def test_what_never_happens_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_steps(text, max_steps=10)
