"""Names: what a key may be, renames and directories, and listings that never lie."""

from __future__ import annotations

import errno
import mmap
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.mount.calls import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RENAME_WHITEOUT,
    DirectoryStream,
    attribute,
    error_of,
    rename,
    wait_sealed,
)
from tests.mount.harness import Actor, Daemon, elsewhere, noise, read_or_none, together

DT_DIR = 4
DT_REG = 8
KEY_BYTES_MAX = 4095


# -- what a name may be

NAMES = {
    "one byte": b"k",
    "254 bytes": b"n" * 254,
    "255 bytes": b"n" * 255,
    "255 bytes of unicode": "é".encode() * 127 + b"e",
    "unicode": "käse-日本語-💾".encode(),
    "two spellings of one letter": "e\u0301é".encode(),
    "percent": b"meta-llama%2FLlama%40bfloat16%.%%",
    "at": b"meta-llama-Llama-3.1-8B-Instruct@1@0@0123456789abcdef@bfloat16.pt",
    "separator": b"a-SEP-b-SEP--SEP-",  # LMCache#5069
    "newline": b"two\nlines\n",
    "not UTF-8": b"\xff\xfe\x80\xc3(",
    "leading dot": b".hidden",
    "leading dash": b"--help",
    "dots": b"...",
    "spaces": b" a  b ",
    "control characters": bytes(range(1, 32)),
    "quotes": b"\"'`$(x)\\*?[",
    "case": b"Aa",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_name_is_kept_byte_for_byte(place: Path, name: bytes) -> None:
    path = os.fsencode(place) + b"/" + name
    with open(path, "wb") as file:
        file.write(name)

    def found() -> tuple[list[bytes], bytes]:
        with open(path, "rb") as reader:
            return os.listdir(os.fsencode(place)), reader.read()

    assert elsewhere(found) == ([name], name)
    os.rename(path, path[:-1] + b"2")
    assert elsewhere(lambda: os.listdir(os.fsencode(place))) == [name[:-1] + b"2"]
    os.unlink(path[:-1] + b"2")
    os.mkdir(path)
    assert os.path.isdir(path)


def test_names_that_look_alike_are_different_blocks(place: Path) -> None:
    names = ["key", "Key", "key ", "key.", "%6bey", "e\u0301", "\u00e9", "a-SEP-b", "a", "a-SEP-"]
    for name in names:
        (place / name).write_text(name)
    assert sorted(os.listdir(place)) == sorted(names)
    assert elsewhere(lambda: [(place / name).read_text() for name in names]) == names


def test_name_of_256_bytes_is_too_long_for_everything(place: Path) -> None:
    # LMCache#4827
    long, block = place / ("n" * 256), place / "block"
    block.write_bytes(b"block")
    actions: list[Callable[[], object]] = [
        lambda: long.write_bytes(b"x"),
        long.stat,
        long.mkdir,
        long.unlink,
        lambda: os.rename(block, long),
    ]
    assert [error_of(action) for action in actions] == [errno.ENAMETOOLONG] * 5
    assert os.listdir(place) == ["block"]


def test_keys_have_up_to_4095_bytes(place: Path, shared: Daemon) -> None:
    fd = os.open(place, os.O_RDONLY)
    used = len(os.fsencode(place.relative_to(shared.mount)))
    while KEY_BYTES_MAX - used > 300:
        os.mkdir("d" * 199, dir_fd=fd)
        below = os.open("d" * 199, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd, used = below, used + 200
    longest = "k" * min(255, KEY_BYTES_MAX - used - 1)
    while used + 1 + len(longest) < KEY_BYTES_MAX:
        os.mkdir("e" * 20, dir_fd=fd)
        below = os.open("e" * 20, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd, used = below, used + 21
        longest = "k" * (KEY_BYTES_MAX - used - 1)

    def put(name: str) -> None:
        block = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=fd)
        os.write(block, name.encode())
        os.close(block)

    put(longest)
    assert error_of(lambda: put(longest + "k")) == errno.ENAMETOOLONG
    assert error_of(lambda: os.mkdir(longest + "d", dir_fd=fd)) == errno.ENAMETOOLONG
    move = partial(os.rename, longest, longest + "k", src_dir_fd=fd, dst_dir_fd=fd)
    assert error_of(move) == errno.ENAMETOOLONG
    assert os.listdir(fd) == [longest]
    reader = os.open(longest, os.O_RDONLY, dir_fd=fd)
    assert os.read(reader, 5000) == longest.encode()
    os.close(reader)
    os.close(fd)


# -- directories


def test_making_one_path_from_16_threads_succeeds_in_all(place: Path) -> None:
    # vLLM's tier and llm-d make hash directories so; Python's makedirs looks again after EEXIST
    gate = threading.Barrier(16)

    def make(number: int) -> None:
        for turn in range(20):
            gate.wait(30)
            os.makedirs(place / f"{turn}/b/c", exist_ok=True)
            (place / f"{turn}/b/c/{number}").write_bytes(b"")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(make, range(16)))
    assert sorted(os.listdir(place / "19/b/c")) == sorted(map(str, range(16)))


def test_directory_that_exists_answers_eexist_whatever_it_holds(place: Path) -> None:
    (place / "empty").mkdir()
    (place / "block").write_bytes(b"")
    for name in ("empty", "block"):
        with pytest.raises(FileExistsError):
            (place / name).mkdir()
    with pytest.raises(NotADirectoryError):
        (place / "block/below").mkdir()
    with pytest.raises(NotADirectoryError):
        (place / "block/below").write_bytes(b"")
    with pytest.raises(IsADirectoryError):
        (place / "empty").write_bytes(b"")
    with pytest.raises(FileNotFoundError):
        (place / "absent/below").write_bytes(b"")


def test_only_an_empty_directory_is_removed(place: Path) -> None:
    directory = place / "directory"
    directory.mkdir()
    (directory / "block").write_bytes(b"")
    assert error_of(directory.rmdir) == errno.ENOTEMPTY
    assert error_of(directory.unlink) == errno.EISDIR
    assert error_of((directory / "block").rmdir) == errno.ENOTDIR
    (directory / "block").unlink()
    directory.rmdir()
    assert not elsewhere(directory.exists)
    assert error_of(directory.rmdir) == errno.ENOENT
    directory.mkdir()
    assert os.listdir(directory) == []


def test_what_is_written_into_a_removed_directory_is_nowhere(place: Path) -> None:
    directory = place / "directory"
    directory.mkdir()
    with open(directory / "block", "wb") as file:
        file.write(b"private, so the directory looks empty")
        file.flush()
        elsewhere(directory.rmdir)
        assert os.pread(file.fileno(), 7, 0) == b"private" if file.readable() else True
    assert not directory.exists()
    directory.mkdir()
    assert os.listdir(directory) == []


def test_directory_times_and_modes_follow_what_happens_in_it(place: Path) -> None:
    os.utime(place, ns=(1, 1))
    (place / "block").write_bytes(b"")
    assert place.stat().st_mtime_ns > 1
    os.utime(place, ns=(1, 1))
    (place / "block").unlink()
    assert place.stat().st_mtime_ns > 1
    place.chmod(0o2750)
    os.chown(place, -1, 77)
    (place / "below").mkdir()
    facts = (place / "below").stat()
    assert (facts.st_gid, facts.st_mode & 0o2000) == (77, 0o2000)
    (place / "block").write_bytes(b"")
    assert (place / "block").stat().st_gid == 77


# -- rename


def test_rename_moves_a_block_within_and_across_directories(place: Path) -> None:
    content = noise(1, 100_000)
    first, second, third = place / "first", place / "second", place / "below/third"
    third.parent.mkdir()
    first.write_bytes(content)
    wait_sealed(first)
    os.setxattr(first, "user.mine", b"kept")
    generation = attribute(first, "generation")
    for old, new in ((first, second), (second, third)):
        os.rename(old, new)
        assert not elsewhere(old.exists)
        assert elsewhere(new.read_bytes) == content
    assert attribute(third, "generation") == generation
    assert os.getxattr(third, "user.mine") == b"kept"


def test_rename_replaces_a_block_whose_readers_keep_it(place: Path) -> None:
    old, new = place / "old", place / "new"
    old.write_bytes(b"old bytes")
    new.write_bytes(b"new bytes")
    with open(old, "rb") as reader:
        view = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
        os.rename(new, old)
        assert reader.read() == view[:] == b"old bytes"
        assert os.fstat(reader.fileno()).st_nlink == 0
    assert elsewhere(old.read_bytes) == b"new bytes"
    assert os.listdir(place) == ["old"]


def test_rename_without_replacing_fails_where_the_name_is_taken(place: Path) -> None:
    old, new = place / "old", place / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    assert error_of(lambda: rename(new, old, RENAME_NOREPLACE)) == errno.EEXIST
    assert (old.read_bytes(), new.read_bytes()) == (b"old", b"new")
    rename(new, place / "free", RENAME_NOREPLACE)
    assert elsewhere((place / "free").read_bytes) == b"new"
    assert not new.exists()
    subprocess.run(["mv", "-n", place / "free", old], check=False)
    assert old.read_bytes() == b"old"


def test_exchange_swaps_two_names_at_once(place: Path) -> None:
    left, right = place / "left", place / "right"
    left.write_bytes(b"l" * 5000)
    right.write_bytes(b"r")
    wait_sealed(left)
    wait_sealed(right)
    times = left.stat().st_mtime_ns, right.stat().st_mtime_ns
    rename(left, right, RENAME_EXCHANGE)
    assert elsewhere(lambda: (left.read_bytes(), right.read_bytes())) == (b"r", b"l" * 5000)
    assert (right.stat().st_mtime_ns, left.stat().st_mtime_ns) == times
    assert error_of(lambda: rename(left, place / "absent", RENAME_EXCHANGE)) == errno.ENOENT
    assert error_of(lambda: rename(left, place / "white", RENAME_WHITEOUT)) == errno.EINVAL
    assert sorted(os.listdir(place)) == ["left", "right"]


def test_rename_onto_itself_changes_nothing(place: Path) -> None:
    path = place / "block"
    path.write_bytes(b"block")
    wait_sealed(path)
    generation = attribute(path, "generation")
    os.rename(path, path)
    assert elsewhere(path.read_bytes) == b"block"
    assert attribute(path, "generation") == generation
    directory = place / "directory"
    directory.mkdir()
    os.rename(directory, directory)
    assert directory.is_dir()


def test_rename_of_what_is_absent_is_enoent(place: Path) -> None:
    assert error_of(lambda: os.rename(place / "absent", place / "new")) == errno.ENOENT
    (place / "block").write_bytes(b"")
    into = place / "absent/new"
    assert error_of(lambda: os.rename(place / "block", into)) == errno.ENOENT


def test_empty_directory_is_renamed(place: Path) -> None:
    old, new = place / "old", place / "new"
    old.mkdir()
    os.setxattr(old, "user.ctx.ttl", b"1h")
    os.rename(old, new)
    assert os.listdir(place) == ["new"]
    assert os.getxattr(new, "user.ctx.ttl") == b"3600.000"
    (new / "block").write_bytes(b"")
    assert elsewhere(lambda: os.listdir(new)) == ["block"]
    (place / "taken").mkdir()
    os.rename(place / "taken", old)
    assert error_of(lambda: os.rename(old, new)) == errno.ENOTEMPTY
    assert error_of(lambda: os.rename(old, new / "block")) == errno.ENOTDIR
    assert error_of(lambda: os.rename(new / "block", old)) == errno.EISDIR


def test_directory_does_not_become_its_own_child(place: Path) -> None:
    (place / "a/b").mkdir(parents=True)
    assert error_of(lambda: os.rename(place / "a", place / "a/b/c")) == errno.EINVAL
    assert error_of(lambda: os.rename(place / "a/b", place / "a")) == errno.ENOTEMPTY


def test_directory_with_blocks_is_copied_by_mv(place: Path) -> None:
    old, new = place / "old", place / "new"
    (old / "below").mkdir(parents=True)
    content = noise(2, 70_000)
    (old / "below/block").write_bytes(content)
    assert error_of(lambda: os.rename(old, new)) == errno.EXDEV
    assert elsewhere((old / "below/block").read_bytes) == content
    subprocess.run(["mv", old, new], check=True)
    assert elsewhere((new / "below/block").read_bytes) == content
    assert not old.exists()


# -- unlink


def test_unlinked_block_lasts_while_it_is_open_or_mapped(place: Path) -> None:
    path, content = place / "block", noise(3, 300_000)
    path.write_bytes(content)
    with open(path, "rb") as reader:
        view = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
        path.unlink()
        assert not elsewhere(path.exists)
        assert os.fstat(reader.fileno()).st_nlink == 0
        assert reader.read() == content
    path.write_bytes(b"another")
    assert view[:] == content
    view.close()
    assert elsewhere(path.read_bytes) == b"another"


def test_writer_that_unlinked_its_name_goes_on_and_leaves_nothing(place: Path) -> None:
    path = place / "block"
    with open(path, "w+b") as file:
        file.write(b"one")
        file.flush()
        path.unlink()
        file.write(b"two")
        file.flush()
        assert os.pread(file.fileno(), 10, 0) == b"onetwo"
    assert os.listdir(place) == []
    assert error_of(path.unlink) == errno.ENOENT


# -- names are never stale


def test_lookups_follow_another_process_at_once(place: Path) -> None:
    # SGLang and vLLM look before each put and get; negative entries must not linger
    one, two = place / "one", place / "two"
    one.write_bytes(b"block")

    def swing() -> Iterator[None]:
        while True:
            os.rename(one, two)
            yield None
            os.rename(two, one)
            yield None

    with Actor(swing) as actor:
        for _ in range(50):
            assert (one.exists(), two.exists()) == (True, False)
            assert (os.access(one, os.F_OK), os.access(two, os.F_OK)) == (True, False)
            actor.step()
            assert (one.exists(), two.exists()) == (False, True)
            assert (read_or_none(one), read_or_none(two)) == (None, b"block")
            actor.step()
            assert (read_or_none(one), read_or_none(two)) == (b"block", None)


def test_directories_come_and_go_under_the_eyes_of_others(place: Path) -> None:
    path = place / "directory"

    def swing() -> Iterator[None]:
        while True:
            path.mkdir()
            (path / "block").write_bytes(b"block")
            yield None
            (path / "block").unlink()
            path.rmdir()
            yield None

    with Actor(swing) as actor:
        for _ in range(20):
            actor.step()
            assert path.is_dir()
            assert (path / "block").read_bytes() == b"block"
            actor.step()
            assert not (path / "block").exists()
            assert not path.exists()


def test_two_processes_may_use_one_temporary_name_in_turn_and_at_once(place: Path) -> None:
    # LMCache#2517
    temporary = place / "key.tmp"

    def put(number: int) -> None:
        final = place / f"key{number}"
        for turn in range(30):
            content = b"%d:%d " % (number, turn) * 5000
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.rename(temporary, final)
            assert final.read_bytes() == content

    together([partial(put, number) for number in range(3)])
    assert sorted(os.listdir(place)) == ["key0", "key1", "key2"]


# -- listing


def test_listing_tells_types_without_a_look(place: Path) -> None:
    (place / "directory").mkdir()
    (place / "block").write_bytes(b"")
    with open(place / "private", "wb") as file:
        file.write(b"being written")
        file.flush()
        with DirectoryStream(place) as stream:
            found = set()
            while (entry := stream.read()) is not None:
                found.add(entry)
    found -= {(b".", DT_DIR), (b"..", DT_DIR)}
    assert found == {(b"directory", DT_DIR), (b"block", DT_REG), (b"private", DT_REG)}


def test_name_that_two_threads_write_is_listed_once(place: Path) -> None:
    gate = threading.Barrier(8)
    stay = threading.Barrier(9)

    def write(_: int) -> None:
        gate.wait(30)
        with open(place / "block", "wb") as file:
            file.write(b"x")
            file.flush()
            stay.wait(30)
            stay.wait(30)

    with ThreadPoolExecutor(8) as pool:
        done = pool.map(write, range(8))
        stay.wait(30)
        names = os.listdir(place)
        stay.wait(30)
        list(done)
    assert names == ["block"]
    assert elsewhere(lambda: os.listdir(place)) == ["block"]


def test_rewound_listing_is_a_new_one(place: Path) -> None:
    (place / "one").write_bytes(b"")
    with DirectoryStream(place) as stream:
        assert stream.names() == [b"one"]
        (place / "two").write_bytes(b"")
        (place / "one").unlink()
        stream.rewind()
        assert stream.names() == [b"two"]
    fd = os.open(place, os.O_RDONLY)
    assert os.listdir(fd) == ["two"]
    (place / "three").write_bytes(b"")
    assert sorted(os.listdir(fd)) == ["three", "two"]
    os.close(fd)


def make_names(place: Path, count: int) -> list[bytes]:
    names = [b"%06d" % number for number in range(count)]
    fd = os.open(place, os.O_RDONLY)
    for name in names:
        os.mknod(name, dir_fd=fd)
    os.close(fd)
    return names


@pytest.mark.parametrize("count", [20_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_large_directory_is_listed_whole_from_any_place(place: Path, count: int) -> None:
    names = make_names(place, count)
    assert sorted(os.listdir(os.fsencode(place))) == names
    with DirectoryStream(place) as stream:
        whole, places = [], []
        while True:
            places.append(stream.tell())
            entry = stream.read()
            if entry is None:
                break
            whole.append(entry[0])
        assert sorted(name for name in whole if not name.startswith(b".")) == names
        for index in random.Random(4).sample(range(len(whole)), 50):
            stream.seek(places[index])
            entry = stream.read()
            assert entry is not None
            assert entry[0] == whole[index]
        stream.seek(places[-10])
        assert stream.names() == whole[-9:]
    os.unlink(place / "002500")
    assert len(os.listdir(place)) == count - 1


def test_listing_during_a_storm_of_changes_never_lies(place: Path) -> None:
    # SGLang's clear() and every evictor's scan
    steady = {f"steady{number}" for number in range(100)}
    changing = {f"changing{number}" for number in range(100)}
    for name in steady:
        (place / name).write_bytes(b"")

    def storm(seed: int) -> None:
        dice = random.Random(seed)
        names = sorted(changing)
        for _ in range(600):
            name = place / dice.choice(names)
            match dice.randrange(3):
                case 0:
                    name.write_bytes(b"x")
                case 1:
                    name.unlink(missing_ok=True)
                case _:
                    error = error_of(partial(os.rename, name, place / dice.choice(names)))
                    assert error in (0, errno.ENOENT)

    def scan(_: int) -> None:
        for _ in range(60):
            found = os.listdir(place)
            assert len(found) == len(set(found))
            assert steady <= set(found) <= steady | changing
            for entry in os.scandir(place):
                assert entry.is_file()

    together([*(partial(storm, n) for n in range(2)), *(partial(scan, n) for n in range(2))])
    found = os.listdir(place)
    assert len(found) == len(set(found))
    for name in found:
        assert (place / name).read_bytes() in (b"", b"x")


def test_everything_found_may_be_removed_by_several_at_once(place: Path) -> None:
    make_names(place, 500)

    def clear() -> int:
        return sum(error_of(partial(os.unlink, place / name)) == 0 for name in os.listdir(place))

    assert sum(together([clear] * 4)) == 500
    assert os.listdir(place) == []
