"""How much memory this machine has."""

import re
from pathlib import Path


def host_memory_bytes() -> int:
    """Memory and swap, in use or not: more than any process ever gets."""
    told = Path("/proc/meminfo").read_text()
    kib = re.findall(r"^(?:MemTotal|SwapTotal): +(\d+) kB$", told, re.M)
    return sum(int(number) for number in kib) << 10
