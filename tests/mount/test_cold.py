"""Two tiers: blocks move by themselves and when told to, and are the same bytes everywhere."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.mount.harness import (
    MIB,
    Actor,
    Daemon,
    elsewhere,
    noise,
    read_or_none,
    together,
    wait_until,
)

PATIENT = '[hot]\nroom_wait = "10m"\n'
SIZES = [0, 1, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 3 * MIB + 123]


def test_written_tier_is_carried_out_before_setxattr_returns(daemon: Daemon) -> None:
    # LMCache#1721: move is broken, or not observable
    content = noise(1, 2 * MIB)
    daemon.put("block", content)
    daemon.set("block", "tier", "cold")
    assert daemon.get("block", "tier") == "cold"
    assert daemon.get("block", "copies") == "cold"
    # Its memory may be kept a moment for the next block that comes up.
    wait_until(lambda: daemon.stats()["tiers"]["hot"]["used_bytes"] < 2 * MIB)
    daemon.set("block", "tier", "hot")
    assert daemon.get("block", "tier") == "hot"
    assert daemon.get("block", "copies") == "hot,cold"
    assert (daemon.mount / "block").read_bytes() == content
    daemon.set("block", "tier", "auto")
    assert json.loads(daemon.get("block", "story"))["placement"] == "auto"


def test_block_kept_cold_leaves_hot_again_when_its_last_reader_is_gone(daemon: Daemon) -> None:
    content = noise(1, MIB)
    path = daemon.put("block", content)
    daemon.set("block", "tier", "cold")
    with open(path, "rb") as file:
        assert file.read() == content
    wait_until(lambda: daemon.get("block", "copies") == "cold")


def test_tier_set_while_writing_is_carried_out_after_sealing(daemon: Daemon) -> None:
    path = daemon.mount / "block"
    with open(path, "wb") as file:
        os.setxattr(file.fileno(), "user.ctx.tier", b"cold")
        file.write(noise(1, MIB))
    wait_until(lambda: daemon.get("block", "copies") == "cold")
    assert path.read_bytes() == noise(1, MIB)


@pytest.mark.parametrize("length", SIZES)
def test_block_comes_back_from_cold_bit_for_bit(daemon: Daemon, length: int) -> None:
    content = noise(length, length)
    path = daemon.put("block", content)
    digest = None
    daemon.wait_sealed("block")
    digest = daemon.get("block", "digest")
    daemon.set("block", "tier", "cold")
    assert path.stat().st_size == length
    assert elsewhere(path.read_bytes) == content
    assert daemon.get("block", "digest") == digest
    if length:
        with open(path, "rb") as file:
            view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            assert bytes(view) == content
            view.close()


def test_bytes_behind_the_end_of_a_promoted_block_are_zeros_in_a_mapping(daemon: Daemon) -> None:
    path = daemon.put("block", noise(1, 5000))
    daemon.set("block", "tier", "cold")
    with open(path, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
        assert ctypes.string_at(address + 5000, 8192 - 5000) == bytes(8192 - 5000)


def test_128_opens_of_one_cold_block_share_one_promotion(daemon: Daemon) -> None:
    content = noise(1, 8 * MIB)
    path = daemon.put("block", content)
    daemon.set("block", "tier", "cold")
    daemon.set("block", "tier", "auto")
    before = daemon.stats()["counters"]["promoted"]
    gate = threading.Barrier(128)
    results: list[bool] = []

    def read() -> None:
        gate.wait()
        results.append(path.read_bytes() == content)

    threads = [threading.Thread(target=read) for _ in range(128)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 128
    assert daemon.stats()["counters"]["promoted"] == before + 1


def test_full_hot_tier_moves_down_and_nothing_is_lost(daemon: Daemon) -> None:
    paths = [daemon.put(f"block{number:03d}", noise(number, MIB)) for number in range(150)]
    for number, path in enumerate(paths):
        assert path.read_bytes() == noise(number, MIB)
    counters = daemon.stats()["counters"]
    assert counters["evicted"] == 0
    assert counters["demoted"] > 80
    assert counters["promoted"] > 80
    assert counters["corrupt"] == counters["trouble"] == 0


def test_full_cold_tier_evicts_the_least_recently_opened(start: Callable[..., Daemon]) -> None:
    daemon = start(hot="32MiB", cold="96MiB")
    first = daemon.put("first", noise(0, MIB))
    second = daemon.put("second", noise(1, MIB))
    for number in range(300):
        daemon.put(f"block{number:03d}", noise(number, MIB))
        assert first.read_bytes() == noise(0, MIB)
        second.exists()
    assert not second.exists()
    held = list(daemon.mount.glob("block*"))
    assert 60 < len(held) < 130
    assert (daemon.mount / "block299") in held
    assert (daemon.mount / "block000") not in held
    for path in held:
        content = read_or_none(path)  # reading others may have evicted it
        assert content in (None, noise(int(path.name.removeprefix("block")), MIB))
    statistics = daemon.stats()
    assert statistics["counters"]["evicted"] >= 300 - len(held)
    assert statistics["counters"]["no_space"] == 0
    cold = statistics["tiers"]["cold"]
    assert cold["live_bytes"] <= cold["capacity_bytes"]


def test_both_tiers_full_of_pinned_blocks_refuse_at_once_and_go_on_reading(
    start: Callable[..., Daemon],
) -> None:
    # llm-d-kv-cache#218
    daemon = start(hot="32MiB", cold="64MiB", config=PATIENT)
    pinned = []
    for number in range(200):
        try:
            path = daemon.put(f"pinned{number}", noise(number, MIB))
        except OSError as error:
            refused = error.errno
            break
        daemon.set(path.name, "pin", "1")
        pinned.append(path)
    else:
        pytest.fail("200 MiB went into 96")
    assert refused == errno.ENOSPC
    assert len(pinned) > 30
    (daemon.mount / f"pinned{len(pinned)}").unlink(missing_ok=True)
    for number in (len(pinned) - 1, len(pinned) - 5):
        assert pinned[number].read_bytes() == noise(number, MIB)
    for path in pinned:
        daemon.set(path.name, "pin", "0")
    daemon.put("fits", noise(1, 8 * MIB))


def test_writers_and_readers_over_two_full_tiers_lose_and_mix_nothing(
    start: Callable[..., Daemon],
) -> None:
    # LMCache#4385, Mooncake#3465
    daemon = start(hot="32MiB", cold="128MiB")

    def write(number: int) -> None:
        for turn in range(20):
            path = daemon.mount / f"w{number}-{turn % 12}"
            temporary = path.with_suffix(f".tmp{turn}")
            temporary.write_bytes(bytes([number]) * (MIB // 2 + turn * 1000))
            os.rename(temporary, path)

    def read(number: int) -> None:
        for turn in range(60):
            owner = (number * 7 + turn * 13) % 16
            content = read_or_none(daemon.mount / f"w{owner}-{turn % 12}")
            assert content is None or set(content[::512]) == {owner}

    together([partial(write, n) for n in range(16)] + [partial(read, n) for n in range(16)])
    counters = daemon.stats()["counters"]
    assert counters["corrupt"] == counters["trouble"] == counters["no_space"] == 0


def test_unlinked_overwritten_and_expired_blocks_give_cold_room_back(daemon: Daemon) -> None:
    empty = daemon.stats()["tiers"]["cold"]["live_bytes"]
    for key in ("unlinked", "overwritten", "expired"):
        daemon.put(key, noise(1, MIB))
        daemon.set(key, "tier", "cold")
    (daemon.mount / "unlinked").unlink()
    daemon.put("overwritten", b"")
    daemon.set("expired", "ttl", "0.05")
    wait_until(lambda: not (daemon.mount / "expired").exists())
    assert daemon.stats()["tiers"]["cold"]["live_bytes"] <= empty + 64 * 1024


def test_open_cold_block_keeps_its_bytes_when_it_is_unlinked(daemon: Daemon) -> None:
    content = noise(1, MIB)
    path = daemon.put("block", content)
    daemon.set("block", "tier", "cold")

    def play() -> Iterator[Any]:
        with open(path, "rb") as file:
            yield None
            yield file.read()

    with Actor(play) as reader:
        reader.step()
        path.unlink()
        assert reader.step() == content


def test_prefetch_brings_a_block_and_its_descendants(daemon: Daemon) -> None:
    parent = ""
    for number in range(4):
        key = f"chain{number}"
        daemon.put(key, noise(number, 10_000))
        if parent:
            daemon.set(key, "parent", parent)
        daemon.set(key, "tier", "cold")
        daemon.set(key, "tier", "auto")
        parent = key
    daemon.set("chain1", "prefetch", "chain")
    wait_until(lambda: daemon.get("chain3", "tier") == "hot")
    assert [daemon.get(f"chain{n}", "tier") for n in range(4)] == ["cold", "hot", "hot", "hot"]


def test_attributes_of_a_cold_block_are_read_without_promoting_it(daemon: Daemon) -> None:
    path = daemon.put("block", noise(1, MIB))
    os.setxattr(path, "user.mine", b"value")
    daemon.set("block", "tier", "cold")
    for _ in range(3):
        assert os.getxattr(path, "user.mine") == b"value"
        path.stat()
        os.listdir(daemon.mount)
        daemon.get("block", "story")
    assert daemon.stats()["counters"]["promoted"] == 0
    assert daemon.get("block", "hits") == "0"


def test_rename_and_attributes_of_a_cold_block_need_no_copy(daemon: Daemon) -> None:
    path = daemon.put("block", noise(1, MIB))
    daemon.set("block", "tier", "cold")
    os.rename(path, daemon.mount / "renamed")
    os.setxattr(daemon.mount / "renamed", "user.mine", b"value")
    assert daemon.get("renamed", "copies") == "cold"
    daemon.crash()
    assert (daemon.mount / "renamed").read_bytes() == noise(1, MIB)
    assert os.getxattr(daemon.mount / "renamed", "user.mine") == b"value"
    assert not path.exists()


def test_writing_on_with_a_cold_block_starts_a_new_generation(daemon: Daemon) -> None:
    path = daemon.put("block", noise(1, MIB))
    daemon.set("block", "tier", "cold")
    generation = daemon.get("block", "generation")
    with open(path, "r+b") as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" + noise(1, MIB)[3:]
    assert daemon.get("block", "generation") != generation


def test_statvfs_counts_both_tiers(daemon: Daemon) -> None:
    empty = os.statvfs(daemon.mount)
    assert 280 * MIB < empty.f_blocks * 4096 <= 320 * MIB
    for number in range(100):
        daemon.put(f"block{number}", noise(number, MIB))
    full = os.statvfs(daemon.mount)
    used = (empty.f_bavail - full.f_bavail) * 4096
    assert 95 * MIB <= used <= 170 * MIB


def test_st_blocks_is_the_physical_size_of_all_copies(daemon: Daemon) -> None:
    path = daemon.put("block", noise(1, MIB))
    daemon.wait_sealed("block")
    assert path.stat().st_blocks * 512 == MIB
    daemon.set("block", "tier", "cold")
    assert MIB <= path.stat().st_blocks * 512 <= MIB + 16 * 1024
    daemon.set("block", "tier", "hot")
    assert 2 * MIB <= path.stat().st_blocks * 512 <= 2 * MIB + 16 * 1024
    assert int(daemon.get("block", "stored")) == path.stat().st_blocks * 512


def test_expired_during_promotion_is_a_miss_or_the_whole_block(daemon: Daemon) -> None:
    # LMCache#5263
    for turn in range(10):
        content = noise(turn, 8 * MIB)
        path = daemon.put("block", content)
        daemon.set("block", "tier", "cold")
        daemon.set("block", "ttl", f"0.{turn + 1:03d}")
        answer = read_or_none(path)
        assert answer is None or answer == content
        path.unlink(missing_ok=True)
    assert daemon.stats()["counters"]["corrupt"] == 0


def test_several_cold_devices_are_used_and_recovered(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    devices = "".join(
        f'[[cold]]\npath = "{tmp_path}/device{number}"\nsize = "128MiB"\n' for number in range(2)
    )
    daemon = start(config=devices)
    for number in range(40):
        daemon.put(f"block{number}", noise(number, MIB))
        daemon.set(f"block{number}", "tier", "cold")
    assert all(d["blocks"] > 5 for d in daemon.stats()["tiers"]["cold"]["devices"])
    daemon.restart()
    for number in range(40):
        assert (daemon.mount / f"block{number}").read_bytes() == noise(number, MIB)


def test_threads_engine_gives_the_same_bytes(start: Callable[..., Daemon], tmp_path: Path) -> None:
    # nixl#1942: no io_uring
    config = f'[[cold]]\npath = "{tmp_path}/device"\nsize = "128MiB"\nengine = "threads"\n'
    daemon = start(config=config)
    for length in SIZES:
        daemon.put(f"b{length}", noise(length, length))
        daemon.set(f"b{length}", "tier", "cold")
    daemon.restart()
    for length in SIZES:
        assert (daemon.mount / f"b{length}").read_bytes() == noise(length, length)
