"""The grammar of data.validation: `held_out=0.01,bach=composer:Bach,other=other.txt`; `\\,` is a
comma of a value. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from model_check.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_BETWEEN_SPLITS = re.compile(r"(?<!\\),")
_PATH_STARTS = ("/", "./", "../", "~")
_HUB_SPLIT = "split"
_AUTO = "auto"
_RESERVED = ("train",)


class DocumentFraction(Struct, frozen=True):
    """A share of the documents, between 0 and 1."""

    share: float
    or_tail: bool = False
    """Where documents are few, the end of the text takes their place."""


class TextPath(Struct, frozen=True):
    """A file or a directory of text."""

    path: str


class RowsWith(Struct, frozen=True):
    """The rows whose `column`, as text, is `value`."""

    column: str
    value: str

    def __str__(self) -> str:
        return f"{self.column} = {self.value}"

    def holds(self, row: Mapping[str, Any]) -> bool:
        return self.column in row and str(row[self.column]) == self.value


class HubSplit(Struct, frozen=True):
    """A split of the hub dataset that is trained on."""

    split: str


What = DocumentFraction | TextPath | RowsWith | HubSplit


def parse_validation(text: str | None) -> dict[str, What]:
    """Name of the split -> its documents, in the order given. Raises ConfigError."""
    if text == _AUTO:
        return {"held": DocumentFraction(0.01, or_tail=True)}
    found: dict[str, What] = {}
    for part in _BETWEEN_SPLITS.split(text) if text else ():
        name, equals, what = (piece.strip() for piece in part.replace(r"\,", ",").partition("="))
        if not equals or not what:
            comma = r"; a comma of a value is written \," if found else ""
            raise _refused(text, f"{part.strip()!r} is not NAME=WHAT{comma}")
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise _refused(text, f"{name!r} cannot name a split (letters, digits, - and _)")
        if name in found:
            raise _refused(text, f"{name} is given twice")
        found[name] = _what(what, text)
    if (total := sum(fractions(found).values())) >= 1:
        raise _refused(text, f"the fractions come to {total:g}, which leaves nothing to train on")
    return found


def fractions(validation: dict[str, What]) -> dict[str, float]:
    """Name -> share, of the splits that are fractions of the documents."""
    return {n: w.share for n, w in validation.items() if isinstance(w, DocumentFraction)}


def _what(what: str, text: str | None) -> What:
    if what.startswith(_PATH_STARTS):
        return TextPath(what)
    if (share := _number(what)) is not None:
        if not 0 < share < 1:
            raise _refused(text, f"a fraction of the documents lies between 0 and 1, not {what}")
        return DocumentFraction(share)
    column, colon, value = what.partition(":")
    if not colon:
        return TextPath(what)
    return HubSplit(value) if column == _HUB_SPLIT else RowsWith(column, value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _refused(text: str | None, reason: str) -> ConfigError:
    return ConfigError(
        f"data.validation = {text!r}: {reason} (example: held_out=0.01,bach=composer:Bach)"
    )
