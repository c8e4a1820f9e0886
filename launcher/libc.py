"""The calls to the C library that Python has no name for. The trampoline waits for this import."""

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_SIG_DFL = 0
_SIG_SETMASK = 2
_SIGSET_BYTES = 128
_NUM_SIGNALS = 64


def die_with_parent(signum: int) -> None:
    """Have the kernel send `signum` to this process when the THREAD that forked it ends.

    Survives exec (but of a set-user-id file), is not inherited by children. The parent may be gone
    already: compare getppid() afterwards. Raises OSError.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)


def set_child_subreaper(wanted: bool) -> bool:
    """Whether orphaned descendants of this process become its children; returns what it was.

    Raises OSError.
    """
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))
    return bool(before.value)


def reset_signals() -> None:
    """Every signal to its default action, none blocked: for a process about to exec.

    Done here rather than by the `signal` module, whose import costs a third of the trampoline.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    for signum in range(1, _NUM_SIGNALS + 1):
        libc.signal(signum, _SIG_DFL)  # refused for KILL, STOP and libc's own: nothing to reset
    libc.sigprocmask(_SIG_SETMASK, ctypes.create_string_buffer(_SIGSET_BYTES), None)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
