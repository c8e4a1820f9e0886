"""Run a command for which the kernel lacks a system call: without_syscall.py NUMBER COMMAND ...

A seccomp filter (seccomp(2)) answers that number with ENOSYS, as an older kernel and gVisor do.
"""

import ctypes
import errno
import os
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def instruction(code: int, if_true: int, if_false: int, operand: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def main() -> None:
    number, *command = sys.argv[1:]
    program = b"".join(
        (
            instruction(_LOAD_WORD, 0, 0, 0),  # the number of the call
            instruction(_JUMP_IF_EQUAL, 0, 1, int(number)),
            instruction(_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
            instruction(_RETURN, 0, 0, _ALLOW),
        )
    )
    held = ctypes.create_string_buffer(program)
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(held))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _FILTER, described, 0, 0),
    ):
        if prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
