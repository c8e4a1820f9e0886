"""`python -m tests.scripted ...`: the launcher, with the scripted trainer and preparation in place
of the real ones. SETTLES: so many seconds it gives the others when one has told its failure."""

import os
from pathlib import Path

from launcher import plan
from launcher.__main__ import main
from launcher.supervise import policy

plan.PROJECT = Path(__file__).parent
policy.SETTLE_S = float(os.environ.get("SETTLES", policy.SETTLE_S))
main()
