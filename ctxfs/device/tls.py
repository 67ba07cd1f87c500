"""Certificates from files, for both ends of a connection; read again when the files changed."""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from ctxfs.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Insecure:
    """No TLS: every name that is claimed is believed. Only where somebody said so."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """For those whom we dial, and those who dial us."""

    dialing: ssl.SSLContext
    listening: ssl.SSLContext


class Certificates:
    """Who we are, and whom we believe. A connection that is there stays when files change."""

    def __init__(self, authority: Path, certificate: Path, key: Path) -> None:
        """PEM files: of who signs for members; of us; our key. Raises ConfigError."""
        self._paths = (authority, certificate, key)
        self._signature = self._look()
        self._contexts = self._load()
        self.trouble: str | None = None  # why the files as they are now are not used

    @property
    def contexts(self) -> Contexts:
        """By the files as they are; by what they were while they are no good (see `trouble`)."""
        try:
            signature = self._look()
            if signature != self._signature:
                self._contexts = self._load()
                self._signature = signature
            self.trouble = None
        except ConfigError as error:
            # Such files are halfway through being replaced, or damaged: looked at again each time.
            self.trouble = str(error)
        return self._contexts

    def ends(self) -> dict[str, str | None]:
        """By file of certificates: when the first of them is no good any more, in UTC; None where
        that cannot be read.
        """
        return {str(path): _end_of(path) for path in self._paths[:2]}

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        try:
            found = [os.stat(path) for path in self._paths]
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)

    def _load(self) -> Contexts:
        authority, certificate, key = self._paths
        made = []
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = ssl.SSLContext(protocol)
            # Names are compared by us, on both sides alike: a member's is no host's.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            try:
                context.load_verify_locations(authority)
                context.load_cert_chain(certificate, key)
            except OSError as error:
                raise ConfigError(
                    f"{authority}, {certificate}, {key}: {error.strerror or error}"
                ) from error
            made.append(context)
        dialing, listening = made
        listening.num_tickets = 0
        return Contexts(dialing, listening)


def _end_of(path: Path) -> str | None:
    # Imported when asked: it is large.
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        return None
    return min(each.not_valid_after_utc for each in found).isoformat()


Security = Certificates | Insecure
