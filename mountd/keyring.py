"""The keys that blocks are encrypted with, from where the configuration says."""

import os

from ctxfs.codec.keyring import KeyRing
from ctxfs.config import CodecConfig
from ctxfs.device import keys


def key_ring(codec: CodecConfig) -> KeyRing | None:
    """Return them; None: nothing is encrypted. Raises ConfigError."""
    source = str(codec.key_file) if codec.key_file is not None else None
    if codec.keyring is not None:
        source = f"{keys.KEYRING_PREFIX}{codec.keyring}"
    return KeyRing.parse(keys.read_keys(source), os.urandom, source) if source else None
