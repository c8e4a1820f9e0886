"""Which steps are profiled: the grammar of `debug.profile_steps`. Pure."""

import re

from model_check.errors import ConfigError

_GRAMMAR = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


def parse_steps(text: str, max_steps: int, from_step: int = 0) -> range:
    """Read `FIRST-LAST` or one step; both ends count. Raises ConfigError for steps that a run of
    the steps `from_step` to `max_steps` - 1 does not reach."""
    given = f"debug.profile_steps = {text!r}"
    match = _GRAMMAR.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{given}: give FIRST-LAST or one step, as 3-5")
    first = int(match[1])
    last = int(match[2] or first)
    if last < first:
        raise ConfigError(f"{given}: ends before it begins")
    never = f"{given}: step {last} is never reached"
    if last >= max_steps:
        raise ConfigError(f"{never} (training.max_steps = {max_steps}, steps count from 0)")
    if last < from_step:
        raise ConfigError(f"{never}: the resumed run goes on with step {from_step}")
    return range(first, last + 1)
