"""The file in the state directory that has deletions outlive the daemon: docs/cluster.md has its
table."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import xxhash

from ctxfs.core.tombstones import Listing, Tombstone, Vector

_FRAME: Final = struct.Struct("<II")  # length of the payload, low half of its XXH3-64
_KIND: Final = struct.Struct("<B")
_TOMBSTONE: Final = struct.Struct("<QQ")  # version, until; then the key
_PAIR: Final = struct.Struct("<HQ")  # slot, version
_DEAD, _KNOWN, _FORGOTTEN = 1, 2, 3
REWRITE_BYTES_MIN: Final = 1 << 20


class TombstoneFile:
    """A snapshot, and behind it what was deleted or heard of since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._snapshot_bytes = 0
        self._swapping = threading.Lock()
        self._meanwhile: list[bytes] | None = None  # what came since the snapshot was taken
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def load(self) -> tuple[Listing, list[Tombstone]]:
        """The snapshot, and what came since. A torn end is cut off."""
        data = self._path.read_bytes()
        known: dict[int, int] = {}
        forgotten: dict[int, int] = {}
        dead: list[Tombstone] = []
        good = in_snapshot = 0
        for kind, payload, end in _frames(data):
            good = end
            if kind == _DEAD:
                version, until_ns = _TOMBSTONE.unpack_from(payload)
                dead.append(Tombstone(payload[_TOMBSTONE.size :], version, until_ns))
                continue
            vector = known if kind == _KNOWN else forgotten
            vector.update(_PAIR.iter_unpack(payload))
            in_snapshot = len(dead)  # the vectors end it
            self._snapshot_bytes = end
        if good < len(data):
            os.ftruncate(self._fd, good)
        return Listing(tuple(dead[:in_snapshot]), known, forgotten), dead[in_snapshot:]

    @property
    def wants_rewrite(self) -> bool:
        """Whether much has come since the snapshot."""
        size = os.fstat(self._fd).st_size
        return size > 2 * self._snapshot_bytes + REWRITE_BYTES_MIN

    def write(self, tombstones: Sequence[Tombstone]) -> None:
        """Returns when they outlive this process, after microseconds; `sync`: the machine too.

        May be called while another thread is in `rewrite` or `sync`.
        """
        data = b"".join(map(_dead, tombstones))
        with self._swapping:
            os.write(self._fd, data)
            if self._meanwhile is not None:
                self._meanwhile.append(data)

    def sync(self) -> None:
        """Return when all that was written is on the medium. Never at once with `rewrite`."""
        os.fdatasync(self._fd)

    def begin_anew(self) -> None:
        """What is written from now on is not in the snapshot that `rewrite` will be given."""
        self._meanwhile = []

    def rewrite(self, listing: Listing) -> None:
        """Begin anew with this snapshot, of the moment of `begin_anew`, in one step."""
        data = b"".join(map(_dead, listing.tombstones))
        data += _vector(_FORGOTTEN, listing.forgotten) + _vector(_KNOWN, listing.known)
        beside = self._path.with_suffix(".new")
        fd = os.open(
            beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        os.write(fd, data)
        os.fdatasync(fd)
        with self._swapping:
            os.write(fd, b"".join(self._meanwhile or ()))
            self._meanwhile = None
            beside.rename(self._path)
            os.close(self._fd)
            self._fd, self._snapshot_bytes = fd, len(data)

    def close(self) -> None:
        os.close(self._fd)


def _frames(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Kind, payload and end of each good frame, up to the first that is not."""
    at = 0
    while at + _FRAME.size < len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        payload = data[at + _FRAME.size : at + _FRAME.size + length]
        if not length or len(payload) < length or _sum(payload) != checksum:
            return
        at += _FRAME.size + length
        yield payload[0], payload[1:], at


def _frame(kind: int, content: bytes) -> bytes:
    payload = _KIND.pack(kind) + content
    return _FRAME.pack(len(payload), _sum(payload)) + payload


def _sum(payload: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(payload)) & 0xFFFF_FFFF


def _dead(tombstone: Tombstone) -> bytes:
    return _frame(_DEAD, _TOMBSTONE.pack(tombstone.version, tombstone.until_ns) + tombstone.key)


def _vector(kind: int, vector: Vector) -> bytes:
    return _frame(kind, b"".join(_PAIR.pack(*pair) for pair in vector.items()))
