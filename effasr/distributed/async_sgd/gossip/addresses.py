"""Finds the addresses at which other nodes can reach this one."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

INTERFACES_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Variable with the names of the interfaces to use, separated by commas; gloo reads it too."""

_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def own_addresses() -> list[str]:
    """Return the IPv4 and IPv6 addresses of this node, the most likely to be reachable first.

    If GLOO_SOCKET_IFNAME is set, only the addresses of those interfaces are returned. Otherwise, if
    torchrun started all processes on this node, only the loopback address is returned. Otherwise
    the address from which MASTER_ADDR is reached comes first, then those of all interfaces, with
    loopback last. Linux only.
    """
    named = os.environ.get(INTERFACES_VARIABLE)
    if named:
        return [address for name in named.split(",") for address in _named(name.strip())]
    size = os.environ.get("WORLD_SIZE")
    if size is not None and size == os.environ.get("LOCAL_WORLD_SIZE"):
        return [_LOOPBACK]
    found = [
        *_towards(os.environ.get("MASTER_ADDR")),
        *(address for _, name in socket.if_nameindex() for address in _of(name)),
    ]
    return sorted(dict.fromkeys(found), key=lambda address: _is_loopback(address))


def _named(name: str) -> list[str]:
    found = _of(name)
    if not found:
        there = ", ".join(other for _, other in socket.if_nameindex())
        raise ValueError(
            f"`{INTERFACES_VARIABLE}` must name interfaces that have an address, but {name!r} has "
            f"none here: choose of {there}, or leave it out."
        )
    return found


def _of(interface: str) -> list[str]:
    """Return its addresses, IPv4 first; link-local IPv6 is omitted: it needs an interface name."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        found.append(socket.inet_ntoa(reply[20:24]))
    with suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if name == interface and not address.is_link_local:
                found.append(str(address))
    return found


def _towards(host: str | None) -> list[str]:
    """Return the source address of packets to a host; nothing is sent."""
    if not host:
        return []
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return [probe.getsockname()[0]]
    return []


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
