"""The bytes of a hot file that nobody changes: as memory, and their digest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

import trio

from ctxfs.codec.digest import digest, digest_of_pieces
from ctxfs.device.engine import Span
from ctxfs.device.lanes import Source
from ctxfs.device.links import FileSpan
from ctxfs.device.memorypool import POOL
from ctxfs.tiers.hot import HotFile

DIGEST_INLINE_BYTES = 128 << 10  # below this a thread costs more than the digest
# What was received a moment ago is in the processor's caches, and one who waits for it waits longer
# for a thread than for this much.
RECEIVED_INLINE_BYTES = 4 << 20


async def content_digest(file: HotFile, *, inline_bytes: int = DIGEST_INLINE_BYTES) -> bytes:
    """Return the digest of a file that nobody changes, in a thread when that pays: above so many
    bytes.
    """
    if file.has_holes():
        return await trio.to_thread.run_sync(lambda: digest_of_pieces(file.pieces()))
    view = file.mapping().view
    if file.size <= inline_bytes:
        return digest(view)
    return await trio.to_thread.run_sync(digest, view)


def sendable(file: HotFile, offset: int, length: int) -> Source:
    """Return bytes of a file that nobody changes, to be sent: memory, to be released afterwards, or
    where a mapping must not be touched, the file's own. Raises TierTrouble.
    """
    if file.has_holes():
        return FileSpan(file.fd, offset, length)
    return file.mapping().view[offset : offset + length]


async def received_digest(file: HotFile) -> bytes:
    """The same, of a file that a peer's bytes have just been received into."""
    return await content_digest(file, inline_bytes=RECEIVED_INLINE_BYTES)


@contextlib.asynccontextmanager
async def readable_span(
    file: HotFile, *, copied: bool = False
) -> AsyncIterator[tuple[Span, memoryview]]:
    """Give a file's content as memory: whole pages, and the bytes alone.

    `copied`: a copy of it, since somebody may change it. Of a file with holes it is always one.
    """
    if not copied and not file.has_holes():
        yield file.span(), file.mapping().view
        return
    with POOL.memory(file.size) as copy:
        await trio.to_thread.run_sync(_read_whole, file.fd, copy.view)
        yield copy.span(0, copy.size), copy.view


def _read_whole(fd: int, view: memoryview) -> None:
    done = 0
    while done < len(view) and (got := os.preadv(fd, [view[done:]], done)):  # at most 2 GiB each
        done += got
    view[done:] = bytes(len(view) - done)  # if it is shorter than it was
