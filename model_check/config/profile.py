"""Which steps are profiled: the grammar of `debug.profile_steps`. Pure."""

import re

from model_check.errors import ConfigError

_GRAMMAR = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


def parse_steps(text: str, max_steps: int, from_step: int = 0) -> range:
    """Read `FIRST-LAST` or one step, both counted; raises ConfigError for what never happens in a
    run of the steps `from_step` to `max_steps` - 1."""
    match = _GRAMMAR.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"debug.profile_steps = {text!r}: give FIRST-LAST or one step, as 3-5")
    first = int(match[1])
    last = int(match[2] or first)
    if last < first:
        raise ConfigError(f"debug.profile_steps = {text!r}: ends before it begins")
    if last >= max_steps:
        raise ConfigError(
            f"debug.profile_steps = {text!r}: step {last} is never reached (training.max_steps = "
            f"{max_steps}, steps count from 0)"
        )
    if last < from_step:
        raise ConfigError(
            f"debug.profile_steps = {text!r}: step {last} is never reached: the resumed run goes "
            f"on with step {from_step}"
        )
    return range(first, last + 1)
