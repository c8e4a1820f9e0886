"""Names that other users gave are escaped before they are printed."""

import pytest

from model_check.engine.console import Console
from model_check.utils.words import printable, printable_lines


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Größe\u00a0日本.txt", "Größe\\xa0日本.txt"),
        ("é\x1b[2J", "é\\x1b[2J"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\udcff", "\\udcff"),
        ("C:\\it's", "C:\\it's"),
    ],
)
def test_only_characters_that_are_not_printable_are_escaped(name: str, shown: str) -> None:
    assert printable(name) == shown


def test_the_lines_of_a_message_stay_lines() -> None:
    assert printable_lines("one\ntwo\x1b") == "one\ntwo\\x1b"


def test_a_workers_console_shows_no_escape_of_a_manifest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console()
    console.prefix = "[GPU3] "
    console.say("data: ⚠️ größe\x1b]0;owned\x07\nnext")
    console.complain("error: \x1b[2J")
    said = capsys.readouterr()
    assert said.out == "[GPU3] data: ⚠️ größe\\x1b]0;owned\\x07\n[GPU3] next\n"
    assert said.err == "[GPU3] error: \\x1b[2J\n"
