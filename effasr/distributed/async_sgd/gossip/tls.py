"""TLS between learners, with certificates of a private certificate authority."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from effasr.checks import check


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
