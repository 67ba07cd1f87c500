"""The codec in threads: how blocks are made smaller and secret for the tiers below, and back."""

from __future__ import annotations

import os
import struct
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import trio

from ctxfs.codec import stream
from ctxfs.codec.header import Header, Method
from ctxfs.codec.keyring import KeyRing
from ctxfs.codec.plan import WORTHWHILE_BYTES
from ctxfs.codec.same import is_same
from ctxfs.codec.stream import CodecSettings, Spread
from ctxfs.core.worth import Worth
from ctxfs.device.engine import Span
from ctxfs.device.mapping import PAGE, Mapping, zero
from ctxfs.device.memorypool import POOL
from ctxfs.errors import CtxfsError

SPREAD_BYTES_MIN = 2 << 20  # shorter blocks are one thread's work
SAME_INLINE_BYTES = 256 << 10  # to compare less takes less time than the way to a thread
_CONTEXT = struct.Struct("<QQ")  # generation, bytes of content
# What a copy's method, one small number, means; with _ENCRYPTED it is encrypted as well.
_METHODS = ("raw", "raw", "zstd", "zstd+planes2", "zstd+planes4", "zstd+planes8")
_STORED, _ZSTD = 1, {1: 2, 2: 3, 4: 4, 8: 5}
_ENCRYPTED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingSettings:
    """`gain_ratio`: the part of a block that compression has to save at least. `keys`: encrypt.
    `share`: the cold tier stores a content once, whatever its keys are.
    """

    compress: bool = False
    level: int = 1
    gain_ratio: float = 0.05
    keys: KeyRing | None = None
    share: bool = True


@dataclass(frozen=True, slots=True)
class Encoded:
    """A stream, in memory that lasts until the end of the `with` it came from."""

    view: memoryview
    span: Span  # the same in whole pages, with zeros behind the end
    method: int

    @property
    def length_bytes(self) -> int:
        return len(self.view)


def method_name(method: int) -> str:
    """Return what `user.ctx.codec` shows for how a copy is stored."""
    known = method & ~_ENCRYPTED
    name = _METHODS[known] if known < len(_METHODS) else "unknown"
    return f"{name}+aes256gcm" if method & _ENCRYPTED else name


def _method_of(header: Header) -> int:
    compressed = header.method is Method.ZSTD
    method = _ZSTD[header.layout.planes] if compressed else _STORED
    return method | _ENCRYPTED if header.key_id else method


class Coding:
    """One for all tiers. `settings` may be changed at any time, and counts for what comes then."""

    def __init__(self, settings: CodingSettings | None = None) -> None:
        self.settings = settings or CodingSettings()
        self.worth = Worth()
        workers = os.cpu_count() or 1
        self._limiter = trio.CapacityLimiter(workers)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="codec")

    def close(self) -> None:
        """End its threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def encoded(
        self, content: memoryview, dtype: bytes, generation: int, *, shorter: bool = False
    ) -> AsyncIterator[Encoded | None]:
        """Give content as it is to be stored, or None: as it is.

        `shorter`: only where it is; else whatever keys ask for.
        """
        settings = self.settings
        # What does not pay is not even sampled each time; of a warm copy that was asked before.
        is_large = len(content) >= WORTHWHILE_BYTES
        if is_large and settings.compress and not shorter:
            worth = self.worth.is_promising(dtype, 1 / (1 - settings.gain_ratio))
            settings = replace(settings, compress=worth)
        if not content or not (settings.compress or settings.keys):
            yield None
            return
        memory = _Memory()
        try:
            work = partial(self._encode, settings, content, dtype, generation, memory, shorter)
            made = await trio.to_thread.run_sync(work, limiter=self._limiter)
            if is_large and settings.compress:
                self.worth.tried(dtype, len(content), made.length_bytes if made else None)
            yield made
        finally:
            memory.close()

    def _encode(
        self,
        settings: CodingSettings,
        content: memoryview,
        dtype: bytes,
        generation: int,
        memory: _Memory,
        shorter: bool,
    ) -> Encoded | None:
        codec = CodecSettings(level=settings.level, gain_min=settings.gain_ratio)
        plan = stream.plan(content, dtype, codec) if settings.compress else None
        if plan is None:
            if shorter or settings.keys is None:
                return None
            plan = stream.stored_plan(codec)
        made = stream.encode(
            content,
            plan,
            memory.allocate,
            keys=settings.keys,
            context=_context(generation, content),
            spread=self._spread(len(content)),
        )
        if made is None or (shorter and len(made) > len(content) * (1 - settings.gain_ratio)):
            return None
        return memory.encoded(made, _method_of(stream.read_header(made)))

    def may_be_kept(self, method: int) -> bool:
        """Whether what was stored like this before may be stored like this again: not unencrypted,
        since there is a key now.
        """
        return self.settings.keys is None or bool(method & _ENCRYPTED)

    async def holds(
        self, stored: memoryview, method: int, generation: int, content: memoryview
    ) -> bool:
        """Whether `stored`, made in this way for that generation, is this content, and may stand
        for it: where there are keys it was encrypted with the newest.

        Raises CopyCorrupt, UnknownKey, NewerStream.
        """
        if not method:
            return await self._is_same(stored, content)
        keys = self.settings.keys
        if keys is not None and stream.read_header(stored).key_id != keys.newest.id:
            return False
        with POOL.memory(len(content)) as decoded:
            await self.decode(stored, decoded.view, generation)
            return await self._is_same(decoded.view, content)

    async def _is_same(self, one: memoryview, other: memoryview) -> bool:
        if len(one) <= SAME_INLINE_BYTES:
            return is_same(one, other)
        return await trio.to_thread.run_sync(is_same, one, other, limiter=self._limiter)

    async def decode(self, encoded: memoryview, content: memoryview, generation: int) -> None:
        """Fill `content` from a stream. Raises CopyCorrupt, UnknownKey, NewerStream."""
        work = partial(self._decode, self.settings.keys, encoded, content, generation)
        failed = await trio.to_thread.run_sync(work, limiter=self._limiter)
        if failed is not None:
            raise failed

    def _decode(
        self, keys: KeyRing | None, encoded: memoryview, content: memoryview, generation: int
    ) -> CtxfsError | None:
        try:
            stream.decode_into(
                encoded,
                content,
                keys=keys,
                context=_context(generation, content),
                spread=self._spread(len(content)),
            )
        except CtxfsError as error:
            # Frames hold pieces of mappings that are to be closed.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            return type(error)(str(error))
        return None

    def _spread(self, length: int) -> Spread:
        return self._map if length >= SPREAD_BYTES_MIN else map

    def _map(self, function: Any, tasks: Iterable[Any], /) -> Iterable[Any]:
        return self._pool.map(function, tasks)


class _Memory:
    """Where one stream is made: pages of its own, taken when the codec knows how many."""

    def __init__(self) -> None:
        self._mapping: Mapping | None = None
        self._lent: list[memoryview] = []

    def allocate(self, length: int) -> memoryview:
        self._mapping = POOL.take(length)
        self._lent.append(self._mapping.view[:])
        return self._lent[-1]

    def encoded(self, made: memoryview, method: int) -> Encoded:
        assert self._mapping is not None
        self._lent.append(made)
        padding = -len(made) % PAGE  # pieces of others' content must not get to a medium
        zero(Span(self._mapping.address + len(made), padding))
        return Encoded(made, self._mapping.span(0, len(made)), method)

    def close(self) -> None:
        for view in reversed(self._lent):
            view.release()
        if self._mapping is not None:
            POOL.give_back(self._mapping)


def _context(generation: int, content: memoryview) -> bytes:
    """What a stream belongs to: bytes of one block are never taken for another's."""
    return _CONTEXT.pack(generation, len(content))
