"""fsync: what it returned for outlives the machine's memory."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from tests.mount.harness import MIB, Daemon, noise, wait_until


def lose_memory(daemon: Daemon) -> None:
    """Kill the daemon and take its tmpfs away, as a power cut does; then start again."""
    daemon.kill()
    daemon.clean()
    daemon.start()


def synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def test_block_synced_before_close_is_there_after_a_power_cut(daemon: Daemon) -> None:
    contents = {f"b{length}": noise(length, length) for length in (1, 4096, 4097, MIB + 1)}
    for key, content in contents.items():
        synced(daemon.mount / key, content)
    lose_memory(daemon)
    for key, content in contents.items():
        assert (daemon.mount / key).read_bytes() == content


def test_block_synced_through_another_descriptor_is_there_after_a_power_cut(
    daemon: Daemon,
) -> None:
    path = daemon.put("block", noise(1, MIB))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    assert daemon.get("block", "copies") == "hot,cold"
    lose_memory(daemon)
    assert path.read_bytes() == noise(1, MIB)


def test_unsynced_block_is_gone_after_a_power_cut_and_nothing_is_left(daemon: Daemon) -> None:
    daemon.put("block", noise(1, MIB))
    daemon.wait_sealed("block")
    lose_memory(daemon)
    assert os.listdir(daemon.mount) == []
    assert daemon.stats()["tiers"]["cold"]["live_bytes"] == 0


def test_what_was_written_after_fsync_is_what_is_sealed(daemon: Daemon) -> None:
    path = daemon.mount / "block"
    with open(path, "wb") as file:
        file.write(b"a" * MIB)
        file.flush()
        os.fsync(file.fileno())
        file.write(b"b" * MIB)
    daemon.wait_sealed("block")
    daemon.set("block", "tier", "cold")
    assert path.read_bytes() == b"a" * MIB + b"b" * MIB
    daemon.set("block", "verify", "1")
    daemon.crash()
    assert path.read_bytes() == b"a" * MIB + b"b" * MIB


def test_synced_then_renamed_block_has_its_final_name_after_a_power_cut(daemon: Daemon) -> None:
    temporary, final = daemon.mount / "b.tmp", daemon.mount / "b"
    synced(temporary, noise(1, MIB))
    os.rename(temporary, final)
    root = os.open(daemon.mount, os.O_RDONLY)
    os.fsync(root)
    os.close(root)
    lose_memory(daemon)
    assert os.listdir(daemon.mount) == ["b"]
    assert final.read_bytes() == noise(1, MIB)


def test_renamed_while_open_and_synced_block_has_its_final_name(daemon: Daemon) -> None:
    temporary, final = daemon.mount / "b.tmp", daemon.mount / "b"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(fd, noise(1, MIB))
    os.rename(temporary, final)
    os.fsync(fd)
    daemon.kill()
    with contextlib.suppress(OSError):
        os.close(fd)  # nobody answers
    daemon.clean()
    daemon.start()
    assert os.listdir(daemon.mount) == ["b"]
    assert final.read_bytes() == noise(1, MIB)


def test_synced_overwrite_replaces_the_old_block_after_a_power_cut(daemon: Daemon) -> None:
    path = daemon.mount / "block"
    synced(path, b"old")
    synced(path, b"new and longer")
    lose_memory(daemon)
    assert path.read_bytes() == b"new and longer"


def test_synced_removal_stays_removed_after_a_power_cut(daemon: Daemon) -> None:
    synced(daemon.mount / "block", noise(1, MIB))
    (daemon.mount / "block").unlink()
    root = os.open(daemon.mount, os.O_RDONLY)
    os.fsync(root)
    os.close(root)
    lose_memory(daemon)
    assert os.listdir(daemon.mount) == []


def test_writing_goes_on_during_fsync_and_nothing_is_lost(daemon: Daemon) -> None:
    path = daemon.mount / "busy"
    stop = threading.Event()
    with open(path, "wb", buffering=0) as file:
        file.truncate(8 * MIB)

        def sync() -> None:
            while not stop.is_set():
                os.fsync(file.fileno())

        thread = threading.Thread(target=sync)
        thread.start()
        for turn in range(30):
            for offset in range(0, 8 * MIB, MIB):
                assert os.pwrite(file.fileno(), bytes([turn]) * MIB, offset) == MIB
        stop.set()
        thread.join()
    assert path.read_bytes() == bytes([29]) * 8 * MIB
    daemon.wait_sealed("busy")
    daemon.set("busy", "tier", "cold")
    assert path.read_bytes() == bytes([29]) * 8 * MIB
    wait_until(lambda: daemon.stats()["tiers"]["cold"]["blocks"] == 1)


def test_many_threads_sync_one_block(daemon: Daemon) -> None:
    path = daemon.mount / "shared"
    with open(path, "wb", buffering=0) as file:

        def write(number: int) -> None:
            for turn in range(10):
                os.pwrite(file.fileno(), bytes([number]) * 4096, (number * 10 + turn) * 4096)
                os.fsync(file.fileno())

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lose_memory(daemon)
    assert path.read_bytes() == b"".join(bytes([number]) * 40960 for number in range(8))
