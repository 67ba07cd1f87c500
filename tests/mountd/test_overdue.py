"""A device that hangs, through both channels: requests are answered all the same."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyfuse3
import pytest
import trio

from ctxfs.core.block import Block
from ctxfs.core.namespace import ROOT_INODE
from ctxfs.store.attributes import Attributes
from ctxfs.store.events import Events
from ctxfs.store.store import Store
from mountd.alertness import Alertness
from mountd.channel_direct import DirectChannel
from mountd.channel_pyfuse3 import Pyfuse3Channel
from mountd.channels import ChosenChannel
from mountd.control import ControlDirectory
from mountd.deadlines import Deadlines
from mountd.device_fuse import FuseDevice
from mountd.fuseproto import replies
from mountd.fuseproto.constants import Opcode
from mountd.fuseproto.requests import HEADER
from mountd.operations import Operations
from tests.fakes import MemoryEngine
from tests.store.world import MIB, World, get_attribute, put, set_attribute

DEADLINE_S = 0.2
CONTENT = b"x" * 100_000


@contextmanager
def _world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        world = World(Path(name), MemoryEngine(64 * MIB))
        world.limits = replace(world.limits, read_deadline_s=60.0, room_wait_s=60.0)
        yield world


@dataclass
class Rig:
    """A store over a device in memory, and what makes channels of it."""

    world: World
    store: Store
    operations: Operations

    @property
    def engine(self) -> MemoryEngine:
        assert self.world.engine is not None
        return self.world.engine

    def hang(self) -> trio.Event:
        self.engine.gate = gate = trio.Event()
        return gate

    def inode(self, name: str) -> int:
        block = self.store.find(self.store.catalog.names.root, name.encode(), None)
        assert isinstance(block, Block)
        return block.generation

    @property
    def overdue(self) -> int:
        return self.store.catalog.counters.overdue


@asynccontextmanager
async def rig(*, trouble_is_error: bool = True) -> AsyncIterator[Rig]:
    with _world() as world:
        async with world.store() as store, trio.open_nursery() as nursery:
            deadlines = Deadlines(
                store.catalog, deadline_s=DEADLINE_S, trouble_is_error=trouble_is_error
            )
            await nursery.start(deadlines.run)
            control = ControlDirectory(Events(10), {}, {})
            operations = Operations(
                store,
                Attributes(store, bytes_max=1 << 16),
                control,
                deadlines,
                Alertness(wanted=False),
                trouble_is_error=trouble_is_error,
            )
            yield Rig(world, store, operations)
            nursery.cancel_scope.cancel()


class Kernel:
    """The other end of a direct channel, as far as these tests go."""

    def __init__(self, end: socket.socket) -> None:
        self._end = trio.socket.from_stdlib_socket(end)
        self._unique = 0

    async def tell(self, opcode: int, node: int, body: bytes) -> int:
        self._unique += 2
        pid = os.getpid()
        head = HEADER.pack(HEADER.size + len(body), opcode, self._unique, node, 0, 0, pid, 0)
        await self._end.send(head + body)
        return self._unique

    async def hear(self) -> tuple[int, int, bytes]:
        """Return the number, errno and body of the next answer."""
        answer = await self._end.recv(1 << 20)
        _, error, unique = replies.OUT_HEADER.unpack_from(answer)
        return unique, -error, answer[replies.OUT_HEADER.size :]

    async def ask(self, opcode: int, node: int, body: bytes) -> tuple[int, bytes]:
        unique = await self.tell(opcode, node, body)
        answered, error, rest = await self.hear()
        assert answered == unique
        return error, rest


@asynccontextmanager
async def direct(rig: Rig) -> AsyncIterator[Kernel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    with ours, theirs:
        device = FuseDevice(ours.fileno(), Path("/nowhere"))
        chosen = ChosenChannel("direct", "a test", privileged=False)
        kernel = Kernel(theirs)
        channel = DirectChannel(device, rig.operations, chosen, None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(channel.serve, nursery.cancel_scope)
            init = struct.pack("=IIII", 7, 40, 1 << 20, 0xFFFF)
            assert (await kernel.ask(Opcode.INIT, 0, init))[0] == 0
            yield kernel
            nursery.cancel_scope.cancel()


async def put_cold(rig: Rig, name: str) -> int:
    await put(rig.store, name, CONTENT)
    await set_attribute(rig.store, name, "tier", "cold")
    await set_attribute(rig.store, name, "tier", "auto")
    return rig.inode(name)


OPEN_TO_READ = struct.pack("=II", os.O_RDONLY, 0)
SET_COLD = struct.pack("=II", 4, 0) + b"user.ctx.tier\0cold"


@pytest.mark.parametrize(
    ("trouble_is_error", "code"), [(False, errno.ENOENT), (True, errno.ETIMEDOUT)]
)
async def test_an_open_on_a_device_that_hangs_is_answered(
    trouble_is_error: bool, code: int
) -> None:
    async with rig(trouble_is_error=trouble_is_error) as here, direct(here) as kernel:
        inode = await put_cold(here, "k")
        gate = here.hang()
        assert (await kernel.ask(Opcode.OPEN, inode, OPEN_TO_READ))[0] == code
        assert here.overdue == 1
        gate.set()
        error, opened = await kernel.ask(Opcode.OPEN, inode, OPEN_TO_READ)
        assert error == 0
        assert replies.handle_of(opened)
        assert here.overdue == 1


async def test_a_move_that_no_cancelling_ends_is_answered_and_nothing_is_answered_twice() -> None:
    async with rig() as here, direct(here) as kernel:
        await put(here.store, "k", CONTENT)
        gate = here.hang()
        before = here.operations.deadlines.statistics()
        error, _ = await kernel.ask(Opcode.SETXATTR, here.inode("k"), SET_COLD)
        assert (before["waiting"], error) == (0, errno.ETIMEDOUT)
        gate.set()
        await here.store.mover.wait_landed()
        # The next answer is that of the next request.
        assert (await kernel.ask(Opcode.GETATTR, 1, bytes(16)))[0] == 0
        assert get_attribute(here.store, "k", "copies") in ("cold", "hot", "hot,cold")


async def test_others_are_answered_while_requests_wait_and_the_wait_shows() -> None:
    async with rig() as here, direct(here) as kernel:
        await put(here.store, "k", CONTENT)
        gate = here.hang()
        slow = await kernel.tell(Opcode.SETXATTR, here.inode("k"), SET_COLD)
        quick = await kernel.tell(Opcode.GETATTR, 1, bytes(16))
        assert (await kernel.hear())[0] == quick
        assert here.operations.deadlines.statistics()["waiting"] == 1
        assert (await kernel.hear())[:2] == (slow, errno.ETIMEDOUT)
        assert here.operations.deadlines.statistics()["waiting"] == 0
        gate.set()


def late(monkeypatch: pytest.MonkeyPatch, name: str) -> trio.Event:
    """Let an operation end well after it was given up, as it may between two turns."""
    honest: Callable[..., Any] = getattr(Operations, name)
    ended = trio.Event()

    async def slow(self: Operations, *arguments: Any) -> Any:
        with trio.CancelScope(shield=True):
            await trio.sleep(DEADLINE_S * 2)
            # A busy machine is late itself.
            while self.deadlines.statistics()["waiting"]:  # noqa: ASYNC110
                await trio.sleep(DEADLINE_S)
            result = await honest(self, *arguments)
            ended.set()
            return result

    monkeypatch.setattr(Operations, name, slow)
    return ended


async def test_what_comes_too_late_leaves_no_open_file_and_no_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig() as here, direct(here) as kernel:
        block = await put(here.store, "k", CONTENT)
        monkeypatch.setattr(Operations, "open_at_once", lambda *asked: None)
        opened, created = late(monkeypatch, "open"), late(monkeypatch, "create")
        error, _ = await kernel.ask(Opcode.OPEN, block.generation, OPEN_TO_READ)
        assert error == errno.ETIMEDOUT
        body = struct.pack("=IIII", os.O_WRONLY | os.O_CREAT, stat.S_IFREG | 0o644, 0, 0) + b"n\0"
        error, _ = await kernel.ask(Opcode.CREATE, ROOT_INODE, body)
        assert error == errno.ETIMEDOUT
        monkeypatch.undo()
        for end in (opened, created):
            await end.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert not block.opens
        assert here.store.catalog.counters.discarded == 1
        assert here.store.catalog.names.find(here.store.catalog.names.root, b"n") is None
        assert here.store.catalog.block_count == 1


CTX = cast(pyfuse3.RequestContext, SimpleNamespace(uid=0, gid=0, pid=os.getpid()))


@asynccontextmanager
async def pyfuse3_channel(rig: Rig) -> AsyncIterator[Pyfuse3Channel]:
    channel = Pyfuse3Channel(rig.operations)
    async with trio.open_nursery() as channel.nursery:
        yield channel
        channel.nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("trouble_is_error", "code"), [(False, errno.ENOENT), (True, errno.ETIMEDOUT)]
)
async def test_pyfuse3_answers_opens_and_moves_on_a_device_that_hangs(
    trouble_is_error: bool, code: int
) -> None:
    async with rig(trouble_is_error=trouble_is_error) as here, pyfuse3_channel(here) as channel:
        inode = pyfuse3.InodeT(await put_cold(here, "k"))
        hot = pyfuse3.InodeT((await put(here.store, "hot", CONTENT)).generation)
        gate = here.hang()
        with pytest.raises(pyfuse3.FUSEError) as opened:
            await channel.open(inode, pyfuse3.FlagT(os.O_RDONLY), CTX)
        assert opened.value.errno == code
        name = pyfuse3.XAttrNameT(b"user.ctx.tier")
        with pytest.raises(pyfuse3.FUSEError) as moved:
            await channel.setxattr(hot, name, b"cold", CTX)
        assert moved.value.errno == errno.ETIMEDOUT
        assert here.overdue == 2
        gate.set()
        info = await channel.open(inode, pyfuse3.FlagT(os.O_RDONLY), CTX)
        await channel.release(info.fh)


async def test_pyfuse3_takes_back_what_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as here, pyfuse3_channel(here) as channel:
        block = await put(here.store, "k", CONTENT)
        opened, created = late(monkeypatch, "open"), late(monkeypatch, "create")
        with pytest.raises(pyfuse3.FUSEError):
            await channel.open(pyfuse3.InodeT(block.generation), pyfuse3.FlagT(os.O_RDONLY), CTX)
        with pytest.raises(pyfuse3.FUSEError):
            await channel.create(
                pyfuse3.InodeT(ROOT_INODE),
                pyfuse3.FileNameT(b"n"),
                pyfuse3.ModeT(0o644),
                pyfuse3.FlagT(os.O_WRONLY | os.O_CREAT),
                CTX,
            )
        for end in (opened, created):
            await end.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert not block.opens
        assert here.store.catalog.counters.discarded == 1
        assert here.store.catalog.block_count == 1


async def test_pyfuse3_hands_on_errors_and_results_of_what_is_in_time() -> None:
    async with rig() as here, pyfuse3_channel(here) as channel:
        with pytest.raises(pyfuse3.FUSEError) as missing:
            await channel.open(pyfuse3.InodeT(4711), pyfuse3.FlagT(os.O_RDONLY), CTX)
        assert missing.value.errno == errno.ESTALE
        assert here.operations.deadlines.statistics()["waiting"] == 0
        assert here.overdue == 0
