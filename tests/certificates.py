"""Certificates for tests: an authority, and what it signs, as files."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class Files:
    """Where a certificate and its key are."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates for servers and clients alike, good for a day."""

    def __init__(self, directory: Path, name: str = "test authority") -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(self._name, self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        self.cert = directory / f"{name.replace(' ', '-')}.pem"
        signed = builder.sign(self._key, hashes.SHA256())
        self.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> Files:
        """A certificate for this DNS name and the loopback address."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signed = (
            _builder(subject, self._name, key.public_key())
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name), loopback]), False)
            .add_extension(x509.ExtendedKeyUsage(usages), False)
            .sign(self._key, hashes.SHA256())
        )
        files = Files(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        files.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        files.key.touch(mode=0o600)
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - hour)
        .not_valid_after(now + 24 * hour)
    )
