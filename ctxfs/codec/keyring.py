"""Keys by id: the newest encrypts, all decrypt. Each stream has a key of its own, made of one."""

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from ctxfs.errors import ConfigError, UnknownKey

SECRET_BYTES: Final = 32
ID: Final = re.compile(r"[A-Za-z0-9._-]{1,16}", re.ASCII)
_PURPOSE: Final = b"ctxfs codec 1"


@dataclass(frozen=True, slots=True)
class Key:
    """`secret`: 32 bytes, which no text shows."""

    id: bytes
    secret: bytes = field(repr=False)

    def stream_key(self, salt: bytes) -> bytes:
        """The key of the one stream that has this salt."""
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return HKDF(SHA256(), SECRET_BYTES, salt, _PURPOSE).derive(self.secret)


class KeyRing:
    """At least one key, the newest last. `random` gives that many unpredictable bytes."""

    def __init__(self, keys: Sequence[Key], random: Callable[[int], bytes]) -> None:
        if not keys:
            raise ConfigError("there is no key")
        self._keys = {key.id: key for key in keys}
        if len(self._keys) != len(keys):
            raise ConfigError("two keys have the same id")
        self.newest = keys[-1]
        self.random = random

    @classmethod
    def parse(cls, content: bytes, random: Callable[[int], bytes], source: str) -> Self:
        """The keys in `content`; `source` says in errors where it came from, which show no key."""
        try:
            return cls(parse_keys(content), random)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @property
    def ids(self) -> tuple[bytes, ...]:
        """In their order, the newest last."""
        return tuple(self._keys)

    def find(self, key_id: bytes) -> Key:
        """Raises UnknownKey."""
        try:
            return self._keys[key_id]
        except KeyError:
            raise _unknown(key_id) from None


def find_key(keys: KeyRing | None, key_id: bytes) -> Key:
    """The key of this id, where there may be no keys at all. Raises UnknownKey."""
    if keys is None:
        raise _unknown(key_id)
    return keys.find(key_id)


def _unknown(key_id: bytes) -> UnknownKey:
    return UnknownKey(f"encrypted with key {key_id.decode('ascii', 'replace')}, which is not here")


def parse_keys(content: bytes) -> list[Key]:
    """The keys of a key file, in order: docs/codec.md. Raises ConfigError, which shows no key."""
    if len(content) == SECRET_BYTES:
        return [Key(_fingerprint(content), content)]
    keys = list(_lines(content))
    if not keys:
        raise ConfigError("there is no key")
    return keys


def _lines(content: bytes) -> Iterator[Key]:
    try:
        text = content.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError("a key file has 32 bytes, or lines of text") from None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        secret = _secret(words[-1])
        if secret is None or len(words) > 2:
            raise ConfigError(f"line {number}: not `id key` with 32 bytes in hex or base64")
        if len(words) == 1:
            yield Key(_fingerprint(secret), secret)
        elif ID.fullmatch(words[0]):
            yield Key(words[0].encode(), secret)
        else:
            raise ConfigError(f"line {number}: an id is 1 to 16 of A-Z a-z 0-9 . _ -")


def _secret(word: str) -> bytes | None:
    try:
        if len(word) == 2 * SECRET_BYTES:
            return bytes.fromhex(word)
        secret = base64.b64decode(word, validate=True)
    except (ValueError, binascii.Error):
        return None
    return secret if len(secret) == SECRET_BYTES else None


def _fingerprint(secret: bytes) -> bytes:
    return hashlib.sha256(secret).hexdigest()[:8].encode()
