"""`user.ctx.*`: what reading and writing each attribute means."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from ctxfs import xattrs
from ctxfs.codec.digest import DIGEST_NAME
from ctxfs.core.block import Block, Directory, Node, State
from ctxfs.core.key import split_key
from ctxfs.core.meta import PIN_FOREVER, PIN_NONE, Placement
from ctxfs.core.times import NEVER
from ctxfs.errors import BadValue, BlockNotFound, CtxfsError, NoAttribute, NotPermitted, TierFull
from ctxfs.relations import REPLICAS_MAX
from ctxfs.store.coding import method_name
from ctxfs.store.events import utc_text
from ctxfs.store.store import Store
from ctxfs.units import parse_duration_ns

NAMES_BYTES_MAX = 60 << 10  # of these, names: the kernel lists 64 KiB of them, ours among them
DTYPE_BYTES_MAX = 64
DIRECTORY_LISTED = (xattrs.TTL, xattrs.TOGETHER, xattrs.REPLICAS)
SECOND_NS = 1_000_000_000


class NotSupported(CtxfsError):
    """An attribute of a kind that is not kept here: access lists, labels, capabilities.

    cp, tar and others that offer these pass over this answer, and over no other.
    """

    code = errno.EOPNOTSUPP


class Attributes:
    """Reads and writes the attributes of blocks and directories."""

    def __init__(self, store: Store, *, bytes_max: int) -> None:
        self._store = store
        self.bytes_max = bytes_max  # of the names and values of a block's foreign attributes
        self.replicas: Callable[[Block], str | None] = lambda block: None  # reached/wanted
        self._catalog = store.catalog
        self._read: dict[bytes, Callable[[Block], str | bytes | None]] = {
            xattrs.TIER: self._tier,
            xattrs.COPIES: lambda block: ",".join(self._copies(block)),
            xattrs.TTL: self._ttl,
            xattrs.PIN: self._pin,
            xattrs.PARENT: lambda block: (block.extras and block.extras.parent) or None,
            xattrs.DTYPE: lambda block: block.dtype or None,
            xattrs.DIGEST: self._digest,
            xattrs.STATE: lambda block: block.state.name.lower(),
            xattrs.GENERATION: lambda block: str(block.generation),
            xattrs.STORED: lambda block: str(self.stored_bytes(block)),
            xattrs.CODEC: self._codec,
            xattrs.HITS: lambda block: str(block.hits),
            xattrs.IDLE: lambda block: f"{self._idle_s(block):.3f}",
            xattrs.CREATED: lambda block: utc_text(block.created_ns),
            xattrs.REPLICAS: self._replicas,
            xattrs.STORY: self._story,
        }
        self._write: dict[bytes, Callable[[Block, str], Awaitable[None]]] = {
            xattrs.TIER: self._set_tier,
            xattrs.TTL: self._set_ttl,
            xattrs.PIN: self._set_pin,
            xattrs.PARENT: self._set_parent,
            xattrs.DTYPE: self._set_dtype,
            xattrs.REPLICAS: self._set_replicas,
            xattrs.PREFETCH: self._prefetch,
            xattrs.VERIFY: self._verify,
        }

    # -- the four calls

    def get(self, node: Node, name: bytes) -> bytes:
        """Return a value. Raises NoAttribute."""
        value: str | bytes | None
        if not name.startswith(xattrs.PREFIX):
            value = self._foreign(node).get(name)
        elif isinstance(node, Directory):
            value = self._directory_value(node, name)
        else:
            reader = self._read.get(name)
            self._store.content.refresh(node)
            value = reader(node) if reader is not None and not node.is_gone else None
        if value is None:
            raise NoAttribute(os.fsdecode(name))
        return value.encode() if isinstance(value, str) else value

    def names(self, node: Node) -> list[bytes]:
        """Return the names that are set."""
        foreign = list(self._foreign(node))
        if isinstance(node, Directory):
            own = [n for n in DIRECTORY_LISTED if self._directory_value(node, n)]
            return own + foreign
        if node.is_gone:
            return foreign
        set_here = {
            xattrs.TIER: node.placement is not Placement.AUTO,
            xattrs.TTL: node.expires_ns != NEVER,
            xattrs.PIN: node.is_pinned(self._catalog.clock().boot_ns),
            xattrs.PARENT: bool(node.extras and node.extras.parent),
            xattrs.DTYPE: bool(node.dtype),
            xattrs.REPLICAS: node.replicas is not None,
            xattrs.DIGEST: node.state is State.SEALED,
        }
        return [*xattrs.BLOCK_LISTED, *(n for n, is_set in set_here.items() if is_set), *foreign]

    async def set(self, node: Node, name: bytes, value: bytes) -> None:
        """Set a value. Raises BadValue, NotPermitted, NotSupported, TierFull, DeviceError."""
        if not name.startswith(xattrs.PREFIX):
            self._set_foreign(node, name, value)
            return
        text = _text(name, value)
        if isinstance(node, Directory):
            self._set_directory(node, name, text)
            return
        writer = self._write.get(name)
        if writer is None:
            if name in xattrs.BLOCK_READ_ONLY:
                if node.writing is not None:
                    return  # a program that copies a block, attributes and all: no harm done
                raise NotPermitted(f"{os.fsdecode(name)} can only be read")
            raise BadValue(f"no attribute {os.fsdecode(name)}")
        if node.is_gone:
            raise BlockNotFound(repr(node.name))
        await writer(node, text)

    async def remove(self, node: Node, name: bytes) -> None:
        """Take a value away; for `user.ctx.*`, back to its default."""
        if not name.startswith(xattrs.PREFIX):
            if name not in self._foreign(node):
                raise NoAttribute(os.fsdecode(name))
            self._change_foreign(node, name, None)
            return
        self.get(node, name)
        if isinstance(node, Directory):
            if name == xattrs.TTL:
                node.default_ttl_ns = -1
            elif name == xattrs.REPLICAS:
                node.default_replicas = 0
            else:
                node.together = False
            self._catalog.record_directory(node)
            return
        default = {
            xattrs.TIER: b"auto",
            xattrs.TTL: b"none",
            xattrs.PIN: b"0",
            xattrs.REPLICAS: b"auto",
        }
        await self.set(node, name, default.get(name, b""))

    # -- foreign attributes

    def _foreign(self, node: Node) -> dict[bytes, bytes]:
        if isinstance(node, Directory):
            return node.attributes
        return node.extras.attributes if node.extras is not None else {}

    def _set_foreign(self, node: Node, name: bytes, value: bytes) -> None:
        if not name.startswith(xattrs.USER_PREFIX):
            raise NotSupported("only user.* attributes are kept")
        if name == xattrs.USER_PREFIX:
            raise BadValue("an attribute needs a name after user.")
        kept = {**self._foreign(node), name: value}
        if sum(len(n) + len(v) for n, v in kept.items()) > self.bytes_max:
            raise TierFull(f"a block keeps at most {self.bytes_max} bytes of attributes")
        if sum(len(n) + 1 for n in kept) > NAMES_BYTES_MAX:
            raise TierFull(f"names of attributes have at most {NAMES_BYTES_MAX} bytes together")
        self._change_foreign(node, name, value)

    def _change_foreign(self, node: Node, name: bytes, value: bytes | None) -> None:
        held = node.attributes if isinstance(node, Directory) else node.more().attributes
        if value is None:
            held.pop(name, None)
        else:
            held[name] = value
        self._changed(node)

    def _changed(self, node: Node) -> None:
        now = self._catalog.clock()
        if isinstance(node, Directory):
            self._catalog.record_directory(node)
            return
        node.ctime_ns = now.wall_ns
        self._catalog.amend(node)

    # -- reading

    def stored_bytes(self, block: Block) -> int:
        """Physical bytes of all local copies."""
        catalog = self._catalog
        below = catalog.warm_bytes(block) + catalog.cold_bytes(block)
        return max(block.hot_bytes, 0) + below

    def _copies(self, block: Block) -> list[str]:
        catalog = self._catalog
        there = {
            "hot": block.is_hot,
            "warm": catalog.is_warm(block),
            "cold": catalog.is_cold(block),
        }
        peers = catalog.elsewhere.get(block.generation, ())
        local = [tier for tier, is_there in there.items() if is_there]
        return local + [f"peer:{name}" for name in peers]

    def _codec(self, block: Block) -> str:
        """How the copy in the slowest tier is stored."""
        catalog = self._catalog
        if catalog.cold is not None and catalog.is_cold(block):
            return method_name(catalog.cold.method(block.generation))
        copy = catalog.warm.copy(block.generation) if catalog.warm is not None else None
        return method_name(copy.method if copy is not None else 0)

    def _tier(self, block: Block) -> str | None:
        copies = self._copies(block)
        if not copies:
            return None
        return "remote" if copies[0].startswith("peer:") else copies[0]

    def _digest(self, block: Block) -> str | None:
        return f"{DIGEST_NAME}:{block.digest.hex()}" if block.state is State.SEALED else None

    def _remaining_s(self, deadline_boot_ns: int) -> float:
        return max(0.0, (deadline_boot_ns - self._catalog.clock().boot_ns) / SECOND_NS)

    def _ttl(self, block: Block) -> str:
        if block.expires_ns == NEVER:
            return "none"
        return f"{self._remaining_s(block.expires_ns):.3f}"

    def _pin(self, block: Block) -> str:
        if not block.is_pinned(self._catalog.clock().boot_ns):
            return "0"
        assert block.extras is not None
        until = block.extras.pin_until_ns
        return "1" if until == PIN_FOREVER else f"{self._remaining_s(until):.3f}"

    def _replicas(self, block: Block) -> str | None:
        if (told := self.replicas(block)) is not None:
            return told
        return None if block.replicas is None else f"1/{block.replicas}"

    def _idle_s(self, block: Block) -> float:
        return max(0.0, (self._catalog.clock().boot_ns - block.used_ns) / SECOND_NS)

    def _story(self, block: Block) -> str:
        ttl = self._ttl(block)
        story: dict[str, Any] = {
            "key": os.fsdecode(self._catalog.names.key_of(block)),
            "state": block.state.name.lower(),
            "generation": block.generation,
            "size_bytes": block.size,
            "stored_bytes": self.stored_bytes(block),
            "tier": self._tier(block),
            "copies": self._copies(block),
            "replicas": self._replicas(block),
            "ttl_s": None if ttl == "none" else float(ttl),
            "pin": self._pin(block),
            "placement": block.placement.name.lower(),
            "parent": os.fsdecode(block.extras.parent) if block.extras else "",
            "dtype": os.fsdecode(block.dtype),
            "digest": self._digest(block),
            "codec": self._codec(block),
            "hits": block.hits,
            "idle_s": round(self._idle_s(block), 3),
            "created": utc_text(block.created_ns),
            "mode": block.mode,
            "uid": block.uid,
            "gid": block.gid,
            "open": block.opens,
            "attributes": {
                os.fsdecode(n): v.decode(errors="backslashreplace")
                for n, v in self._foreign(block).items()
            },
        }
        return json.dumps(story)

    def _directory_value(self, directory: Directory, name: bytes) -> str | None:
        if name == xattrs.TTL and directory.default_ttl_ns >= 0:
            ttl_ns = directory.default_ttl_ns
            return f"{ttl_ns / SECOND_NS:.3f}" if ttl_ns else "none"
        if name == xattrs.TOGETHER and directory.together:
            return "1"
        if name == xattrs.REPLICAS and directory.default_replicas:
            return str(directory.default_replicas)
        return None

    # -- writing

    def _set_directory(self, directory: Directory, name: bytes, text: str) -> None:
        if name == xattrs.TTL:
            directory.default_ttl_ns = _positive_ns(name, text) or 0
        elif name == xattrs.TOGETHER:
            if text not in ("0", "1"):
                raise BadValue(f"user.ctx.together takes 1 or 0, not {text!r}")
            directory.together = text == "1"
        elif name == xattrs.REPLICAS:
            directory.default_replicas = _replicas(text)
        elif name in xattrs.BLOCK_WRITABLE or name in xattrs.BLOCK_READ_ONLY:
            raise BadValue(
                f"{os.fsdecode(name)} belongs to blocks; a directory has ttl, together, replicas"
            )
        else:
            raise BadValue(f"no attribute {os.fsdecode(name)}")
        self._catalog.record_directory(directory)

    async def _set_tier(self, block: Block, text: str) -> None:
        catalog = self._catalog
        wanted = {p.name.lower(): p for p in Placement}.get(text)
        below = {"warm": catalog.warm, "cold": catalog.cold}
        local = ["auto", "hot", *(name for name, tier in below.items() if tier is not None)]
        if wanted is None or text not in local:
            raise BadValue(f"user.ctx.tier takes {', '.join(local)} here, not {text!r}")
        if wanted is not block.placement:
            block.more().placement = wanted
            block.ctime_ns = catalog.clock().wall_ns
            catalog.record_change(block)  # it is of this host alone
        if block.writing is not None and block.writing.writers:
            return  # carried out when it is sealed
        await self._store.sealing.wait_sealed(block)
        if block.state is not State.SEALED:
            return  # its writer has it mapped: carried out as well when it is sealed
        if wanted is Placement.HOT:
            await self._store.promote(block)
        elif wanted is Placement.WARM:
            await self._store.mover.move_to_warm(block)
        elif wanted is Placement.COLD:
            await self._store.mover.demoter.demote(block)

    async def _set_ttl(self, block: Block, text: str) -> None:
        ttl_ns = _positive_ns(xattrs.TTL, text)
        now_ns = self._catalog.clock().boot_ns
        self._catalog.set_expiry(block, NEVER if ttl_ns is None else now_ns + ttl_ns)
        self._changed(block)

    async def _set_pin(self, block: Block, text: str) -> None:
        if text in ("0", "1"):
            block.more().pin_until_ns = PIN_FOREVER if text == "1" else PIN_NONE
        else:
            lasting_ns = _positive_ns(xattrs.PIN, text)
            if lasting_ns is None:
                raise BadValue(f"user.ctx.pin takes 1, 0 or a duration, not {text!r}")
            block.more().pin_until_ns = self._catalog.clock().boot_ns + lasting_ns
        self._changed(block)

    async def _set_parent(self, block: Block, text: str) -> None:
        parent = os.fsencode(text)
        if parent:
            split_key(parent)
        block.more().parent = parent
        self._changed(block)

    async def _set_dtype(self, block: Block, text: str) -> None:
        if len(text) > DTYPE_BYTES_MAX or not text.isprintable():
            raise BadValue(f"user.ctx.dtype takes a name such as bf16, not {text!r}")
        block.more().dtype = text.encode()
        self._changed(block)

    async def _set_replicas(self, block: Block, text: str) -> None:
        block.more().replicas = _replicas(text)
        self._changed(block)
        if block.state is State.SEALED and block.published:
            self._catalog.block_sealed(block)  # there may be members that lack it now

    async def _prefetch(self, block: Block, text: str) -> None:
        if text not in ("1", "chain"):
            raise BadValue(f"user.ctx.prefetch takes 1 or chain, not {text!r}")
        self._store.prefetch(block, chain=text == "chain")

    async def _verify(self, block: Block, text: str) -> None:
        if text != "1":
            raise BadValue(f"user.ctx.verify takes 1, not {text!r}")
        await self._store.verify(block)


def _text(name: bytes, value: bytes) -> str:
    """Return a value as text; a newline that `echo` left at its end does no harm."""
    try:
        return value.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        if name == xattrs.PARENT:
            return os.fsdecode(value)
        raise BadValue(f"{os.fsdecode(name)} takes text") from error


def _replicas(text: str) -> int:
    """How many members are to hold a block; 0: as many as the cluster says. What reading gives,
    reached/wanted, is accepted, too.
    """
    if text == "auto":
        return 0
    wanted = text.rpartition("/")[2]
    if not (wanted.isascii() and wanted.isdigit() and 1 <= int(wanted[:4]) <= REPLICAS_MAX):
        raise BadValue(f"user.ctx.replicas takes 1 to {REPLICAS_MAX}, or auto; not {text!r}")
    return int(wanted)


def _positive_ns(name: bytes, text: str) -> int | None:
    """Return a duration; None for `none`. Zero would mean "gone at once": unlink says it better."""
    try:
        duration_ns = parse_duration_ns(text)
    except CtxfsError as error:
        raise BadValue(f"{os.fsdecode(name)}: {error}") from error
    if duration_ns is not None and not 0 < duration_ns < 2**62:
        raise BadValue(f"{os.fsdecode(name)} takes more than 0 seconds, or none; not {text!r}")
    return duration_ns
