"""The grammar of data.validation."""

import pytest

from model_check.config.validation import (
    DocumentFraction,
    HubSplit,
    RowsWith,
    TextPath,
    parse_validation,
)
from model_check.errors import ConfigError


def test_each_kind_of_split_is_understood() -> None:
    text = "held=0.01, bach=composer:J. S. Bach,file=data/x.txt,odd=./a:b,hub=split:validation"
    assert parse_validation(text) == {
        "held": DocumentFraction(0.01),
        "bach": RowsWith("composer", "J. S. Bach"),
        "file": TextPath("data/x.txt"),
        "odd": TextPath("./a:b"),
        "hub": HubSplit("validation"),
    }
    assert parse_validation(None) == {}


def test_a_value_may_hold_commas_and_backslashes() -> None:
    text = r"bach=composer:Bach\, J. S.,path=data\,v1/x.txt,odd=name:C:\new\,,last=0.1"
    assert parse_validation(text) == {
        "bach": RowsWith("composer", "Bach, J. S."),
        "path": TextPath("data,v1/x.txt"),
        "odd": RowsWith("name", "C:\\new,"),
        "last": DocumentFraction(0.1),
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0.01", "'0.01' is not NAME=WHAT"),
        ("a=0.1,", "'' is not NAME=WHAT"),
        ("a=c:Bach, J. S.", r"'J. S.' is not NAME=WHAT; a comma of a value is written \,"),
        ("a=", "'a=' is not NAME=WHAT"),
        ("a=0.1,a=0.2", "a is given twice"),
        ("train=0.1", "'train' cannot name a split"),
        ("a/b=0.1", "'a/b' cannot name a split"),
        ("a=1.5", "lies between 0 and 1, not 1.5"),
        ("a=0.5,b=0.5", "come to 1, which leaves nothing to train on"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_validation(text)
    assert reason in str(refused.value)
