"""Calls of the kernel that not every Python has: each is made through the C library.

Pythons that were built for an old C library (conda's, uv's) lack pidfds, though the kernel has
them, so these calls are made by their number everywhere. Imports little: every worker's start waits
for it.
"""

import ctypes
import errno
import os
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
P_PIDFD = 3
"""For `os.waitid`."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_SIG_DFL, _SIG_IGN = 0, 1
_SIGHUP, _SIGINT, _SIGQUIT, _SIGKILL = 1, 2, 3, 9
_SIG_SETMASK = 2
_SIGSET_BYTES = 128
_NUM_SIGNALS = 64
_SYS_PIDFD_SEND_SIGNAL = 424
_SYS_PIDFD_OPEN = 434
"""System calls since 424 have one number on every machine (but Alpha)."""
_MFD_CLOEXEC = 1
_SFD_CLOEXEC = os.O_CLOEXEC


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the THREAD that forked it ends; end it now if that
    parent is gone already: nobody waits for this process then.

    Survives exec (but of a set-user-id file), is not inherited by children. Raises OSError.
    """
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def set_child_subreaper(enabled: bool) -> bool:
    """Whether orphaned descendants of this process become its children; returns what it was.

    Raises OSError.
    """
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, int(enabled))
    return bool(before.value)


def reset_signals() -> None:
    """Set every signal to its default action and block none: for a process about to exec.
    What a shell makes its children ignore (`nohup`, a job in the background of a script) stays
    ignored.

    Not with the `signal` module, whose import takes a third of the trampoline's time.
    """
    _LIBC.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    _LIBC.signal.restype = ctypes.c_void_p
    for signum in range(1, _NUM_SIGNALS + 1):
        before = _LIBC.signal(signum, _SIG_DFL)  # refused for KILL, STOP and libc's own
        if before == _SIG_IGN and signum in (_SIGHUP, _SIGINT, _SIGQUIT):
            _LIBC.signal(signum, _SIG_IGN)
    _LIBC.sigprocmask(_SIG_SETMASK, ctypes.create_string_buffer(_SIGSET_BYTES), None)


def pidfd_open(pid: int) -> int:
    """A descriptor of this process, close-on-exec; readable when it is dead. Raises OSError."""
    return _call("syscall", _SYS_PIDFD_OPEN, pid, 0)


def pidfd_send_signal(pidfd: int, signum: int) -> None:
    """Signal exactly the process that `pidfd` names. Raises OSError."""
    _call("syscall", _SYS_PIDFD_SEND_SIGNAL, pidfd, signum, 0, 0)


def thread_send_signal(pid: int, tid: int, signum: int) -> None:
    """Signal one thread of a process. `pid` must be held (a child that is not reaped): a thread's
    number is then reused in this process alone. Raises OSError."""
    _call("tgkill", pid, tid, signum)


def check_pidfds() -> None:
    """Try them on this very process. Raises OSError that says what they need."""
    try:
        pidfd = pidfd_open(os.getpid())
        try:
            pidfd_send_signal(pidfd, 0)
        finally:
            os.close(pidfd)
    except OSError as error:
        needs = "pidfds need Linux 5.4 or newer; an old container runtime may block them"
        raise OSError(error.errno, f"{error.strerror} ({needs})") from error


def signalfd(signum: int) -> int:
    """A descriptor that is readable while `signum` is pending: block it first. Close-on-exec.
    Raises OSError."""
    signals = (1 << (signum - 1)).to_bytes(_SIGSET_BYTES, sys.byteorder)
    return _call("signalfd", -1, signals, _SFD_CLOEXEC)


def memfd_create(name: str) -> int:
    """A file in memory, close-on-exec. Raises OSError."""
    return _call("memfd_create", name.encode(), _MFD_CLOEXEC)


def _prctl(option: int, argument: int) -> None:
    _call("prctl", option, argument, 0, 0, 0)


def _call(name: str, *arguments: int | bytes) -> int:
    """Call a function of the C library that returns -1 and sets errno when it fails."""
    if not hasattr(_LIBC, name):  # an old C library
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    # By itself ctypes passes an int as 32 bits and would lose the upper half of an address.
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result: int = getattr(_LIBC, name)(*words)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
