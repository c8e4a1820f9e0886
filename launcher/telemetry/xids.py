"""What the driver's error numbers (Xid) mean, and what to do: the common ones. Pure.

After NVIDIA's catalogue of Xid errors; the words are ours.
"""

from launcher.verdict.severity import Severity, Symptom

_DRAIN = "end what runs on it, then reset it (`nvidia-smi --gpu-reset`) or reboot"
_REPLACE = "if it comes back after a reset, have the board replaced"
_PROGRAM = "usually the program's fault; on one GPU of several that run the same, suspect the GPU"

# Xid -> (what it means, what to do)
_MEANINGS = {
    13: ("graphics engine exception", _PROGRAM),
    31: ("GPU memory page fault", _PROGRAM),
    32: ("corrupted commands arrived over PCIe", "check the slot, riser and board"),
    38: ("driver firmware error", "update the driver"),
    43: ("the GPU stopped processing a program's work", _PROGRAM),
    45: ("work was cleaned up after an earlier error, or the program was killed", ""),
    48: ("double-bit memory error (uncorrectable)", f"{_DRAIN}; {_REPLACE}"),
    56: ("display engine error", "see `dmesg | grep -i xid`"),
    61: ("internal micro-controller halt", f"{_DRAIN}; {_REPLACE}"),
    62: ("internal micro-controller halt", f"{_DRAIN}; {_REPLACE}"),
    63: ("a row of memory was remapped, or will be", "reset the GPU when it is idle"),
    64: ("a row of memory could not be remapped", "have the board replaced"),
    68: ("video processor exception", _PROGRAM),
    69: ("graphics engine class error", _PROGRAM),
    74: ("NVLink error", "check bridges and seating, reset all GPUs on the link"),
    79: ("the GPU has fallen off the bus", "power-cycle; check power, cooling and seating"),
    92: ("high rate of single-bit memory errors", _REPLACE),
    94: ("contained memory error: one program was ended", f"restart it; {_REPLACE}"),
    95: ("uncontained memory error", f"{_DRAIN}; {_REPLACE}"),
    109: ("a context switch timed out", _PROGRAM),
    119: ("the GPU's system processor (GSP) did not answer", f"{_DRAIN}; update the driver"),
    120: ("the GPU's system processor (GSP) failed", f"{_DRAIN}; update the driver"),
    140: ("unrecovered memory error", f"{_DRAIN}; {_REPLACE}"),
}
_UNLISTED_CURE = "see NVIDIA's catalogue of Xid errors and `dmesg | grep -i xid`"

_SEVERITIES = {
    **dict.fromkeys((48, 64, 74, 79, 94, 95, 140), Severity.ISOLATE),
    63: Severity.RESET,
}
"""Those that DCGM always fails (DcgmHealthWatch.cpp: 48, 74, 79, 95, 140) or fails and warns of as
memory errors (63, 64, 94); the others are MONITOR. 63 asks for a reset, as a pending remap does."""
FALLEN = 79
HARMLESS = {45}
"""Follow from another error, or from our own end of a worker: worth a line, no warning."""


def xid_symptom(xid: int) -> Symptom:
    """`Xid 79 (the GPU has fallen off the bus): power-cycle; ...`."""
    meaning, cure = _MEANINGS.get(xid, ("", _UNLISTED_CURE))
    figure = f"Xid {xid} ({meaning})" if meaning else f"Xid {xid}"
    return Symptom(_SEVERITIES.get(xid, Severity.MONITOR), figure, cure)
