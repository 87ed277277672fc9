"""Keys and certificates of files, checked before anything uses them. Pure.

A keystore is PEM (a key and its chain, in one file or two) or PKCS#12, a truststore PEM or PKCS#12. The key has to be
that of the first certificate. Java's own format, JKS, is rejected: `keytool -importkeystore` converts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    pkcs12,
)

from tidelog.security.secrets import Secret

CERTIFICATES_MAX = 2_000
"""Of a truststore. Mozilla's list of authorities has 150."""
_JKS = b"\xfe\xed\xfe\xed"
_DAY_MS = 86_400_000


class KeyMaterialError(ValueError):
    """A file has no usable key or certificate. The message names the file and contains nothing of its content."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A key and its certificates, the node's first."""

    key_pem: bytes = field(repr=False)
    chain: tuple[x509.Certificate, ...]

    @property
    def chain_pem(self) -> bytes:
        return pem_of(self.chain)

    @property
    def expires_at_ms(self) -> int:
        """The chain is valid until then, in milliseconds since 1970."""
        return min(_milliseconds(certificate.not_valid_after_utc) for certificate in self.chain)

    def days_left(self, now_ms: int) -> float:
        """Negative after the expiry."""
        return (self.expires_at_ms - now_ms) / _DAY_MS


def pem_of(certificates: Sequence[x509.Certificate]) -> bytes:
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


def _milliseconds(at: datetime) -> int:
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def read_pem_identity(path: str, data: bytes, *, key_path: str, key_data: bytes, password: Secret | None) -> Identity:
    """The key may be in the file of the certificates. Raises `KeyMaterialError`."""
    _reject_jks(path, data)
    return _checked_identity(path, _pem_key(key_path, key_data, password), _pem_certificates(path, data))


def read_pkcs12_identity(path: str, data: bytes, *, password: Secret | None) -> Identity:
    """Raises `KeyMaterialError`."""
    store = _pkcs12(path, data, password)
    if store.key is None or store.cert is None:
        raise KeyMaterialError(f"{path}: the keystore has no key with a certificate")
    others = [entry.certificate for entry in store.additional_certs]
    return _checked_identity(path, store.key, _in_order(store.cert.certificate, others))


def read_pem_authorities(path: str, data: bytes) -> tuple[x509.Certificate, ...]:
    """Raises `KeyMaterialError`."""
    _reject_jks(path, data)
    return tuple(_pem_certificates(path, data))


def read_pkcs12_authorities(path: str, data: bytes, *, password: Secret | None) -> tuple[x509.Certificate, ...]:
    """Raises `KeyMaterialError`."""
    store = _pkcs12(path, data, password)
    found = [entry.certificate for entry in ([store.cert] if store.cert else []) + store.additional_certs]
    return tuple(_bounded(path, found))


def _reject_jks(path: str, data: bytes) -> None:
    if data[:4] == _JKS:
        raise KeyMaterialError(f"{path}: this is a JKS file; convert it to PKCS12 with keytool -importkeystore")


def _pem_key(path: str, data: bytes, password: Secret | None) -> PrivateKeyTypes:
    secret = None if password is None else password.reveal().encode("utf-8", "surrogateescape")
    try:
        return load_pem_private_key(data, secret)
    except TypeError:  # it is encrypted and there is no password, or the other way around
        reason = "the key is encrypted, and there is no password" if secret is None else "the key is not encrypted"
    except (ValueError, UnsupportedAlgorithm):
        reason = "no private key in PEM" if secret is None else "no private key in PEM, or another password"
    raise KeyMaterialError(f"{path}: {reason}")


def _pem_certificates(path: str, data: bytes) -> list[x509.Certificate]:
    try:
        found = x509.load_pem_x509_certificates(data)
    except ValueError:
        raise KeyMaterialError(f"{path}: no certificate in PEM, or one that cannot be read") from None
    return _bounded(path, found)


def _pkcs12(path: str, data: bytes, password: Secret | None) -> pkcs12.PKCS12KeyAndCertificates:
    _reject_jks(path, data)
    secret = None if password is None else password.reveal().encode("utf-8", "surrogateescape")
    try:
        return pkcs12.load_pkcs12(data, secret)
    except (ValueError, UnsupportedAlgorithm):
        raise KeyMaterialError(f"{path}: no PKCS#12 file, or another password") from None


def _bounded(path: str, found: list[x509.Certificate]) -> list[x509.Certificate]:
    if not 0 < len(found) <= CERTIFICATES_MAX:
        raise KeyMaterialError(f"{path}: {len(found)} certificates; from 1 to {CERTIFICATES_MAX} are allowed")
    return found


def _in_order(first: x509.Certificate, others: list[x509.Certificate]) -> list[x509.Certificate]:
    """A chain from the first certificate up: PKCS#12 files have the others in any order, and maybe more."""
    chain = [first]
    left = list(others)
    while issuer := next((entry for entry in left if entry.subject == chain[-1].issuer), None):
        chain.append(issuer)
        left.remove(issuer)
    return chain


def _checked_identity(path: str, key: PrivateKeyTypes, chain: list[x509.Certificate]) -> Identity:
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) != chain[0].public_key().public_bytes(*form):
        raise KeyMaterialError(f"{path}: the key is not that of the first certificate")
    return Identity(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), tuple(chain))
