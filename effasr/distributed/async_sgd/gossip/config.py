"""Configuration of averaging between learners: schedule, topology, and TLS."""

import random
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from effasr.checks import check

# Pairs of learners that average with each other.
#
# Even-numbered learners are active: they begin exchanges. Odd-numbered ones are passive: they
# answer. Every edge joins an active and a passive learner, so learners cannot deadlock. A ring of
# odd size lacks the edge between its last and its first learner, which are both active: it is a
# path, and a long path mixes about four times as slowly.
#
# An exchange multiplies the expected squared distance of n learners from their mean by at most
# 1 - (1 - cos(2 pi / n)) / n in a ring of even size, 1 - (1 - cos(pi / n)) / (n - 1) in one of odd
# size, and 1 - 1 / n (n odd: 1 - 1 / (n + 1)) with ``random``. As about n / 2 exchanges take place
# per update, ``random`` mixes many learners as fast as few.

Topology = Literal["ring", "random"]


def is_active(learner: int) -> bool:
    """Return whether a learner begins exchanges rather than answering them."""
    return learner % 2 == 0


def neighbours(topology: Topology, learner: int, learners: int) -> tuple[int, ...]:
    """Return the learners that ``learner`` may average with, in ascending order."""
    if learners < 2:
        raise ValueError(
            f"`learners` must be at least 2, but is {learners}: a single learner has nobody to "
            "average with; start more processes, make learners smaller, or use strategy ddp."
        )
    check(0 <= learner < learners, "learner", f"be from 0 to {learners - 1}", learner)
    if topology == "random":
        return tuple(range(1 if is_active(learner) else 0, learners, 2))
    beside = {(learner - 1) % learners, (learner + 1) % learners}
    return tuple(sorted(n for n in beside if is_active(n) != is_active(learner)))


def choose(topology: Topology, seed: int, learner: int, living: Sequence[int], count: int) -> int:
    """Return the neighbour that an active learner averages with next."""
    if topology == "ring":
        return living[count % len(living)]
    return random.Random(f"{seed} {learner} {count}").choice(living)


# TLS between learners, with certificates of a private certificate authority.


@dataclass(frozen=True, kw_only=True, slots=True)
class TLSConfig:
    """Encryption of connections between learners; both sides present a certificate.

    Any certificate signed by the authority is accepted, whatever its host name, because learners
    are reached by address. The authority should therefore sign only for the nodes of this cluster.

    Attributes:
        ca: PEM file of the authority that signed the certificates of all nodes.
        certificate: PEM file of this node's certificate and of the intermediate certificates.
        key: PEM file of the certificate's private key, not encrypted.
    """

    ca: str
    certificate: str
    key: str

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            check(getattr(self, name), name, "be the path of a PEM file", "empty")


def tls_context(config: TLSConfig, protocol: int) -> ssl.SSLContext:
    """Return the context of a side; ``protocol``: ssl.PROTOCOL_TLS_SERVER or _CLIENT."""
    for name in ("ca", "certificate", "key"):
        path = Path(getattr(config, name))
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise ValueError(
                f"`training.gossip.tls.{name}` must be a readable PEM file, but {path} is not: "
                f"{error.strerror}."
            ) from error
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(config.ca)
    except ssl.SSLError as error:
        raise ValueError(
            f"`training.gossip.tls.ca` must hold certificates in PEM format, but {config.ca} does "
            f"not ({error.reason or error})."
        ) from error
    try:
        context.load_cert_chain(config.certificate, config.key, password=_no_password)
    except (ssl.SSLError, _Encrypted) as error:
        reason = "the key is encrypted" if isinstance(error, _Encrypted) else error.reason or error
        raise ValueError(
            "`training.gossip.tls.certificate` and `key` must be a certificate and its private "
            f"key, not encrypted, in PEM format, but {config.certificate} and {config.key} are "
            f"not ({reason})."
        ) from error
    return context


class _Encrypted(Exception):
    """The private key requires a password."""


def _no_password() -> str:
    # Without this, OpenSSL would ask for the password at the terminal.
    raise _Encrypted


@dataclass(frozen=True, kw_only=True, slots=True)
class GossipConfig:
    """Background averaging of weights between pairs of learners.

    Attributes:
        topology: Pairs of learners that average. ``ring``: each learner alternates between its two
            neighbours; an even number of learners is better. ``random``: an even-numbered learner
            averages with an odd-numbered one, drawn anew each time; this mixes many learners faster
            than a ring and stays connected when several are lost.
        learner_size: Processes per learner, which exchange gradients in every step; null: those of
            a node. With ``adpsgd``, always 1.
        period: Updates between two copies of its weights that a learner publishes. A larger period
            reduces traffic between GPU and host and between nodes.
        timeout_s: Longest silence of a learner in an exchange, in seconds, before it is left out of
            the run. A process that ends is detected at once; slow computation does not count as
            silence.
        tls: Certificates for encrypting connections between learners; null: learners authenticate
            each other as members of this run, but data are not encrypted.
    """

    topology: Literal["ring", "random"] = "ring"
    learner_size: int | None = None
    period: int = 1
    timeout_s: float = 120.0
    tls: TLSConfig | None = None

    def __post_init__(self) -> None:
        if self.topology not in ("ring", "random"):
            raise ValueError(f"`topology` must be ring or random, but is {self.topology!r}.")
        if self.learner_size is not None and self.learner_size < 1:
            raise ValueError(
                f"`learner_size` must be at least 1 or null, but is {self.learner_size}."
            )
        check(self.period >= 1, "period", "be at least 1", self.period)
        check(self.timeout_s > 0, "timeout_s", "be positive", self.timeout_s)
