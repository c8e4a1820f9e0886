"""Whether the network interfaces by which ranks are to meet are there: gloo and NCCL wait for
minutes for one that is not, and accuse a rank."""

import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping

from model_check.errors import ConfigError

_FLAGS_OF, _IS_UP = 0x8913, 1
"""SIOCGIFFLAGS and IFF_UP of Linux. /sys/class/net may show those of another network namespace."""
_REQUEST = struct.Struct("16sH22x")
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def check_interfaces(
    environ: Mapping[str, str], *, is_here_alone: bool, on_gpus: bool = True
) -> None:
    """`is_here_alone`: all ranks are on this machine, and meet by its loopback where nobody says
    otherwise. `on_gpus`: NCCL joins them. Raises ConfigError."""
    here = sorted(name for _, name in socket.if_nameindex())
    for name in (_GLOO, _NCCL) if on_gpus else (_GLOO,):
        value = environ.get(name, "")
        wanted = [word.strip() for word in value.split(",") if word.strip()]
        if wanted and not any(_matching(name, wanted, here)):
            raise ConfigError(
                f"{name}={value}: this machine has no such network interface (it has "
                f"{', '.join(here)}): unset it, or name one of these"
            )
    if is_here_alone and not environ.get(_GLOO) and not _is_up("lo"):
        raise ConfigError(
            "the loopback interface of this machine (or container) is down, and ranks meet there: "
            f"ip link set lo up, or {_GLOO}=NAME names another one"
        )


def _matching(variable: str, wanted: list[str], here: list[str]) -> Iterator[str]:
    """Names are whole to gloo, and to NCCL beginnings, but behind `=`; `^`: all but these."""
    if variable == _GLOO:
        yield from (name for name in here if name in wanted)
        return
    mark = wanted[0][0] if wanted[0][0] in "=^" else ""
    words = [wanted[0][len(mark) :], *wanted[1:]]
    for name in here:
        is_named = any(name == w if mark == "=" else name.startswith(w) for w in words)
        if is_named != (mark == "^"):
            yield name


def _is_up(interface: str) -> bool:
    """True, too, where that is not told."""
    request = _REQUEST.pack(interface.encode(), 0)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            _, flags = _REQUEST.unpack(fcntl.ioctl(asking, _FLAGS_OF, request))
    except OSError:
        return True
    return bool(flags & _IS_UP)
