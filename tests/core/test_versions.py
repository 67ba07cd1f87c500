"""The clock that versions come from: higher than all it knows, unique, and not dragged along."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.versions import (
    AHEAD_US_MAX,
    VERSION_MAX,
    VersionAhead,
    VersionClock,
    slot_of,
    time_us_of,
)

NOW_US = 1_796_000_000_000_000
times = st.integers(NOW_US - 10**9, NOW_US + 10**9)


@given(st.lists(st.tuples(st.integers(0, 2), times | st.none()), max_size=60))
def test_versions_are_unique_and_higher_than_all_that_was_seen(
    steps: list[tuple[int, int | None]],
) -> None:
    """A step: a member issues a version, at a time, or sees the last one that anybody issued."""
    clocks = [VersionClock(slot) for slot in (0, 7, 1023)]
    issued: list[int] = []
    highest = [0, 0, 0]
    for number, time_us in steps:
        clock = clocks[number]
        if time_us is not None:
            version = clock.next(time_us)
            assert version > highest[number]
            assert slot_of(version) == clock.slot
            issued.append(version)
        elif issued:
            clock.see(issued[-1], NOW_US)
        highest[number] = max(highest[number], clock.highest)
        if time_us is None and issued:
            assert clock.highest >= issued[-1]
    assert len(set(issued)) == len(issued)


def test_a_version_says_when_and_by_whom() -> None:
    version = VersionClock(5).next(NOW_US)
    assert (time_us_of(version), slot_of(version)) == (NOW_US, 5)
    assert version < VERSION_MAX


def test_a_clock_that_is_set_back_goes_on_from_where_it_was() -> None:
    clock = VersionClock(5)
    first = clock.next(NOW_US)
    assert time_us_of(clock.next(NOW_US - 10**12)) == time_us_of(first) + 1


def test_a_start_goes_on_above_what_is_on_the_media() -> None:
    old = VersionClock(5).next(NOW_US + 500)
    assert VersionClock(9, highest=old).next(NOW_US) > old


def test_numbers_of_a_daemon_that_was_alone_are_older_than_all_versions() -> None:
    assert VersionClock(0, highest=1 << 45).next(NOW_US) > 1 << 45


@pytest.mark.parametrize("version", [(NOW_US + AHEAD_US_MAX + 1) << 10, VERSION_MAX + 1, 1 << 200])
def test_a_version_from_the_future_is_refused_and_changes_nothing(version: int) -> None:
    clock = VersionClock(5)
    with pytest.raises(VersionAhead, match="ahead of this host's clock"):
        clock.see(version, NOW_US)
    assert clock.next(NOW_US) == NOW_US << 10 | 5


def test_there_are_1024_slots() -> None:
    with pytest.raises(ValueError, match="1024"):
        VersionClock(1024)
