"""What compresses blocks, of ours and of others, in one shape."""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import zstandard

from ctxfs.codec.keyring import Key, KeyRing
from ctxfs.codec.spreading import Spread
from ctxfs.codec.stream import CodecSettings, decode_into, encode, encoded_length_max, plan

CONTEXT = b"what a block is known by"
ZIPNN_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Rival:
    """`encode` takes a block and gives its encoded bytes; `decode` gives the block back."""

    name: str
    encode: Callable[[bytes], Any]
    decode: Callable[[Any], Any]


@contextlib.contextmanager
def rivals(dtype: str, longest: int, threads: int) -> Iterator[list[Rival]]:
    """All that can run here, for blocks of one dtype and at most `longest` bytes."""
    with ThreadPoolExecutor(threads) as executor:
        keys = KeyRing([Key(b"bench", bytes(range(32)))], os.urandom)
        found = [
            _ours("ctxfs", dtype, longest),
            _ours("ctxfs, no hint", "", longest),
            _ours("ctxfs, aes256gcm", dtype, longest, keys=keys),
        ]
        if threads > 1:
            found.append(_ours(f"ctxfs, {threads} threads", dtype, longest, spread=executor.map))
        found += [_zstd(level) for level in (1, 3)]
        if (zipnn := _zipnn(dtype)) is not None:
            found.append(zipnn)
        yield found


def _ours(
    name: str, dtype: str, longest: int, *, keys: KeyRing | None = None, spread: Spread = map
) -> Rival:
    """Planning included. The memory written to is used again, as a tier's is."""
    settings = CodecSettings()
    room = memoryview(bytearray(encoded_length_max(longest, settings)))
    target = memoryview(bytearray(longest))

    def to_stream(block: bytes) -> tuple[memoryview, int]:
        source = memoryview(block)
        found = plan(source, dtype.encode(), settings)
        if found is not None:
            encoded = encode(
                source, found, lambda _: room, keys=keys, context=CONTEXT, spread=spread
            )
            if encoded is not None:
                return encoded, len(block)
        raise ValueError("a block does not compress, so there is nothing to measure")

    def from_stream(encoded: tuple[memoryview, int]) -> memoryview:
        stream, length = encoded
        decode_into(stream, target[:length], keys=keys, context=CONTEXT, spread=spread)
        return target[:length]

    return Rival(name, to_stream, from_stream)


def _zstd(level: int) -> Rival:
    compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    return Rival(f"zstd -{level}", compressor.compress, decompressor.decompress)


def _zipnn(dtype: str) -> Rival | None:
    """https://pypi.org/project/zipnn/, which wants torch: only where somebody has installed it."""
    try:
        zipnn = importlib.import_module("zipnn")
    except ImportError:
        return None
    coder = zipnn.ZipNN(
        input_format="byte", bytearray_dtype=ZIPNN_NAMES.get(dtype, "float32"), threads=1
    )
    # It turns bits in the memory that it is given, so it gets a copy.
    return Rival("zipnn, with a copy", partial(_in_copy, coder.compress), coder.decompress)


def _in_copy(compress: Callable[[bytearray], Any], block: bytes) -> Any:
    return compress(bytearray(block))
