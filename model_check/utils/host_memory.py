"""How much memory this machine has.

psutil is imported where it is asked: that takes 5 ms, and the first line of a command's run 60.
"""


def host_memory_bytes() -> int:
    """Memory and swap, in use or not: more than any process ever gets."""
    import psutil

    return int(psutil.virtual_memory().total + psutil.swap_memory().total)


def available_memory_bytes() -> int:
    """What new processes can get without swapping, as the kernel estimates it."""
    import psutil

    return int(psutil.virtual_memory().available)
