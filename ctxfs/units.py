"""Sizes and durations, between what people write and integers."""

import re
from fractions import Fraction

from ctxfs.errors import BadValue

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

MILLISECOND_NS = 10**6
SECOND_NS = 10**9
MINUTE_NS = 60 * SECOND_NS
HOUR_NS = 60 * MINUTE_NS
DAY_NS = 24 * HOUR_NS

SIZE_MAX = 2**63 - 1  # what a file offset holds
DURATION_NS_MAX = 2**63 - 1  # about 292 years: added to the wall clock it still fits 64 bits

SIZES_ACCEPTED = "a size like 512MiB, 8G, 8GB or 0 (K M G T are 1024-based, KB MB GB TB 1000-based)"
DURATIONS_ACCEPTED = "a duration like 90 (seconds), 250ms, 15m, 1h30m, 30d or none"

_TEXT_MAX = 64  # longer is no number anybody means, and parsing it costs

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(i?b)?", re.IGNORECASE | re.ASCII)
_POWERS = ("", "k", "m", "g", "t", "p")

_DURATION_UNITS: dict[str, int] = {
    "d": DAY_NS,
    "h": HOUR_NS,
    "m": MINUTE_NS,
    "s": SECOND_NS,
    "ms": MILLISECOND_NS,
    "us": 10**3,
    "ns": 1,
}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_SECONDS = re.compile(_NUMBER, re.ASCII)
_DURATION = re.compile(
    "".join(rf"(?:(?P<{unit}>{_NUMBER}){unit})?" for unit in _DURATION_UNITS), re.ASCII
)


def parse_size(text: str) -> int:
    """Bytes. A fraction of a byte is dropped. Raises BadValue."""
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _TEXT_MAX else None
    if match is None:
        raise BadValue(f"{_shown(text)} is not {SIZES_ACCEPTED}")
    number, prefix, suffix = match.groups()
    power = _POWERS.index(prefix.lower())
    if suffix is not None and suffix[0] in "iI" and not power:
        raise BadValue(f"{_shown(text)} is not {SIZES_ACCEPTED}")
    # "GB" alone is decimal; "G" and "GiB" are what memory and disks of a cache are counted in.
    base = 1000 if suffix is not None and len(suffix) == 1 else 1024
    size = int(Fraction(number) * base**power)
    if size > SIZE_MAX:
        raise BadValue(f"{_shown(text)} is more than {SIZE_MAX} bytes")
    return size


def format_size(size: int) -> str:
    """For people to read, rounded: `8.0 GiB`, `512 B`."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            return f"{size} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} PiB"


def write_size(size: int) -> str:
    """For a configuration file: exact, `parse_size` gives the same number back."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


def parse_duration_ns(text: str) -> int | None:
    """Nanoseconds; None for `none`. A bare number is seconds. Raises BadValue."""
    word = text.strip()
    if word == "none":
        return None
    if not word or len(word) > _TEXT_MAX:
        raise BadValue(f"{_shown(text)} is not {DURATIONS_ACCEPTED}")
    if _SECONDS.fullmatch(word):
        word += "s"
    match = _DURATION.fullmatch(word)
    if match is None:
        raise BadValue(f"{_shown(text)} is not {DURATIONS_ACCEPTED}")
    parts = {unit: number for unit, number in match.groupdict().items() if number is not None}
    duration_ns = int(sum(Fraction(parts[unit]) * _DURATION_UNITS[unit] for unit in parts))
    if duration_ns > DURATION_NS_MAX:
        raise BadValue(f"{_shown(text)} is longer than 292 years; write none for no limit")
    return duration_ns


def format_duration(duration_ns: int | None) -> str:
    """Exact and short: `1h30m`, `250ms`, `0s`, `none`. Read back by `parse_duration_ns`."""
    if duration_ns is None:
        return "none"
    parts = []
    rest = duration_ns
    for unit, length_ns in _DURATION_UNITS.items():
        count, rest = divmod(rest, length_ns)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def _shown(text: str) -> str:
    """The text as an error names it: quoted, and never long."""
    return repr(text if len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + "…")
