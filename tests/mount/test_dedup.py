"""Two keys with one content, on a real mount."""

from __future__ import annotations

import os

from tests.mount.harness import MIB, Daemon, noise
from tests.mount.test_cold_restart import lose_memory, put_cold, sync_names


def live_bytes(daemon: Daemon) -> int:
    count: int = daemon.stats()["tiers"]["cold"]["live_bytes"]
    return count


def saved_bytes(daemon: Daemon) -> int:
    count: int = daemon.stats()["tiers"]["cold"]["dedup"]["saved_bytes"]
    return count


def free_bytes(daemon: Daemon) -> int:
    found = os.statvfs(daemon.mount)
    return found.f_bfree * found.f_frsize


def test_two_keys_share_a_content_over_kills_until_both_are_gone(daemon: Daemon) -> None:
    content = noise(1, MIB)
    empty, free_before = live_bytes(daemon), free_bytes(daemon)
    put_cold(daemon, "one", content)
    alone = live_bytes(daemon) - empty
    put_cold(daemon, "two", content)
    assert live_bytes(daemon) - empty <= alone + 4096
    assert saved_bytes(daemon) >= MIB
    stored = [int(daemon.get(key, "stored")) for key in ("one", "two")]
    assert abs(sum(stored) - alone) <= 4096
    sync_names(daemon)
    daemon.crash()
    assert (daemon.mount / "one").read_bytes() == (daemon.mount / "two").read_bytes() == content
    (daemon.mount / "one").unlink()
    sync_names(daemon)
    assert saved_bytes(daemon) == 0
    assert live_bytes(daemon) - empty >= MIB
    lose_memory(daemon)
    daemon.start()
    assert os.listdir(daemon.mount) == ["two"]
    assert (daemon.mount / "two").read_bytes() == content
    (daemon.mount / "two").unlink()
    assert live_bytes(daemon) - empty <= 4096
    assert free_before - free_bytes(daemon) <= MIB // 2


def test_contents_that_are_synced_before_they_are_closed_are_shared_too(daemon: Daemon) -> None:
    content = noise(2, MIB)
    empty = live_bytes(daemon)
    for number in range(4):
        with (daemon.mount / f"k{number}").open("wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
        daemon.set(f"k{number}", "tier", "cold")
    assert live_bytes(daemon) - empty <= MIB + 16384
    assert saved_bytes(daemon) == 3 * MIB
    for number in range(3):
        (daemon.mount / f"k{number}").unlink()
    sync_names(daemon)
    lose_memory(daemon)
    daemon.start()
    assert (daemon.mount / "k3").read_bytes() == content
