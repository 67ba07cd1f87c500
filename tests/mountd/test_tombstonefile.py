"""Deletions that outlive the daemon."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.tombstones import Listing, Tombstone
from mountd.tombstonefile import TombstoneFile

_NUMBER = st.integers(0, 2**63 - 1)
_DEAD = st.lists(st.builds(Tombstone, st.binary(min_size=1, max_size=300), _NUMBER, _NUMBER))
_VECTOR = st.dictionaries(st.integers(0, 1023), _NUMBER, max_size=20)


def test_a_new_file_knows_nothing(tmp_path: Path) -> None:
    assert TombstoneFile(tmp_path / "t").load() == (Listing((), {}, {}), [])


@given(dead=_DEAD, known=_VECTOR, forgotten=_VECTOR, since=_DEAD)
def test_snapshot_and_what_came_since_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    dead: list[Tombstone],
    known: dict[int, int],
    forgotten: dict[int, int],
    since: list[Tombstone],
) -> None:
    path = tmp_path_factory.mktemp("t") / "t"
    file = TombstoneFile(path)
    listing = Listing(tuple(dead), known, forgotten)
    file.rewrite(listing)
    file.write(since)
    file.close()
    assert TombstoneFile(path).load() == (listing, since)


def test_a_torn_end_is_cut_off_and_written_over(tmp_path: Path) -> None:
    one, two = Tombstone(b"one", 1, 9), Tombstone(b"two", 2, 9)
    file = TombstoneFile(tmp_path / "t")
    file.write([one])
    whole = (tmp_path / "t").stat().st_size
    file.write([two])
    file.close()
    for length in range(whole, (tmp_path / "t").stat().st_size):
        torn = tmp_path / f"torn{length}"
        torn.write_bytes((tmp_path / "t").read_bytes()[:length])
        again = TombstoneFile(torn)
        assert again.load()[1] == [one]
        again.write([two])
        again.close()
        assert TombstoneFile(torn).load()[1] == [one, two]


def test_it_is_written_anew_when_much_has_come(tmp_path: Path) -> None:
    file = TombstoneFile(tmp_path / "t")
    file.rewrite(Listing((), {}, {}))
    assert not file.wants_rewrite
    file.write([Tombstone(b"k" * 255, number, 9) for number in range(5000)])
    assert file.wants_rewrite


def test_what_is_deleted_while_it_is_written_anew_is_in_the_new_one(tmp_path: Path) -> None:
    before, meanwhile, after = (Tombstone(b"k%d" % each, each, 9) for each in range(3))
    file = TombstoneFile(tmp_path / "t")
    file.write([before])
    file.begin_anew()
    file.write([meanwhile])
    file.rewrite(Listing((before,), {}, {}))
    file.write([after])
    file.sync()
    file.close()
    listing = Listing((before,), {}, {})
    assert TombstoneFile(tmp_path / "t").load() == (listing, [meanwhile, after])
