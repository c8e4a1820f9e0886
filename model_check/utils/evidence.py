"""How long the evidence of a failure may take: for the launcher, and for ranks without one."""

EVIDENCE_S = 60.0
"""Whoever keeps it has so long, and the time of its bytes."""
EVIDENCE_BYTES_PER_S = 50e6
