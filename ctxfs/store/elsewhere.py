"""Blocks that other hosts have: found when a name leads nowhere here, fetched when opened."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from ctxfs.core.block import Block, Directory, Extras, State
from ctxfs.core.meta import PIN_FOREVER, PIN_NONE
from ctxfs.core.times import NEVER, Now
from ctxfs.core.versions import VersionAhead
from ctxfs.errors import CopyCorrupt
from ctxfs.store.catalog import Catalog
from ctxfs.wire.messages import FOREVER_NS, Attributes

log = logging.getLogger(__name__)

# Where others keep what says that a directory is there. No block can have such a name.
PREFIXES = b".ctx/prefix/"
# A block that nobody opens is as good as unknown after that: its holders may have dropped it.
BELIEVED_NS = 10_000_000_000
_TIME_MAX = 2**63 - 1  # of what is written down
KNOWN_MAX = 65536  # blocks without any copy here
LIES_MAX = 1024  # blocks of which it is known who has wrong bytes of them


class Found(Protocol):
    """What another host says of a block. `attributes`: lifetimes are what remains of them."""

    @property
    def version(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def attributes(self) -> Attributes: ...
    @property
    def holders(self) -> tuple[str, ...]: ...


class Finding(Protocol):
    """A question that is under way, or answered."""

    async def wait(self) -> Found | None: ...


class Remote(Protocol):
    """The tier of other hosts. Their trouble is a miss to whoever asks them for a key."""

    def is_missing(self, key: bytes) -> bool: ...

    def is_home(self, key: bytes, replicas: int | None = None) -> bool: ...

    def lied(self, name: str) -> None: ...

    def begin(self, key: bytes) -> Finding: ...

    async def find(self, key: bytes) -> Found | None: ...

    async def fetch(
        self,
        key: bytes,
        version: int,
        holders: tuple[str, ...],
        into: memoryview,
        *,
        but: frozenset[str] = frozenset(),
    ) -> str: ...


@dataclass(slots=True)
class _Search:
    """One question, however many ask it."""

    done: trio.Event = field(default_factory=trio.Event)


class Elsewhere:
    """`may_accept(key, version, member)`: whether no deletion beats what that member holds, as far
    as it and we have heard."""

    def __init__(
        self,
        catalog: Catalog,
        remote: Remote,
        may_accept: Callable[[bytes, int, str], bool],
        missing_s: float = 0.5,
    ) -> None:
        """`missing_s`: for how long a name that leads nowhere may be believed to."""
        self.missing_s = missing_s
        self._catalog = catalog
        self._remote = remote
        self._may_accept = may_accept
        self._searches: dict[tuple[int, bytes], _Search] = {}
        self._since_ns: OrderedDict[int, int] = OrderedDict()  # generation: boot clock
        # Key and version: who gave wrong bytes of it, and is not asked for them again.
        self._liars: OrderedDict[tuple[bytes, int], frozenset[str]] = OrderedDict()

    def __len__(self) -> int:
        """How many blocks are known of that have no copy here."""
        return len(self._since_ns)

    # -- names

    def is_worth_asking(self, directory: Directory, name: bytes) -> bool:
        """Whether a name that leads nowhere here may lead somewhere else, for all that is known."""
        key = self._key(directory, name)
        return not (self._remote.is_missing(key) and self._remote.is_missing(PREFIXES + key))

    async def search(self, directory: Directory, name: bytes) -> None:
        """Return when all that others know of a name is known here."""
        place = (directory.inode, name)
        search = self._searches.get(place)
        if search is not None:
            await search.done.wait()
            return
        search = self._searches[place] = _Search()
        try:
            await self._search(directory, name)
        finally:
            del self._searches[place]
            search.done.set()

    async def _search(self, directory: Directory, name: bytes) -> None:
        key = self._key(directory, name)
        # Both are asked for at once; where there is a block, nobody waits for the sign.
        sign = self._remote.begin(PREFIXES + key)
        found, prefix = await self._remote.find(key), None
        if found is None:
            prefix = await sign.wait()
        if directory.removed or self._catalog.names.find(directory, name) is not None:
            return  # it came by itself meanwhile, or cannot come any more
        if found is not None:
            self._take(directory, name, key, found)
        elif prefix is not None:
            self._make_directory(directory, name, prefix.attributes)

    def _key(self, directory: Directory, name: bytes) -> bytes:
        prefix = self._catalog.names.key_of(directory)
        return prefix + b"/" + name if prefix else name

    def _make_directory(self, parent: Directory, name: bytes, attributes: Attributes) -> None:
        directory = self._catalog.make_directory(parent, name)
        directory.mode, directory.uid = attributes.mode, attributes.uid
        directory.gid = attributes.gid
        self._catalog.record_directory(directory)

    def _take(self, directory: Directory, name: bytes, key: bytes, found: Found) -> None:
        """Have a name lead to a block of which there is no copy here."""
        catalog = self._catalog
        versions = catalog.versions
        assert versions is not None
        now = catalog.clock()
        try:
            versions.see(max(found.version, found.attributes.revision), now.wall_ns // 1000)
        except VersionAhead as error:
            log.error("%r is not taken from %s: %s", key, found.holders, error)
            return
        liars = self._liars.get((key, found.version), frozenset())
        holders = tuple(
            each
            for each in found.holders
            if each not in liars and self._may_accept(key, found.version, each)
        )
        if not holders:
            return
        block = Block(catalog.new_generation(), directory, name)
        block.size, block.digest, block.origin = found.size, found.digest, found.version
        take_attributes(block, found.attributes, now)
        block.state = State.SEALED
        catalog.names.publish(block, directory, name)
        catalog.block_count += 1
        catalog.elsewhere[block.generation] = holders
        catalog.set_expiry(block, block.expires_ns)
        catalog.name_changed(directory.inode, name)
        self._since_ns[block.generation] = now.boot_ns
        self._forget_too_many()

    # -- bytes

    async def fetch(self, block: Block, view: memoryview, is_right: IsRight) -> str:
        """Fill `view` from whoever holds the block and gives the right bytes; returns who did.

        Raises BlockNotFound where none has it any more, CopyCorrupt where none was right, and what
        the tier raises.
        """
        key = self._catalog.names.key_of(block)
        version = block.version
        while True:
            liars = self._liars.get((key, version), frozenset())
            holders = self._catalog.elsewhere.get(block.generation, ())
            if liars and not set(holders) - liars:
                raise CopyCorrupt("no host that holds it gave the right bytes")
            holder = await self._remote.fetch(key, version, holders, view, but=liars)
            if await is_right():
                return holder
            self._catalog.counters.corrupt += 1
            self._catalog.tell("corrupt", block, tier="remote", peer=holder)
            log.error("%s sent wrong bytes of %r, and is not asked for it again", holder, key)
            self._remote.lied(holder)
            self._liars[key, version] = liars | {holder}
            if len(self._liars) > LIES_MAX:
                self._liars.popitem(last=False)

    def arrived(self, block: Block) -> None:
        """It has a copy here now, which is to stay where this host is one of its homes."""
        self._since_ns.pop(block.generation, None)
        if self._remote.is_home(self._catalog.names.key_of(block), block.replicas):
            self._catalog.elsewhere.pop(block.generation, None)
        self._catalog.record(block)

    # -- what is known

    def left(self, block: Block) -> None:
        """Its last copy here went, and it is still to be had elsewhere."""
        self._since_ns[block.generation] = self._catalog.clock().boot_ns

    def forget_old(self) -> None:
        """Let go of blocks that nobody opened for a while."""
        now_ns = self._catalog.clock().boot_ns
        while self._since_ns:
            generation, since_ns = next(iter(self._since_ns.items()))
            if now_ns - since_ns < BELIEVED_NS:
                return
            self._forget(generation)

    def _forget_too_many(self) -> None:
        while len(self._since_ns) > KNOWN_MAX:
            self._forget(next(iter(self._since_ns)))

    def _forget(self, generation: int) -> None:
        del self._since_ns[generation]
        block = self._catalog.names.by_inode.get(generation)
        if (
            not isinstance(block, Block)
            or block.is_gone
            or generation not in self._catalog.elsewhere
        ):
            return
        if block.is_hot or block.opens:  # the end of these is told by `left`
            return
        self._catalog.drop(block)


class IsRight(Protocol):
    """Compares what arrived with the digest."""

    async def __call__(self) -> bool: ...


def take_attributes(block: Block, attributes: Attributes, now: Now) -> None:
    """Give a block what travelled with it. Durations begin now."""
    replace_attributes(block, attributes, now)
    block.created_ns = min(attributes.created_ns, _TIME_MAX)
    block.ctime_ns = block.mtime_ns
    block.atime_ns, block.used_ns = now.wall_ns, now.boot_ns


def replace_attributes(block: Block, attributes: Attributes, now: Now) -> None:
    """Give a block the attributes that others say it has by now. Durations begin now.

    Where it is to stay, and when it was used, are of this host alone.
    """
    block.mode, block.uid, block.gid = attributes.mode & 0o7777, attributes.uid, attributes.gid
    block.mtime_ns, block.ctime_ns = min(attributes.mtime_ns, _TIME_MAX), now.wall_ns
    ttl_ns, pin_ns = attributes.ttl_ns, attributes.pin_ns
    block.expires_ns = NEVER if ttl_ns == FOREVER_NS else min(now.boot_ns + ttl_ns, _TIME_MAX)
    pin = PIN_NONE
    if pin_ns:
        pin = PIN_FOREVER if pin_ns == FOREVER_NS else min(now.boot_ns + pin_ns, _TIME_MAX)
    extras = Extras(
        pin_until_ns=pin,
        placement=block.placement,
        parent=attributes.parent,
        dtype=attributes.dtype,
        attributes=dict(attributes.user),
        revision=attributes.revision,
        replicas=attributes.replicas,
    )
    block.extras = None if extras == Extras() else extras


def attributes_of(block: Block, now: Now) -> Attributes:
    """What travels with a block: of lifetimes, what remains."""
    extras = block.extras or Extras()
    pin = extras.pin_until_ns
    if pin not in (PIN_NONE, PIN_FOREVER):
        pin = max(0, pin - now.boot_ns)
    ttl_ns = FOREVER_NS if block.expires_ns == NEVER else max(0, block.expires_ns - now.boot_ns)
    return Attributes(
        mode=block.mode,
        uid=block.uid,
        gid=block.gid,
        created_ns=max(0, block.created_ns),
        mtime_ns=max(0, block.mtime_ns),
        ttl_ns=ttl_ns,
        pin_ns=pin,
        parent=extras.parent,
        dtype=extras.dtype,
        user=tuple(extras.attributes.items()),
        revision=extras.revision,
        replicas=extras.replicas,
    )
