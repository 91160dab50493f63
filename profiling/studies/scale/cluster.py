"""Costs of sending and reducing: closed forms for the collectives of a cluster.

A message of b bytes takes ``latency + b / bandwidth`` seconds (Hockney 1994, "The communication
challenge for MPP", Parallel Computing 20). Adding up is taken to be free, since it is hidden behind
the transfer of the next chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["auto", "ring", "tree", "two_level"]


@dataclass(frozen=True, slots=True)
class Link:
    """A way for messages, in both directions at once.

    Attributes:
        latency_s: Latency in seconds of a message of no bytes.
        bytes_per_s: Bytes per second in one direction.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf):
            raise ValueError(f"`latency_s` must be at least 0, but is {self.latency_s}.")
        if not self.bytes_per_s > 0:
            raise ValueError(f"`bytes_per_s` must be positive, but is {self.bytes_per_s}.")

    def seconds(self, size: float) -> float:
        """Return the seconds that a message of ``size`` bytes takes."""
        return self.latency_s + size / self.bytes_per_s

    def slower(self, factor: float) -> Link:
        """Return the link with its bandwidth divided by ``factor``."""
        return Link(self.latency_s, self.bytes_per_s / factor)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal GPUs, numbered node by node.

    Attributes:
        gpus: Number of GPUs in all nodes.
        gpus_per_node: GPUs of a node; the last node may have fewer.
        intra: Link between two GPUs of a node.
        inter: Link between two nodes: all network cards of a node together.
        algorithm: Algorithm of the all-reduce; ``auto`` is the fastest, as NCCL's tuner chooses.
        slowest_inter: Factor by which the slowest node's link is slower than ``inter``.
    """

    gpus: int
    gpus_per_node: int
    intra: Link
    inter: Link
    algorithm: Algorithm = "auto"
    slowest_inter: float = 1.0

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {getattr(self, name)}.")
        if self.slowest_inter < 1:
            raise ValueError(f"`slowest_inter` must be at least 1, but is {self.slowest_inter}.")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.gpus // self.gpus_per_node)

    def node_of(self, gpu: int) -> int:
        """Return the node of a GPU."""
        return gpu // self.gpus_per_node

    def all_reduce(self, size: float, gpus: int | None = None) -> float:
        """Return seconds until so many neighbouring GPUs, or all, have the sum of so many bytes."""
        count = self.gpus if gpus is None else min(gpus, self.gpus)
        local, nodes = self._split(count)
        outer = self._slowest
        if count == 1:
            return 0.0
        if nodes == 1:
            # A tree inside a node is a chain, as NCCL's is.
            known = {"ring": ring(size, count, self.intra)}
            known["tree"] = chain(size, count, self.intra)
            known["two_level"] = known["ring"]
        else:
            flat = Link(
                max(self.intra.latency_s, outer.latency_s),
                min(self.intra.bytes_per_s, outer.bytes_per_s),
            )
            known = {"ring": ring(size, count, flat)}
            known["tree"] = chain(size, local, self.intra) + tree(size, nodes, outer)
            known["two_level"] = ring(size, local, self.intra) + ring(size, nodes, outer)
        return min(known.values()) if self.algorithm == "auto" else known[self.algorithm]

    def all_gather(self, size: float) -> float:
        """Return the seconds of an all-gather of so many bytes; a reduce-scatter takes as long.

        By a ring, or inside and between nodes in turn, which is half of an all-reduce.
        """
        local, nodes = self._split(self.gpus)
        if nodes == 1:
            return ring(size, local, self.intra) / 2
        return (ring(size, local, self.intra) + ring(size, nodes, self._slowest)) / 2

    @property
    def _slowest(self) -> Link:
        return self.inter.slower(self.slowest_inter)

    def _split(self, count: int) -> tuple[int, int]:
        """Return the GPUs of a node, and the nodes, that so many neighbours occupy."""
        return min(count, self.gpus_per_node), -(-count // self.gpus_per_node)


def ring(size: float, ranks: int, link: Link) -> float:
    """Return an all-reduce by reduce-scatter and all-gather, each rank sending to the next.

    .. math:: 2 (n - 1) (a + S / (n B))

    References:
        Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", JPDC 69.
    """
    return 2 * (ranks - 1) * link.seconds(size / ranks)


def tree(size: float, ranks: int, link: Link) -> float:
    """Return the time of an all-reduce over two binary trees, each with half the bytes, in chunks.

    .. math:: 2 (ceil(log2 n) a + S / B)

    References:
        Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in
        MPICH", IJHPCA 19, on logarithmic against linear latency; Sanders, Speck and Traeff 2009,
        "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing
        35, on two trees that together use the whole bandwidth.
    """
    if ranks == 1:
        return 0.0
    return 2 * (math.ceil(math.log2(ranks)) * link.latency_s + size / link.bytes_per_s)


def chain(size: float, ranks: int, link: Link) -> float:
    """Return an all-reduce to one end of a chain and back, in chunks one after the other."""
    if ranks == 1:
        return 0.0
    return 2 * ((ranks - 1) * link.latency_s + size / link.bytes_per_s)
