"""A certificate authority for tests: members' certificates as PEM files."""

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ctxfs.device.tls import Certificates

_DAY = datetime.timedelta(days=1)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


@dataclass
class Authority:
    """Signs for members; its files lie in `directory`."""

    directory: Path
    name: str = "ca"

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._builder(self.name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = self.directory / f"{self.name}.pem"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(self, name: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
        )

    def sign(self, name: str, file: str | None = None) -> Certificates:
        """Certificate and key of the member `name`, in files of that name, or of another."""
        self.write(name, file or name)
        base = self.directory / f"{self.name}-{file or name}"
        return Certificates(self.path, base.with_suffix(".crt"), base.with_suffix(".key"))

    def write(self, name: str, file: str) -> None:
        """Make new files, or replace those that are there."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._builder(name, key)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        base = self.directory / f"{self.name}-{file}"
        base.with_suffix(".key").write_bytes(_pem_of(key))
        base.with_suffix(".crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
