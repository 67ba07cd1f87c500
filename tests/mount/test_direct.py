"""What only the direct channel does: lending hot files to the kernel, and many requests at once."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxfs.codec.digest import DIGEST_NAME, digest
from mountd import channels
from tests.mount.calls import Pages
from tests.mount.harness import MIB, Actor, Daemon, elsewhere, noise, wait_until

LENDS = channels.what_root_lacks() is None and channels.kernel_is_old(os.uname().release) is None
needs_passthrough = pytest.mark.skipif(not LENDS, reason="needs root, and Linux 6.9 or later")

Start = Callable[..., Daemon]

pytestmark = pytest.mark.channel("direct")


@pytest.fixture
def direct(start: Start) -> Daemon:
    """A daemon with 64 MiB of hot tier."""
    return start(hot="64MiB")


def lent(daemon: Daemon) -> int:
    return int(daemon.stats()["counters"]["opens_lent"])


def read_bytes(daemon: Daemon) -> int:
    return int(daemon.stats()["counters"]["read_bytes"])


def used(daemon: Daemon) -> int:
    return int(daemon.stats()["tiers"]["hot"]["used_bytes"])


def sealed(daemon: Daemon, key: str, content: bytes) -> Path:
    path = daemon.put(key, content)
    daemon.wait_sealed(key)
    return path


@needs_passthrough
def test_it_is_chosen_where_the_kernel_can_read_by_itself(start: Start) -> None:
    stats = start(channel="auto").stats()
    assert stats["channel"] == "direct"
    assert stats["passthrough"]
    assert "root" in stats["channel_why"]


@needs_passthrough
def test_reads_and_maps_of_a_sealed_block_do_not_reach_the_daemon(direct: Daemon) -> None:
    content = noise(1, 3 * MIB + 7)
    path = sealed(direct, "k", content)
    before, opened = read_bytes(direct), lent(direct)
    assert elsewhere(path.read_bytes) == content
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert view[:] == content
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        buffer = mmap.mmap(-1, 4096)
        assert os.preadv(fd, [buffer], MIB) == 4096
        assert buffer[:] == content[MIB : MIB + 4096]
        os.close(fd)
    # Only the reads of .ctx/stats went through the daemon, and they are not counted.
    assert read_bytes(direct) == before
    assert lent(direct) == opened + 3


@needs_passthrough
def test_many_opens_share_one_backing_file_and_all_read(direct: Daemon) -> None:
    content = noise(2, 70_000)
    path = sealed(direct, "k", content)

    def play() -> Iterator[Any]:
        files = [os.open(path, os.O_RDONLY) for _ in range(20)]
        yield None
        for fd in files[::2]:
            os.close(fd)
        yield [os.pread(fd, 100_000, 0) for fd in files[1::2]]

    with Actor(play) as first, Actor(play) as second:
        first.step()
        second.step()
        assert first.step() == second.step() == [content] * 10
        assert path.read_bytes() == content
    assert path.read_bytes() == content


@needs_passthrough
def test_a_block_that_was_open_before_it_was_sealed_stays_cached_until_that_is_closed(
    direct: Daemon,
) -> None:
    path = direct.mount / "k"
    with open(path, "wb", buffering=0) as writer:
        writer.write(b"early")
        early = os.open(path, os.O_RDONLY)
    direct.wait_sealed("k")
    opened = lent(direct)
    assert elsewhere(path.read_bytes) == b"early"
    assert os.read(early, 100) == b"early"
    assert lent(direct) == opened
    os.close(early)
    wait_until(lambda: elsewhere(path.read_bytes) == b"early" and lent(direct) > opened)


@needs_passthrough
def test_its_writer_may_go_on_writing_while_it_has_it_open_for_reading(direct: Daemon) -> None:
    path = sealed(direct, "k", b"old bytes")
    with open(path, "rb") as reader:
        with open(path, "r+b") as writer:
            writer.write(b"new")
        assert path.read_bytes() == b"new bytes"
        assert elsewhere(path.read_bytes) == b"new bytes"
        assert reader.read() == b"new bytes"
    direct.wait_sealed("k")
    assert direct.get("k", "digest") == f"{DIGEST_NAME}:{digest(b'new bytes').hex()}"


@needs_passthrough
def test_a_block_with_holes_is_not_lent_and_maps_take_no_memory(direct: Daemon) -> None:
    path = direct.mount / "k"
    with open(path, "wb") as writer:
        writer.truncate(32 * MIB)
    direct.wait_sealed("k")
    opened, before = lent(direct), used(direct)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert not any(view[::4096])
        assert lent(direct) == opened
        assert used(direct) - before < MIB


def fill(path: Path, written: list[int]) -> None:
    with open(path, "wb", buffering=0) as file:
        written.extend(file.write(noise(number, MIB)) for number in range(64))


@needs_passthrough
def test_room_of_an_unlinked_block_comes_back_when_its_last_mapping_ends(start: Start) -> None:
    direct = start(config='[hot]\nroom_wait = "300ms"\n')
    content = noise(3, 20 * MIB)
    path = sealed(direct, "k", content)
    before = used(direct)

    def play() -> Iterator[Any]:
        pages = Pages(path)
        yield None
        yield pages.content() == content
        pages.close()
        yield None

    with Actor(play) as reader:
        reader.step()
        path.unlink()
        assert used(direct) >= before - MIB  # nobody has it open, but it is mapped
        written: list[int] = []
        with pytest.raises(OSError, match="No space"):
            fill(direct.mount / "large", written)
        assert len(written) < 44  # the cap holds
        assert used(direct) <= 64 * MIB
        assert reader.step() is True
        reader.step()
        wait_until(lambda: used(direct) < 64 * MIB - 20 * MIB)
    assert "Traceback" not in direct.log()


@needs_passthrough
def test_evicted_blocks_stay_readable_to_who_maps_them(direct: Daemon) -> None:
    content = noise(4, 8 * MIB)
    path = sealed(direct, "mapped", content)
    pages = Pages(path)
    for number in range(40):
        direct.put(f"k{number}", noise(number, 4 * MIB))
        assert used(direct) <= 64 * MIB
    assert not path.exists()
    assert pages.content() == content
    pages.close()


def test_an_ended_caller_gets_its_answer_before_its_request_is_done(
    start: Start,
) -> None:
    config = '[hot]\nroom_wait = "120s"\n'
    daemon = start(hot="16MiB", config=config)
    holder = daemon.put("holder", noise(1, 6 * MIB))
    daemon.wait_sealed("holder")
    other = daemon.put("other", noise(2, 6 * MIB))
    daemon.wait_sealed("other")
    waits = daemon.stats()["counters"]["room_waits"]
    with open(holder, "rb"), open(other, "rb"):
        command = ["dd", "if=/dev/zero", f"of={daemon.mount}/k", "bs=1M", "count=8"]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as writer:
            wait_until(lambda: daemon.stats()["counters"]["room_waits"] > waits)
            writer.send_signal(signal.SIGCONT)  # not a signal that ends it: it goes on waiting
            assert holder.stat().st_size == 6 * MIB  # others are answered meanwhile
            assert writer.poll() is None
            writer.send_signal(signal.SIGTERM)
            writer.communicate(timeout=20)
            assert writer.returncode == -signal.SIGTERM
    wait_until(lambda: daemon.stats()["counters"]["discarded"] == 1)
    assert not (daemon.mount / "k").exists()


def test_requests_that_wait_do_not_keep_others_waiting(direct: Daemon) -> None:
    follow = os.open(direct.mount / ".ctx/events", os.O_RDONLY)
    try:
        os.read(follow, 1 << 20)
        threads = [threading.Thread(target=os.read, args=(follow, 4096)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for number in range(50):
            direct.put(f"k{number}", b"content")
            assert (direct.mount / f"k{number}").read_bytes() == b"content"
        for thread in threads:
            thread.join()
    finally:
        os.close(follow)


def test_a_forced_channel_without_passthrough_serves_reads_itself(direct: Daemon) -> None:
    content = noise(5, 5 * MIB + 1)
    path = direct.mount / "k"
    path.write_bytes(content)
    with open(path, "r+b") as file:  # a writer's own reads are never lent
        assert file.read() == content
    assert path.read_bytes() == content


def test_extended_attributes_are_created_and_replaced_as_asked(direct: Daemon) -> None:
    path = direct.put("k", b"x")
    os.setxattr(path, "user.mine", b"1", os.XATTR_CREATE)
    with pytest.raises(FileExistsError):
        os.setxattr(path, "user.mine", b"2", os.XATTR_CREATE)
    os.setxattr(path, "user.mine", b"3", os.XATTR_REPLACE)
    assert os.getxattr(path, "user.mine") == b"3"
    with pytest.raises(OSError, match="No data"):
        os.setxattr(path, "user.other", b"4", os.XATTR_REPLACE)


def test_writing_takes_setuid_and_setgid_from_a_file(direct: Daemon) -> None:
    path = direct.mount / "k"
    with open(path, "wb") as file:
        os.fchmod(file.fileno(), 0o6755)
        os.fchown(file.fileno(), 1000, 1000)
        assert os.fstat(file.fileno()).st_mode & 0o7777 == 0o755
    assert path.stat().st_mode & 0o7777 == 0o755
