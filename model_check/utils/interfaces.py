"""Which network interface of this machine leads to an address."""

import socket
from contextlib import suppress

import psutil


def interface_to(address: str, port: int) -> str | None:
    """`eth0`; `lo` for an address of loopback. None: no route leads there. Sends nothing."""
    with suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(place)  # of a datagram: the kernel picks a route, and that is all
            mine = asking.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address.partition("%")[0] == mine.partition("%")[0] for each in addresses):
                return name
    return None
