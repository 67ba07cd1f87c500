"""Writing down that a block has the same content as another one on its device."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from ctxfs.core.meta import Alias, BlockMeta
from ctxfs.errors import BlockNotFound, CtxfsError, TierFull
from ctxfs.ondisk import ledger
from ctxfs.ondisk.layout import ALIGN_BYTES, padded
from ctxfs.tiers.cold_index import ColdIndex
from ctxfs.tiers.cold_requests import check_frame, note_request
from ctxfs.tiers.cold_space import Space
from ctxfs.tiers.cold_writer import ColdWriter


@dataclass(slots=True, eq=False)
class _Coming:
    """One that waits for the next record, or for its own."""

    entry: Alias
    error: Exception | None = None


class AliasWriter:
    """Aliases of one device. Those that come while some are being written share the next record."""

    def __init__(
        self,
        space: Space,
        index: ColdIndex,
        writer: ColdWriter,
        make_ready: Callable[[], Awaitable[None]],
    ) -> None:
        """`make_ready`: has what is claimed of the space ready to be written, or raises."""
        self._space = space
        self._index = index
        self._writer = writer
        self._make_ready = make_ready
        self._writing = trio.Lock()
        self._waiting: list[_Coming] = []

    async def put(self, meta: BlockMeta, content: int) -> None:
        """Return when it is written that `meta`, which is not here, has a content that is here,
        and that the caller has claimed.

        Cancelled before the write began: nothing was put. Raises TierFull, DeviceError, BadValue,
        BlockNotFound where it was dropped meanwhile.
        """
        coming = _Coming(Alias(meta, content))
        check_frame(ledger.encode(coming.entry), self._space.geometry)
        generation = meta.generation
        self._index.sharing.coming[generation] = content
        self._waiting.append(coming)
        try:
            async with self._writing:
                if coming in self._waiting:
                    taken, self._waiting = self._waiting, []
                    with trio.CancelScope(shield=True):  # others wait for it
                        await self._write(taken)
        finally:
            if coming in self._waiting:
                self._waiting.remove(coming)
            self._index.sharing.coming.pop(generation, None)
        if not self._index.is_alias_of(generation, content):
            raise coming.error or BlockNotFound("it went away while its alias was written")

    async def _write(self, taken: list[_Coming]) -> None:
        """Write them; each that failed is told why."""
        request = note_request([each.entry for each in taken])
        cost = 2 * padded(sum(map(len, request.frames))) + 4 * ALIGN_BYTES
        error: Exception | None = None
        self._space.claimed_bytes += cost
        try:
            if self._space.room_bytes <= 0:
                raise TierFull("no room for an alias")
            await self._make_ready()
            await self._writer.submit([request])
            error = request.error
        except CtxfsError as trouble:
            error = trouble
        finally:
            self._space.claimed_bytes -= cost
        for each in taken:
            each.error = error
