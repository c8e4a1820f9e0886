"""Random changes of a file, as transfers, editors, other programs and people make them: for
benchmarks/odd_inputs.py."""

import gzip
import io
import json
import random
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

WORDS = "the model checks every GPU of a box and says which one cannot train "
PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>403</body></html>"
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
Change = Callable[[bytes, random.Random], bytes]


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 3, 30))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def insert(content: bytes, chance: random.Random) -> bytes:
    odd = (
        *(
            b"\0",
            b"\xff\xfe",
            b"\xef\xbb\xbf",
            "\u2028\u2029\x85".encode(),
            b"\x1b[2J",
            b"\r",
            b"\t",
        ),
        *(
            "\u200b\u202e".encode(),
            b"\xed\xa0\x80",
            b"\xc3",
            b'"',
            b"{",
            b"]]]",
            b"#",
            b"=",
            b"\n---\n",
        ),
        *(b"\n", b"'", b"!!python/object", b"&a [*a]", b"\\u0000", b"\\ud800", b"%s", b"{{ 1/0 }}"),
    )
    at = chance.randrange(len(content) + 1)
    return content[:at] + chance.choice(odd) * chance.choice((1, 1, 2, 50)) + content[at:]


def repeat(content: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(content) + 1)
    end = min(len(content), begin + chance.choice((1, 10, 1000)))
    return content[:end] + content[begin:end] * chance.choice((1, 5, 1000)) + content[end:]


def drop(content: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(content) + 1)
    return content[:begin] + content[begin + chance.choice((1, 8, 200)) :]


def encode(content: bytes, chance: random.Random) -> bytes:
    text = content.decode(errors="replace")
    name = chance.choice(
        ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "shift_jis")
    )
    return text.encode(name, errors="replace")


def end_lines(content: bytes, chance: random.Random) -> bytes:
    return content.replace(b"\n", chance.choice((b"\r\n", b"\r", "\u2028".encode(), b"\n\n", b"")))


def pack(content: bytes, chance: random.Random) -> bytes:
    into = io.BytesIO()
    match chance.randrange(3):
        case 0:
            return gzip.compress(content)
        case 1:
            with zipfile.ZipFile(into, "w") as archive:
                archive.writestr("x", content)
        case _:
            with tarfile.open(fileobj=into, mode="w") as tar:
                tar.addfile(tarfile.TarInfo("x"))
    return into.getvalue()


# fmt: off
WHOLE = (
    b"", b" ", b"\n", b"null", b"[]", b"{}", b"0", b'"text"', b"true", b"NaN", b"1", PAGE, POINTER,
    b"\0" * 5000, b"[" * 100_000, b'{"a":' * 100_000, b"\x80\x04\x95", b"\x7fELF" + bytes(100),
    b"PK\x03\x04", b"\x89PNG\r\n\x1a\n", b"%PDF-1.7", b"a: &a [*a]", b"- " * 5000, b"x" * 300_000,
    b"%YAML 1.1\n",
)
VALUES = (
    None, True, False, 0, -1, 1, 2, 3.5, -0.0, 1e308, float("nan"), float("inf"), 2**31, 2**63,
    2**70, "", " ", "0", "-1", "true", "null", "auto", "\ud800", "\0", "\u202e", "x" * 100_000,
    "/dev/null", "~", "../../etc/passwd", "1e3", "0x10", "1_000",
    [], {}, [None], ["a", 1], {"a": 1}, [[]],
)
# fmt: on


def replace(content: bytes, chance: random.Random) -> bytes:
    return chance.choice(WHOLE)


def change_json(content: bytes, chance: random.Random) -> bytes:
    """A value, a key, or the form of JSON; of rows, one row."""
    lines = content.splitlines(keepends=True)
    if not _is_json(content):
        if not lines or not _is_json(lines[0]):
            return flip(content, chance)
        at = chance.randrange(len(lines))
        if not _is_json(lines[at]):
            return flip(content, chance)
        lines[at] = change_json(lines[at].strip(), chance) + b"\n"
        return b"".join(lines)
    document = json.loads(content)
    form = chance.randrange(8)
    if form == 0:
        return json.dumps(document, indent=2).encode()
    if form == 1:
        return json.dumps([document]).encode()
    for _ in range(chance.choice((1, 1, 2))):
        places = list(_places(document))
        if places:
            where, key = chance.choice(places)
            _change(where, key, chance)
    return json.dumps(document, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def _places(value: Any, most: int = 3000) -> Iterator[tuple[Any, Any]]:
    waiting = [value]
    while waiting and most > 0:
        inner = waiting.pop()
        keys: Sequence[Any] = ()
        if isinstance(inner, dict):
            keys = list(inner)
        elif isinstance(inner, list):
            keys = range(len(inner))
        for key in keys:
            most -= 1
            yield inner, key
            waiting.append(inner[key])


def _change(where: Any, key: Any, chance: random.Random) -> None:
    match chance.randrange(4):
        case 0:
            del where[key]
        case 1 if isinstance(where, dict):
            other = chance.choice(("", "x", str(key).upper(), f"{key} ", "\0", "__class__"))
            where[other] = where[key]
        case 2 if chance.random() < 0.1:
            where[key] = json.loads("[" * 500 + "]" * 500)
        case _:
            where[key] = deepcopy(chance.choice(VALUES))


CHANGES: tuple[Change, ...] = (
    *(cut, flip, insert, repeat, drop, encode, end_lines, pack, replace),
    *(change_json, change_json, change_json, change_json),
)


class Chance(random.Random):
    """Of one case. The first of a kind is the good input as it is."""

    def __init__(self, seed: int, kind: str, number: int) -> None:
        super().__init__(f"{seed} {kind} {number}")
        self.is_good = number == 0


def damage(path: Path, chance: Chance) -> str:
    """Change a file; what was done."""
    if chance.is_good:
        return "nothing"
    if chance.random() < 0.05:
        path.unlink()
        match kind := chance.choice(
            ("directory", "dangling", "circle", "/dev/null", "/dev/zero", "gone")
        ):
            case "directory":
                path.mkdir()
            case "dangling":
                path.symlink_to("nowhere")
            case "circle":
                path.symlink_to(path)
            case "gone":
                pass
            case device:
                path.symlink_to(device)
        return f"{path.name}: {kind}"
    names = []
    for _ in range(chance.choice((1, 1, 1, 2))):
        change = chance.choice(CHANGES)
        path.write_bytes(change(path.read_bytes(), chance))
        names.append(change.__name__)
    return f"{path.name}: {', '.join(names)}"
