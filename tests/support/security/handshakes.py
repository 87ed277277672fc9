"""TLS handshakes in memory, and certificates for them."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
    pkcs12,
)

HOST = "broker-1.example"


@dataclass(frozen=True)
class Session:
    """What both sides agreed on."""

    version: str | None
    cipher: str
    client_certificate: bytes | None
    """In DER."""


def shake_hands(server_context: ssl.SSLContext, client_context: ssl.SSLContext, host: str = HOST) -> Session:
    """Raises what `ssl` raises on the side that finds a fault first."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    unfinished = [client, server]
    for _ in range(20):
        for side in list(unfinished):
            try:
                side.do_handshake()
                unfinished.remove(side)
            except ssl.SSLWantReadError:
                continue
        if not unfinished:
            break
    assert not unfinished, "the handshake has an end"
    client.write(b"hello")
    assert server.read(5) == b"hello"
    cipher = server.cipher()
    assert cipher is not None
    return Session(server.version(), cipher[0], server.getpeercert(binary_form=True))


def write_pem(directory: Path, issued: trustme.LeafCert, *, name: str = "node") -> Path:
    """Key and chain in one file."""
    path = directory / f"{name}.pem"
    path.write_bytes(issued.private_key_and_cert_chain_pem.bytes())
    return path


def write_authority(directory: Path, *authorities: trustme.CA, name: str = "authorities") -> Path:
    path = directory / f"{name}.pem"
    path.write_bytes(b"".join(authority.cert_pem.bytes() for authority in authorities))
    return path


def encrypted_key(issued: trustme.LeafCert, password: bytes) -> bytes:
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password))


def write_pkcs12(directory: Path, issued: trustme.LeafCert, password: bytes, *, authorities: list[trustme.CA]) -> Path:
    """A keystore with the authorities behind the node's certificate."""
    path = directory / "node.p12"
    certificates = [x509.load_pem_x509_certificate(pem.bytes()) for pem in issued.cert_chain_pems]
    certificates += [x509.load_pem_x509_certificate(authority.cert_pem.bytes()) for authority in authorities]
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    path.write_bytes(
        pkcs12.serialize_key_and_certificates(
            b"node", key, certificates[0], certificates[1:], BestAvailableEncryption(password)
        )
    )
    return path
