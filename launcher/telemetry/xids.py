"""What the driver's error numbers (Xid) mean, and what to do: the common ones. Pure.

After NVIDIA's catalogue of Xid errors; the words are ours.
"""

from typing import NamedTuple

from launcher.verdict.severity import Severity, Symptom

_DRAIN = "end what runs on it, then reset it (`nvidia-smi --gpu-reset`) or reboot"
_REPLACE = "if it comes back after a reset, have the board replaced"
_PROGRAM = "usually the program's fault; on one GPU of several that run the same, suspect the GPU"


class _Meaning(NamedTuple):
    text: str
    cure: str


_MEANINGS = {
    13: _Meaning("graphics engine exception", _PROGRAM),
    31: _Meaning("GPU memory page fault", _PROGRAM),
    32: _Meaning("corrupted commands arrived over PCIe", "check the slot, riser and board"),
    38: _Meaning("driver firmware error", "update the driver"),
    43: _Meaning("the GPU stopped processing a program's work", _PROGRAM),
    45: _Meaning("work was cleaned up after an earlier error, or the program was killed", ""),
    48: _Meaning("double-bit memory error (uncorrectable)", f"{_DRAIN}; {_REPLACE}"),
    56: _Meaning("display engine error", "see `dmesg | grep -i xid`"),
    61: _Meaning("internal micro-controller halt", f"{_DRAIN}; {_REPLACE}"),
    62: _Meaning("internal micro-controller halt", f"{_DRAIN}; {_REPLACE}"),
    63: _Meaning("a row of memory was remapped, or will be", "reset the GPU when it is idle"),
    64: _Meaning("a row of memory could not be remapped", "have the board replaced"),
    68: _Meaning("video processor exception", _PROGRAM),
    69: _Meaning("graphics engine class error", _PROGRAM),
    74: _Meaning("NVLink error", "check bridges and seating, reset all GPUs on the link"),
    79: _Meaning("the GPU has fallen off the bus", "power-cycle; check power, cooling and seating"),
    92: _Meaning("high rate of single-bit memory errors", _REPLACE),
    94: _Meaning("contained memory error: one program was ended", f"restart it; {_REPLACE}"),
    95: _Meaning("uncontained memory error", f"{_DRAIN}; {_REPLACE}"),
    109: _Meaning("a context switch timed out", _PROGRAM),
    119: _Meaning(
        "the GPU's system processor (GSP) did not answer", f"{_DRAIN}; update the driver"
    ),
    120: _Meaning("the GPU's system processor (GSP) failed", f"{_DRAIN}; update the driver"),
    140: _Meaning("unrecovered memory error", f"{_DRAIN}; {_REPLACE}"),
}

# Those that DCGM always fails (DcgmHealthWatch.cpp: 48, 74, 79, 95, 140) or fails and warns of as
# memory errors (63, 64, 94). 63 asks for a reset, as a pending remap does.
_ISOLATE = {48, 64, 74, 79, 94, 95, 140}
_RESET = {63}
HARMLESS = {45}
"""Follow from another error, or from our own end of a worker: worth a line, no warning."""


def xid_symptom(xid: int) -> Symptom:
    """`Xid 79 (the GPU has fallen off the bus): power-cycle; ...`."""
    meaning = _MEANINGS.get(xid)
    if meaning is None:
        cure = "see NVIDIA's catalogue of Xid errors and `dmesg | grep -i xid`"
        return Symptom(Severity.MONITOR, f"Xid {xid}", cure)
    return Symptom(_severity(xid), f"Xid {xid} ({meaning.text})", meaning.cure)


def _severity(xid: int) -> Severity:
    if xid in _ISOLATE:
        return Severity.ISOLATE
    return Severity.RESET if xid in _RESET else Severity.MONITOR
