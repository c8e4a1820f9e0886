"""`python -m tests.scripted ...`: the launcher, with the scripted trainer and preparation in place
of the real ones. SETTLES: so many seconds it gives the others when one has told its failure."""

import os
from pathlib import Path
from typing import Any

from launcher.__main__ import import_msgspec, main

import_msgspec()
from msgspec.structs import replace  # noqa: E402

from launcher import plan  # noqa: E402
from launcher.compare import compare  # noqa: E402
from launcher.supervise import policy  # noqa: E402


def spec_of_arm(*args: Any) -> plan.WorkerSpec:
    """The launcher of an arm is as scripted as that of the comparison."""
    spec = real_spec(*args)
    scripted = ("tests.scripted" if word == "launcher" else word for word in spec.argv)
    return replace(spec, argv=tuple(scripted))


real_spec = compare._Run._spec
compare._Run._spec = spec_of_arm  # type: ignore[method-assign]
plan.PROJECT = Path(__file__).parent
policy.SETTLE_S = float(os.environ.get("SETTLES", policy.SETTLE_S))
main()
