"""Nodes with a network of their own: namespaces of Linux, joined by a bridge, at a limited rate."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_INSIDE = "eth0"


@dataclass(frozen=True, slots=True)
class Network:
    """Network location of a node's processes.

    Attributes:
        address: Address of the parent, as processes reach it.
        prefixes: Words to prepend to the command of each node's processes.
        environment: Environment for all of them.
    """

    address: str
    prefixes: list[list[str]]
    environment: dict[str, str]


def plain(nodes: int) -> Network:
    """Return nodes that share this machine's network."""
    return Network("127.0.0.1", [[] for _ in range(nodes)], {"GLOO_SOCKET_IFNAME": "lo"})


def why_not() -> str | None:
    """Return why namespaces are not available; None if they are."""
    for name in ("ip", "tc"):
        if shutil.which(name) is None:
            return f"there is no command {name} (package iproute2)"
    if os.geteuid():
        return "it needs root"
    name = f"effasr{os.getpid()}"
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "probe", "type", "veth", "peer", "name", "probe2")
            _tc(name, "probe", 100.0)
        finally:
            _ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"the kernel refuses it: {' '.join(str(error.stderr).split())}"
    return None


@contextmanager
def limited(nodes: int, mbit: float) -> Iterator[Network]:
    """Put every node into a separate network namespace, whose link has a limited rate.

    Args:
        nodes: Number of nodes.
        mbit: Rate of each link in each direction, in Mbit/s.

    Raises:
        ValueError: ``mbit`` is not positive.
        RuntimeError: It cannot be set up; `why_not` returns the reason.
    """
    if not mbit > 0:
        raise ValueError(f"`mbit` must be positive, but is {mbit}.")
    if (reason := why_not()) is not None:
        raise RuntimeError(f"namespaces with limited links cannot be made: {reason}.")
    # Names of links have at most 15 characters.
    tag = f"ef{os.getpid() % 10**6}"
    subnet = f"10.213.{os.getpid() % 254 + 1}"
    bridge = f"{tag}b"
    made: list[str] = []
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"{subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for node in range(nodes):
            space, outside = f"{tag}n{node}", f"{tag}v{node}"
            _ip("netns", "add", space)
            made.append(space)
            peer = ("peer", "name", _INSIDE, "netns", space)
            _ip("link", "add", outside, "type", "veth", *peer)
            _ip("link", "set", outside, "master", bridge, "up")
            _ip("-n", space, "address", "add", f"{subnet}.{node + 10}/24", "dev", _INSIDE)
            _ip("-n", space, "link", "set", _INSIDE, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            # What a link sends is limited where it enters it, at either end.
            _tc(space, _INSIDE, mbit)
            _tc(None, outside, mbit)
        prefixes = [["ip", "netns", "exec", space] for space in made]
        yield Network(f"{subnet}.1", prefixes, {"GLOO_SOCKET_IFNAME": _INSIDE})
    except subprocess.CalledProcessError as error:
        reason = " ".join(str(error.stderr).split())
        raise RuntimeError(f"a network could not be set up: {reason}") from error
    finally:
        for space in made:
            _ip("netns", "delete", space, check=False)
        _ip("link", "delete", bridge, check=False)


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def _tc(space: str | None, link: str, mbit: float) -> None:
    """A token bucket: of 10 ms, for the kernel fills it at most every few; without loss."""
    inside = [] if space is None else ["-n", space]
    burst = max(16_000, round(mbit * 1e6 / 8 / 100))
    limit = ("rate", f"{mbit}mbit", "burst", str(burst), "latency", "500ms")
    command = ["tc", *inside, "qdisc", "add", "dev", link, "root", "tbf", *limit]
    subprocess.run(command, check=True, capture_output=True, text=True)
