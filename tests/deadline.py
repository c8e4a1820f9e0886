"""How long a test waits for what must come."""

DEADLINE_S = 240
"""Only a hang takes as long. Less than launch.hang_timeout_s, so that a hang is not ended by what a
test is not about."""
