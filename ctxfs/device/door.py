"""What a member answers its peers with. The store's peer door implements this."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ctxfs.device.lanes import Source
from ctxfs.wire.greeting import Identity
from ctxfs.wire.messages import (
    Answer,
    Durability,
    GoneKey,
    Lease,
    Leased,
    Offer,
    Read,
    Refused,
    Stats,
    Tombstones,
)


@dataclass(frozen=True, slots=True)
class Opened:
    """Bytes that were asked for. They stay, and nobody changes them, until `release` is called.

    `source` is exactly as long as what was asked for: memory, the faster, or of a file with holes a
    `FileSpan`. It is not touched after `release`, which is called once.
    """

    source: Source
    release: Callable[[], None]


class Arrival(Protocol):
    """Where an offered block goes. One of `stored` and `abandon` ends it; both may not."""

    @property
    def target(self) -> memoryview:
        """Writable, exactly as long as the block; of nobody else's use until the end."""

    async def stored(self) -> Durability:
        """All bytes are there: verify and keep them. Raises CtxfsError, also for a bad digest.

        Where it raises or is cancelled, it has abandoned by itself.
        """

    def abandon(self) -> None:
        """The rest does not come. Nothing touches the target any more."""


class Door(Protocol):
    """Answers peers. What raises a CtxfsError is answered as refused, by its kind:

    BlockGone as GONE, BlockNotFound as MISS, PeerBusy as BUSY, TierFull and NoRoom as NO_ROOM,
    NotPermitted and NotYours as FORBIDDEN, all others as TROUBLE. Coroutines are cancelled when
    nobody waits for the answer any more. `peer` is who asks, as its certificate says.
    """

    def stats(self) -> Stats:
        """How we are. At once: peers take its absence for our death."""

    def lookup(self, peer: Identity, keys: Sequence[bytes]) -> Sequence[Answer]:
        """One answer for each key, in order."""

    async def read(self, peer: Identity, request: Read) -> Opened:
        """Bring the block to hot if need be, and lease it."""

    async def offer(self, peer: Identity, request: Offer) -> Arrival | Refused:
        """Make room for a block, or say why it is not wanted (HAVE, GONE, NO_ROOM, BUSY)."""

    async def lease(self, peer: Identity, request: Lease) -> Leased:
        """Keep a block where it is. A lease ends by itself, at `release`, and at `left`."""

    async def release(self, peer: Identity, lease: int) -> None:
        """End a lease; it may have ended."""

    async def forget(self, peer: Identity, entries: Sequence[GoneKey]) -> None:
        """These are gone. Returns when a restart would not forget that."""

    async def tombstones(self, peer: Identity, known: dict[int, int], cursor: int) -> Tombstones:
        """A page of what is gone that who knows so much has not heard of, by version, from above
        `cursor` on; at most BATCH_MAX entries."""

    def left(self, peer: Identity, session: bytes) -> None:
        """A control connection ended; another one of the same peer may live."""
