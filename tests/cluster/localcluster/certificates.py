"""A certificate authority for one cluster: server and client certificates, and the kubeconfig files that hold them."""

from __future__ import annotations

import base64
import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = datetime.timedelta(days=365)


def _name(common_name: str, organization: str | None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(attributes)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@dataclass(frozen=True)
class CertificateAuthority:
    """Issues P-256 certificates into `folder` as NAME.crt and NAME.key; the authority's own are ca.crt and ca.key."""

    folder: Path
    _key: ec.EllipticCurvePrivateKey
    _subject: x509.Name

    @classmethod
    def create(cls, folder: Path) -> CertificateAuthority:
        folder.mkdir(parents=True, mode=0o700)
        authority = cls(folder, ec.generate_private_key(ec.SECP256R1()), _name("modelserve-local-cluster", None))
        builder = authority._builder(authority._subject, authority._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        authority._write("ca", builder, authority._key)
        return authority

    def _builder(self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + _LIFETIME)
        )

    def _write(self, name: str, builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> None:
        certificate = builder.sign(self._key, hashes.SHA256())
        (self.folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self._write_key(name, key)

    def _write_key(self, name: str, key: ec.EllipticCurvePrivateKey) -> None:
        path = self.folder / f"{name}.key"
        path.touch(mode=0o600)
        path.write_bytes(_pem(key))

    def issue_key_pair(self, name: str) -> None:
        """NAME.key and NAME.pub without a certificate: what service account tokens are signed and checked with."""
        key = ec.generate_private_key(ec.SECP256R1())
        self._write_key(name, key)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (self.folder / f"{name}.pub").write_bytes(public)

    def issue_server(self, name: str, hosts: list[str]) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address(h)) if h[0].isdigit() else x509.DNSName(h) for h in hosts]
        builder = self._builder(_name(name, None), key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        self._write(name, builder, key)

    def issue_client(self, name: str, *, user: str, group: str | None = None) -> None:
        """A client certificate: the API server reads the user from the common name, the group from the organization."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_name(user, group), key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        self._write(name, builder, key)

    def write_kubeconfig(self, path: Path, *, client: str, server: str) -> None:
        """A kubeconfig that carries the certificates of `client` (a name given to issue_client) within itself."""

        def encoded(file: str) -> str:
            return base64.b64encode((self.folder / file).read_bytes()).decode()

        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "modelserve-local",
            "clusters": [
                {
                    "name": "modelserve-local",
                    "cluster": {"server": server, "certificate-authority-data": encoded("ca.crt")},
                }
            ],
            "users": [
                {
                    "name": client,
                    "user": {
                        "client-certificate-data": encoded(f"{client}.crt"),
                        "client-key-data": encoded(f"{client}.key"),
                    },
                }
            ],
            "contexts": [{"name": "modelserve-local", "context": {"cluster": "modelserve-local", "user": client}}],
        }
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(document))
