"""Templates -> pages: each value is masked, made visible and escaped where it is put in. The one
place that imports jinja2: 50 ms, when the workers have ended."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from msgspec import Struct

from launcher.report.page.axes import SIDE
from launcher.verdict.results import Verdict
from model_check.utils.secrets import masked
from model_check.utils.words import escape

SIGNS = {
    Verdict.PASS: "✓",
    Verdict.WARN: "!",
    Verdict.FAIL: "✕",
    Verdict.SUSPECT: "?",
    Verdict.INCONCLUSIVE: "~",
    Verdict.INVALID: "≠",
    Verdict.STOPPED: "■",
}
"""Beside each verdict's colour, for those who do not see it."""
_LONG = re.compile(r"\S{18,}")
_JOINT = re.compile(r"(?<=[./_:=@,-])(?=\w)")
_HERE = Path(__file__).parent


class Link(Struct, frozen=True):
    """A cell of a table that leads to another page."""

    text: str
    href: str


class Bits(Struct, frozen=True):
    """A cell that shows which digits differ."""

    chars: list[tuple[bool, str]]
    """(whether it differs, characters)"""


def rendered(template: str, **values: Any) -> str:
    """The whole document. A name that the template needs and does not get raises."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_visible,
    )
    style = Markup((_HERE / "style.css").read_text())
    environment.globals.update(signs=SIGNS, style=style, side=SIDE)
    environment.filters["soft"] = _soft
    return environment


def _visible(value: object) -> object:
    """Without secrets, and without what could not be seen. Markup is a template's own."""
    return value if isinstance(value, Markup) else escape(masked(str(value)))


def _soft(value: object) -> Markup:
    """A long word may break behind its dots, slashes and their like, and not within a name."""
    parts = _LONG.sub(lambda word: _JOINT.sub("\0", word[0]), str(_visible(value))).split("\0")
    return Markup("<wbr>").join(parts)
