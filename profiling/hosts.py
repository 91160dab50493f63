"""Hosts of one process each on this machine, with delays, losses and a partition (Linux, as root).

    python profiling/hosts.py 8 METRICS OUTPUT [--delay-ms D] [--loss P] [--cut S] -- MODULE ...

Each host is a network namespace, whose packets this process forwards: TCP sees what it would see in
a network. Written is the speed after the first line of METRICS, a run's metrics.jsonl.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

_NEW_NETWORK, _SET_TUN, _TUN_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x1001  # <linux/if_tun.h>
_MTU = 9000


def start(number: int, count: int, command: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """Return the process of a host, and the device with its packets."""
    local, remote = socket.socketpair()
    address = f"10.9.0.{number + 1}"

    def enter() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "a network namespace needs root")
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, _SET_TUN, struct.pack("16sH22x", b"host", _TUN_WITHOUT_HEADER))
        for change in (
            "link set lo up",
            f"addr add {address}/24 dev host",
            f"link set host mtu {_MTU} up",
        ):
            subprocess.run(["ip", *change.split()], check=True)
        socket.send_fds(remote, [b"x"], [device])

    ranks = {"RANK": number, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    ranks |= {"MASTER_ADDR": "10.9.0.1", "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": "host"}
    variables = os.environ | {name: str(value) for name, value in ranks.items()}
    process = subprocess.Popen(command, env=variables, preexec_fn=enter)
    return process, socket.recv_fds(local, 1, 1)[1][0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="in one direction")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the packets")
    parser.add_argument("--cut", type=float, default=0.0, help="seconds without the second half")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    command = [sys.executable, "-m", *options.command]
    hosts = [start(number, options.count, command) for number in range(options.count)]
    devices = [device for _, device in hosts]
    waiting: list[tuple[float, int, int, bytes]] = []
    draw, began, seen, packets = random.Random(0), float("inf"), 0, 0
    while any(process.poll() is None for process, _ in hosts):
        pause = max(0.0, min(0.1, waiting[0][0] - time.monotonic())) if waiting else 0.1
        now = time.monotonic()
        for device in select.select(devices, [], [], pause)[0]:
            packet, source = os.read(device, _MTU), devices.index(device)
            target, now = packet[19] - 1, time.monotonic()
            half = options.count // 2
            is_cut = began < now < began + options.cut and (source < half) != (target < half)
            is_lost = is_cut or draw.random() < options.loss
            if packet[0] >> 4 == 4 and target < options.count and not is_lost:
                packets += 1
                heapq.heappush(waiting, (now + options.delay_ms / 1e3, packets, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            *_, target, packet = heapq.heappop(waiting)
            os.write(devices[target], packet)
        size = options.metrics.stat().st_size if options.metrics.is_file() else 0
        if size > seen:
            began, ended, seen = min(began, now), now, size
    lines = [json.loads(text) for text in options.metrics.read_text(encoding="utf-8").splitlines()]
    speed = (lines[-1]["step"] - lines[0]["step"]) / (ended - began)
    figures = {
        "steps_per_s": speed,
        "loss": lines[-1]["loss"],
        "consensus_distance": lines[-1].get("consensus_distance"),
    }
    options.output.write_text(json.dumps(figures), encoding="utf-8")
    return max(process.returncode for process, _ in hosts)


if __name__ == "__main__":
    sys.exit(main())
