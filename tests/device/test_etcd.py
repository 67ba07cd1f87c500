"""The client of etcd, against a real one."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from ctxfs.device.etcd import Etcd, EtcdSettings
from ctxfs.device.etcd_values import KeyValue, encoded, prefix_end
from ctxfs.device.etcd_watch import Watch
from ctxfs.errors import (
    ConfigError,
    EtcdAway,
    EtcdError,
    EtcdRefused,
    HistoryGone,
    LeaseGone,
)
from tests.certificates import Authority
from tests.etcd_server import EtcdServer, free_port

PATIENT_S = 20.0  # no test waits for it: it only bounds what goes wrong


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def settings(*endpoints: str, deadline_s: float = PATIENT_S) -> EtcdSettings:
    return EtcdSettings(endpoints=endpoints, deadline_s=deadline_s)


@pytest.fixture
async def etcd(server: EtcdServer) -> AsyncIterator[Etcd]:
    async with Etcd(settings(server.endpoint)) as client:
        yield client


async def test_what_is_put_is_listed_byte_for_byte(etcd: Etcd) -> None:
    prefix = b"/bytes\x00/"
    await etcd.put(prefix + b"\xff\x00", bytes(range(256)))
    await etcd.put(prefix + b"empty", b"")
    found = await etcd.list(prefix)
    assert [(each.key, each.value) for each in found.pairs] == [
        (prefix + b"empty", b""),
        (prefix + b"\xff\x00", bytes(range(256))),
    ]
    assert found.revision == max(each.revision for each in found.pairs)


async def test_a_key_is_claimed_by_one_alone(etcd: Etcd) -> None:
    assert await etcd.put_if(b"/claim", b"first") is None
    there = await etcd.put_if(b"/claim", b"second")
    assert there is not None
    assert there.value == b"first"
    assert await etcd.put_if(b"/claim", b"third", revision=there.revision) is None
    again = await etcd.put_if(b"/claim", b"fourth", revision=there.revision)
    assert again is not None
    assert again.value == b"third"
    await etcd.delete(b"/claim")
    assert await etcd.put_if(b"/claim", b"x", revision=there.revision) == KeyValue(
        b"/claim", None, 0
    )


async def test_what_is_kept_under_a_lease_goes_with_it(etcd: Etcd) -> None:
    lease, ttl_s = await etcd.grant(60)
    assert ttl_s >= 60
    await etcd.put(b"/leased", b"x", lease)
    assert await etcd.keep_alive(lease) == ttl_s
    await etcd.revoke(lease)
    assert (await etcd.list(b"/leased")).pairs == ()


async def test_a_lease_that_runs_out_is_told_of(etcd: Etcd) -> None:
    lease, _ = await etcd.grant(1)
    await etcd.put(b"/short", b"x", lease)
    found = await etcd.list(b"/short")
    async with Watch(etcd, b"/short", found.revision + 1) as watch:
        (gone,) = await watch.next()
    assert (gone.key, gone.value) == (b"/short", None)
    for call in (etcd.keep_alive(lease), etcd.revoke(lease), etcd.put(b"/s", b"", lease)):
        with pytest.raises(LeaseGone):
            await call


async def test_a_watch_tells_all_changes_since_a_revision_in_order(etcd: Etcd) -> None:
    start = (await etcd.list(b"/w/")).revision
    await etcd.put(b"/w/a", b"1")
    await etcd.put(b"/x", b"of others")
    await etcd.put(b"/w/a", b"2")
    async with Watch(etcd, b"/w/", start + 1) as watch:
        await etcd.delete(b"/w/a")
        told: list[KeyValue] = []
        while len(told) < 3:
            told += await watch.next()
    assert [(each.key, each.value) for each in told] == [
        (b"/w/a", b"1"),
        (b"/w/a", b"2"),
        (b"/w/a", None),
    ]


async def test_a_silent_watch_is_taken_up_again_and_misses_nothing(etcd: Etcd) -> None:
    start = (await etcd.list(b"/quiet")).revision
    async with Watch(etcd, b"/quiet", start + 1, idle_s=0.05) as watch:
        with trio.move_on_after(0.3):
            await watch.next()
        await etcd.put(b"/quiet", b"x")
        assert [each.value for each in await watch.next()] == [b"x"]


async def test_a_watch_goes_on_when_etcd_was_stopped_and_started(tmp_path: Path) -> None:
    with EtcdServer(tmp_path) as server:
        async with Etcd(settings(server.endpoint)) as etcd:
            await etcd.put(b"/k", b"1")
            async with Watch(etcd, b"/k", 1) as watch:
                assert [each.value for each in await watch.next()] == [b"1"]
                server.stop()
                with pytest.raises(EtcdAway, match="refused"):
                    await watch.next()
                with pytest.raises(EtcdAway, match="refused"):
                    await etcd.list(b"/k")
                server.start()
                await etcd.put(b"/k", b"2")
                assert [each.value for each in await watch.next()] == [b"2"]


async def test_a_watch_from_what_was_compacted_says_so(etcd: Etcd) -> None:
    for value in (b"1", b"2", b"3"):
        await etcd.put(b"/c", value)
    revision = (await etcd.list(b"/c")).revision
    await etcd.call("kv/compaction", {"revision": str(revision)})
    with pytest.raises(HistoryGone, match="compacted"):
        async with Watch(etcd, b"/c", revision - 1) as watch:
            await watch.next()
    async with Watch(etcd, b"/c", revision) as watch:
        assert [each.value for each in await watch.next()] == [b"3"]


async def test_a_watch_in_an_etcd_that_was_made_anew_says_so(etcd: Etcd) -> None:
    revision = (await etcd.list(b"/c")).revision
    with pytest.raises(HistoryGone, match="has no revision"):
        async with Watch(etcd, b"/c", revision + 1000):
            pass


async def test_endpoints_that_are_down_or_hang_are_passed_over(server: EtcdServer) -> None:
    down = f"http://127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hangs = f"http://127.0.0.1:{silent.getsockname()[1]}"
        # A third of it is what the silent one costs.
        async with Etcd(settings(down, hangs, server.endpoint, deadline_s=1.5)) as etcd:
            await etcd.put(b"/f", b"1")
            assert etcd.endpoint == server.endpoint
            # Now that one is asked first: the others are not asked at all.
            silent.close()
            await etcd.put(b"/f", b"2")
            revision = (await etcd.list(b"/f")).revision
            async with Watch(etcd, b"/f", revision) as watch:
                assert [each.value for each in await watch.next()] == [b"2"]


async def serve(
    answer: Callable[[trio.SocketStream], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[trio.SocketListener],
) -> None:
    """Answer on loopback, until the listener is closed or the nursery cancelled."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def answer_and_close(stream: trio.SocketStream) -> None:
        async with stream:
            await answer(stream)

    async with listener, trio.open_nursery() as nursery:
        task_status.started(listener)
        with suppress(trio.ClosedResourceError):
            while True:
                nursery.start_soon(answer_and_close, await listener.accept())


async def test_a_watch_goes_on_at_another_endpoint(tmp_path: Path) -> None:
    """Two addresses of one etcd, the first of which is cut off."""
    with EtcdServer(tmp_path) as server:
        port = int(server.endpoint.rpartition(":")[2])
        async with trio.open_nursery() as nursery:
            connected: list[trio.CancelScope] = []

            async def copy(source: trio.SocketStream, to: trio.SocketStream) -> None:
                async for piece in source:
                    await to.send_all(piece)

            async def relay(stream: trio.SocketStream) -> None:
                onward = await trio.open_tcp_stream("127.0.0.1", port)
                async with onward, trio.open_nursery() as both:
                    connected.append(both.cancel_scope)
                    both.start_soon(copy, stream, onward)
                    both.start_soon(copy, onward, stream)

            listener = await nursery.start(serve, relay)
            relayed = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
            etcd = Etcd(settings(relayed, server.endpoint))
            async with etcd, Watch(etcd, b"/k", 1) as watch:
                await etcd.put(b"/k", b"1")
                assert [each.value for each in await watch.next()] == [b"1"]
                assert etcd.endpoint == relayed
                await listener.aclose()
                for scope in connected:
                    scope.cancel()
                await etcd.put(b"/k", b"2")
                assert etcd.endpoint == server.endpoint
                assert [each.value for each in await watch.next()] == [b"2"]
            nursery.cancel_scope.cancel()


async def test_where_no_endpoint_answers_each_is_told_of() -> None:
    ends = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    async with Etcd(settings(*ends)) as etcd:
        with pytest.raises(EtcdAway) as caught:
            await etcd.list(b"/")
    assert all(f"{end}: Connection refused" in str(caught.value) for end in ends)


async def test_what_is_no_etcd_is_told_of() -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

    async with trio.open_nursery() as nursery:
        listener = await nursery.start(serve, answer)
        port = listener.socket.getsockname()[1]
        async with Etcd(settings(f"http://127.0.0.1:{port}")) as etcd:
            with pytest.raises(EtcdError, match="is not etcd, or too old"):
                await etcd.list(b"/")
        nursery.cancel_scope.cancel()


# ---- users and certificates


async def protect(etcd: Etcd) -> None:
    """Users: root, and one who may use only what is beneath /ours/."""
    permission = {
        "permType": "READWRITE",
        "key": encoded(b"/ours/"),
        "range_end": encoded(prefix_end(b"/ours/")),
    }
    for path, body in (
        ("auth/user/add", {"name": "root", "password": "r"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/role/add", {"name": "us"}),
        ("auth/role/grant", {"name": "us", "perm": permission}),
        ("auth/user/add", {"name": "ctxfs", "password": "secret"}),
        ("auth/user/grant", {"user": "ctxfs", "role": "us"}),
        ("auth/enable", {}),
    ):
        await etcd.call(path, dict(body))


async def test_a_user_may_do_what_its_roles_permit(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.touch(mode=0o600)
    password.write_text("secret\n")
    with EtcdServer(tmp_path) as server:
        async with Etcd(settings(server.endpoint)) as etcd:
            await protect(etcd)
            with pytest.raises(EtcdRefused):
                await etcd.put(b"/ours/a", b"")
        ours = EtcdSettings(
            endpoints=(server.endpoint,),
            deadline_s=PATIENT_S,
            user="ctxfs",
            password_file=password,
        )
        async with Etcd(ours) as etcd:
            await etcd.put(b"/ours/a", b"1")
            etcd._token = "from.another-life"
            async with Watch(etcd, b"/ours/", 1) as watch:
                assert [each.value for each in await watch.next()] == [b"1"]
            with pytest.raises(EtcdRefused, match="permission denied"):
                await etcd.put(b"/theirs", b"")
            with pytest.raises(EtcdRefused, match="permission denied"):
                async with Watch(etcd, b"/theirs", 1) as watch:
                    await watch.next()
            # Whoever changes users makes tokens old.
            password.write_text("another")
            with pytest.raises(EtcdRefused, match="invalid user ID or password"):
                await etcd._log_in()
            with pytest.raises(EtcdRefused):
                await etcd.list(b"/ours/")
            password.chmod(0o644)
            with pytest.raises(ConfigError, match="others may read"):
                await etcd.list(b"/ours/")


async def test_certificates_are_checked_on_both_sides(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    mine, theirs = authority.issue("node1"), authority.issue("etcd")
    foreign = stranger.issue("foreign")
    tls: list[str | Path] = ["--cert-file", theirs.cert, "--key-file", theirs.key]
    tls += ["--trusted-ca-file", authority.cert, "--client-cert-auth"]
    with EtcdServer(tmp_path, *tls, scheme="https") as server:

        def with_files(ca: Path, cert: Path | None, key: Path | None) -> EtcdSettings:
            return EtcdSettings(
                endpoints=(server.endpoint,), deadline_s=PATIENT_S, ca=ca, cert=cert, key=key
            )

        async with Etcd(with_files(authority.cert, mine.cert, mine.key)) as etcd:
            await etcd.put(b"/tls", b"1")
        for wrong in (
            with_files(authority.cert, None, None),
            with_files(authority.cert, foreign.cert, foreign.key),
        ):
            async with Etcd(wrong) as etcd:
                with pytest.raises(EtcdAway, match=r"certificate|reset|is TLS as it wants"):
                    await etcd.list(b"/")
        async with Etcd(with_files(stranger.cert, mine.cert, mine.key)) as etcd:
            with pytest.raises(EtcdAway, match="its certificate is not good"):
                await etcd.list(b"/")
    for wrong in (
        EtcdSettings(endpoints=("https://x",), ca=tmp_path / "missing"),
        EtcdSettings(endpoints=("https://x",), cert=mine.cert, key=theirs.key),
    ):
        with pytest.raises(ConfigError, match=r"missing|node1"):
            async with Etcd(wrong):
                pass
