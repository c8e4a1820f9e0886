"""The calls to the C library that Python has no name for. The trampoline waits for this import."""

import ctypes
import errno
import os
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_SIG_DFL, _SIG_IGN = 0, 1
_SIGHUP, _SIGINT, _SIGQUIT = 1, 2, 3
_SIG_SETMASK = 2
_SIGSET_BYTES = 128
_NUM_SIGNALS = 64
_SYS_PIDFD_SEND_SIGNAL = 424
_SYS_PIDFD_OPEN = 434
"""System calls since 424 have one number on every machine (but Alpha)."""
_MFD_CLOEXEC = 1
_SFD_CLOEXEC = os.O_CLOEXEC


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
    """Every signal to its default action, none blocked: for a process about to exec. What a shell
    has its children ignore (`nohup`, a job in the background of a script) stays ignored.

    Done here rather than by the `signal` module, whose import costs a third of the trampoline.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    for signum in range(1, _NUM_SIGNALS + 1):
        before = libc.signal(signum, _SIG_DFL)  # refused for KILL, STOP and libc's own
        if before == _SIG_IGN and signum in (_SIGHUP, _SIGINT, _SIGQUIT):
            libc.signal(signum, _SIG_IGN)
    libc.sigprocmask(_SIG_SETMASK, ctypes.create_string_buffer(_SIGSET_BYTES), None)


def pidfd_open(pid: int) -> int:
    """As `os.pidfd_open`, which a Python lacks that was built for an old C library."""
    return _syscall(_SYS_PIDFD_OPEN, pid, 0)


def pidfd_send_signal(pidfd: int, signum: int) -> None:
    """As `signal.pidfd_send_signal`."""
    _syscall(_SYS_PIDFD_SEND_SIGNAL, pidfd, signum, 0, 0)


def signalfd(signum: int) -> int:
    """A descriptor that is readable while `signum` is pending: block it first. Close-on-exec.
    Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    signals = (1 << (signum - 1)).to_bytes(_SIGSET_BYTES, sys.byteorder)
    return _checked(libc.signalfd(-1, signals, _SFD_CLOEXEC))


def memfd_create(name: str) -> int:
    """A file in memory, close-on-exec, as `os.memfd_create`. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return _checked(libc.memfd_create(name.encode(), _MFD_CLOEXEC))


def _syscall(number: int, *arguments: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return _checked(libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
