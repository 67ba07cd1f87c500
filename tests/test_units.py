"""Sizes and durations are read as people mean them, and written so that they read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.errors import BadValue
from ctxfs.units import (
    DAY_NS,
    DURATION_NS_MAX,
    GIB,
    MIB,
    MINUTE_NS,
    SECOND_NS,
    SIZE_MAX,
    TIB,
    format_duration,
    format_size,
    parse_duration_ns,
    parse_size,
    write_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("8GiB", 8 * GIB),
        ("8G", 8 * GIB),
        ("8g", 8 * GIB),
        ("8 GiB", 8 * GIB),
        (" 8gib ", 8 * GIB),
        ("8GB", 8 * 10**9),
        ("512m", 512 * MIB),
        ("1.5TiB", 3 * TIB // 2),
        ("0.1k", 102),
        ("1P", 1024 * TIB),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "-1", "8X", "GiB", "8iB", "1e9", "8 G B", "8GiB8", "٣G", "1" * 100, "99999999T"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BadValue):
        parse_size(text)


def test_a_refused_size_says_what_is_accepted() -> None:
    with pytest.raises(BadValue, match=r"'lots' is not a size like 512MiB"):
        parse_size("lots")


@given(st.integers(0, SIZE_MAX))
def test_a_written_size_reads_back_exactly(size: int) -> None:
    assert parse_size(write_size(size)) == size


@given(st.integers(0, 2**59))
def test_a_shown_size_reads_back_nearly(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.051)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (8 * GIB, "8.0 GiB"), (2**60, "1024.0 PiB")],
)
def test_a_size_is_shown_with_one_digit(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "duration_ns"),
    [
        ("none", None),
        ("0", 0),
        ("90", 90 * SECOND_NS),
        ("90s", 90 * SECOND_NS),
        ("15m", 15 * MINUTE_NS),
        ("72h", 3 * DAY_NS),
        ("30d", 30 * DAY_NS),
        ("1h30m", 90 * MINUTE_NS),
        ("1.5h", 90 * MINUTE_NS),
        ("250ms", SECOND_NS // 4),
        ("1m1ms", MINUTE_NS + 10**6),
        ("0.5", SECOND_NS // 2),
        ("7us3ns", 7003),
    ],
)
def test_a_duration_is_read_as_people_write_it(text: str, duration_ns: int | None) -> None:
    assert parse_duration_ns(text) == duration_ns


@pytest.mark.parametrize(
    "text", ["", " ", "-5", "5x", "s", "30m1h", "1h1h", "None", "1e3", "300y", "٣s", "9" * 80]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(BadValue):
        parse_duration_ns(text)


def test_a_duration_beyond_the_clock_is_refused() -> None:
    assert parse_duration_ns(f"{DURATION_NS_MAX}ns") == DURATION_NS_MAX
    with pytest.raises(BadValue, match="write none"):
        parse_duration_ns(f"{DURATION_NS_MAX + 1}ns")


@given(st.none() | st.integers(0, DURATION_NS_MAX))
def test_a_written_duration_reads_back_exactly(duration_ns: int | None) -> None:
    assert parse_duration_ns(format_duration(duration_ns)) == duration_ns


@given(st.text())
def test_no_text_makes_anything_but_a_number_or_a_refusal(text: str) -> None:
    for parse in (parse_size, parse_duration_ns):
        try:
            value = parse(text)
        except BadValue:
            continue
        assert value is None or value >= 0
