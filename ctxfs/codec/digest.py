"""The content hash of a block.

XXH3-128 runs at memory speed, which a cryptographic hash does not; it finds broken media and
torn writes, not forgers. https://github.com/Cyan4973/xxHash
"""

from collections.abc import Iterable
from typing import Final

from ctxfs.codec.offload import CPU, DIGEST_BYTES, Buffer, Offload

__all__ = ["DIGEST_BYTES", "DIGEST_NAME", "EMPTY", "digest", "digest_of_pieces"]

DIGEST_NAME: Final = "xxh3-128"
EMPTY: Final[bytes] = CPU.digest(())


def digest(content: Buffer, offload: Offload = CPU) -> bytes:
    """Return the 16-byte XXH3-128 of `content`, big-endian. Lets other threads run meanwhile."""
    return offload.digest((content,))


def digest_of_pieces(pieces: Iterable[Buffer], offload: Offload = CPU) -> bytes:
    """Return the digest of a content that comes piece by piece."""
    return offload.digest(pieces)
