"""Templates -> pages: each value is masked, made visible and escaped where it is put in. The one
place that imports jinja2: 50 ms, when the workers have ended."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

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
_HERE = Path(__file__).parent


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
    environment.globals.update(signs=SIGNS, style=style)
    return environment


def _visible(value: object) -> object:
    """Without secrets, and without what could not be seen. Markup is a template's own."""
    return value if isinstance(value, Markup) else escape(masked(str(value)))
