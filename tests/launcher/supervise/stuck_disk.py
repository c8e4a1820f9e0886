"""Run a command where a disk hangs: `stuck_disk.py DIRECTORY COMMAND ARG ...`.

Mounts, in a mount namespace of its own, a FUSE filesystem on DIRECTORY whose server answers nothing
but the mount itself. Whoever looks for a file in it waits, and after a SIGKILL he waits in state D:
the request is out, and the kernel will not take it back. DIRECTORY.asked is there from then on. The
server's pid goes to DIRECTORY.pid; its death frees everybody. Needs root and /dev/fuse.
"""

import ctypes
import os
import struct
import sys

_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 1 << 18
_FUSE_LOOKUP = 1
_FUSE_INIT = 26
_REQUEST_BYTES = 1 << 17
_HEADER_BYTES = 40


def main() -> None:
    directory, *command = sys.argv[1:]
    device = mount(directory)
    server = os.fork()
    if server == 0:
        os.setsid()
        for fd in range(3):
            os.close(fd)
        serve(device, f"{directory}.asked")
    os.close(device)
    with open(f"{directory}.pid", "w") as file:
        file.write(f"{server}\n")
    os.execvp(command[0], command)


def mount(directory: str) -> int:
    """The descriptor on which the kernel asks. Raises OSError where that is not allowed."""
    os.makedirs(directory, exist_ok=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    check(libc.unshare(_CLONE_NEWNS))
    check(libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None))
    check(libc.mount(b"stuck", os.fsencode(directory), b"fuse", 0, options))
    return device


def check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def serve(device: int, asked: str) -> None:
    """Until killed."""
    while True:
        request = os.read(device, _REQUEST_BYTES)
        _, opcode, unique = struct.unpack_from("=IIQ", request)
        if opcode == _FUSE_INIT:
            major, minor, read_ahead, _ = struct.unpack_from("=IIII", request, _HEADER_BYTES)
            most = struct.pack("=HHIIHH", 12, 9, 1 << 16, 1, 16, 0)  # background, write, time, ...
            body = struct.pack("=IIII", major, min(minor, 31), read_ahead, 0) + most + bytes(28)
            os.write(device, struct.pack("=IiQ", 16 + len(body), 0, unique) + body)
        elif opcode == _FUSE_LOOKUP:
            with open(asked, "w") as file:
                file.write("now it hangs\n")


if __name__ == "__main__":
    main()
