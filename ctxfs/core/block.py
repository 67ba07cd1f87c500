"""What is known in memory of a block and of a directory."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ctxfs.core.meta import PIN_FOREVER, PIN_NONE, BlockMeta, DirectoryMeta, Placement
from ctxfs.core.times import NEVER, Now

NOT_HOT = -1


class State(enum.IntEnum):
    """The life of a generation."""

    WRITING = 0  # somebody may still change it, or its digest is being computed
    SEALED = 1  # immutable
    GONE = 2  # no name leads here; bytes last as long as somebody has them open


@dataclass(slots=True)
class Extras:
    """What few blocks have; kept apart so that the others cost nothing."""

    pin_until_ns: int = PIN_NONE  # boot clock, or PIN_FOREVER
    placement: Placement = Placement.AUTO
    parent: bytes = b""
    dtype: bytes = b""
    attributes: dict[bytes, bytes] = field(default_factory=dict)
    revision: int = 0  # in a cluster, version of the attributes, if they changed after sealing
    replicas: int = 0  # members that are to hold it; 0: as many as the cluster says


@dataclass(slots=True)
class Writing:
    """A generation that is being written, and by whom."""

    owner: int  # process (thread group) that opened it; only it sees the name until published
    started_ns: int  # boot clock
    opener: int = 0  # the thread it was made for, until that opens it; 0: any of the owner's
    writers: int = 0  # open descriptions that may write
    changed: bool = False  # bytes were written since it was opened
    base: Block | None = None  # what it began as a copy of, when opened without O_TRUNC
    time_given: bool = False  # the writer set a modification time after its last write
    seen: bool = False  # published, and opened by another process since
    coming: int = 0  # generation of the shadow that fsync wrote last, or writes
    durable_epoch: int = -1  # `epoch` at the last fsync that reached the cold tier
    # Where bytes had no room, and have not been written since: such a generation is never shown.
    refused_at: int | None = None
    epoch: int = 0  # grows with every change of bytes; a digest of an old epoch is void


class Block:
    """One generation. Plain data: the store decides, tiers act."""

    __slots__ = (
        "atime_ns",
        "created_ns",
        "ctime_ns",
        "digest",
        "directory",
        "expires_ns",
        "extras",
        "generation",
        "gid",
        "hits",
        "hot_bytes",
        "lookups",
        "mode",
        "mtime_ns",
        "name",
        "opens",
        "origin",
        "published",
        "row",
        "size",
        "stamp",
        "state",
        "uid",
        "used_ns",
        "writing",
    )

    def __init__(self, generation: int, directory: Directory, name: bytes) -> None:
        self.generation = generation
        self.directory = directory
        self.name = name
        self.state = State.WRITING
        self.published = False
        self.size = 0
        self.digest = b""
        self.mode = 0o600
        self.uid = 0
        self.gid = 0
        self.created_ns = 0  # this and the next three: wall clock
        self.mtime_ns = 0
        self.ctime_ns = 0
        self.atime_ns = 0
        self.used_ns = 0  # boot clock, last open
        self.expires_ns = NEVER  # boot clock
        self.stamp = 0
        self.origin = 0  # the version, if it is not the generation: it came from another host
        self.hits = 0
        self.hot_bytes = NOT_HOT  # physical bytes of its hot file, or NOT_HOT
        self.opens = 0  # open descriptions; a lease on its bytes
        self.lookups = 0  # references the kernel holds to the inode
        self.extras: Extras | None = None
        self.writing: Writing | None = None
        self.row = 0  # in the table of named blocks; 0: in none

    @property
    def is_gone(self) -> bool:
        """Whether no name and no copy is left."""
        return self.state is State.GONE

    @property
    def version(self) -> int:
        """What its content is called on all hosts, and orders those of one key."""
        return self.origin or self.generation

    @property
    def is_hot(self) -> bool:
        """Whether a hot file holds its bytes."""
        return self.hot_bytes != NOT_HOT

    @property
    def placement(self) -> Placement:
        """Where the user wants it to stay."""
        return self.extras.placement if self.extras is not None else Placement.AUTO

    @property
    def revision(self) -> int:
        """What orders the attributes that one version has had; 0: those it was sealed with."""
        return self.extras.revision if self.extras is not None else 0

    @property
    def replicas(self) -> int | None:
        """How many members are to hold it; None: as many as the cluster says."""
        return (self.extras.replicas or None) if self.extras is not None else None

    @property
    def dtype(self) -> bytes:
        """What its numbers are, as the user says; b"" where nobody did."""
        return self.extras.dtype if self.extras is not None else b""

    def is_pinned(self, now_boot_ns: int) -> bool:
        """Whether a pin holds now."""
        if self.extras is None or self.extras.pin_until_ns == PIN_NONE:
            return False
        return self.extras.pin_until_ns == PIN_FOREVER or self.extras.pin_until_ns > now_boot_ns

    def more(self) -> Extras:
        """Return its extras, made on first need."""
        if self.extras is None:
            self.extras = Extras()
        return self.extras

    def meta(self, key: bytes, now: Now) -> BlockMeta:
        """Return what is written down of it."""
        extras = self.extras or _NO_EXTRAS
        pin = extras.pin_until_ns
        return BlockMeta(
            generation=self.generation,
            stamp=self.stamp,
            key=key,
            size=self.size,
            digest=self.digest,
            mode=self.mode,
            uid=self.uid,
            gid=self.gid,
            created_ns=self.created_ns,
            mtime_ns=self.mtime_ns,
            atime_ns=self.atime_ns,
            expires_ns=now.to_wall(self.expires_ns),
            pin_until_ns=pin if pin in (PIN_NONE, PIN_FOREVER) else now.to_wall(pin),
            placement=extras.placement,
            origin=self.origin,
            revision=extras.revision,
            replicas=extras.replicas,
            parent=extras.parent,
            dtype=extras.dtype,
            attributes=tuple(extras.attributes.items()),
        )

    def apply(self, meta: BlockMeta, now: Now) -> None:
        """Take over what was written down of it."""
        self.state = State.SEALED
        self.stamp = meta.stamp
        self.origin = meta.origin
        self.size = meta.size
        self.digest = meta.digest
        self.mode, self.uid, self.gid = meta.mode, meta.uid, meta.gid
        self.created_ns = meta.created_ns
        self.mtime_ns = self.ctime_ns = meta.mtime_ns
        self.atime_ns = meta.atime_ns
        self.used_ns = min(now.boot_ns, now.to_boot(meta.atime_ns))
        self.expires_ns = now.to_boot(meta.expires_ns)
        pin = meta.pin_until_ns
        if pin not in (PIN_NONE, PIN_FOREVER):
            pin = now.to_boot(pin)
        extras = Extras(
            pin,
            meta.placement,
            meta.parent,
            meta.dtype,
            dict(meta.attributes),
            meta.revision,
            meta.replicas,
        )
        self.extras = None if extras == _NO_EXTRAS else extras


_NO_EXTRAS = Extras()


class Entries(Protocol):
    """The published names in a directory, and where they lead. The namespace changes them."""

    def get(self, name: bytes, /) -> Node | None: ...

    def __getitem__(self, name: bytes, /) -> Node: ...

    def __contains__(self, name: bytes, /) -> bool: ...

    def __iter__(self) -> Iterator[bytes]: ...

    def __len__(self) -> int: ...

    def values(self) -> Iterator[Node]: ...

    def peek(self) -> Iterator[Node]:
        """Yield all to be read at once, and no more: blocks may be copies."""
        ...


class Directory:
    """A prefix of keys that somebody made, or that blocks lie beneath."""

    __slots__ = (
        "attributes",
        "default_replicas",
        "default_ttl_ns",
        "entries",
        "gid",
        "inode",
        "lookups",
        "mode",
        "mtime_ns",
        "name",
        "parent",
        "removed",
        "stamp",
        "together",
        "uid",
    )

    def __init__(self, inode: int, parent: Directory | None, name: bytes, entries: Entries) -> None:
        self.inode = inode
        self.parent = parent
        self.name = name
        self.entries = entries
        self.mode = 0o755
        self.uid = 0
        self.gid = 0
        self.mtime_ns = 0
        self.stamp = 0
        self.default_ttl_ns = -1  # -1: ask the parent; 0: none
        self.together = False
        self.default_replicas = 0  # 0: ask the parent
        self.lookups = 0
        self.removed = False
        self.attributes: dict[bytes, bytes] = {}

    def meta(self, key: bytes) -> DirectoryMeta:
        """Return what is written down of it."""
        return DirectoryMeta(
            inode=self.inode,
            stamp=self.stamp,
            key=key,
            mode=self.mode,
            uid=self.uid,
            gid=self.gid,
            mtime_ns=self.mtime_ns,
            default_ttl_ns=self.default_ttl_ns,
            together=self.together,
            default_replicas=self.default_replicas,
            attributes=tuple(self.attributes.items()),
        )

    def apply(self, meta: DirectoryMeta) -> None:
        """Take over what was written down of it."""
        self.stamp = meta.stamp
        self.mode, self.uid, self.gid = meta.mode, meta.uid, meta.gid
        self.mtime_ns = meta.mtime_ns
        self.default_ttl_ns = meta.default_ttl_ns
        self.together = meta.together
        self.default_replicas = meta.default_replicas
        self.attributes = dict(meta.attributes)


Node = Block | Directory
