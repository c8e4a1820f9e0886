"""How much memory this machine has."""

import psutil


def host_memory_bytes() -> int:
    """Memory and swap, in use or not: more than any process ever gets."""
    return int(psutil.virtual_memory().total + psutil.swap_memory().total)


def available_memory_bytes() -> int:
    """What new processes can get without swapping, as the kernel estimates it."""
    return int(psutil.virtual_memory().available)
