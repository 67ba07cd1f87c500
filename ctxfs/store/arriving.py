"""What an offered block, or the sign that a directory is there, arrives in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from ctxfs.core.block import Block
from ctxfs.tiers.hot import HotFile
from ctxfs.wire.messages import Durability, Offer

Publish = Callable[[Offer, Block, HotFile], Awaitable[Durability]]
LetGo = Callable[[Offer, HotFile], None]
NOTHING: Final = memoryview(bytearray())


class Arriving:
    """A block on its way into a hot file that nobody else knows. One of `stored` and `abandon`
    ends it. Satisfies `ctxfs.device.door.Arrival`.
    """

    def __init__(
        self, offer: Offer, block: Block, file: HotFile, publish: Publish, let_go: LetGo
    ) -> None:
        """`publish` ends the lease on the file, whatever becomes of it. Raises TierTrouble."""
        self.target = file.mapping().view
        self._offer = offer
        self._block = block
        self._file = file
        self._publish = publish
        self._let_go = let_go

    async def stored(self) -> Durability:
        """Verify it and have it found under its key. Raises CopyCorrupt, BlockGone, CtxfsError."""
        return await self._publish(self._offer, self._block, self._file)

    def abandon(self) -> None:
        """The rest does not come."""
        self._let_go(self._offer, self._file)


class ArrivingDirectory:
    """A directory that is to be made: no bytes. Satisfies `ctxfs.device.door.Arrival`."""

    target = NOTHING

    def __init__(self, offer: Offer, make: Callable[[Offer], Awaitable[None]]) -> None:
        self._offer = offer
        self._make = make

    async def stored(self) -> Durability:
        """Make it. Raises CtxfsError."""
        await self._make(self._offer)
        return Durability.MEMORY

    def abandon(self) -> None:
        """Nothing was made yet."""
