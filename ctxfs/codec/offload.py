"""The seam at which an accelerator may take over: compress, encrypt, digest. The CPU does it now.

What an implementation promises is in docs/codec.md.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import xxhash
import zstandard
from zstandard import ZstdCompressionParameters, ZstdCompressor, ZstdDecompressor, ZstdError

from ctxfs.codec.pool import Pool
from ctxfs.errors import BadStream, BadTag

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

DIGEST_BYTES: Final = 16
TAG_BYTES: Final = 16
WINDOW_BYTES: Final = 128 << 10  # that a frame may ask for, however little it holds
ZSTD_LEVEL_MAX: Final = 19  # above, memory grows out of proportion

Buffer = memoryview | bytes | bytearray


class Effort(enum.Enum):
    """How to compress. `ENTROPY`: what is only unevenly frequent; `SEARCH`: what repeats."""

    RAW = "raw"
    ENTROPY = "entropy"
    SEARCH = "search"


@dataclass(frozen=True, slots=True)
class Compression:
    """Compress `source`. `level` is zstd's, and counts with `SEARCH` alone."""

    source: Buffer
    effort: Effort
    level: int


@dataclass(frozen=True, slots=True)
class Decompression:
    """Inflate `source`, one frame, into all of `target`."""

    source: Buffer
    target: memoryview


@dataclass(frozen=True, slots=True)
class Ciphering:
    """Encrypt text to text and tag, or back. `target` has exactly the length of the result."""

    nonce: bytes
    associated: bytes
    source: Buffer
    target: memoryview


class Offload(Protocol):
    """Batches of work over buffers. All calls may come from several threads at once."""

    @property
    def name(self) -> str: ...

    @property
    def batch_chunks(self) -> int:
        """How many chunks it likes to be given in one call."""

    def compress(self, jobs: Sequence[Compression]) -> list[Buffer | None]:
        """A zstd frame for each job, or None where that would not be smaller than the source."""

    def decompress(self, jobs: Sequence[Decompression]) -> None:
        """Fill the targets. Raises BadStream."""

    def encrypt(self, key: bytes, jobs: Sequence[Ciphering]) -> None:
        """AES-256-GCM; 16 bytes of tag go behind the text."""

    def decrypt(self, key: bytes, jobs: Sequence[Ciphering]) -> None:
        """The reverse. Raises BadTag; the targets are then to be thrown away."""

    def checksum(self, pieces: Iterable[Buffer]) -> int:
        """XXH3-64 of the pieces, one behind the other."""

    def digest(self, pieces: Iterable[Buffer]) -> bytes:
        """XXH3-128 of the pieces, one behind the other; big-endian, 16 bytes."""


def _parameters(effort: Effort, level: int) -> ZstdCompressionParameters:
    if effort is Effort.ENTROPY:
        # Chance matches in a plane of exponents cost time and size: docs/codec.md.
        return ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6, window_log=16)
    return ZstdCompressionParameters.from_level(level)


class CpuOffload:
    """zstd, OpenSSL and xxHash in the calling thread. Satisfies `Offload`."""

    name = "cpu"
    batch_chunks = 1

    def __init__(self) -> None:
        self._compressors: dict[tuple[Effort, int], Pool[ZstdCompressor]] = {}
        self._decompressors = Pool(ZstdDecompressor)

    def compress(self, jobs: Sequence[Compression]) -> list[Buffer | None]:
        return [self._compress(job) for job in jobs]

    def _compress(self, job: Compression) -> bytes | None:
        if job.effort is Effort.RAW:
            return None
        kind = (job.effort, job.level if job.effort is Effort.SEARCH else 0)
        # Two threads may both find nothing here; `setdefault` leaves one pool.
        pool = self._compressors.get(kind) or self._compressors.setdefault(
            kind, Pool(lambda: ZstdCompressor(compression_params=_parameters(*kind)))
        )
        compressor = pool.take()
        frame = compressor.compress(job.source)
        pool.give(compressor)
        return frame if len(frame) < len(job.source) else None

    def decompress(self, jobs: Sequence[Decompression]) -> None:
        decompressor = self._decompressors.take()
        try:
            for job in jobs:
                _inflate(decompressor, job)
        except (ZstdError, MemoryError) as error:
            raise BadStream(f"a frame cannot be inflated: {error}") from error
        self._decompressors.give(decompressor)  # one that failed is not used again

    def encrypt(self, key: bytes, jobs: Sequence[Ciphering]) -> None:
        cipher = _aes(key)
        for job in jobs:
            cipher.encrypt_into(job.nonce, job.source, job.associated, job.target)

    def decrypt(self, key: bytes, jobs: Sequence[Ciphering]) -> None:
        from cryptography.exceptions import InvalidTag

        cipher = _aes(key)
        try:
            for job in jobs:
                cipher.decrypt_into(job.nonce, job.source, job.associated, job.target)
        except InvalidTag as error:
            raise BadTag("the tag does not match") from error

    def checksum(self, pieces: Iterable[Buffer]) -> int:
        state = xxhash.xxh3_64()
        for piece in pieces:
            state.update(piece)
        return int(state.intdigest())

    def digest(self, pieces: Iterable[Buffer]) -> bytes:
        state = xxhash.xxh3_128()
        for piece in pieces:
            state.update(piece)
        result: bytes = state.digest()
        return result


def _inflate(decompressor: ZstdDecompressor, job: Decompression) -> None:
    """With a target as long as the frame says, zstd writes there at once and needs no window."""
    length = len(job.target)
    frame = zstandard.get_frame_parameters(job.source)
    if frame.content_size != length:
        raise BadStream("a frame does not hold what its plane should have")
    # A frame that is cut short gets a window all the same, before that is noticed.
    if frame.window_size > max(length, WINDOW_BYTES):
        raise BadStream("a frame wants more memory than its plane has")
    with decompressor.stream_reader(job.source, closefd=False) as reader:
        if reader.readinto(job.target) != length:
            raise BadStream("a frame ends early")


def _aes(key: bytes) -> "AESGCM":
    # Imported where it is first needed: it is 7 MB of memory that a mount without keys saves.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


CPU: Final = CpuOffload()
