"""Many blocks at once, as columns: what a start hands over without an object for each of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxfs.core.meta import BlockMeta, Placement

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

# Parent's key, dtype, and foreign attributes as name and value.
Extras = tuple[bytes, bytes, tuple[tuple[bytes, bytes], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockColumns:
    """One row a block; the fields are those of BlockMeta, times are wall-clock nanoseconds.

    All arrays have the same length; `digest` is (n, 16). Row i's key is
    `keys[key_end[i - 1]:key_end[i]]`, that of row 0 begins at 0.
    """

    generation: U64
    stamp: U64
    size: U64
    created_ns: I64
    mtime_ns: I64
    atime_ns: I64
    expires_ns: U64
    pin_until_ns: U64
    mode: U16
    uid: U32
    gid: U32
    placement: U8
    origin: U64
    revision: U64
    replicas: U16
    digest: U8
    keys: bytes  # all keys back to back
    key_end: U64  # end of each row's key in `keys`
    extras: dict[int, Extras]  # by row; only rows that have any

    def __len__(self) -> int:
        return len(self.generation)

    def meta(self, row: int) -> BlockMeta:
        """One row as an object."""
        start = int(self.key_end[row - 1]) if row else 0
        parent, dtype, attributes = self.extras.get(row, (b"", b"", ()))
        return BlockMeta(
            generation=int(self.generation[row]),
            stamp=int(self.stamp[row]),
            key=self.keys[start : int(self.key_end[row])],
            size=int(self.size[row]),
            digest=self.digest[row].tobytes(),
            mode=int(self.mode[row]),
            uid=int(self.uid[row]),
            gid=int(self.gid[row]),
            created_ns=int(self.created_ns[row]),
            mtime_ns=int(self.mtime_ns[row]),
            atime_ns=int(self.atime_ns[row]),
            expires_ns=int(self.expires_ns[row]),
            pin_until_ns=int(self.pin_until_ns[row]),
            placement=Placement(int(self.placement[row])),
            origin=int(self.origin[row]),
            revision=int(self.revision[row]),
            replicas=int(self.replicas[row]),
            parent=parent,
            dtype=dtype,
            attributes=attributes,
        )

    @classmethod
    def from_metas(cls, metas: Iterable[BlockMeta]) -> BlockColumns:
        """The blocks in the order given."""
        rows = list(metas)

        def column(name: str, kind: type[np.generic]) -> npt.NDArray[Any]:
            return np.array([getattr(meta, name) for meta in rows], dtype=kind)

        lengths = np.array([len(meta.key) for meta in rows], dtype=np.uint64)
        return cls(
            generation=column("generation", np.uint64),
            stamp=column("stamp", np.uint64),
            size=column("size", np.uint64),
            created_ns=column("created_ns", np.int64),
            mtime_ns=column("mtime_ns", np.int64),
            atime_ns=column("atime_ns", np.int64),
            expires_ns=column("expires_ns", np.uint64),
            pin_until_ns=column("pin_until_ns", np.uint64),
            mode=column("mode", np.uint16),
            uid=column("uid", np.uint32),
            gid=column("gid", np.uint32),
            placement=column("placement", np.uint8),
            origin=column("origin", np.uint64),
            revision=column("revision", np.uint64),
            replicas=column("replicas", np.uint16),
            digest=np.frombuffer(b"".join(meta.digest for meta in rows), np.uint8).reshape(-1, 16),
            keys=b"".join(meta.key for meta in rows),
            key_end=np.cumsum(lengths, dtype=np.uint64),
            extras={
                row: (meta.parent, meta.dtype, meta.attributes)
                for row, meta in enumerate(rows)
                if meta.parent or meta.dtype or meta.attributes
            },
        )
