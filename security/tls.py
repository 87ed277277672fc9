"""TLS of listeners and clients: settings, contexts of Python's `ssl`, and files that change while a process runs.

`TlsFiles` keeps an identity, authorities and a context. `refresh`, called every `ssl.reload.interval.ms`, reads the
files and replaces all of it at once if the new files are usable together; if not, the last good ones stay and the
problem is reported once. A context never changes after it was built: take it from `TlsFiles` for each connection.

TLS 1.2 with ECDHE and AEAD, and TLS 1.3, whose suites Python's `ssl` does not let anybody choose. No compression, no
renegotiation, and no session tickets: each connection verifies the certificate of its client.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from cryptography import x509

from tidelog.security.key_material import (
    Identity,
    KeyMaterialError,
    pem_of,
    read_pem_authorities,
    read_pem_identity,
    read_pkcs12_authorities,
    read_pkcs12_identity,
)
from tidelog.security.secrets import Secret

FILE_BYTES_MAX = 4 << 20
PROTOCOLS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
CIPHERS = {
    f"TLS_ECDHE_{key}_WITH_{suite}": f"ECDHE-{key}-{name}"
    for suite, name in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
    )
    for key in ("ECDSA", "RSA")
}
"""Suites of TLS 1.2: IANA's name, as Kafka's settings have it, and OpenSSL's."""


SECURITY_LEVEL = 2
"""OpenSSL's: at least 112 bits, so RSA keys have 2048 bits or more and no certificate is signed with SHA-1. Builds
differ in their default."""


class TlsError(Exception):
    """Settings or files that TLS cannot use. The message has no secret."""


class StoreType(Enum):
    PEM = "PEM"
    PKCS12 = "PKCS12"


class ClientAuth(Enum):
    """`ssl.client.auth`"""

    NONE = "none"
    REQUESTED = "requested"
    """A client without a certificate is let in; one with a bad certificate is not."""
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    path: str
    type: StoreType = StoreType.PEM
    password: Secret | None = None
    """Of the PKCS#12 file, or of the key in PEM."""
    key_path: str = ""
    """PEM only: the key is in a file of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    keystore: Store | None = None
    truststore: Store | None = None
    """None: no client is verified; servers are verified by the authorities of the system."""
    client_auth: ClientAuth = ClientAuth.NONE
    protocols: tuple[str, ...] = ("TLSv1.2", "TLSv1.3")
    ciphers: tuple[str, ...] = ()
    """Of TLS 1.2, by IANA's or OpenSSL's names. Empty: all of `CIPHERS`."""
    checks_hostname: bool = True
    """Of clients."""

    def problems(self, *, is_server: bool) -> list[str]:
        """One sentence for each."""
        found = [f"ssl.enabled.protocols: {name!r} is not one of {', '.join(PROTOCOLS)}" for name in self._unknown()]
        if not self.protocols:
            found.append("ssl.enabled.protocols: name at least one protocol")
        known = {*CIPHERS, *CIPHERS.values()}
        found += [
            f"ssl.cipher.suites: {name!r} is not a suite of TLS 1.2 with ECDHE and AEAD; those of TLS 1.3 are always on"
            for name in self.ciphers
            if name not in known
        ]
        if is_server and self.keystore is None:
            found.append("ssl.keystore.location: a listener with TLS needs a key and a certificate")
        if is_server and self.client_auth is not ClientAuth.NONE and self.truststore is None:
            found.append("ssl.truststore.location: ssl.client.auth needs the authorities of client certificates")
        if self.keystore and self.keystore.type is StoreType.PKCS12 and self.keystore.key_path:
            found.append("ssl.keystore.location: a PKCS12 file contains its key, it has no further file")
        return found

    def _unknown(self) -> list[str]:
        return [name for name in self.protocols if name not in PROTOCOLS]


@dataclass(frozen=True, slots=True)
class TlsState:
    """What one reading of the files gave."""

    identity: Identity | None
    authorities: tuple[x509.Certificate, ...]
    context: ssl.SSLContext

    def days_until_expiry(self, now_ms: int) -> float | None:
        return None if self.identity is None else self.identity.days_left(now_ms)


class Refresh(Enum):
    UNCHANGED = "unchanged"
    LOADED = "loaded"
    FAILED = "failed"
    """The files have changed and cannot be used; `TlsFiles.problem` says why. Returned once for each such change."""


class TlsFiles:
    """The current state of a listener or of a client. Its methods read files: call them off the event loop."""

    def __init__(self, settings: TlsSettings, *, is_server: bool) -> None:
        """Reads the files; raises `TlsError`."""
        if problems := settings.problems(is_server=is_server):
            raise TlsError("; ".join(problems))
        self._settings = settings
        self._is_server = is_server
        self.problem: str | None = None
        """Why the newest files are not in use; None if they are."""
        self._tried, problem = _read_files(settings)
        """The newest files that could be read."""
        self._rejection: str | None = None
        """Why they are not in use."""
        if problem is not None:
            raise TlsError(problem)
        self.state = _build(settings, self._tried, is_server=is_server)

    @property
    def context(self) -> ssl.SSLContext:
        return self.state.context

    def refresh(self) -> Refresh:
        """Read the files again."""
        files, problem = _read_files(self._settings)
        is_changed = problem is None and files != self._tried
        if is_changed:
            self._tried, self._rejection = files, None
            try:
                self.state = _build(self._settings, files, is_server=self._is_server)
            except TlsError as error:
                self._rejection = str(error)
            else:
                self.problem = None
                return Refresh.LOADED
        problem = problem or self._rejection
        is_reported = problem is None or (problem == self.problem and not is_changed)
        self.problem = problem
        return Refresh.UNCHANGED if is_reported else Refresh.FAILED


def _read_files(settings: TlsSettings) -> tuple[dict[str, bytes], str | None]:
    """Return the content of each file, and what is wrong. Contents are compared, not times: a file may be replaced
    twice within one tick of a clock, and a directory of Kubernetes by a link."""
    files: dict[str, bytes] = {}
    for store in (settings.keystore, settings.truststore):
        if store is None:
            continue
        for path in filter(None, (store.path, store.key_path)):
            try:
                with open(path, "rb") as file:
                    files[path] = file.read(FILE_BYTES_MAX + 1)
            except OSError as error:
                return files, f"{path}: {error.strerror}"
            if len(files[path]) > FILE_BYTES_MAX:
                return files, f"{path}: more than {FILE_BYTES_MAX} bytes"
    return files, None


def _build(settings: TlsSettings, files: dict[str, bytes], *, is_server: bool) -> TlsState:
    """Raises `TlsError`."""
    try:
        identity = _identity(settings.keystore, files)
        authorities = _authorities(settings.truststore, files)
    except KeyMaterialError as error:
        raise TlsError(str(error)) from None
    context = _base_context(settings, is_server=is_server)
    try:
        if authorities:
            context.load_verify_locations(cadata=pem_of(authorities).decode())
        elif not is_server:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        if identity is not None:
            with _memory_file(identity.key_pem + identity.chain_pem) as path:
                context.load_cert_chain(path)
    except ssl.SSLError as error:
        path = settings.keystore.path if settings.keystore else ""
        raise TlsError(f"{path}: OpenSSL rejects the key or a certificate: {error.reason}") from None
    return TlsState(identity, authorities, context)


def _identity(store: Store | None, files: dict[str, bytes]) -> Identity | None:
    if store is None:
        return None
    data = files[store.path]
    if store.type is StoreType.PKCS12:
        return read_pkcs12_identity(store.path, data, password=store.password)
    key_path = store.key_path or store.path
    return read_pem_identity(store.path, data, key_path=key_path, key_data=files[key_path], password=store.password)


def _authorities(store: Store | None, files: dict[str, bytes]) -> tuple[x509.Certificate, ...]:
    if store is None:
        return ()
    if store.type is StoreType.PKCS12:
        return read_pkcs12_authorities(store.path, files[store.path], password=store.password)
    return read_pem_authorities(store.path, files[store.path])


def _base_context(settings: TlsSettings, *, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    versions = sorted(PROTOCOLS[name] for name in settings.protocols)
    context.minimum_version, context.maximum_version = versions[0], versions[-1]
    names = [CIPHERS.get(name, name) for name in settings.ciphers] or list(CIPHERS.values())
    context.set_ciphers(":".join([*names, f"@SECLEVEL={SECURITY_LEVEL}"]))
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    if is_server:
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.verify_mode = {
            ClientAuth.NONE: ssl.CERT_NONE,
            ClientAuth.REQUESTED: ssl.CERT_OPTIONAL,
            ClientAuth.REQUIRED: ssl.CERT_REQUIRED,
        }[settings.client_auth]
    else:
        context.check_hostname = settings.checks_hostname
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextmanager
def _memory_file(data: bytes) -> Iterator[str]:
    """`load_cert_chain` takes only paths, and a key must not come to a disk."""
    descriptor = os.memfd_create("tidelog-tls", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
