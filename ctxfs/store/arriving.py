"""What an offered block, or the sign that a directory is there, arrives in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from ctxfs.tiers.hot import HotFile
from ctxfs.wire.messages import Durability

NOTHING: Final = memoryview(bytearray())


class Arriving:
    """A block on its way into a hot file that nobody else knows. One of `stored` and `abandon`
    ends it. Satisfies `ctxfs.device.door.Arrival`.
    """

    def __init__(
        self,
        file: HotFile,
        publish: Callable[[], Awaitable[Durability]],
        let_go: Callable[[], None],
    ) -> None:
        """`publish` ends the lease on the file, whatever becomes of it. Raises TierTrouble."""
        self.target = file.mapping().view
        self._publish = publish
        self._let_go = let_go

    async def stored(self) -> Durability:
        """Verify it and have it found under its key. Raises CopyCorrupt, BlockGone, CtxfsError."""
        return await self._publish()

    def abandon(self) -> None:
        """The rest does not come."""
        self._let_go()


class ArrivingDirectory:
    """A directory that is to be made: no bytes. Satisfies `ctxfs.device.door.Arrival`."""

    target = NOTHING

    def __init__(self, make: Callable[[], Awaitable[None]]) -> None:
        self._make = make

    async def stored(self) -> Durability:
        """Make it. Raises CtxfsError."""
        await self._make()
        return Durability.MEMORY

    def abandon(self) -> None:
        """Nothing was made yet."""
