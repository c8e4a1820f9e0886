"""Run a Python program on a kernel whose flock() fails: `without_flock.py ERRNO PROGRAM ARG ...`.

With a seccomp filter of this very process: the system call is refused, nothing is imitated.
"""

import ctypes
import errno
import platform
import runpy
import struct
import sys
from pathlib import Path

FLOCK = {"x86_64": 73, "aarch64": 32}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_flock(error: int) -> None:
    """From here on, in this process and its children."""
    steps = [
        (_LOAD, 0, 0, 0),  # the number of the system call
        (_JUMP_IF_EQUAL, 0, 1, FLOCK[platform.machine()]),
        (_RETURN, 0, 0, _FAIL | error),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = _Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    refuse_flock(getattr(errno, sys.argv[1]))
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
