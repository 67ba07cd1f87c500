"""The life of a block: private while it is written, published in one step, then immutable."""

from __future__ import annotations

import errno
import mmap
import os
import random
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.mount.harness import (
    MIB,
    Actor,
    elsewhere,
    noise,
    read_or_none,
    together,
    wait_until,
)

MAP_POPULATE = 0x8000


def attribute(path: Path, name: str) -> str:
    return os.getxattr(path, f"user.ctx.{name}").decode()


def wait_sealed(path: Path) -> None:
    wait_until(lambda: attribute(path, "state") == "sealed")


# -- publishing


def test_block_is_absent_elsewhere_until_close_and_then_whole(place: Path) -> None:
    path = place / "block"
    content = noise(1, 3 * MIB)
    with open(path, "wb") as file:
        file.write(content[:MIB])
        file.flush()
        assert not elsewhere(path.exists)
        assert elsewhere(lambda: os.listdir(place)) == []
        assert path.stat().st_size == MIB  # the writer sees its own
        assert path.read_bytes() == content[:MIB]
        file.write(content[MIB:])
    assert elsewhere(path.read_bytes) == content


def test_rename_publishes_while_the_descriptor_is_open(place: Path) -> None:
    # safetensors 0.8 and llm-d rename before they close
    temporary, final = place / ".tmpAbCd", place / "model.safetensors"
    content = noise(2, 2 * MIB)
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.rename(temporary, final)
        assert elsewhere(final.read_bytes) == content
        assert not temporary.exists()
        assert not elsewhere(temporary.exists)
    assert elsewhere(final.read_bytes) == content
    wait_sealed(final)


def test_what_is_written_after_the_rename_belongs_to_the_block(place: Path) -> None:
    temporary, final = place / "b.tmp", place / "b"
    with open(temporary, "wb") as file:
        file.write(b"before")
        file.flush()
        os.rename(temporary, final)
        file.write(b" and after")
    assert elsewhere(final.read_bytes) == b"before and after"


def test_absent_name_is_found_at_once_when_another_process_renames_onto_it(place: Path) -> None:
    path = place / "late"
    for round_number in range(50):
        assert not path.exists()

        def put(number: int = round_number) -> None:
            temporary = place / f"late.tmp{number}"
            temporary.write_bytes(b"here")
            os.rename(temporary, path)

        elsewhere(put)
        assert path.read_bytes() == b"here"
        path.unlink()


def test_file_written_through_a_duplicate_is_published_when_both_are_closed(place: Path) -> None:
    # numpy's tofile writes through a dup and closes both: FLUSH comes twice
    path = place / "dup"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    copy = os.dup(fd)
    os.write(copy, b"all of it")
    os.close(copy)
    assert path.read_bytes() == b"all of it"
    os.close(fd)
    assert elsewhere(path.read_bytes) == b"all of it"
    wait_sealed(path)


def test_forked_child_that_closes_its_copy_publishes_nothing(place: Path) -> None:
    path = place / "forked"
    with open(path, "wb") as file:
        file.write(b"half")
        file.flush()
        elsewhere(file.close)
        assert not elsewhere(path.exists)
        file.write(b" and half")
    assert elsewhere(path.read_bytes) == b"half and half"


def test_forked_child_may_do_the_writing(place: Path) -> None:
    path = place / "delegated"
    with open(path, "wb") as file:
        elsewhere(lambda: os.write(file.fileno(), b"by the child") and None)
    assert elsewhere(path.read_bytes) == b"by the child"


def test_close_publishes_though_the_writer_has_the_name_open_for_reading_too(place: Path) -> None:
    path = place / "both"
    path.write_bytes(b"first")
    with open(path, "rb") as reader:
        with open(path, "wb") as writer:
            writer.write(b"second")
            writer.flush()
            elsewhere(lambda: None)  # a new process: the close could be its
        assert elsewhere(path.read_bytes) == b"second"
        assert reader.read() == b"first"
    wait_sealed(path)
    assert elsewhere(path.read_bytes) == b"second"


def test_two_open_descriptions_of_one_writer_publish_at_the_first_close(place: Path) -> None:
    path = place / "two"
    with open(path, "wb") as first, open(path, "r+b") as second:
        first.write(b"abc")
        first.flush()
        second.seek(3)
        second.write(b"def")
        elsewhere(lambda: None)
        second.close()
        assert elsewhere(path.read_bytes) == b"abcdef"
    wait_sealed(path)


def test_redirected_output_of_a_shell_is_private_until_the_program_ends(place: Path) -> None:
    # the shell opens the file, makes it descriptor 1, and closes the first one: a FLUSH
    path = place / "redirected"
    script = f"{{ echo one; read line; echo two; }} > '{path}'"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE) as shell:
        wait_until(lambda: output_so_far(path, shell.pid) == b"one\n")
        assert not path.exists()
        shell.communicate(b"go on\n")
    assert path.read_bytes() == b"one\ntwo\n"


def output_so_far(path: Path, pid: int) -> bytes | None:
    """Return what a process has written to its standard output so far."""
    if os.readlink(f"/proc/{pid}/fd/1") != str(path):
        return None
    return Path(f"/proc/{pid}/fd/1").read_bytes()


def test_empty_file_is_a_block(place: Path) -> None:
    path = place / "empty"
    path.touch()
    assert elsewhere(path.read_bytes) == b""
    wait_sealed(path)
    assert attribute(path, "digest") == f"xxh3-128:{xxhash.xxh3_128_hexdigest(b'')}"


def test_digest_of_a_sealed_block_is_that_of_its_content(place: Path) -> None:
    for length in (1, 4095, 4096, 4097, 128 << 10, (128 << 10) + 1, 3 * MIB + 17):
        path = place / f"length{length}"
        content = noise(length, length)
        path.write_bytes(content)
        wait_sealed(path)
        assert attribute(path, "digest") == f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}"


# -- overwriting


def test_opening_with_truncation_and_closing_empties_the_block(place: Path) -> None:
    path = place / "emptied"
    path.write_bytes(b"something")
    with open(path, "wb"):
        pass
    assert elsewhere(path.read_bytes) == b""
    assert path.stat().st_size == 0


def test_old_readers_and_mappings_keep_their_bytes_over_an_overwrite(place: Path) -> None:
    path = place / "overwritten"
    old, new = noise(3, MIB + 5), noise(4, 2 * MIB)
    path.write_bytes(old)

    def play() -> Iterator[Any]:
        with open(path, "rb") as file:
            number = file.fileno()
            maps = [
                mmap.mmap(number, 0, flags=flags, prot=mmap.PROT_READ)
                for flags in (
                    mmap.MAP_PRIVATE,
                    mmap.MAP_SHARED,
                    mmap.MAP_PRIVATE | MAP_POPULATE,
                )
            ]
            copy = mmap.mmap(number, 0, access=mmap.ACCESS_COPY)  # torch: private, writable
            copy[0:3] = b"own"
            yield None
            yield [bytes(each) for each in maps], bytes(copy), file.read()

    with Actor(play) as reader:
        reader.step()
        path.write_bytes(new)
        assert elsewhere(path.read_bytes) == new
        maps, copy, content = reader.step()
    assert maps == [old] * 3
    assert copy == b"own" + old[3:]
    assert content == old


def test_old_generation_stays_for_everybody_else_until_the_new_one_is_closed(place: Path) -> None:
    path = place / "second"
    path.write_bytes(b"one")
    generation = attribute(path, "generation")
    with open(path, "wb") as file:
        file.write(b"two")
        file.flush()
        assert elsewhere(path.read_bytes) == b"one"
    assert elsewhere(path.read_bytes) == b"two"
    assert attribute(path, "generation") != generation


def test_writing_anew_what_is_still_open_for_writing_leaves_its_readers_alone(place: Path) -> None:
    path = place / "k"
    with open(path, "wb", buffering=0) as first:
        first.write(b"old")
        os.close(os.dup(first.fileno()))  # publishes
        with open(path, "rb", buffering=0) as reader:
            mapping = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
            with open(path, "wb", buffering=0) as second:
                assert os.fstat(reader.fileno()).st_size == 3
                assert mapping[:] == b"old"
                second.write(b"newer")
            assert reader.read() == b"old"
            assert mapping[:] == b"old"
            mapping.close()
    assert path.read_bytes() == b"newer"
    assert elsewhere(path.read_bytes) == b"newer"


def test_opened_without_truncation_a_block_starts_with_the_old_bytes(place: Path) -> None:
    # LMCache local_disk with O_DIRECT, and NIXL: O_WRONLY|O_CREAT over a longer block
    path = place / "kept"
    old = noise(5, 100_000)
    path.write_bytes(old)
    elsewhere(path.read_bytes)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.pwrite(fd, b"new", 10)
    assert elsewhere(path.read_bytes) == old
    os.close(fd)
    assert elsewhere(path.read_bytes) == old[:10] + b"new" + old[13:]
    assert path.stat().st_size == len(old)


def test_append_adds_at_the_end(place: Path) -> None:
    path = place / "appended"
    path.write_bytes(b"one")
    elsewhere(path.read_bytes)
    with open(path, "ab") as file:
        file.write(b"two")
    assert elsewhere(path.read_bytes) == b"onetwo"


def test_exclusive_creation_of_an_existing_block_fails(place: Path) -> None:
    path = place / "exclusive"
    with open(path, "xb") as file:
        file.write(b"mine")
        with pytest.raises(FileExistsError):
            elsewhere(lambda: open(path, "xb").close())
    with pytest.raises(FileExistsError):
        open(path, "xb").close()
    assert elsewhere(path.read_bytes) == b"mine"


def test_truncate_by_name_makes_a_new_generation_of_that_length(place: Path) -> None:
    path = place / "cut"
    path.write_bytes(b"0123456789")
    with open(path, "rb") as reader:
        wait_sealed(path)
        elsewhere(lambda: os.truncate(path, 4))
        assert elsewhere(path.read_bytes) == b"0123"
        assert path.read_bytes() == b"0123"
        elsewhere(lambda: os.truncate(path, 6))
        assert path.read_bytes() == b"0123\0\0"
        assert reader.read() == b"0123456789"  # and no SIGBUS for mappings: cpython#148650


def test_mapping_survives_the_truncation_of_its_block(place: Path) -> None:
    # cpython#84897: SIGBUS when the file beneath a mapping shrinks
    path = place / "mapped"
    content = noise(6, 64 << 10)
    path.write_bytes(content)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        elsewhere(lambda: os.truncate(path, 0))
        assert view[:] == content


def test_touch_keeps_bytes_and_generation_and_moves_the_time(place: Path) -> None:
    path = place / "touched"
    path.write_bytes(b"bytes")
    elsewhere(path.read_bytes)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    before = attribute(path, "generation")
    elsewhere(path.touch)
    assert path.read_bytes() == b"bytes"
    assert attribute(path, "generation") == before
    assert path.stat().st_mtime > 1_000_000_000


def test_opening_for_writing_without_writing_changes_nothing(place: Path) -> None:
    path = place / "untouched"
    path.write_bytes(b"bytes")
    wait_sealed(path)
    before = attribute(path, "generation")
    elsewhere(lambda: open(path, "r+b").close())
    assert path.read_bytes() == b"bytes"
    assert attribute(path, "generation") == before


# -- one generation, several opens by its writer


def test_temporary_file_is_closed_reopened_grown_mapped_and_renamed(place: Path) -> None:
    # LMCache GDS
    temporary, final = place / "x.tmp0a1b2c3d", place / "x.kvcache.safetensors"
    content = noise(7, MIB)

    def write() -> str:
        temporary.write_bytes(b"h" * 4096)
        first = attribute(temporary, "generation")
        fd = os.open(temporary, os.O_RDWR)
        os.ftruncate(fd, 4096 + len(content))
        with mmap.mmap(fd, 0) as view:
            view[4096:] = content
        os.close(fd)
        assert attribute(temporary, "generation") == first
        os.rename(temporary, final)
        return attribute(final, "generation")

    generation = elsewhere(write)
    assert final.read_bytes() == b"h" * 4096 + content
    assert attribute(final, "generation") == generation
    wait_sealed(final)
    assert attribute(final, "digest").endswith(xxhash.xxh3_128_hexdigest(b"h" * 4096 + content))


def test_sealed_block_goes_on_for_its_writer_until_somebody_else_opened_it(place: Path) -> None:
    path = place / "resumed"
    path.write_bytes(b"abc")
    wait_sealed(path)
    generation = attribute(path, "generation")
    with open(path, "r+b") as file:
        file.seek(3)
        file.write(b"def")
    wait_sealed(path)
    assert attribute(path, "generation") == generation
    assert elsewhere(path.read_bytes) == b"abcdef"
    with open(path, "r+b") as file:
        file.write(b"A")
    assert attribute(path, "generation") != generation
    assert elsewhere(path.read_bytes) == b"Abcdef"


def test_shared_mapping_written_before_rename_is_in_the_block(place: Path) -> None:
    temporary, final = place / "m.tmp", place / "m"
    content = noise(8, 300_001)
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    os.ftruncate(fd, len(content))
    view = mmap.mmap(fd, 0)
    view[:] = content
    view.close()
    os.rename(temporary, final)
    assert elsewhere(final.read_bytes) == content
    os.close(fd)
    wait_sealed(final)
    assert elsewhere(final.read_bytes) == content


def test_mapping_that_outlives_its_descriptor_keeps_the_block_unsealed(place: Path) -> None:
    # np.memmap("w+") closes its file and goes on with the mapping
    path = place / "memmap"
    with open(path, "w+b") as file:
        file.truncate(MIB)
        view = mmap.mmap(file.fileno(), 0)
    view[:3] = b"abc"
    view.flush()
    assert elsewhere(lambda: path.read_bytes()[:3]) == b"abc"
    view[3:6] = b"def"
    view.close()
    wait_sealed(path)
    content = b"abcdef" + bytes(MIB - 6)
    assert elsewhere(path.read_bytes) == content
    assert attribute(path, "digest").endswith(xxhash.xxh3_128_hexdigest(content))


def test_file_kept_open_and_rewritten_is_served_and_not_sealed(place: Path) -> None:
    # LMCache's NIXL static pool
    path = place / "obj_0_abcd.bin"
    path.touch()
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    for number in range(1, 6):
        content = noise(number, MIB)
        assert os.pwrite(fd, content, 0) == MIB
        assert elsewhere(path.read_bytes) == content
        assert attribute(path, "state") == "writing"
    os.close(fd)
    wait_sealed(path)


def test_open_through_proc_self_fd_reads_the_same_block(place: Path) -> None:
    path = place / "proc"
    path.write_bytes(b"content")
    with open(path, "rb") as file:
        assert Path(f"/proc/self/fd/{file.fileno()}").read_bytes() == b"content"
    with open(path, "wb") as file:
        file.write(b"private")
        file.flush()
        assert Path(f"/proc/self/fd/{file.fileno()}").read_bytes() == b"private"
        with open(f"/proc/self/fd/{file.fileno()}", "r+b") as again:
            again.write(b"P")
    assert elsewhere(path.read_bytes) == b"Private"


def test_sealed_block_cannot_be_written_through_proc_self_fd(place: Path) -> None:
    path = place / "sealed"
    path.write_bytes(b"content")
    elsewhere(path.read_bytes)
    with open(path, "rb") as file:
        with pytest.raises(PermissionError) as caught:
            open(f"/proc/self/fd/{file.fileno()}", "r+b").close()
        assert caught.value.errno == errno.EPERM
    generation = attribute(path, "generation")
    assert path.read_bytes() == b"content"
    assert elsewhere(lambda: attribute(path, "generation")) == generation


# -- several writers


def test_two_writers_of_one_name_never_mix(place: Path) -> None:
    # sglang PR#10969: ranks that write the same file
    path = place / "raced"
    first, second = b"a" * MIB, b"b" * MIB

    def write(content: bytes) -> Iterator[Any]:
        with open(path, "wb") as file:
            file.write(content[: MIB // 2])
            file.flush()
            yield None
            file.write(content[MIB // 2 :])
        yield None

    with Actor(lambda: write(first)) as one, Actor(lambda: write(second)) as two:
        one.step()
        two.step()
        assert not path.exists()
        two.step()
        assert path.read_bytes() == second
        one.step()
        assert path.read_bytes() == first
    wait_sealed(path)


def test_same_temporary_name_in_two_processes_gives_two_whole_blocks(place: Path) -> None:
    # LMCache#2517: a fixed tmp name per key, both renamed
    temporary, final = place / "key.tmp", place / "key"
    first, second = b"a" * MIB, b"b" * MIB

    def put(content: bytes) -> Iterator[Any]:
        with open(temporary, "wb") as file:
            file.write(content[: MIB // 2])
            file.flush()
            yield None
            file.write(content[MIB // 2 :])
        yield None
        os.rename(temporary, final)
        yield None

    with Actor(lambda: put(first)) as one, Actor(lambda: put(second)) as two:
        for actor in (one, two, one):
            actor.step()
        one.step()
        assert final.read_bytes() == first
        two.step()
        assert final.read_bytes() == first
        two.step()
        assert final.read_bytes() == second
    assert os.listdir(place) == ["key"]


def test_every_racing_writer_and_reader_sees_one_whole_generation(place: Path) -> None:
    # LMCache#4385: bytes of one block in another
    path = place / "storm"
    path.write_bytes(bytes([0]) * MIB)

    def write(number: int) -> None:
        for turn in range(20):
            temporary = place / f"storm.tmp.{number}.{turn}"
            temporary.write_bytes(bytes([number]) * MIB)
            os.rename(temporary, path)

    def read() -> None:
        for _ in range(60):
            content = read_or_none(path)
            assert content is not None
            assert len(content) == MIB
            assert len(set(content[::4096])) == 1

    together([partial(write, number) for number in range(1, 4)] + [read] * 3)
    assert elsewhere(lambda: os.listdir(place)) == ["storm"]


def test_another_process_cannot_remove_a_private_temporary_file(place: Path) -> None:
    # LMCache's nixl cleanup() unlinks everybody's *.tmp.* at shutdown
    temporary, final = place / "k.bin.tmp.uuid", place / "k.bin"
    with open(temporary, "wb") as file:
        file.write(b"live")
        file.flush()

        def clean() -> list[str]:
            names = os.listdir(place)
            for name in names:
                os.unlink(place / name)
            return names

        assert elsewhere(clean) == []
        os.rename(temporary, final)
    assert elsewhere(final.read_bytes) == b"live"


def test_blocks_hold_what_their_names_say_after_random_use(place: Path) -> None:
    # LMCache#4385
    def use(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(60):
            number = dice.randrange(12)
            path = place / f"self-{number}"
            expected = f"{number:08d}".encode()
            match dice.randrange(5):
                case 0 | 1:
                    path.write_bytes(expected * dice.randrange(1, 30_000))
                case 2:
                    temporary = place / f"self-{number}.tmp{os.getpid()}"
                    temporary.write_bytes(expected * dice.randrange(1, 30_000))
                    os.rename(temporary, path)
                case 3:
                    path.unlink(missing_ok=True)
                case _:
                    content = read_or_none(path)
                    assert content is None or content == expected * (len(content) // 8)

    together([partial(use, seed) for seed in range(4)])
    for path in place.iterdir():
        number = path.name.removeprefix("self-").encode()
        content = path.read_bytes()
        assert content == number.rjust(8, b"0") * (len(content) // 8)


def test_names_overwritten_in_place_by_several_processes_never_fail(place: Path) -> None:
    # two instances that put the same keys: LMCache local_disk after a restart
    path = place / "shared"

    def overwrite(number: int) -> None:
        for turn in range(100):
            flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if turn % 2 else 0)
            fd = os.open(path, flags, 0o644)
            assert os.write(fd, bytes([number]) * 8192) == 8192
            os.close(fd)
            content = path.read_bytes()
            assert content in [bytes([each]) * 8192 for each in range(1, 5)]

    together([partial(overwrite, number) for number in range(1, 5)])


def test_truncation_by_name_in_a_storm_of_overwrites_never_fails(place: Path) -> None:
    path = place / "storm"
    path.write_bytes(b"x" * 5000)

    def truncate(number: int) -> None:
        for turn in range(150):
            os.truncate(path, 1000 + turn * 10 + number)

    def overwrite() -> None:
        for turn in range(150):
            temporary = place / f"storm.tmp{turn}"
            temporary.write_bytes(b"x" * (5000 + turn))
            os.rename(temporary, path)

    together([partial(truncate, number) for number in range(3)] + [overwrite])
    assert set(path.read_bytes()) <= {ord("x"), 0}
    os.truncate(path, 10)
    assert elsewhere(path.read_bytes) == path.read_bytes() == b"x" * 10
