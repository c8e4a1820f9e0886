"""What the terminal is shown."""

import pytest

from launcher.output.view import CONTINUES, MAX_LINE_BYTES, View
from model_check.utils.words import escape


def feed_bytewise(view: View, data: bytes) -> list[str]:
    return [line for i in range(len(data)) for line in view.feed(data[i : i + 1], 0.0)]


def test_a_line_is_shown_when_it_is_whole() -> None:
    view = View()
    assert view.feed(b"part1-", 0.0) == []
    assert view.feed(b"part2\nnext", 0.0) == ["part1-part2"]
    assert view.close() == ["next"]


def test_blank_lines_are_lines() -> None:
    assert View().feed(b"a\n\n\nb\n", 0.0) == ["a", "", "", "b"]


def test_nothing_is_left_after_a_last_newline() -> None:
    view = View()
    view.feed(b"a\n", 0.0)
    assert view.close() == []


def test_a_character_split_between_reads_stays_whole() -> None:
    assert feed_bytewise(View(), "naïve 損失 🔥\n".encode()) == ["naïve 損失 🔥"]


def test_bytes_that_are_no_text_are_replaced() -> None:
    view = View()
    assert view.feed(b"a\xffb\n", 0.0) == ["a\ufffdb"]
    view.feed(b"end \xe6\x90", 0.0)
    assert view.close() == ["end \ufffd"]


JOINED = "\U0001f468\u200d\U0001f469 \u0645\u06cc\u200c\u062e"
"""An emoji, and a word of Persian."""


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x00\x07\x08\x7f", "\\x00\\x07\\x08\\x7f"),
        ("\x9b2J", "\\x9b2J"),
        ("a\x0b\x0c\x85\u2028b", "a\\x0b\\x0c\\x85\\u2028b"),
        ("\u202etxt.exe", "\\u202etxt.exe"),
        ("a\u200bb\ufeffc", "a\\u200bb\\ufeffc"),
        ("ok\U000e0068\U000e0069", "ok\\U000e0068\\U000e0069"),
        ("\U000e0101\u3164\u2063\xad", "\\U000e0101\\u3164\\u2063\\u00ad"),
        (JOINED, JOINED),
        ("tab\tstays", "tab\tstays"),
    ],
)
def test_what_could_move_the_cursor_is_made_visible(raw: str, shown: str) -> None:
    assert View().feed(raw.encode() + b"\n", 0.0) == [shown]
    assert escape(raw) == shown


def test_crlf_ends_a_line_also_when_split() -> None:
    assert View().feed(b"a\r\nb\r\n", 0.0) == ["a", "b"]
    assert feed_bytewise(View(), b"a\r\n\r\nb\r\n") == ["a", "", "b"]


def test_a_burst_of_frames_shows_one_and_the_last_one_when_the_line_ends() -> None:
    view = View()
    frames = b"".join(b"\r%d%%" % i for i in range(100))
    assert view.feed(frames, 10.0) == ["98%"]  # of the newest it is not known that it is whole
    assert view.feed(b"\r100%\nafter\n", 10.1) == ["100%", "after"]


def test_a_bar_shows_about_one_frame_a_second() -> None:
    view = View()
    shown = [line for i in range(100) for line in view.feed(b"\r%d" % i, i / 10)]
    assert len(shown) in range(9, 12)


def test_a_frame_is_shown_once() -> None:
    view = View()
    assert view.feed(b"\r 40%\r", 10.0) == [" 40%"]
    assert view.feed(b" 40%\r", 99.0) == []
    assert view.feed(b"\n", 100.0) == []
    assert view.feed(b"\r 40%\r", 200.0) == [" 40%"]  # another bar


def test_a_cleared_bar_leaves_no_blank_line() -> None:
    view = View()
    assert view.feed(b"\r 40%", 10.0) == []
    assert view.feed(b"\r     \r", 10.1) == [" 40%"]
    assert view.feed(b"saved\n", 10.2) == ["saved"]


def test_a_bar_that_ends_without_a_newline_shows_its_last_frame() -> None:
    view = View()
    view.feed(b"\r 40%\r 41%", 10.0)
    assert view.close() == [" 41%"]


def test_frames_with_the_return_at_their_end_are_a_bar_too() -> None:
    view = View()
    assert view.feed(b"10%\r", 0.0) == ["10%"]
    assert view.feed(b"20%\r", 0.1) == []
    assert view.feed(b"30%\r", 1.0) == ["30%"]
    assert view.feed(b"40%\r", 1.1) == []
    assert view.close() == ["40%"]


@pytest.mark.parametrize("character", ["x", "損", "\x00", "\r\x1b"])
def test_no_line_is_above_64_kib_and_none_of_it_is_lost(character: str) -> None:
    view = View()
    data = character.encode() * 200_000
    lines = [
        line for at in range(0, len(data), 65536) for line in view.feed(data[at : at + 65536], 0)
    ]
    lines += view.close()
    assert max(len(line.encode()) for line in lines) <= MAX_LINE_BYTES - 64
    if character != "\r\x1b":
        assert len(lines) > 1
        assert all(line.endswith(CONTINUES) for line in lines[:-1])
        assert (
            "".join(line.removesuffix(CONTINUES) for line in lines) == escape(character) * 200_000
        )


def test_an_endless_line_is_not_collected() -> None:
    view = View()
    for _ in range(100):
        view.feed(b"y" * 65536, 0.0)
    assert len(view._pending) <= MAX_LINE_BYTES


def test_plain_text_in_any_pieces_is_its_lines() -> None:
    text = "".join(f"Step [{n}/100] | Loss: {n / 7:.4f}\t|\n" for n in range(200))
    for width in (1, 7, 1000, len(text)):
        view = View()
        pieces = [text[at : at + width].encode() for at in range(0, len(text), width)]
        assert [line for piece in pieces for line in view.feed(piece, 0.0)] == text.splitlines()


def test_plain_text_after_half_a_character_ends_that_character() -> None:
    view = View()
    assert view.feed(b"\xe2\x82", 0.0) == []
    assert view.feed(b"plain\n", 0.0) == ["\ufffdplain"]
