"""Who is let in: certificates, names, clusters, and what strangers cost."""

from contextlib import suppress
from pathlib import Path

import pytest
import trio

from ctxfs.device.links import FileSpan, Link
from ctxfs.device.peer import Peer
from ctxfs.device.peersession import Session, connect
from ctxfs.device.tcp import dial
from ctxfs.device.timing import Timing
from ctxfs.device.tls import Certificates
from ctxfs.errors import ConfigError, PeerRejected, PeerUnreachable
from ctxfs.wire import frames
from ctxfs.wire.greeting import Identity, hello
from ctxfs.wire.limits import Limits
from ctxfs.wire.messages import Durability, Have, Heartbeat, Role, Stored
from tests.device.authority import Authority
from tests.device.peering import (
    INSECURE,
    ME,
    PATIENCE_S,
    SMALL,
    Lab,
    content_of,
    lab,
    memory_file,
    offer_of,
)

TOKEN = bytes(16)
QUICK = Timing(dial_s=1.0)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def refusal_of(pair: Lab) -> str:
    """Why the peer cannot connect."""
    with pytest.raises(PeerUnreachable) as refused:
        await pair.peer.lookup([b"k"], PATIENCE_S)
    return str(refused.value)


@pytest.mark.parametrize("lends_memory", [True, False])
async def test_members_with_certificates_read_and_push(
    authority: Authority, lends_memory: bool
) -> None:
    mine, theirs = authority.sign("one"), authority.sign("two")
    async with lab(security=mine, theirs=theirs, limits=SMALL) as pair:
        pair.door.lends_memory = lends_memory
        content = pair.door.put(b"k", content_of(1_500_000))
        target = bytearray(len(content))
        await pair.peer.read(b"k", 1, memoryview(target), PATIENCE_S)
        assert target == content
        fd = memory_file(content)
        offer = offer_of(b"n", content)
        said = await pair.peer.push(offer, FileSpan(fd, 0, len(content)), PATIENCE_S)
        assert said == Stored(Durability.MEDIUM)
        said = await pair.peer.push(offer_of(b"m", content), memoryview(content), PATIENCE_S)
        assert said == Stored(Durability.MEDIUM)


async def test_reads_and_pushes_both_ways_at_once_over_tls_do_not_mix(
    authority: Authority,
) -> None:
    mine, theirs = authority.sign("one"), authority.sign("two")
    async with lab(security=mine, theirs=theirs, limits=SMALL) as pair:
        content = content_of(700_000)
        targets = [bytearray(len(content)) for _ in range(8)]
        async with trio.open_nursery() as nursery:
            for number, target in enumerate(targets):
                pair.door.put(b"k%d" % number, content)
                offer = offer_of(b"n%d" % number, content)
                nursery.start_soon(
                    pair.peer.read, b"k%d" % number, 1, memoryview(target), PATIENCE_S
                )
                nursery.start_soon(pair.peer.push, offer, memoryview(content), PATIENCE_S)
        assert all(target == content for target in targets)
        assert len(pair.door.offers) == 8


async def test_who_is_not_the_member_that_was_looked_for_is_not_asked(
    authority: Authority,
) -> None:
    async with lab(security=authority.sign("one"), theirs=authority.sign("three")) as pair:
        assert "not for b'two'" in await refusal_of(pair)


async def test_who_claims_another_name_than_its_certificate_is_turned_away(
    authority: Authority,
) -> None:
    async with lab(security=authority.sign("three"), theirs=authority.sign("two")) as pair:
        assert "the certificate is not for b'one'" in await refusal_of(pair)
        assert pair.server.peers == set()


async def test_a_certificate_of_another_authority_is_worth_nothing(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    async with lab(security=other.sign("one"), theirs=authority.sign("two")) as pair:
        await refusal_of(pair)
        assert pair.server.peers == set()


async def test_plain_and_secure_members_do_not_talk(authority: Authority) -> None:
    async with lab(security=INSECURE, theirs=authority.sign("two"), timing=QUICK) as pair:
        await refusal_of(pair)
    async with lab(security=authority.sign("one"), theirs=INSECURE, timing=QUICK) as pair:
        await refusal_of(pair)


async def test_changed_certificates_are_used_from_the_next_connection_on(
    authority: Authority,
) -> None:
    theirs = authority.sign("three", file="file")
    quick = Timing(backoff_min_s=0.01, backoff_max_s=0.02)
    async with lab(security=authority.sign("one"), theirs=theirs, timing=quick) as pair:
        assert "not for b'two'" in await refusal_of(pair)
        authority.write("two", "file")
        await pair.peer.wait_healthy()
        await pair.peer.lookup([b"k"], PATIENCE_S)


def test_certificates_that_became_no_good_leave_the_former_ones_in_use(
    authority: Authority, tmp_path: Path
) -> None:
    mine = authority.sign("one")
    before = mine.contexts
    (tmp_path / "ca-one.key").write_bytes(b"half of a k")
    assert (mine.contexts is before, mine.trouble is None) == (True, False)
    authority.write("one", "one")
    assert (mine.contexts is before, mine.trouble is None) == (False, True)
    with pytest.raises(ConfigError, match=r"none\.crt"):
        Certificates(authority.path, tmp_path / "none.crt", tmp_path / "none.key")


async def test_another_cluster_is_turned_away() -> None:
    async with lab() as pair:
        stranger = Identity(cluster=b"other", name=b"one")
        peer = Peer(stranger, b"two", pair.listener.address, INSECURE)
        pair.nursery.start_soon(peer.run)
        with pytest.raises(PeerUnreachable, match="another cluster"):
            await peer.lookup([b"k"], PATIENCE_S)


async def a_session(pair: Lab) -> Session:
    """Of the member `one`, without data connections."""
    return await connect(
        pair.listener.address,
        b"two",
        ME,
        INSECURE,
        token=TOKEN,
        lanes=0,
        limits=Limits(),
        timing=QUICK,
    )


async def until_hung_up(link: Link) -> None:
    with trio.fail_after(PATIENCE_S), suppress(PeerUnreachable):
        while True:
            await link.receive(1000)


async def test_data_connections_need_a_session_of_the_same_member() -> None:
    async with lab() as pair:
        session = await a_session(pair)
        thief = hello(Identity(cluster=b"lab", name=b"six"), Role.DATA, TOKEN, Limits())
        link = await dial(pair.listener.address, INSECURE)
        await link.send_all(frames.PREFACE + frames.encode(0, thief))
        assert b"no session for this" in await link.receive(1000)
        link.close()
        with pytest.raises(PeerRejected, match="session of this token"):
            await a_session(pair)
        session.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        frames.PREFACE + bytes(24),
        frames.PREFACE + b"\xff" * 64,
        frames.PREFACE + frames.encode(1, Heartbeat()),
    ],
    ids=["http", "tls", "zeros", "ones", "no hello"],
)
async def test_a_stranger_that_says_anything_else_costs_its_connection(said: bytes) -> None:
    async with lab() as pair:
        pair.door.put(b"k", b"content")
        link = await dial(pair.listener.address, INSECURE)
        await link.send_all(said)
        await until_hung_up(link)
        link.close()
        (found,) = await pair.peer.lookup([b"k"], PATIENCE_S)
        assert isinstance(found, Have)
        assert pair.server.counters.strangers == 1


async def test_a_member_that_breaks_the_protocol_loses_its_session_and_nobody_elses() -> None:
    async with lab() as pair:
        await pair.peer.lookup([b"k"], PATIENCE_S)
        rude = Identity(cluster=b"lab", name=b"rude")
        link = await dial(pair.listener.address, INSECURE)
        await link.send_all(
            frames.PREFACE
            + frames.encode(0, hello(rude, Role.CONTROL, TOKEN, Limits()))
            + frames.encode(0, hello(rude, Role.CONTROL, TOKEN, Limits()))
        )
        await until_hung_up(link)
        link.close()
        await pair.until(lambda: b"rude" in pair.door.gone_peers)
        assert pair.server.peers == {b"one"}
        await pair.peer.lookup([b"k"], PATIENCE_S)
        assert pair.peer.counters.connected == 1
