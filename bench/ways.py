"""Ways of sharing blocks between hosts, all in one shape: a mount, Redis, Mooncake's store."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import time
from pathlib import Path
from typing import Any, Final, Protocol

from bench.measures import read_all, write

NUMBER_BYTES: Final = 8  # at the beginning of each block, so that no two are the same
PAUSE_S: Final = 100e-6  # between two looks whether something has come about
WAIT_S: Final = 30.0  # and then it does not come about any more
REPLICAS: Final = 2  # of what is put with replicas


class Blocks:
    """What blocks consist of: the same noise, and a number that makes each another one."""

    def __init__(self, size_max: int) -> None:
        self.size = size_max  # of those that come next
        self.memory = mmap.mmap(-1, size_max)
        self.memory[:] = os.urandom(size_max)

    def next(self) -> memoryview:
        """The content of the next block; it lasts until the next call."""
        self.memory[:NUMBER_BYTES] = os.urandom(NUMBER_BYTES)
        return memoryview(self.memory)[: self.size]


class Way(Protocol):
    """What one client can do. All raise OSError, or what a library of others raises."""

    blocks: Blocks

    def prepare(self, name: str) -> None:
        """Put a block for another host to get; it may return before that can."""

    def settle(self, name: str) -> None:
        """Return when the other host can get it."""

    def put(self, name: str) -> None:
        """Put a block, and return when it is on two hosts."""

    def get(self, name: str) -> None:
        """Get a block, whole."""

    def drop(self, name: str) -> None:
        """Remove a block."""


class Mount:
    """The mount of a daemon."""

    def __init__(self, blocks: Blocks, *, path: str) -> None:
        self.blocks = blocks
        self._path = Path(path)
        self._buffer = bytearray(blocks.size)

    def prepare(self, name: str) -> None:
        with self.blocks.next() as block:
            write(self._path / name, block)

    def settle(self, name: str) -> None:
        self._until(name, b"state", b"sealed")

    def put(self, name: str) -> None:
        self.prepare(name)
        self._until(name, b"replicas", b"%d/%d" % (REPLICAS, REPLICAS))

    def get(self, name: str) -> None:
        with memoryview(self._buffer)[: self.blocks.size] as into:
            read_all(self._path / name, into)

    def drop(self, name: str) -> None:
        (self._path / name).unlink()

    def _until(self, name: str, attribute: bytes, value: bytes) -> None:
        path = self._path / name
        end = time.monotonic() + WAIT_S
        while (said := _attribute(path, attribute)) != value:
            if time.monotonic() > end:
                raise OSError(f"{path}: {attribute.decode()} stays {said!r}")
            time.sleep(PAUSE_S)


def _attribute(path: Path, name: bytes) -> bytes | None:
    with contextlib.suppress(OSError):  # a block that is not sealed has not all of them
        return os.getxattr(path, b"user.ctx." + name)
    return None


class Redis:
    """A primary, where blocks are put, and its replica on the other host, where they are got."""

    def __init__(
        self, blocks: Blocks, *, primary: tuple[str, int], replica: tuple[str, int]
    ) -> None:
        redis: Any = importlib.import_module("redis")
        self.blocks = blocks
        self._primary = redis.Redis(*primary)
        self._replica = redis.Redis(*replica)

    def prepare(self, name: str) -> None:
        with self.blocks.next() as block:
            self._primary.set(name, block)

    def settle(self, name: str) -> None:
        if self._primary.wait(1, round(WAIT_S * 1000)) != 1:
            raise OSError("Redis's replica takes nothing")

    def put(self, name: str) -> None:
        self.prepare(name)
        self.settle(name)

    def get(self, name: str) -> None:
        found = self._replica.get(name)
        if found is None or len(found) != self.blocks.size:
            raise OSError(f"Redis does not give {name}")

    def drop(self, name: str) -> None:
        self._primary.delete(name)


class Mooncake:
    """Mooncake's store, by its calls that move a block from and to memory of ours."""

    LOCAL_BYTES = 64 << 20  # of buffers that are its own

    def __init__(self, blocks: Blocks, *, address: str, master: str, far: str) -> None:
        """`far`: the segment from which blocks are got. It is on the other host."""
        module: Any = importlib.import_module("mooncake.store")
        self.blocks = blocks
        self._store = module.MooncakeDistributedStore()
        own = max(self.LOCAL_BYTES, 4 * blocks.size)
        check(self._store.setup(address, "P2PHANDSHAKE", 0, own, "tcp", "", master))
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(blocks.memory))
        check(self._store.register_buffer(self._at, blocks.size))
        self._once, self._twice = module.ReplicateConfig(), module.ReplicateConfig()
        self._once.replica_num, self._once.preferred_segment = 1, far
        self._twice.replica_num = REPLICAS

    def prepare(self, name: str) -> None:
        self._put(name, self._once)

    def settle(self, name: str) -> None:
        """It is there when the call that puts it returns."""

    def put(self, name: str) -> None:
        self._put(name, self._twice)

    def _put(self, name: str, config: Any) -> None:
        self.blocks.next().release()
        check(self._store.put_from(name, self._at, self.blocks.size, config))

    def get(self, name: str) -> None:
        got = self._store.get_into(name, self._at, self.blocks.size)
        if got != self.blocks.size:
            raise OSError(f"Mooncake does not give {name}: {got}")

    def drop(self, name: str) -> None:
        # By force: for some seconds, who got it last holds a lease on it.
        check(self._store.remove(name, True))


def check(answer: int) -> None:
    """Mooncake's calls return 0 where all is well. Raises OSError."""
    if answer != 0:
        raise OSError(f"Mooncake answers {answer}")


WAYS: Final = {"mount": Mount, "redis": Redis, "mooncake": Mooncake}
