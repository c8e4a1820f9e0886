"""The lock of an open file, which a process's end frees, however it ends."""


def try_lock(descriptor: int) -> bool:
    """Lock it for us alone. False: another process holds it. Raises OSError where files cannot be
    locked (a kernel, an NFS without flock)."""
    from filelock import lock_descriptor  # 30 ms, which only those who take a lock pay

    return lock_descriptor(descriptor, blocking=False)


def unlock(descriptor: int) -> None:
    """Free it. Closing is not enough: a child that we forked may hold the file open. Raises
    OSError."""
    from filelock import unlock_descriptor

    unlock_descriptor(descriptor)
