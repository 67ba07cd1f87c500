"""The warm tier on real files: what is put is there, its room counted, a restart finds it."""

from pathlib import Path

import pytest

from ctxfs.errors import BlockNotFound, CopyCorrupt, TierTrouble
from ctxfs.tiers.warm import WarmCopy, WarmTier

MIB = 1 << 20


def put(tier: WarmTier, generation: int, data: bytes, method: int = 3) -> bool:
    if not tier.try_reserve(len(data)):
        return False
    tier.write(generation, method, memoryview(data))
    tier.arrived(generation, WarmCopy(len(data), method))
    return True


def content(tier: WarmTier, generation: int) -> bytes:
    with tier.open(generation) as found:
        return bytes(found.view)


def test_a_copy_is_there_and_counts_in_whole_pages(tmp_path: Path) -> None:
    tier = WarmTier(tmp_path, MIB)
    assert put(tier, 7, b"x" * 5000)
    assert 7 in tier
    assert content(tier, 7) == b"x" * 5000
    assert (tier.used_bytes, tier.reserved_bytes, tier.room_bytes) == (8192, 0, MIB - 8192)
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir()) == 8192


def test_the_cap_holds_whatever_is_on_its_way(tmp_path: Path) -> None:
    tier = WarmTier(tmp_path, 3 * 4096)
    assert tier.try_reserve(4097)
    assert not tier.try_reserve(4097)
    assert tier.try_reserve(4096)
    assert not tier.try_reserve(1)
    tier.unreserve(4097)
    assert put(tier, 1, b"y" * 8192)
    assert tier.room_bytes == 0


def test_a_dropped_copy_gives_its_room_back_and_who_reads_keeps_the_bytes(tmp_path: Path) -> None:
    tier = WarmTier(tmp_path, MIB)
    put(tier, 1, b"z" * 4096)
    with tier.open(1) as reading:
        tier.drop(1)
        tier.drop(1)
        assert bytes(reading.view) == b"z" * 4096
    assert (tier.used_bytes, list(tmp_path.iterdir())) == (0, [])
    with pytest.raises(BlockNotFound):
        tier.open(1)


@pytest.mark.parametrize("method", [3, 4])
def test_a_copy_that_comes_again_replaces_the_one_there(tmp_path: Path, method: int) -> None:
    tier = WarmTier(tmp_path, MIB)
    put(tier, 1, b"old" * 4000, method=3)
    put(tier, 1, b"new", method=method)
    assert content(tier, 1) == b"new"
    assert tier.used_bytes == 4096
    assert len(list(tmp_path.iterdir())) == 1


def test_the_next_daemon_finds_what_was_whole_and_removes_the_rest(tmp_path: Path) -> None:
    before = WarmTier(tmp_path, MIB)
    put(before, 1, b"a" * 100, method=5)
    put(before, 2, b"b" * 200)
    before.close()
    (tmp_path / "0000000000000003.03.arriving").write_bytes(b"half")
    (tmp_path / "no number").write_bytes(b"")
    after = WarmTier(tmp_path, MIB)
    assert dict(after.scan()) == {1: WarmCopy(100, 5), 2: WarmCopy(200, 3)}
    assert (len(after), after.used_bytes) == (2, 8192)
    assert len(list(tmp_path.iterdir())) == 2
    assert content(after, 1) == b"a" * 100


def test_files_changed_behind_our_back_are_bad_copies(tmp_path: Path) -> None:
    tier = WarmTier(tmp_path, MIB)
    put(tier, 1, b"a" * 100)
    put(tier, 2, b"b" * 100)
    short, gone = sorted(tmp_path.iterdir())
    short.write_bytes(b"a")
    gone.unlink()
    for generation in (1, 2):
        with pytest.raises(CopyCorrupt):
            tier.open(generation)
        tier.drop(generation)
    assert tier.used_bytes == 0


def test_a_write_that_fails_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    tier = WarmTier(tmp_path, MIB)
    (tmp_path / "0000000000000001.03").mkdir()
    with pytest.raises(TierTrouble):
        tier.write(1, 3, memoryview(b"data"))
    assert not (tmp_path / "0000000000000001.03.arriving").exists()
