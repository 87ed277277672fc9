"""TLS settings, handshakes between the contexts of both sides, and files that change."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import traceback
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from support.security.handshakes import HOST, encrypted_key, shake_hands, write_authority, write_pem, write_pkcs12

from tidelog.security.principals import PrincipalMapping
from tidelog.security.secrets import Secret
from tidelog.security.tls import CIPHERS, ClientAuth, Refresh, Store, StoreType, TlsError, TlsFiles, TlsSettings

PASSWORD = "a password of a key"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def issued(authority: trustme.CA) -> trustme.LeafCert:
    return authority.issue_cert(HOST)


@pytest.fixture
def node(tmp_path: Path, authority: trustme.CA, issued: trustme.LeafCert) -> Path:
    """A directory with the keystore and truststore of a node."""
    write_pem(tmp_path, issued)
    write_authority(tmp_path, authority)
    return tmp_path


def server_of(directory: Path, **more: Any) -> TlsFiles:
    settings: dict[str, Any] = {
        "keystore": Store(path=str(directory / "node.pem")),
        "truststore": Store(path=str(directory / "authorities.pem")),
    }
    return TlsFiles(TlsSettings(**{**settings, **more}), is_server=True)


def client_of(directory: Path, **more: Any) -> TlsFiles:
    settings: dict[str, Any] = {"truststore": Store(path=str(directory / "authorities.pem"))}
    return TlsFiles(TlsSettings(**{**settings, **more}), is_server=False)


def issue_client(directory: Path, authority: trustme.CA, **more: Any) -> Store:
    issued = authority.issue_cert("duke@example.com", common_name="duke", **more)
    return Store(path=str(write_pem(directory, issued, name="client")))


class TestHandshakes:
    def test_both_sides_use_tls_1_3_by_default(self, node: Path) -> None:
        session = shake_hands(server_of(node).context, client_of(node).context)
        assert (session.version, session.client_certificate) == ("TLSv1.3", None)

    @pytest.mark.parametrize("protocol", ["TLSv1.2", "TLSv1.3"])
    @pytest.mark.parametrize("limited", ["server", "client"])
    def test_either_side_limits_the_protocols(self, node: Path, protocol: str, limited: str) -> None:
        server = server_of(node, **({"protocols": (protocol,)} if limited == "server" else {}))
        client = client_of(node, **({"protocols": (protocol,)} if limited == "client" else {}))
        assert shake_hands(server.context, client.context).version == protocol

    def test_sides_without_a_common_protocol_do_not_connect(self, node: Path) -> None:
        server, client = server_of(node, protocols=("TLSv1.3",)), client_of(node, protocols=("TLSv1.2",))
        with pytest.raises(ssl.SSLError):
            shake_hands(server.context, client.context)

    def test_protocols_before_1_2_are_refused(self, node: Path) -> None:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises(ssl.SSLError):
            shake_hands(server_of(node).context, old)

    @pytest.mark.parametrize("name", [name for name in (*CIPHERS, *CIPHERS.values()) if "ECDSA" in name])
    def test_a_suite_of_tls_1_2_can_be_chosen(self, node: Path, name: str) -> None:
        server = server_of(node, ciphers=(name,), protocols=("TLSv1.2",))
        assert shake_hands(server.context, client_of(node).context).cipher == CIPHERS.get(name, name)

    @pytest.mark.parametrize("cipher", ["AES128-GCM-SHA256", "ECDHE-ECDSA-AES128-SHA256", "DHE-RSA-AES128-GCM-SHA256"])
    def test_suites_without_ecdhe_or_aead_are_refused(self, node: Path, cipher: str) -> None:
        client = client_of(node, protocols=("TLSv1.2",)).context
        client.set_ciphers(cipher)
        with pytest.raises(ssl.SSLError):
            shake_hands(server_of(node).context, client)

    def test_the_name_of_the_host_is_verified(self, node: Path) -> None:
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            shake_hands(server_of(node).context, client_of(node).context, host="broker-2.example")
        unchecked = client_of(node, checks_hostname=False)
        assert shake_hands(server_of(node).context, unchecked.context, host="broker-2.example").version == "TLSv1.3"

    def test_a_server_of_another_authority_is_refused(self, node: Path) -> None:
        foreign = trustme.CA().issue_cert(HOST)
        server = server_of(node, keystore=Store(path=str(write_pem(node, foreign, name="foreign"))))
        with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
            shake_hands(server.context, client_of(node).context)

    def test_without_a_truststore_the_system_decides(self, node: Path) -> None:
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(server_of(node).context, client_of(node, truststore=None).context)

    def test_an_intermediate_authority_is_sent_along(self, tmp_path: Path) -> None:
        root = trustme.CA()
        write_pem(tmp_path, root.create_child_ca().issue_cert(HOST))
        write_authority(tmp_path, root)
        assert shake_hands(server_of(tmp_path).context, client_of(tmp_path).context).version == "TLSv1.3"


class TestClientCertificates:
    @pytest.mark.parametrize("protocol", ["TLSv1.2", "TLSv1.3"])
    @pytest.mark.parametrize("client_auth", [ClientAuth.REQUESTED, ClientAuth.REQUIRED])
    def test_a_client_with_a_certificate_has_a_principal(
        self, node: Path, authority: trustme.CA, protocol: str, client_auth: ClientAuth
    ) -> None:
        server = server_of(node, client_auth=client_auth, protocols=(protocol,))
        client = client_of(node, keystore=issue_client(node, authority))
        for _ in range(2):
            certificate = shake_hands(server.context, client.context).client_certificate
            assert certificate is not None
            user = PrincipalMapping("RULE:^CN=([^,]+),.*$/$1/").principal(certificate)
            assert str(user) == "User:duke"

    def test_without_client_auth_no_certificate_is_asked_for(self, node: Path, authority: trustme.CA) -> None:
        client = client_of(node, keystore=issue_client(node, authority))
        assert shake_hands(server_of(node).context, client.context).client_certificate is None

    def test_a_client_without_a_certificate_is_let_in_only_if_none_is_required(self, node: Path) -> None:
        requested = server_of(node, client_auth=ClientAuth.REQUESTED)
        assert shake_hands(requested.context, client_of(node).context).client_certificate is None
        with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
            shake_hands(server_of(node, client_auth=ClientAuth.REQUIRED).context, client_of(node).context)

    @pytest.mark.parametrize("client_auth", [ClientAuth.REQUESTED, ClientAuth.REQUIRED])
    def test_a_foreign_or_expired_certificate_is_refused(
        self, node: Path, authority: trustme.CA, client_auth: ClientAuth
    ) -> None:
        server = server_of(node, client_auth=client_auth)
        yesterday = datetime.now(UTC) - timedelta(days=1)
        expired = client_of(node, keystore=issue_client(node, authority, not_after=yesterday))
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            shake_hands(server.context, expired.context)
        foreign = client_of(node, keystore=issue_client(node, trustme.CA()))
        with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
            shake_hands(server.context, foreign.context)

    @pytest.mark.parametrize("protocol", ["TLSv1.2", "TLSv1.3"])
    def test_sessions_have_no_tickets(self, node: Path, authority: trustme.CA, protocol: str) -> None:
        """A resumed session would not look at the certificate again."""
        server = server_of(node, client_auth=ClientAuth.REQUIRED, protocols=(protocol,)).context
        client = client_of(node, keystore=issue_client(node, authority)).context
        shake_hands(server, client)
        assert server.num_tickets == 0
        assert server.options & ssl.OP_NO_TICKET
        assert server.session_stats()["hits"] == 0


class TestStores:
    def test_the_key_may_be_in_a_file_of_its_own_and_encrypted(self, node: Path, issued: trustme.LeafCert) -> None:
        (node / "tls.crt").write_bytes(issued.cert_chain_pems[0].bytes())
        (node / "tls.key").write_bytes(encrypted_key(issued, PASSWORD.encode()))
        keystore = Store(path=str(node / "tls.crt"), key_path=str(node / "tls.key"), password=Secret(PASSWORD))
        server = server_of(node, keystore=keystore)
        assert shake_hands(server.context, client_of(node).context).version == "TLSv1.3"

    def test_pkcs12_has_keys_and_authorities(self, tmp_path: Path) -> None:
        root = trustme.CA()
        middle = root.create_child_ca()
        path = write_pkcs12(tmp_path, middle.issue_cert(HOST), PASSWORD.encode(), authorities=[root])
        write_authority(tmp_path, root)
        store = Store(path=str(path), type=StoreType.PKCS12, password=Secret(PASSWORD))
        server = server_of(tmp_path, keystore=store)
        assert server.state.identity is not None
        assert len(server.state.identity.chain) == 3
        assert shake_hands(server.context, client_of(tmp_path).context).version == "TLSv1.3"
        assert shake_hands(server.context, client_of(tmp_path, truststore=store).context).version == "TLSv1.3"

    @pytest.mark.skipif(shutil.which("keytool") is None, reason="keytool of a JDK makes the file")
    def test_a_truststore_of_keytool_can_be_read(self, node: Path) -> None:
        path = node / "trust.p12"
        arguments = ["-importcert", "-noprompt", "-alias", "ca", "-file", str(node / "authorities.pem")]
        store = ["-keystore", str(path), "-storetype", "PKCS12", "-storepass", PASSWORD]
        subprocess.run(["keytool", *arguments, *store], check=True, capture_output=True)
        truststore = Store(path=str(path), type=StoreType.PKCS12, password=Secret(PASSWORD))
        assert shake_hands(server_of(node).context, client_of(node, truststore=truststore).context).version == "TLSv1.3"

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "no private key"),
            (b"no PEM", "no private key"),
            (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "no private key"),
            (b"\xfe\xed\xfe\xed\0\0\0\2", "JKS"),
            (b"x" * (5 << 20), "more than"),
        ],
        ids=["empty", "text", "broken", "jks", "long"],
    )
    def test_a_file_that_is_no_keystore_is_named(self, node: Path, content: bytes, reason: str) -> None:
        path = node / "other.pem"
        path.write_bytes(content)
        with pytest.raises(TlsError, match=reason) as raised:
            server_of(node, keystore=Store(path=str(path)))
        assert str(raised.value).startswith(str(path))

    @pytest.mark.parametrize("kind", list(StoreType))
    def test_a_wrong_password_is_reported_without_it(
        self, node: Path, issued: trustme.LeafCert, kind: StoreType
    ) -> None:
        if kind is StoreType.PKCS12:
            path = write_pkcs12(node, issued, b"another", authorities=[])
        else:
            path = node / "encrypted.pem"
            path.write_bytes(encrypted_key(issued, b"another") + issued.cert_chain_pems[0].bytes())
        with pytest.raises(TlsError, match=r"another password|no PKCS#12") as raised:
            server_of(node, keystore=Store(path=str(path), type=kind, password=Secret(PASSWORD)))
        assert PASSWORD not in "".join(traceback.format_exception(raised.value))
        with pytest.raises(TlsError, match=r"there is no password|no PKCS#12"):
            server_of(node, keystore=Store(path=str(path), type=kind))

    def test_a_password_for_a_key_that_is_not_encrypted_is_reported(self, node: Path) -> None:
        with pytest.raises(TlsError, match="not encrypted"):
            server_of(node, keystore=Store(path=str(node / "node.pem"), password=Secret(PASSWORD)))

    def test_a_key_of_another_certificate_is_refused(self, node: Path, authority: trustme.CA) -> None:
        other = authority.issue_cert(HOST)
        (node / "other.key").write_bytes(other.private_key_pem.bytes())
        keystore = Store(path=str(node / "node.pem"), key_path=str(node / "other.key"))
        with pytest.raises(TlsError, match="not that of the first certificate"):
            server_of(node, keystore=keystore)

    def test_a_weak_key_is_refused(self, node: Path) -> None:
        key = rsa.generate_private_key(65537, 1024)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "weak")])
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (node / "weak.pem").write_bytes(pem + builder.sign(key, SHA256()).public_bytes(Encoding.PEM))
        with pytest.raises(TlsError, match=r"weak\.pem: OpenSSL rejects .*KEY_TOO_SMALL"):
            server_of(node, keystore=Store(path=str(node / "weak.pem")))

    def test_a_truststore_needs_a_certificate(self, node: Path) -> None:
        (node / "authorities.pem").write_bytes(b"")
        with pytest.raises(TlsError, match="no certificate"):
            server_of(node)

    def test_a_keystore_needs_a_key(self, node: Path) -> None:
        with pytest.raises(TlsError, match="no private key"):
            server_of(node, keystore=Store(path=str(node / "authorities.pem")))

    def test_keys_and_passwords_are_not_shown(self, node: Path) -> None:
        server = server_of(node)
        assert "PRIVATE KEY" not in repr(server.state)
        assert PASSWORD not in repr(TlsSettings(keystore=Store(path="x", password=Secret(PASSWORD))))


class TestSettings:
    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"protocols": ("TLSv1.1",)}, "'TLSv1.1' is not one of TLSv1.2, TLSv1.3"),
            ({"protocols": ()}, "at least one"),
            ({"ciphers": ("TLS_AES_128_GCM_SHA256",)}, "those of TLS 1.3 are always on"),
            ({"ciphers": ("ALL",)}, "not a suite"),
            ({"keystore": None}, "ssl.keystore.location"),
            ({"truststore": None, "client_auth": ClientAuth.REQUESTED}, "ssl.truststore.location"),
            ({"keystore": Store(path="x", key_path="y", type=StoreType.PKCS12)}, "contains its key"),
        ],
    )
    def test_settings_that_cannot_work_are_reported_together(
        self, node: Path, changes: dict[str, Any], problem: str
    ) -> None:
        with pytest.raises(TlsError, match=problem):
            server_of(node, **changes)
        with pytest.raises(TlsError, match=rf"ZZ.*{problem}|{problem}.*ZZ"):
            server_of(node, **{**changes, "ciphers": ("ZZ", *changes.get("ciphers", ()))})


class TestChangedFiles:
    def test_nothing_happens_while_files_stay(self, node: Path) -> None:
        server = server_of(node)
        state = server.state
        assert [server.refresh() for _ in range(3)] == [Refresh.UNCHANGED] * 3
        assert server.state is state

    def test_a_new_certificate_counts_from_the_next_connection_on(self, node: Path, authority: trustme.CA) -> None:
        server, client = server_of(node), client_of(node)
        old = server.context
        write_pem(node, authority.issue_cert(HOST, "broker-2.example"))
        assert server.refresh() is Refresh.LOADED
        assert shake_hands(server.context, client.context, host="broker-2.example").version == "TLSv1.3"
        assert shake_hands(old, client.context).version == "TLSv1.3", "connections that began before"
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(old, client.context, host="broker-2.example")

    def test_a_half_written_pair_leaves_the_last_good_one_and_is_reported_once(
        self, node: Path, authority: trustme.CA, issued: trustme.LeafCert
    ) -> None:
        for name, pem in (("tls.crt", issued.cert_chain_pems[0]), ("tls.key", issued.private_key_pem)):
            (node / name).write_bytes(pem.bytes())
        server = server_of(node, keystore=Store(path=str(node / "tls.crt"), key_path=str(node / "tls.key")))
        renewed = authority.issue_cert(HOST)
        state = server.state
        (node / "tls.crt").write_bytes(renewed.cert_chain_pems[0].bytes())
        assert [server.refresh() for _ in range(3)] == [Refresh.FAILED, Refresh.UNCHANGED, Refresh.UNCHANGED]
        assert "not that of the first certificate" in str(server.problem)
        assert server.state is state
        (node / "tls.key").write_bytes(renewed.private_key_pem.bytes())
        assert [server.refresh(), server.refresh()] == [Refresh.LOADED, Refresh.UNCHANGED]
        assert server.problem is None
        assert server.state is not state

    def test_each_bad_change_is_reported(self, node: Path, issued: trustme.LeafCert) -> None:
        server = server_of(node)
        (node / "node.pem").write_bytes(b"bad")
        assert [server.refresh(), server.refresh()] == [Refresh.FAILED, Refresh.UNCHANGED]
        (node / "node.pem").write_bytes(b"bad, too")
        assert [server.refresh(), server.refresh()] == [Refresh.FAILED, Refresh.UNCHANGED]
        write_pem(node, issued)
        assert server.refresh() is Refresh.LOADED

    def test_a_missing_file_is_reported_once_and_may_come_back(self, node: Path) -> None:
        server = server_of(node)
        (node / "node.pem").rename(node / "away.pem")
        assert [server.refresh(), server.refresh()] == [Refresh.FAILED, Refresh.UNCHANGED]
        assert "No such file" in str(server.problem)
        (node / "away.pem").rename(node / "node.pem")
        assert server.refresh() is Refresh.UNCHANGED
        assert server.problem is None

    def test_a_rejected_file_that_is_away_for_a_while_stays_rejected(self, node: Path) -> None:
        server = server_of(node)
        (node / "node.pem").write_bytes(b"bad")
        assert server.refresh() is Refresh.FAILED
        (node / "node.pem").rename(node / "away.pem")
        assert server.refresh() is Refresh.FAILED
        (node / "away.pem").rename(node / "node.pem")
        assert server.refresh() is Refresh.FAILED
        assert "no private key" in str(server.problem)

    def test_an_authority_that_is_removed_no_longer_counts(self, node: Path, authority: trustme.CA) -> None:
        other = trustme.CA()
        write_authority(node, authority, other)
        server = server_of(node, client_auth=ClientAuth.REQUIRED)
        client = client_of(node, keystore=issue_client(node, other))
        assert shake_hands(server.context, client.context).client_certificate
        write_authority(node, authority)
        assert server.refresh() is Refresh.LOADED
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(server.context, client.context)

    def test_a_link_to_another_directory_is_a_change(self, node: Path, authority: trustme.CA) -> None:
        """As Kubernetes replaces a secret."""
        for name in ("one", "two"):
            (node / name).mkdir()
            write_pem(node / name, authority.issue_cert(HOST))
        link = node / "current"
        link.symlink_to("one")
        server = server_of(node, keystore=Store(path=str(link / "node.pem")))
        (node / "next").symlink_to("two")
        (node / "next").rename(link)
        assert server.refresh() is Refresh.LOADED

    def test_no_descriptor_stays_open(self, node: Path, authority: trustme.CA) -> None:
        server = server_of(node)
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(5):
            write_pem(node, authority.issue_cert(HOST))
            assert server.refresh() is Refresh.LOADED
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_days_until_the_first_certificate_of_the_chain_expires(tmp_path: Path) -> None:
    expiry = datetime(2030, 1, 11, tzinfo=UTC)
    root = trustme.CA()
    write_pem(tmp_path, root.issue_cert(HOST, not_before=datetime(2020, 1, 1, tzinfo=UTC), not_after=expiry))
    write_authority(tmp_path, root)
    state = server_of(tmp_path).state
    now_ms = int(datetime(2030, 1, 1, tzinfo=UTC).timestamp() * 1000)
    assert state.days_until_expiry(now_ms) == 10
    assert state.days_until_expiry(now_ms + 11 * 86_400_000) == -1
    assert client_of(tmp_path).state.days_until_expiry(now_ms) is None
