"""Peers that die, stop or cannot be reached: what it costs who asks, and how they come back."""

import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing

from ctxfs.device.links import Link
from ctxfs.device.peer import Peer
from ctxfs.device.peeranswers import Answering
from ctxfs.device.tcp import Address
from ctxfs.device.timing import Timing
from ctxfs.errors import DeadlineExceeded, PeerUnreachable
from ctxfs.wire.breaker import Health
from ctxfs.wire.connection import Connection, Side
from tests.device.faraway import CONTENT, Faraway, Wire, faraway, why_no_namespaces, wire
from tests.device.peering import INSECURE, ME, PATIENCE_S, SMALL, MemoryDoor

QUICK = Timing(
    dial_s=0.5,
    beat_s=0.1,
    beat_deadline_s=0.2,
    silence_s=0.4,
    idle_s=2.0,
    backoff_min_s=0.02,
    backoff_max_s=0.1,
)
SHORT_S = 0.1  # a deadline that is to be missed


@pytest.fixture
def far() -> Iterator[Faraway]:
    with faraway() as made:
        yield made


@pytest.fixture
def link() -> Iterator[Wire]:
    """A link to a namespace, in which nobody is yet."""
    if why := why_no_namespaces():
        pytest.skip(why)
    with wire() as made:
        yield made


@asynccontextmanager
async def asking(address: Address) -> AsyncIterator[Peer]:
    """Somebody who is connected to the member at this address."""
    peer = Peer(ME, b"two", address, INSECURE, lanes=2, timing=QUICK)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.run)
        with trio.fail_after(PATIENCE_S):
            await peer.wait_healthy()
            yield peer
        nursery.cancel_scope.cancel()


async def read(peer: Peer, within_s: float = PATIENCE_S) -> bytes:
    target = bytearray(len(CONTENT))
    await peer.read(b"k", 1, memoryview(target), within_s)
    return bytes(target)


async def read_in_the_end(peer: Peer) -> bytes:
    """For when it is not yet known that the connection broke."""
    while True:
        await peer.wait_healthy()
        with suppress(PeerUnreachable):
            return await read(peer)


async def check_costs_one_deadline(peer: Peer) -> None:
    """The first to ask waits for its deadline, everybody after it for nothing."""
    before = peer.counters
    # Which of them, the heartbeat decides: it may have found out first.
    with pytest.raises((DeadlineExceeded, PeerUnreachable)):
        await peer.lookup([b"k"], SHORT_S)
    for _ in range(100):
        with pytest.raises(PeerUnreachable):
            await peer.lookup([b"k"], PATIENCE_S)
    assert peer.health is Health.BROKEN
    assert peer.counters.missed <= before.missed + 1
    assert peer.ill_for_s > 0


@pytest.mark.parametrize("cut", ["both", "to", "back"])
async def test_a_link_that_is_cut_costs_one_deadline_and_comes_back(link: Wire, cut: str) -> None:
    with faraway((link.address, 0), link.namespace) as far:
        async with asking(far.address) as peer:
            assert await read(peer) == CONTENT
            link.cut(to=cut != "back", back=cut != "to")
            await check_costs_one_deadline(peer)
            link.mend()
            await peer.wait_healthy()
            assert await read(peer) == CONTENT


async def test_a_link_cut_in_the_middle_of_a_read_leaves_its_target_alone(link: Wire) -> None:
    with faraway((link.address, 0), link.namespace) as far:
        async with asking(far.address) as peer:
            target = bytearray(len(CONTENT))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cut_when_bytes_came, peer, link)
                with pytest.raises((DeadlineExceeded, PeerUnreachable)):
                    await read_again_and_again(peer, target)
            target[:] = bytes(len(target))
            link.mend()
            assert await read_in_the_end(peer) == CONTENT
            assert target == bytes(len(target))


async def read_again_and_again(peer: Peer, target: bytearray) -> None:
    while True:
        await peer.read(b"k", 1, memoryview(target), 0.3)


async def cut_when_bytes_came(peer: Peer, link: Wire) -> None:
    while not peer.counters.traffic.received_bytes:
        await trio.lowlevel.checkpoint()
    link.cut()


async def test_a_peer_that_stops_costs_one_deadline_and_comes_back(far: Faraway) -> None:
    async with asking(far.address) as peer:
        far.process.send_signal(signal.SIGSTOP)
        await check_costs_one_deadline(peer)
        far.process.send_signal(signal.SIGCONT)
        await peer.wait_healthy()
        assert await read(peer) == CONTENT


async def test_a_peer_that_dies_is_known_dead_at_once_and_found_again(far: Faraway) -> None:
    async with asking(far.address) as peer:
        far.process.kill()
        far.process.wait()
        await check_costs_one_deadline(peer)
        with faraway(far.address):
            await peer.wait_healthy()
            assert await read(peer) == CONTENT


async def test_who_waits_for_an_answer_when_the_peer_dies_is_told_at_once(far: Faraway) -> None:
    async with asking(far.address) as peer:
        far.process.send_signal(signal.SIGSTOP)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill, far)
            with pytest.raises(PeerUnreachable, match="connection"):
                await peer.lookup([b"k"], PATIENCE_S)


async def kill(far: Faraway) -> None:
    far.process.kill()


async def test_a_peer_that_was_never_there_is_asked_by_nobody() -> None:
    with faraway() as far:
        far.process.kill()
        far.process.wait()
        peer = Peer(ME, b"two", far.address, INSECURE, timing=QUICK)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.run)
            with pytest.raises(PeerUnreachable, match="REFUSED"):
                await peer.lookup([b"k"], PATIENCE_S)
            nursery.cancel_scope.cancel()


async def test_a_data_connection_that_comes_while_its_session_ends_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        link = Link(server.accept()[0])
    answering = Answering(
        link,
        Connection(Side.LISTENER, 64),
        ME,
        MemoryDoor(),
        unit=SMALL.stripe_bytes,
        limits=SMALL,
        timing=QUICK,
    )
    told: list[str] = []

    async def come_late() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                try:
                    await answering.run_lane(link, Connection(Side.LISTENER, 64))
                except PeerUnreachable as error:
                    told.append(str(error))

    answering._outbox.run = come_late  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_ends, answering)
        await trio.testing.wait_all_tasks_blocked()
        theirs.close()
    assert told == ["the session is over"]
    link.close()


async def _ends(answering: Answering) -> None:
    with pytest.RaisesGroup(PeerUnreachable):
        await answering.run()
