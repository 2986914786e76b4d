"""Certificates that the webhook makes for itself, and the bundle that the API server is to trust. No I/O.

Each is trusted by itself: there is no authority whose key would have to be kept, and the bundle holds the present one
and those before it, so that a replica which still shows an older one is trusted as well.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = timedelta(days=90)
RENEWED_BEFORE = timedelta(days=30)  # its end
CLOCK_SKEW = timedelta(hours=1)
MOST_TRUSTED = 4  # certificates of a bundle


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes

    def serves(self, hosts: Sequence[str], now: datetime) -> bool:
        """Whether it is for these hosts, and need not be renewed yet."""
        try:
            found = x509.load_pem_x509_certificate(self.certificate)
            key = serialization.load_pem_private_key(self.key, password=None)
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, TypeError, x509.ExtensionNotFound):
            return False
        own = key.public_key() == found.public_key()
        valid = found.not_valid_before_utc <= now < found.not_valid_after_utc - RENEWED_BEFORE
        return own and valid and set(names) == set(_names(hosts))


def new_pair(hosts: Sequence[str], now: datetime) -> Pair:
    """A P-256 key, and a certificate for host names and addresses that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "modelserve-webhook")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName(_names(hosts)), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    certificate = builder.sign(key, hashes.SHA256())
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def bundle_with(certificate: bytes, earlier: bytes, now: datetime) -> bytes:
    """The certificate, and of an earlier bundle those that have not ended; the newest first, MOST_TRUSTED at most."""
    kept = [certificate]
    for each in _certificates(earlier):
        pem = each.public_bytes(serialization.Encoding.PEM)
        if pem not in kept and now < each.not_valid_after_utc:
            kept.append(pem)
    return b"".join(kept[:MOST_TRUSTED])


def trusts(bundle: bytes, certificate: bytes) -> bool:
    """Whether a certificate is one of a bundle."""
    shown = list(_certificates(certificate))
    return bool(shown) and shown[0] in _certificates(bundle)


def _certificates(pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem) if pem.strip() else []
    except ValueError:
        return []


def _names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for host in hosts:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            found.append(x509.DNSName(host))
    return found
