"""How a worker names the trials of its kernels in what it tells of itself: `trial of KERNEL` ->
`passed`, or what the kernel did instead."""

from collections.abc import Mapping

TRIAL_OF = "trial of "
PASSED = "passed"


def trial_of(kernel: str) -> str:
    """`kernel`: for a sentence, `attention kernel flash_attn`."""
    return f"{TRIAL_OF}{kernel}"


def trials_in(told: Mapping[str, object]) -> dict[str, str]:
    """Of all that a worker told, its trials, in their order."""
    return {name: str(shown) for name, shown in told.items() if name.startswith(TRIAL_OF)}
