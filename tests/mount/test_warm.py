"""The warm tier and the codec on a real mount: what an operator configures, and what he sees."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.mount.harness import MIB, Daemon, is_mounted, wait_until

BLOCKS = 24
KEY_A, KEY_B = "a " + "1f" * 32, "b " + "2e" * 32


def values(seed: int, size: int = MIB) -> bytes:
    """bf16 numbers of one scale."""
    numbers = np.random.default_rng(seed).normal(size=size // 2).astype("<f4")
    return (numbers.view("<u4") >> 16).astype("<u2").tobytes()


def test_more_blocks_fit_memory_than_their_bytes(tmp_path: Path, channel: str) -> None:
    with Daemon(tmp_path, hot="12MiB", arguments=("--warm", "16MiB"), channel=channel) as daemon:
        for number in range(BLOCKS):
            daemon.put(f"k{number}", values(number))
            daemon.wait_sealed(f"k{number}")
        for number in range(BLOCKS):
            assert (daemon.mount / f"k{number}").read_bytes() == values(number)
        stats = daemon.stats()
        assert stats["counters"]["evicted"] == 0
        assert stats["counters"]["hits_warm"] > 0
        warm = stats["tiers"]["warm"]
        assert 0 < warm["used_bytes"] <= warm["capacity_bytes"]
        assert warm["content_bytes"] > 1.2 * warm["used_bytes"]
        files = (daemon.state / "warm").iterdir()
        assert sum(file.stat().st_blocks * 512 for file in files) == warm["used_bytes"]
    assert not is_mounted(tmp_path / "state/warm")


def test_warm_blocks_outlive_the_daemon_and_are_saved_at_the_end(
    tmp_path: Path, channel: str
) -> None:
    with Daemon(
        tmp_path, hot="12MiB", cold="64MiB", arguments=("--warm", "16MiB"), channel=channel
    ) as daemon:
        daemon.put("k", values(1))
        daemon.set("k", "tier", "warm")
        assert daemon.get("k", "copies") == "warm"
        daemon.crash()
        assert daemon.get("k", "copies") == "warm"
        assert daemon.get("k", "tier") == "warm"
        daemon.restart()
        assert daemon.get("k", "copies") == "cold"
        assert daemon.get("k", "codec") == "zstd+planes2"
        assert int(daemon.get("k", "stored")) < 0.8 * MIB
        assert (daemon.mount / "k").read_bytes() == values(1)


def test_a_daemon_without_a_warm_tier_removes_what_one_with_it_left(
    tmp_path: Path, channel: str
) -> None:
    daemon = Daemon(tmp_path, arguments=("--warm", "8MiB"), channel=channel)
    with daemon:
        daemon.put("k", values(1))
        daemon.set("k", "tier", "warm")
        daemon.kill()
        assert is_mounted(daemon.state / "warm")
        daemon.command[daemon.command.index("8MiB")] = "0"
        daemon.start()
        assert not is_mounted(daemon.state / "warm")
        assert not (daemon.mount / "k").exists()


def test_blocks_are_encrypted_on_the_device_and_keys_rotated_by_a_signal(
    tmp_path: Path, channel: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY_A}\n")
    keys.chmod(0o600)
    text = b"the quick brown fox jumps over the lazy dog " * 4000
    config = f'[codec]\nkey_file = "{keys}"\n'
    with Daemon(tmp_path, cold="64MiB", config=config, channel=channel) as daemon:
        daemon.put("old", text)
        daemon.set("old", "tier", "cold")
        assert daemon.get("old", "codec") == "zstd+aes256gcm"
        keys.write_text(f"{KEY_A}\n{KEY_B}\n")
        os.kill(daemon.pid, 1)
        wait_until(lambda: "configuration reread" in daemon.log())
        daemon.put("new", text[::-1])
        daemon.set("new", "tier", "cold")
        assert (daemon.mount / "old").read_bytes() == text
        daemon.stop()
        image = daemon.cold_path.read_bytes()
        assert b"quick brown" not in image
        assert b"god yzal" not in image
        keys.write_text(f"{KEY_B}\n")
        daemon.start()
        # Without its key a block is a miss, and stays.
        with pytest.raises(FileNotFoundError):
            (daemon.mount / "old").read_bytes()
        assert (daemon.mount / "new").read_bytes() == text[::-1]
        assert daemon.stats()["counters"]["corrupt"] == 0
        keys.write_text(f"{KEY_A}\n{KEY_B}\n")
        os.kill(daemon.pid, 1)
        wait_until(lambda: daemon.log().count("configuration reread") == 2)
        assert (daemon.mount / "old").read_bytes() == text


def test_keys_that_cannot_be_had_are_told_before_anything_is_mounted(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY_A}\n")
    keys.chmod(0o644)
    daemon = Daemon(tmp_path, cold="64MiB", config=f'[codec]\nkey_file = "{keys}"\n')
    with pytest.raises(AssertionError, match="others"), daemon:
        pass
    assert not is_mounted(daemon.mount)
    daemon.cold_path.unlink(missing_ok=True)
