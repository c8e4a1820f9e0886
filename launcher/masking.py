"""Command lines without their secrets: what may be printed and kept. Pure."""

import re
from collections.abc import Iterator, Sequence

MASK = "***"
_SECRET_NAME = re.compile(
    r"(^|[-_.])(token|secret|password|passwd|credentials?|api[-_]?key|access[-_]?key)$", re.I
)
# Known by their looks, wherever they stand: tokens of common services, HTTP and URL credentials.
_SECRET_VALUES = (
    re.compile(r"\b(?:hf|ghp|glpat)[-_]\w{6,}|\bsk-[\w-]{6,}"),
    re.compile(r"(?i)(?<=bearer )\S+"),
    re.compile(r"(?<=://)[^/@\s]+(?=@)"),
)


def masked(argv: Sequence[str]) -> list[str]:
    """`argv` with everything that looks like a secret replaced: `NAME=VALUE`, `--token VALUE`,
    and values that are known by their looks."""
    return list(_masked(argv))


def _masked(argv: Sequence[str]) -> Iterator[str]:
    follows_name = False
    for argument in argv:
        name, equals, value = argument.partition("=")
        if follows_name:
            yield MASK
        elif equals and value and _SECRET_NAME.search(name):
            yield f"{name}={MASK}"
        else:
            for pattern in _SECRET_VALUES:
                argument = pattern.sub(MASK, argument)
            yield argument
        follows_name = not follows_name and not equals and _names_a_secret(argument)


def _names_a_secret(argument: str) -> bool:
    return argument.startswith("-") and _SECRET_NAME.search(argument) is not None
