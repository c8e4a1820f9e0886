"""`python -m tests.scripted ...`: the launcher, with the scripted trainer and preparation in place
of the real ones. SETTLES: so many seconds it gives the others when one has told its failure."""

import os
from pathlib import Path

from launcher.__main__ import import_msgspec, main

import_msgspec()
from launcher import plan  # noqa: E402
from launcher.compare import compare  # noqa: E402
from launcher.supervise import policy  # noqa: E402

compare.PROGRAM = "tests.scripted.__main__"
plan.PROJECT = Path(__file__).parent
policy.SETTLE_S = float(os.environ.get("SETTLES", policy.SETTLE_S))
main()
