"""Blocks as files: every way in which programs move bytes, and what stat tells of them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.mount.calls import (
    MAP_POPULATE,
    UTIME_NOW,
    UTIME_OMIT,
    attribute,
    error_of,
    fallocate,
    set_times,
    wait_sealed,
)
from tests.mount.harness import MIB, Actor, Daemon, elsewhere, noise, wait_until

NS = 1_000_000_000


@pytest.fixture(scope="module")
def shared(channel: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """As elsewhere, but small and over a cold file: blocks leave and come back meanwhile."""
    base = tmp_path_factory.mktemp("shared")
    with Daemon(base, hot="64MiB", cold="256MiB", channel=channel) as one:
        yield one


# -- bytes in and out


def test_33_mib_go_in_one_write_and_come_back_in_one_read(place: Path) -> None:
    path, content = place / "block", noise(1, 33 * MIB)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    assert os.write(fd, content) == len(content)
    os.close(fd)

    def read() -> bool:
        reader = os.open(path, os.O_RDONLY)
        return os.read(reader, 40 * MIB) == content

    assert elsewhere(read)


@pytest.mark.parametrize("shift", [0, 13, 4096])
def test_direct_write_and_read_take_a_buffer_at_any_address(place: Path, shift: int) -> None:
    path, length = place / "block", 14 * MIB
    memory = memoryview(mmap.mmap(-1, length + 8192))
    memory[shift : shift + length] = noise(2, length)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    assert os.write(fd, memory[shift : shift + length]) == length
    os.close(fd)
    back = memoryview(mmap.mmap(-1, length + 8192))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    assert os.readv(fd, [back[shift : shift + length]]) == length
    assert os.readv(fd, [back[:100]]) == 0
    os.close(fd)
    assert back[shift : shift + length] == memory[shift : shift + length]


def test_direct_io_of_an_odd_length_is_taken(place: Path) -> None:
    path, content = place / "block", noise(3, 28 + 3 * MIB + 5)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    assert os.write(fd, content) == len(content)
    os.close(fd)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    assert os.pread(fd, 4 * MIB, 28) == content[28:]
    os.close(fd)


def test_vectors_are_written_and_read_whole(place: Path) -> None:
    path = place / "block"
    parts = [noise(n, length) for n, length in enumerate((28, 4096, 0, 2 * MIB + 1, 7))]
    whole = b"".join(parts)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    assert os.writev(fd, parts) == len(whole)
    assert os.pwritev(fd, parts, len(whole)) == len(whole)
    assert os.lseek(fd, 0, os.SEEK_SET) == 0
    head, rest = bytearray(28), bytearray(2 * len(whole) - 28)
    assert os.readv(fd, [head, rest]) == 2 * len(whole)
    assert head + rest == whole * 2
    os.close(fd)
    fd = os.open(path, os.O_RDONLY)
    assert os.preadv(fd, [head, rest], len(whole)) == len(whole)
    assert head + rest[: len(whole) - 28] == whole
    os.close(fd)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, MIB + 1])
def test_block_of_any_size_comes_back_as_it_was(place: Path, size: int) -> None:
    path, content = place / "block", noise(size, size)
    path.write_bytes(content)
    assert elsewhere(path.read_bytes) == content
    assert path.stat().st_size == size
    wait_sealed(path)
    os.setxattr(path, "user.ctx.tier", b"cold")
    assert elsewhere(path.read_bytes) == content
    assert path.stat().st_size == size


@pytest.mark.parametrize(
    ("engine", "direct"),
    [("libaio", 0), ("libaio", 1), ("io_uring", 0), ("io_uring", 1), ("mmap", 0)],
)
def test_fio_verifies_what_it_wrote(place: Path, engine: str, direct: int) -> None:
    job = [
        "fio", "--name=job", f"--filename={place / 'block'}", "--size=6m", "--bs=64k",
        f"--ioengine={engine}", f"--direct={direct}", "--iodepth=8", "--rw=randwrite",
        "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0",
    ]  # fmt: skip
    for more in ([], ["--verify_only"]):
        done = subprocess.run([*job, *more], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (place / "block").stat().st_size == 6 * MIB


# -- holes


def test_holes_read_as_zeros_and_take_no_room(place: Path) -> None:
    path = place / "sparse"
    with open(path, "wb") as file:
        file.truncate(8 * MIB)
        os.pwrite(file.fileno(), b"data", 3 * MIB)
    expected = bytes(3 * MIB) + b"data" + bytes(5 * MIB - 4)
    assert elsewhere(path.read_bytes) == expected
    wait_sealed(path)
    assert path.stat().st_blocks * 512 < 3 * MIB
    with open(path, "rb") as sealed, mmap.mmap(sealed.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert view[:] == expected
    os.setxattr(path, "user.ctx.tier", b"cold")
    assert elsewhere(path.read_bytes) == expected


def test_data_beyond_the_end_leaves_a_hole_before_it(place: Path) -> None:
    path = place / "tail"
    with open(path, "wb") as file:
        file.seek(MIB + 5)
        file.write(b"end")
    assert elsewhere(path.read_bytes) == bytes(MIB + 5) + b"end"


def extents(fd: int) -> Iterator[tuple[int, int]]:
    end = 0
    with contextlib.suppress(OSError):  # ENXIO: no more data
        while True:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
            yield start, end


def test_seeking_data_misses_none(place: Path) -> None:
    path = place / "sparse"
    with open(path, "wb") as file:
        file.truncate(4 * MIB)
        for offset in (0, MIB, 3 * MIB):
            os.pwrite(file.fileno(), b"x" * 4096, offset)
    fd = os.open(path, os.O_RDONLY)
    found = list(extents(fd))
    assert all(any(s <= o < e for s, e in found) for o in (0, MIB, 3 * MIB))
    assert found[-1][1] <= 4 * MIB
    with pytest.raises(OSError, match="No such device or address"):
        os.lseek(fd, 4 * MIB, os.SEEK_DATA)
    os.close(fd)
    copy = place / "copy"
    subprocess.run(["cp", "--sparse=always", path, copy], check=True)
    assert copy.read_bytes() == path.read_bytes()


# -- the kernel moves the bytes


def test_sendfile_goes_out_and_in(place: Path, tmp_path: Path) -> None:
    content = noise(4, 5 * MIB)
    outside, inside = tmp_path / "outside", place / "inside"
    outside.write_bytes(content)
    with open(outside, "rb") as source, open(inside, "wb") as target:
        assert os.sendfile(target.fileno(), source.fileno(), 0, 9 * MIB) == len(content)
    assert elsewhere(inside.read_bytes) == content
    near, far = socket.socketpair()
    with near, far, open(inside, "rb") as source:
        assert near.sendfile(source, 4097, 8000) == 8000
        assert far.recv(9000, socket.MSG_WAITALL | socket.MSG_DONTWAIT) == content[4097:12097]


def test_copy_file_range_copies_between_blocks(place: Path) -> None:
    content = noise(5, 3 * MIB)
    source, target = place / "source", place / "target"
    source.write_bytes(content)
    with open(source, "rb") as file, open(target, "wb") as copy:
        done = 0
        while done < len(content):
            copied = os.copy_file_range(file.fileno(), copy.fileno(), len(content) - done)
            assert copied > 0
            done += copied
    assert elsewhere(target.read_bytes) == content


def test_splice_moves_bytes_through_a_pipe(place: Path) -> None:
    content = noise(6, 64 << 10)
    source, target = place / "source", place / "target"
    source.write_bytes(content)
    near, far = os.pipe()
    with open(source, "rb") as file, open(target, "wb") as copy:
        assert os.splice(file.fileno(), far, len(content)) == len(content)
        assert os.splice(near, copy.fileno(), len(content)) == len(content)
    os.close(near)
    os.close(far)
    assert elsewhere(target.read_bytes) == content


# -- advice, allocation, locks, ioctl


def test_every_kind_of_advice_is_taken_and_harms_nothing(place: Path) -> None:
    path, content = place / "block", noise(7, MIB)
    path.write_bytes(content)
    advices = [getattr(os, name) for name in dir(os) if name.startswith("POSIX_FADV_")]
    assert len(advices) == 6
    with open(path, "rb") as file:
        for advice in advices:
            os.posix_fadvise(file.fileno(), 0, 0, advice)
            assert os.pread(file.fileno(), MIB, 0) == content


@pytest.mark.parametrize("emulated", [True, False])
def test_first_fallocate_of_a_mount_is_carried_out_or_cleanly_unsupported(
    hot_only: Daemon, emulated: bool
) -> None:
    path = hot_only.mount / "block"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    for _ in range(2):
        if emulated:
            os.posix_fallocate(fd, 0, MIB)  # writes zeros itself where the kernel says no
            assert os.fstat(fd).st_size == MIB
            continue
        # numpy and KVBM go on after this error alone
        assert error_of(lambda: fallocate(fd, 0, 0, MIB)) in (0, errno.EOPNOTSUPP)
    assert os.pwrite(fd, b"data", 0) == 4
    os.close(fd)
    assert elsewhere(path.read_bytes)[:4] == b"data"


def try_flock(path: Path, how: int) -> bool:
    def attempt() -> bool:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    return elsewhere(attempt)


def test_flock_holds_between_processes(place: Path) -> None:
    path = place / "name.lock"
    path.touch()
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not try_flock(path, fcntl.LOCK_SH)
        fcntl.flock(file, fcntl.LOCK_SH)
        assert try_flock(path, fcntl.LOCK_SH)
        assert not try_flock(path, fcntl.LOCK_EX)
    assert try_flock(path, fcntl.LOCK_EX)


def test_record_lock_of_a_writer_holds_against_its_child(place: Path) -> None:
    with open(place / "block", "wb") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 10, 0)

        def is_free(start: int) -> bool:
            lock = partial(fcntl.lockf, file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, start)
            return error_of(lock) == 0

        assert elsewhere(lambda: is_free(50))
        assert not elsewhere(lambda: is_free(5))
        fcntl.lockf(file, fcntl.LOCK_UN)
        assert elsewhere(lambda: is_free(5))


def test_record_locks_of_readers_are_shared_and_end_with_their_owner(place: Path) -> None:
    path = place / "block"
    path.write_bytes(bytes(100))

    def hold() -> Iterator[bool]:
        with open(path, "rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH, 10, 0)
            yield True
            yield True

    def is_held() -> bool:
        question = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 100, 0)
        with open(path, "rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return bool(struct.unpack("hhqqi4x", answer)[0] == fcntl.F_RDLCK)

    with Actor(hold) as holder:
        assert holder.step()
        assert is_held()
        holder.end(signal.SIGKILL)
        assert not is_held()


def test_terminal_questions_are_answered_as_for_a_file(place: Path) -> None:
    with open(place / "block", "wb") as file:
        assert not os.isatty(file.fileno())
        with pytest.raises(termios.error) as error:
            termios.tcgetattr(file.fileno())
    assert error.value.args[0] == errno.ENOTTY


# -- mappings


@pytest.mark.parametrize("tier", ["hot", "cold"])
@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
@pytest.mark.parametrize("populate", [0, MAP_POPULATE])
def test_mapping_shows_the_bytes(place: Path, tier: str, flags: int, populate: int) -> None:
    path, content = place / "block", noise(8, 2 * MIB + 123)
    path.write_bytes(content)
    os.setxattr(path, "user.ctx.tier", tier.encode())
    with open(path, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, flags=flags | populate, prot=mmap.PROT_READ)
    assert view[:] == content
    view.madvise(mmap.MADV_DONTNEED)
    assert view[:] == content
    path.unlink()
    assert view[:] == content


def test_private_writable_mapping_changes_nobody_elses_bytes(place: Path) -> None:
    # torch maps safetensors so
    path, content = place / "block", noise(9, MIB)
    path.write_bytes(content)
    with open(path, "rb") as file:
        view = mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    view[:100] = b"?" * 100
    assert path.read_bytes() == content
    assert elsewhere(path.read_bytes) == content
    path.write_bytes(b"another")
    assert view[:] == b"?" * 100 + content[100:]


def test_sealed_block_cannot_be_mapped_for_shared_writing(place: Path) -> None:
    path = place / "block"
    path.write_bytes(b"sealed")
    with open(path, "rb") as file, pytest.raises(PermissionError):
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE)


def test_what_was_written_through_a_shared_mapping_is_in_the_block(place: Path) -> None:
    # np.memmap("w+"), torch.from_file(shared=True)
    path, content = place / "block", noise(10, 3 * MIB + 17)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(fd, len(content))
    view = mmap.mmap(fd, 0)
    view[:MIB] = content[:MIB]
    view.flush()
    assert os.pread(fd, MIB, 0) == content[:MIB]
    view[MIB:] = content[MIB:]
    view.close()
    os.close(fd)
    wait_sealed(path)
    assert elsewhere(path.read_bytes) == content


# -- times, owners, modes


def test_access_time_alone_is_moved_by_utimensat(place: Path) -> None:
    # llm-d does this on every hit
    path = place / "block"
    path.write_bytes(b"block")
    wait_sealed(path)
    os.utime(path, ns=(5 * NS, 7 * NS))
    generation = attribute(path, "generation")
    before_ns = time.time_ns()
    set_times(path, UTIME_NOW, UTIME_OMIT)
    after = path.stat()
    assert after.st_atime_ns >= before_ns - NS
    assert after.st_mtime_ns == 7 * NS
    set_times(path, UTIME_OMIT, UTIME_NOW)
    assert path.stat().st_atime_ns == after.st_atime_ns
    assert path.stat().st_mtime_ns >= before_ns - NS
    assert attribute(path, "generation") == generation


def test_reading_moves_the_access_time_and_looking_does_not(place: Path) -> None:
    path = place / "block"
    path.write_bytes(b"block")
    wait_sealed(path)
    os.utime(path, ns=(5 * NS, 5 * NS))
    assert elsewhere(lambda: path.stat().st_atime_ns) == 5 * NS
    assert path.name in os.listdir(place)
    assert path.stat().st_atime_ns == 5 * NS
    path.read_bytes()
    wait_until(lambda: path.stat().st_atime_ns > 5 * NS)  # the kernel may believe it a second
    assert path.stat().st_mtime_ns == 5 * NS


def test_access_times_need_not_be_moved(place: Path) -> None:
    # LMCache's GDS backend reads so
    path = place / "block"
    path.write_bytes(b"block")
    fd = os.open(path, os.O_RDONLY | os.O_NOATIME)
    assert os.read(fd, 100) == b"block"
    os.close(fd)


def test_mode_owner_and_times_of_a_sealed_block_change_without_its_bytes(place: Path) -> None:
    path, content = place / "block", noise(11, 100_000)
    path.write_bytes(content)
    wait_sealed(path)
    generation, digest = attribute(path, "generation"), attribute(path, "digest")
    os.chmod(path, 0o640)
    os.chown(path, 1234, 4321)
    os.utime(path, ns=(3 * NS + 1, 4 * NS + 2))
    facts = path.stat()
    assert stat.S_IMODE(facts.st_mode) == 0o640
    assert (facts.st_uid, facts.st_gid) == (1234, 4321)
    assert (facts.st_atime_ns, facts.st_mtime_ns) == (3 * NS + 1, 4 * NS + 2)
    assert attribute(path, "generation") == generation
    assert attribute(path, "digest") == digest
    assert elsewhere(path.read_bytes) == content


def test_modification_time_is_the_time_of_publishing(place: Path) -> None:
    # SGLang's evictor and its nixl cleaner go by it
    temporary, path = place / ".k.tmp", place / "k"
    with open(temporary, "wb") as file:
        file.write(b"block")
        file.flush()
        before_ns = time.time_ns()
        os.rename(temporary, path)
        published_ns = path.stat().st_mtime_ns
        assert before_ns <= published_ns <= time.time_ns()
    wait_sealed(path)
    assert path.stat().st_mtime_ns == published_ns
    os.rename(path, place / "other")
    assert (place / "other").stat().st_mtime_ns == published_ns


def test_modification_time_given_by_the_writer_stays(place: Path) -> None:
    # cp -p, tar and rsync set it before they close
    path = place / "block"
    with open(path, "wb") as file:
        file.write(b"block")
        file.flush()
        os.utime(file.fileno(), ns=(8 * NS, 9 * NS))
    assert path.stat().st_mtime_ns == 9 * NS
    wait_sealed(path)
    assert path.stat().st_mtime_ns == 9 * NS


def test_statx_and_stat_agree(place: Path) -> None:
    path = place / "block"
    path.write_bytes(noise(12, 12345))
    wait_sealed(path)
    told = subprocess.run(
        ["stat", "--format=%s %b %B %i %F", path], capture_output=True, text=True, check=True
    ).stdout.split(maxsplit=4)  # coreutils' stat calls statx(2)
    facts = path.stat()
    assert told[:4] == [str(n) for n in (12345, facts.st_blocks, 512, facts.st_ino)]
    assert told[4].strip() == "regular file"
    assert facts.st_ino == int(attribute(path, "generation"))


def test_blocks_of_a_file_are_its_physical_size(place: Path) -> None:
    path = place / "block"
    path.write_bytes(noise(13, MIB + 1))
    wait_sealed(path)
    os.setxattr(path, "user.ctx.tier", b"hot")
    facts = path.stat()
    assert facts.st_blocks * 512 == int(attribute(path, "stored"))
    assert facts.st_blocks * 512 >= MIB + 4096
    assert facts.st_blksize == 4096


# -- room


def test_free_space_shrinks_by_what_is_written_and_comes_back(hot_only: Daemon) -> None:
    before = os.statvfs(hot_only.mount)
    assert (before.f_bsize, before.f_frsize, before.f_namemax) == (4096, 4096, 255)
    assert before.f_blocks * 4096 == 64 * MIB
    assert 0 < before.f_bavail == before.f_bfree < before.f_blocks
    path = hot_only.put("block", noise(14, 10 * MIB))
    hot_only.wait_sealed("block")
    full = os.statvfs(hot_only.mount)
    assert 0 <= before.f_bfree - full.f_bfree - 10 * MIB // 4096 <= 4 * MIB // 4096
    with open(path, "rb") as file:
        path.unlink()
        assert os.statvfs(hot_only.mount).f_bfree < before.f_bfree - 9 * MIB // 4096
        assert file.read(4) == noise(14, 10 * MIB)[:4]
    wait_until(lambda: before.f_bfree - os.statvfs(hot_only.mount).f_bfree < MIB // 4096)


# -- what blocks are not


def refusals(place: Path) -> dict[str, Callable[[], object]]:
    target, block = place / "new", place / "block"
    return {
        "symbolic link": lambda: os.symlink("block", target),
        "hard link": lambda: os.link(block, target),
        "character device": lambda: os.mknod(target, 0o600 | stat.S_IFCHR, os.makedev(1, 3)),
        "block device": lambda: os.mknod(target, 0o600 | stat.S_IFBLK, os.makedev(7, 0)),
        "fifo": lambda: os.mkfifo(target),
        "socket": lambda: os.mknod(target, 0o600 | stat.S_IFSOCK),
    }


def test_links_and_special_files_are_refused(place: Path) -> None:
    (place / "block").write_bytes(b"block")
    for what, make in refusals(place).items():
        with pytest.raises(PermissionError) as error:
            make()
        assert error.value.errno == errno.EPERM, what
        assert os.listdir(place) == ["block"], what


def test_mknod_makes_an_empty_block(place: Path) -> None:
    path = place / "block"
    os.mknod(path, 0o640 | stat.S_IFREG)
    assert elsewhere(path.read_bytes) == b""
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(FileExistsError):
        os.mknod(path, 0o640 | stat.S_IFREG)
    path.write_bytes(b"and then written")
    assert elsewhere(path.read_bytes) == b"and then written"


def test_appends_of_one_writer_follow_each_other(place: Path) -> None:
    path = place / "log"
    first = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    second = os.open(path, os.O_WRONLY | os.O_APPEND)
    for number, fd in zip(range(100), itertools.cycle([first, second]), strict=False):
        line = b"%03d " % number
        assert os.write(fd, line) == len(line)
    os.close(first)
    os.close(second)
    expected = b"".join(b"%03d " % number for number in range(100))
    assert elsewhere(path.read_bytes) == expected
    with open(path, "ab") as file:
        assert file.tell() == len(expected)
        file.write(b"end")
    assert elsewhere(path.read_bytes) == expected + b"end"


def test_temporary_files_of_python_work(place: Path) -> None:
    # without a name: O_TMPFILE is asked for first, and must be refused as unsupported
    nameless = partial(os.open, place, os.O_TMPFILE | os.O_RDWR, 0o600)
    assert error_of(nameless) == errno.EOPNOTSUPP
    with tempfile.TemporaryFile(dir=place) as file:
        file.write(b"scratch")
        file.seek(0)
        assert file.read() == b"scratch"
    with tempfile.NamedTemporaryFile(dir=place, delete=False) as named:
        named.write(b"kept")
    assert elsewhere(Path(named.name).read_bytes) == b"kept"
    assert os.listdir(place) == [Path(named.name).name]
