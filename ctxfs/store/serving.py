"""What other hosts are told of the blocks that are here, and what they may read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ctxfs.codec.digest import EMPTY
from ctxfs.core.block import Block, Directory, State
from ctxfs.core.key import is_lock, is_temporary
from ctxfs.core.times import NEVER, Now
from ctxfs.core.tombstones import Tombstones
from ctxfs.errors import BlockGone, BlockNotFound
from ctxfs.store.elsewhere import PREFIXES, attributes_of
from ctxfs.store.handle import Handle
from ctxfs.store.keys import block_at, directory_at
from ctxfs.store.store import Store
from ctxfs.wire.messages import Answer, Attributes, Gone, Have, Miss, Tiers

PEERS = -2  # the owner of what is open for other hosts: no process


class Serving:
    """Answers for sealed blocks with a copy here. Those that are only elsewhere are no answer."""

    def __init__(self, store: Store, tombstones: Tombstones) -> None:
        # Whether others may hear of a block that has a temporary name: it may get another soon.
        self.was_offered: Callable[[Block], bool] = lambda block: True
        self._store = store
        self._catalog = store.catalog
        self._tombstones = tombstones

    def lookup(self, keys: Sequence[bytes], load: int) -> list[Answer]:
        """One answer for each key. `load`: 0 idle to 255, read elsewhere if you can."""
        now = self._catalog.clock()
        return [self._answer(key, now, load) for key in keys]

    def _answer(self, key: bytes, now: Now, load: int) -> Answer:
        have = self._have_directory(key) if key.startswith(PREFIXES) else None
        block = self._block(key, now)
        if block is not None:
            have = self._have(block, now, load)
        dead = self._tombstones.get(key)
        if have is not None and (dead is None or have.version > dead.version):
            return have
        return Gone(dead.version, dead.until_ns) if dead is not None else Miss()

    def _block(self, key: bytes, now: Now) -> Block | None:
        """The block of this key that others may have."""
        block = block_at(self._catalog, key)
        if block is None or block.state is not State.SEALED or is_lock(block.name):
            return None
        if is_temporary(block.name) and not self.was_offered(block):
            return None
        is_over = block.expires_ns != NEVER and block.expires_ns <= now.boot_ns
        return block if self._catalog.is_here(block) and not is_over else None

    def _have(self, block: Block, now: Now, load: int) -> Have:
        catalog = self._catalog
        tiers = (
            (Tiers.HOT, block.is_hot),
            (Tiers.WARM, catalog.is_warm(block)),
            (Tiers.COLD, catalog.is_cold(block)),
        )
        return Have(
            version=block.version,
            size=block.size,
            digest=block.digest,
            tiers=sum(tier for tier, is_there in tiers if is_there),
            load=load,
            attributes=attributes_of(block, now),
        )

    def _have_directory(self, key: bytes) -> Have | None:
        """The sign that a directory is there is the directory itself."""
        directory = directory_at(self._catalog, key.removeprefix(PREFIXES))
        if directory is None:
            return None
        return Have(
            version=directory.inode,
            size=0,
            digest=EMPTY,
            tiers=Tiers.HOT,
            load=0,
            attributes=directory_attributes(directory),
        )

    async def open(self, key: bytes, version: int) -> Handle:
        """Lease the bytes of a version, promoted if need be; `Store.release` ends it.

        Whoever wrote them does not go on with this generation afterwards. Raises BlockGone,
        BlockNotFound, and as `Store.open_for_read`.
        """
        block = self._block(key, self._catalog.clock())
        if block is not None and block.version == version:
            return await self._store.open_for_read(block, owner=PEERS)
        dead = self._tombstones.get(key)
        if dead is not None and version <= dead.version:
            raise BlockGone("the block was removed", dead.version, dead.until_ns)
        raise BlockNotFound("this version is not here")


def directory_attributes(directory: Directory) -> Attributes:
    """What travels with the sign that a directory is there."""
    return Attributes(
        mode=directory.mode,
        uid=directory.uid,
        gid=directory.gid,
        created_ns=max(0, directory.mtime_ns),
        mtime_ns=max(0, directory.mtime_ns),
    )
