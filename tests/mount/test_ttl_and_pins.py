"""Lifetimes end when they should, wherever the block is; pins keep blocks from leaving for room."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.harness import MIB, Daemon, elsewhere, noise, wait_until

TTL = "user.ctx.ttl"
PIN = "user.ctx.pin"


@pytest.fixture(scope="module")
def one(channel: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with both tiers for all tests that leave it as it is."""
    base = tmp_path_factory.mktemp("lifetimes")
    with Daemon(base, hot="64MiB", cold="256MiB", channel=channel) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log(), daemon.log()


def wait_gone(path: Path) -> None:
    wait_until(lambda: not path.exists())


def hot_bytes(daemon: Daemon) -> int:
    used: int = daemon.stats()["tiers"]["hot"]["used_bytes"]
    return used


def fill(daemon: Daemon, mib: int) -> None:
    for number in range(mib // 4):
        daemon.put(f"filler{number}", noise(number, 4 * MIB))
        daemon.wait_sealed(f"filler{number}")


# -- lifetimes


@pytest.mark.parametrize("tier", ["hot", "cold"])
def test_block_expires_for_real_and_its_space_comes_back(daemon: Daemon, tier: str) -> None:
    # d-inference#237: an expiry that was stored and never enforced
    empty = hot_bytes(daemon)  # the journal, and pages kept ready
    path = daemon.put("k", noise(1, 3 * MIB))
    generation = int(daemon.get("k", "generation"))
    daemon.set("k", "tier", tier)
    daemon.set("k", "ttl", "1")
    assert 0 < float(daemon.get("k", "ttl")) <= 1
    started = time.monotonic()
    wait_gone(path)
    assert time.monotonic() - started > 0.5
    with pytest.raises(FileNotFoundError):
        path.read_bytes()
    assert os.listdir(daemon.mount) == []
    wait_until(lambda: hot_bytes(daemon) < empty + MIB)
    stats = daemon.stats()
    assert stats["tiers"]["cold"]["blocks"] == 0
    assert stats["tiers"]["cold"]["live_bytes"] < 512  # it may have noted by now that it is gone
    assert (stats["counters"]["expired"], stats["counters"]["expired_bytes"]) == (1, 3 * MIB)
    assert stats["counters"]["evicted"] == 0
    (event,) = daemon.events("expired")
    assert (event["key"], event["generation"], event["size_bytes"]) == ("k", generation, 3 * MIB)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90", 90), ("90s", 90), ("15m", 900), ("72h", 259_200), ("30d", 2_592_000),
        ("1h30m", 5400), ("1.5h", 5400), ("36500d", 3_153_600_000),
    ],
)  # fmt: skip
def test_lifetime_is_taken_as_people_write_it(one: Daemon, written: str, seconds: int) -> None:
    one.put("written", b"x")
    before = time.monotonic()
    one.set("written", "ttl", written)
    left = float(one.get("written", "ttl"))
    assert seconds - (time.monotonic() - before) - 0.001 <= left <= seconds
    one.set("written", "ttl", "none")
    assert one.get("written", "ttl") == "none"


@pytest.mark.parametrize(
    "value", ["", " ", "soon", "-1", "0", "0s", "1w", "1e3", "5 minutes", "nan", "inf", "9" * 40]
)
def test_what_is_no_lifetime_is_refused_and_changes_nothing(one: Daemon, value: str) -> None:
    path = one.put("refused", b"x")
    one.set("refused", "ttl", "1h")
    with pytest.raises(OSError, match="Invalid argument") as caught:
        os.setxattr(path, TTL, value.encode())
    assert caught.value.errno == errno.EINVAL
    assert 3000 < float(one.get("refused", "ttl")) <= 3600


def test_use_does_not_extend_a_lifetime_and_rename_keeps_it(one: Daemon) -> None:
    # Mooncake#2187: a lookup that renews leases for ever
    path = one.put("used", noise(2, MIB))
    one.set("used", "ttl", "1h")
    left = float(one.get("used", "ttl"))

    def went_down() -> float:
        nonlocal left
        wait_until(lambda: float(one.get(path.name, "ttl")) < left)
        left = float(one.get(path.name, "ttl"))
        return left

    path.read_bytes()
    went_down()
    path.touch()
    path.chmod(0o600)
    os.setxattr(path, "user.mine", b"1")
    went_down()
    for tier in ("cold", "hot"):
        one.set("used", "tier", tier)
        went_down()
    os.mkdir(one.mount / "fresh")
    one.set("fresh", "ttl", "30d")
    path = path.rename(one.mount / "fresh/moved")
    one.set("fresh/moved", "pin", "1")
    path = path.rename(one.mount / "moved")
    assert 3000 < went_down() < 3600
    path.unlink()


def test_lifetime_that_was_changed_counts_from_the_change(one: Daemon) -> None:
    path = one.put("changed", b"x")
    one.set("changed", "ttl", "0.3")
    one.set("changed", "ttl", "none")
    other = one.put("canary", b"x")
    one.set("canary", "ttl", "0.4")
    wait_gone(other)
    assert path.exists()
    one.set("changed", "ttl", "1h")
    one.set("changed", "ttl", "0.1")
    wait_gone(path)


def test_new_generation_starts_its_lifetime_over(one: Daemon) -> None:
    os.mkdir(one.mount / "over")
    one.set("over", "ttl", "1h")
    path = one.put("over/k", b"old")
    one.set("over/k", "ttl", "0.3")
    with open(path, "rb") as reader:
        elsewhere(lambda: path.write_bytes(b"new"))
        canary = one.put("canary", b"x")
        one.set("canary", "ttl", "0.4")
        wait_gone(canary)
        assert path.read_bytes() == b"new"
        assert reader.read() == b"old"
    assert 3000 < float(one.get("over/k", "ttl")) <= 3600


def test_lifetime_begins_when_writing_does_and_ends_after_it(one: Daemon) -> None:
    os.mkdir(one.mount / "short")
    one.set("short", "ttl", "0.2")
    path = one.mount / "short/k"
    canary = one.mount / "canary"
    with open(path, "wb") as file:
        file.write(b"x")
        file.flush()
        one.put("canary", b"x")
        one.set("canary", "ttl", "0.3")
        wait_gone(canary)
        file.write(b"y")  # never taken from under its writer
        assert path.read_bytes() == b"x"
    wait_gone(path)


def test_configured_default_holds_where_no_directory_says_otherwise(
    start: Callable[..., Daemon],
) -> None:
    daemon = start(config='[defaults]\nttl = "1h"\n')
    daemon.put("a", b"x")
    assert 3000 < float(daemon.get("a", "ttl")) <= 3600
    os.mkdir(daemon.mount / "d")
    daemon.set("d", "ttl", "none")
    daemon.put("d/b", b"x")
    assert daemon.get("d/b", "ttl") == "none"
    daemon.set("", "ttl", "2d")
    daemon.put("c", b"x")
    assert 3600 < float(daemon.get("c", "ttl")) <= 172_800
    elsewhere((daemon.mount / "a").read_bytes)
    elsewhere(lambda: (daemon.mount / "a").write_bytes(b"y"))
    assert 3600 < float(daemon.get("a", "ttl")) <= 172_800


def test_block_that_expires_while_it_is_open_or_mapped_stays_readable(hot_only: Daemon) -> None:
    # LMCache#5263: a buffer reclaimed while it is being loaded
    empty = hot_bytes(hot_only)
    content = noise(3, 4 * MIB)
    path = hot_only.put("k", content)
    hot_only.set("k", "ttl", "0.3")
    file = open(path, "rb")  # noqa: SIM115
    view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    wait_gone(path)
    assert hot_only.stats()["counters"]["expired"] == 1
    assert hot_bytes(hot_only) >= 4 * MIB  # not given to others while somebody reads it
    fill(hot_only, 120)
    assert file.read() == content
    file.close()
    assert view[:] == content
    view.close()
    for number in range(30):
        (hot_only.mount / f"filler{number}").unlink(missing_ok=True)
    wait_until(lambda: hot_bytes(hot_only) < empty + MIB)


def test_cold_block_that_expires_while_it_is_brought_up_is_whole_or_a_miss(one: Daemon) -> None:
    for number in range(8):
        path = one.put(f"race{number}", noise(number, 4 * MIB))
        one.set(path.name, "tier", "cold")
        one.set(path.name, "ttl", f"{number}ms" if number else "0.5ms")
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        assert content == noise(number, 4 * MIB)


@pytest.mark.parametrize("way", ["restart", "crash"])
def test_lifetime_goes_on_while_the_daemon_is_away(daemon: Daemon, way: str) -> None:
    for key in ("hot", "cold"):
        daemon.put(f"{key}.short", noise(4, MIB))
        daemon.put(f"{key}.long", noise(5, MIB))
        for length in ("short", "long"):
            daemon.set(f"{key}.{length}", "tier", key)
        daemon.set(f"{key}.long", "ttl", "1h")
    left = float(daemon.get("cold.long", "ttl"))
    started = time.monotonic()
    for key in ("hot", "cold"):
        daemon.set(f"{key}.short", "ttl", "1s")
    if way == "restart":
        assert daemon.stop() == 0
    else:
        daemon.kill()
    wait_until(lambda: time.monotonic() - started > 1)
    daemon.start()
    wait_gone(daemon.mount / "hot.short")
    wait_gone(daemon.mount / "cold.short")
    for key in ("hot", "cold"):
        assert 3000 < float(daemon.get(f"{key}.long", "ttl")) < left
        assert (daemon.mount / f"{key}.long").read_bytes() == noise(5, MIB)
    assert sorted(os.listdir(daemon.mount)) == ["cold.long", "hot.long"]
    # and again: what expired does not come back from an older record
    daemon.crash()
    assert sorted(os.listdir(daemon.mount)) == ["cold.long", "hot.long"]


def test_lifetime_that_was_taken_away_stays_away_over_a_death(daemon: Daemon) -> None:
    path = daemon.put("k", noise(6, MIB))
    daemon.set("k", "ttl", "0.5")
    daemon.set("k", "tier", "cold")
    daemon.set("k", "ttl", "none")
    daemon.crash()
    assert daemon.get("k", "ttl") == "none"
    daemon.put("canary", b"x")
    daemon.set("canary", "ttl", "0.6")
    wait_gone(daemon.mount / "canary")
    assert path.read_bytes() == noise(6, MIB)


def test_thousand_blocks_that_expire_at_once_hold_nobody_up(one: Daemon) -> None:
    folder = one.mount / "many"
    folder.mkdir()
    for number in range(1000):
        one.put(f"many/{number}", b"x")
    stays = one.put("stays", b"content")
    end = time.monotonic() + 2
    for number in range(1000):
        one.set(f"many/{number}", "ttl", f"{max(0.001, end - time.monotonic()):.6f}")
    looks = 0

    def all_gone() -> bool:
        nonlocal looks
        assert stays.stat().st_size == 7
        looks += 1
        return not os.listdir(folder)

    wait_until(all_gone)
    assert looks > 1
    assert stays.read_bytes() == b"content"
    one.wait_sealed("stays")
    assert one.stats()["counters"]["expired"] >= 1000


# -- pins


def test_pin_is_written_as_one_nothing_or_a_duration(one: Daemon) -> None:
    one.put("pin", b"x")
    for written, reads in (("1", "1"), ("0", "0"), ("1", "1")):
        one.set("pin", "pin", written)
        assert one.get("pin", "pin") == reads
    one.set("pin", "pin", "1h")
    assert 3000 < float(one.get("pin", "pin")) <= 3600
    one.set("pin", "pin", "0.1")
    wait_until(lambda: one.get("pin", "pin") == "0")


def test_pinned_block_outlasts_a_full_tier_until_its_pin_lapses(hot_only: Daemon) -> None:
    forever = hot_only.put("forever", noise(7, 4 * MIB))
    lapsing = hot_only.put("lapsing", noise(8, 4 * MIB))
    plain = hot_only.put("plain", noise(9, 4 * MIB))
    hot_only.set("forever", "pin", "1")
    hot_only.set("lapsing", "pin", "1h")
    assert hot_only.stats()["tiers"]["hot"]["pinned_bytes"] >= 8 * MIB
    fill(hot_only, 180)
    assert not plain.exists()
    for path, number in ((forever, 7), (lapsing, 8)):
        assert path.read_bytes() == noise(number, 4 * MIB)
    hot_only.set("lapsing", "pin", "0.1")
    wait_until(lambda: hot_only.get("lapsing", "pin") == "0")
    fill(hot_only, 180)
    assert not lapsing.exists()
    assert forever.read_bytes() == noise(7, 4 * MIB)


def test_pins_outlast_restart_death_and_full_tiers(start: Callable[..., Daemon]) -> None:
    # LMCache#2155: pins that a restart forgets
    daemon = start(hot="32MiB", cold="64MiB")
    for key, pin in (("forever", "1"), ("hour", "1h"), ("short", "0.2"), ("off", "1")):
        daemon.put(key, noise(len(key), 2 * MIB))
        daemon.set(key, "pin", pin)
    daemon.set("forever", "tier", "cold")
    daemon.set("forever", "tier", "auto")
    daemon.set("off", "pin", "0")
    wait_until(lambda: daemon.get("short", "pin") == "0")
    for again in (daemon.crash, daemon.restart):
        again()
        assert daemon.get("forever", "pin") == "1"
        assert 3000 < float(daemon.get("hour", "pin")) < 3600
        assert (daemon.get("short", "pin"), daemon.get("off", "pin")) == ("0", "0")
    fill(daemon, 240)
    for key in ("forever", "hour"):
        assert (daemon.mount / key).read_bytes() == noise(len(key), 2 * MIB)
    assert not (daemon.mount / "off").exists()
    assert not (daemon.mount / "short").exists()


def test_pinned_block_expires_all_the_same(one: Daemon) -> None:
    for pin in ("1", "1h"):
        path = one.put("pinned", b"x")
        one.set("pinned", "pin", pin)
        one.set("pinned", "ttl", "0.1")
        wait_gone(path)


def test_pinned_block_can_be_unlinked_and_overwritten(one: Daemon) -> None:
    path = one.put("pinned", b"old")
    one.set("pinned", "pin", "1")
    elsewhere(path.read_bytes)
    path.write_bytes(b"new")
    assert elsewhere(path.read_bytes) == b"new"
    path.unlink()
    assert not path.exists()
