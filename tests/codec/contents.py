"""Contents as caches hold them, and short ways to encode and decode them."""

import hashlib
from collections.abc import Callable

import numpy as np

from ctxfs.codec.keyring import Key, KeyRing
from ctxfs.codec.offload import CPU, Effort, Offload
from ctxfs.codec.planes import Layout
from ctxfs.codec.spreading import Spread
from ctxfs.codec.stream import CodecSettings, Plan, decode_into, encode, plan

SMALL = CodecSettings(chunk_bytes=4096)
SETTINGS = CodecSettings()
BF16 = Layout(2, True)
KEY = Key(b"first", b"\x01" * 32)
OTHER_KEY = Key(b"second", b"\x02" * 32)


def floats(count: int, seed: int = 1) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(count, dtype=np.float32)


def bf16(count: int, seed: int = 1) -> bytes:
    """Normally distributed numbers, cut to bf16."""
    return (floats(count, seed).view(np.uint32) >> 16).astype("<u2").tobytes()


def fp16(count: int, seed: int = 1) -> bytes:
    return floats(count, seed).astype("<f2").tobytes()


def noise(length: int, seed: int = 1) -> bytes:
    """What nothing compresses."""
    return np.random.default_rng(seed).bytes(length)


class Counting:
    """Bytes that look random and are not, so that a test fails the same way twice."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def __call__(self, length: int) -> bytes:
        self.taken.append(hashlib.shake_128(str(len(self.taken)).encode()).digest(length))
        return self.taken[-1]


def ring(*keys: Key) -> KeyRing:
    return KeyRing(keys or (KEY,), Counting())


def plan_for(layout: Layout, *, phase: int = 0, settings: CodecSettings = SMALL) -> Plan:
    """Any layout at all, whether it fits or not: search in the first plane, entropy in the rest."""
    efforts = (Effort.SEARCH, *[Effort.ENTROPY] * (layout.planes - 1))
    return Plan(settings=settings, layout=layout, phase=phase, efforts=efforts, ratio=2.0)


def planned(content: bytes, dtype: bytes = b"", settings: CodecSettings = SETTINGS) -> Plan:
    found = plan(memoryview(content), dtype, settings)
    assert found is not None
    return found


def page(length: int) -> memoryview:
    return memoryview(bytearray(length))


def encoded(
    content: bytes,
    how: Plan,
    *,
    keys: KeyRing | None = None,
    context: bytes = b"",
    allocate: Callable[[int], memoryview] = page,
    offload: Offload = CPU,
    spread: Spread = map,
) -> bytes:
    found = encode(
        memoryview(content),
        how,
        allocate,
        keys=keys,
        context=context,
        offload=offload,
        spread=spread,
    )
    assert found is not None
    return bytes(found)


def decoded(
    stream: bytes,
    length: int,
    *,
    keys: KeyRing | None = None,
    context: bytes = b"",
    spread: Spread = map,
) -> bytes:
    target = bytearray(length)
    decode_into(memoryview(stream), memoryview(target), keys=keys, context=context, spread=spread)
    return bytes(target)
