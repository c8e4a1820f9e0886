"""NVML's return codes: those that mean something here, and what to do about each. Pure."""

NO_PERMISSION = 4
NOT_FOUND = 6
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
NOT_AVAILABLE = {2, 3, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND}
"""Invalid argument, not supported, no permission, not found, function not found: this device or
driver has no such value. Any other code is a device in trouble."""

WITHOUT = "--device cpu, without --gpus, trains on the CPU"
MISSING = "see `nvidia-smi -L` and `dmesg | grep -i -e nvrm -e xid`"
"""Where a GPU that is missing may have left a trace."""

_CURES: dict[int | None, str] = {
    4: "this user may not open /dev/nvidia*: check their permissions; in a container restart it "
    "(a `systemctl daemon-reload` on the host takes its devices away)",
    8: "a power cable of the board is missing or the supply is too weak",
    9: "the kernel driver is not loaded: `modprobe nvidia`, and after a kernel update reinstall "
    "the driver; in a container start it with --gpus all",
    10: "the driver timed out: see `dmesg | grep -i xid`, then reset the GPU or reboot",
    11: "interrupts of the GPU do not arrive: see `dmesg`, check BIOS and PCIe settings, reboot",
    12: "reinstall the driver; in a container start it with --gpus all",
    13: "the driver is too old for this program: update it",
    14: "the board's infoROM is damaged: have the board replaced",
    15: "it fell off the bus: see `dmesg | grep -i xid` (79), power-cycle the machine, and have "
    "the board checked if it happens again",
    16: "it needs a reset: `nvidia-smi --gpu-reset -i {index}` while nothing runs on it, or reboot",
    17: "the operating system blocks the device: check its cgroup; in a container restart it",
    18: "the driver was updated while its kernel module stayed loaded: reboot, or unload and "
    "reload the nvidia modules; in a container restart it",
    20: "the host is out of memory: see `free -h`",
    999: "in a container restart it; else see what `nvidia-smi` and `dmesg | grep -i nvrm` say, "
    "and reboot",
}

_UNKNOWN = "see what `nvidia-smi` and `dmesg | grep -i nvrm` say"


def cure_for(code: int | None, index: int | None = None) -> str:
    """What a person can do about NVML return code `code` (None: no code), on GPU `index`."""
    return _CURES.get(code, _UNKNOWN).format(index="<index>" if index is None else index)
