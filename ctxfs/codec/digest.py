"""The content hash of a block.

XXH3-128 runs at memory speed, which a cryptographic hash does not; it finds broken media and
torn writes, not forgers. https://github.com/Cyan4973/xxHash
"""

from collections.abc import Iterable
from typing import Final

import xxhash

DIGEST_BYTES: Final = 16
DIGEST_NAME: Final = "xxh3-128"
EMPTY: Final[bytes] = xxhash.xxh3_128_digest(b"")


def digest(content: memoryview | bytes) -> bytes:
    """Return the 16-byte XXH3-128 of `content`, big-endian. Lets other threads run meanwhile."""
    result: bytes = xxhash.xxh3_128_digest(content)
    return result


def digest_of_pieces(pieces: Iterable[memoryview | bytes]) -> bytes:
    """Return the digest of a content that comes piece by piece."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    result: bytes = state.digest()
    return result
