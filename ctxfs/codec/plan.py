"""What fits a source: found out on a sample, with the dtype as a hint."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ctxfs.codec.header import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    CHUNK_UNIT,
    ENTRY,
    FIXED_BYTES,
    Method,
)
from ctxfs.codec.offload import CPU, TAG_BYTES, ZSTD_LEVEL_MAX, Buffer, Compression, Effort, Offload
from ctxfs.codec.planes import PLAIN, SCRATCHES, Layout, Scratch, split
from ctxfs.errors import ConfigError

WORTHWHILE_BYTES: Final = 16 << 10  # below, what is won does not fill a sector
SAMPLE_PART: Final = 64  # one byte in so many
SAMPLE_BYTES_MIN: Final = 32 << 10
SAMPLE_BYTES_MAX: Final = 128 << 10
PIECES: Final = 8
RANKED_BYTES: Final = 16 << 10  # of the sample; entropies need less than a trial
# Entropies that differ by less are taken for equal. On few bytes, finer planes always seem a little
# better; a phase that is off by one loses no more than the link of one bit to its exponent.
LAYOUT_TIE: Final = 1.01
PHASE_TIE: Final = 1.001
PLANE_GAIN_MIN: Final = 0.03  # what wins less is stored, so that decoding it is a copy
# A search takes up to twice the time, so it has to win a little more.
_HANDICAPS: Final = {Effort.ENTROPY: 1.0, Effort.SEARCH: 1.005}

_NAMES: Final[dict[bytes, tuple[Layout, ...]]] = {
    **dict.fromkeys((b"bf16", b"bfloat16"), (Layout(2, True),)),
    **dict.fromkeys((b"fp32", b"float32", b"float"), (Layout(4, True),)),
    **dict.fromkeys((b"fp64", b"float64", b"double"), (Layout(8, True),)),
    **dict.fromkeys((b"fp16", b"float16", b"half", b"int16", b"uint16"), (Layout(2, False),)),
    **dict.fromkeys((b"int32", b"uint32"), (Layout(4, False),)),
    **dict.fromkeys((b"int64", b"uint64"), (Layout(8, False),)),
    **dict.fromkeys((b"int8", b"uint8", b"int4", b"uint4", b"bool"), ()),
}
_ONE_BYTE: Final = (b"fp8", b"float8")
_ANY: Final = (
    Layout(2, True),
    Layout(4, True),
    Layout(2, False),
    Layout(4, False),
    Layout(8, False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSettings:
    """`level` is zstd's. `gain_min`: what part of its bytes a block must lose to be worth it."""

    level: int = 1
    gain_min: float = 0.05
    chunk_bytes: int = 512 << 10

    def __post_init__(self) -> None:
        if not 1 <= self.level <= ZSTD_LEVEL_MAX:
            raise ConfigError(f"a level is 1 to {ZSTD_LEVEL_MAX}")
        if not 0 <= self.gain_min < 1:
            raise ConfigError("a gain is at least 0 and less than 1")
        if not CHUNK_BYTES_MIN <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise ConfigError(f"a chunk is {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX} bytes")
        if self.chunk_bytes % CHUNK_UNIT:
            raise ConfigError(f"a chunk is a multiple of {CHUNK_UNIT} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to encode. `ratio`, and `bytes_per_s` where there was a clock, as found on the sample."""

    settings: CodecSettings
    layout: Layout
    phase: int
    efforts: tuple[Effort, ...]  # of each plane, the lowest first
    ratio: float
    bytes_per_s: float | None = None

    @property
    def method(self) -> Method:
        packs = any(effort is not Effort.RAW for effort in self.efforts)
        return Method.ZSTD if packs else Method.STORED


def encoded_length_max(raw_length: int, settings: CodecSettings) -> int:
    """Bytes that a stream of so much content cannot exceed, encrypted or not."""
    chunks = -(-raw_length // settings.chunk_bytes)
    return FIXED_BYTES + raw_length + chunks * (ENTRY.size + TAG_BYTES)


def stored_plan(settings: CodecSettings) -> Plan:
    """For what is only to be encrypted."""
    return Plan(settings=settings, layout=PLAIN, phase=0, efforts=(Effort.RAW,), ratio=1.0)


def plan(
    source: memoryview,
    dtype: bytes,
    settings: CodecSettings,
    *,
    offload: Offload = CPU,
    clock_ns: Callable[[], int] | None = None,
) -> Plan | None:
    """What to do with `source`, or None: keep it raw. `dtype`: `user.ctx.dtype`, b"" if not set.

    With a `clock_ns`, the chosen way is run once more and timed, on one thread.
    """
    if len(source) < WORTHWHILE_BYTES:
        return None
    sample, scratch = sample_of(source), SCRATCHES.take()
    try:
        best = _best(_Trial(sample, settings, offload, scratch), dtype)
        if best.ratio * (1 - settings.gain_min) < 1:
            return None
        return best if clock_ns is None else _timed(sample, best, offload, scratch, clock_ns)
    finally:
        SCRATCHES.give(scratch)


def _best(trial: "_Trial", dtype: bytes) -> Plan:
    # Bytes as they stand are not dense enough in any value for chance matches to do harm.
    plain = trial.run(PLAIN, 0, (Effort.SEARCH,))
    # The end of the sample has no header in it. Where it begins must keep the phase.
    begin = max(0, len(trial.sample) - RANKED_BYTES) // CHUNK_UNIT * CHUNK_UNIT
    ranked = _ranked(trial.sample[begin:], dtype, trial.scratch)
    if ranked is None:
        return plain
    planes = trial.run(*ranked, (Effort.ENTROPY, Effort.SEARCH))
    return max(plain, planes, key=lambda found: found.ratio)


def sample_of(source: memoryview) -> memoryview:
    """Pieces from all over the source. Each begins at a multiple of 8, so that phases agree."""
    wanted = min(SAMPLE_BYTES_MAX, max(SAMPLE_BYTES_MIN, len(source) // SAMPLE_PART))
    if len(source) <= wanted:
        return source
    length = wanted // PIECES // 8 * 8
    step = (len(source) - length) // (PIECES - 1)
    starts = (number * step // 8 * 8 for number in range(PIECES))
    return memoryview(b"".join(source[start : start + length] for start in starts))


def layouts_of(dtype: bytes) -> tuple[Layout, ...]:
    """What a dtype may mean, plain bytes apart."""
    name = dtype.lower()
    if name.startswith(_ONE_BYTE):
        return ()
    return _NAMES.get(name, _ANY)


def _ranked(sample: memoryview, dtype: bytes, scratch: Scratch) -> tuple[Layout, int] | None:
    """The layout and phase whose planes have the least entropy."""
    found = [
        _first_as_good(
            # Turned bits cross from byte to byte; without, another phase only swaps the planes.
            [
                (_entropy_bytes(sample, layout, phase, scratch), layout, phase)
                for phase in range(layout.element_bytes if layout.rotated else 1)
            ],
            PHASE_TIE,
        )
        for layout in layouts_of(dtype)
    ]
    return _first_as_good(found, LAYOUT_TIE)[1:] if found else None


def _first_as_good(
    found: Sequence[tuple[float, Layout, int]], tie: float
) -> tuple[float, Layout, int]:
    """The first whose entropy is the least, or hardly more."""
    enough = min(entropy for entropy, _, _ in found) * tie
    return next(each for each in found if each[0] <= enough)


def _whole(sample: memoryview, layout: Layout, phase: int) -> memoryview:
    rest = len(sample) - phase
    return sample[phase : phase + rest - rest % layout.element_bytes]


def _entropy_bytes(sample: memoryview, layout: Layout, phase: int, scratch: Scratch) -> float:
    """Bytes that a perfect code for each plane by itself would need, per byte."""
    total = 0.0
    planes = split(_whole(sample, layout, phase), layout, scratch)
    for plane in planes:
        counts = np.bincount(plane, minlength=256)
        shares = counts[counts > 0] / len(plane)
        total -= float((shares * np.log2(shares)).sum()) / 8
    return total / len(planes)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Compressing the sample in several ways."""

    sample: memoryview
    settings: CodecSettings
    offload: Offload
    scratch: Scratch

    def run(self, layout: Layout, phase: int, efforts: Sequence[Effort]) -> Plan:
        """The best of `efforts` for each plane."""
        planes = split(_whole(self.sample, layout, phase), layout, self.scratch)
        found = [self._best(plane.data, efforts) for plane in planes]
        ratio = sum(len(plane) for plane in planes) / max(1, sum(length for _, length in found))
        return Plan(
            settings=self.settings,
            layout=layout,
            phase=phase,
            efforts=tuple(effort for effort, _ in found),
            ratio=ratio,
        )

    def _best(self, plane: Buffer, efforts: Sequence[Effort]) -> tuple[Effort, int]:
        """How to compress a plane, and its length then."""
        level = self.settings.level
        frames = self.offload.compress([Compression(plane, effort, level) for effort in efforts])
        lengths = {
            effort: len(plane if frame is None else frame)
            for effort, frame in zip(efforts, frames, strict=True)
        }
        effort = min(lengths, key=lambda each: lengths[each] * _HANDICAPS[each])
        if lengths[effort] > len(plane) * (1 - PLANE_GAIN_MIN):
            return Effort.RAW, len(plane)
        return effort, lengths[effort]


def _timed(
    sample: memoryview,
    found: Plan,
    offload: Offload,
    scratch: Scratch,
    clock_ns: Callable[[], int],
) -> Plan:
    before = clock_ns()
    offload.compress(list(_jobs(sample, found, scratch)))
    seconds = max(1, clock_ns() - before) / 1e9
    return Plan(
        settings=found.settings,
        layout=found.layout,
        phase=found.phase,
        efforts=found.efforts,
        ratio=found.ratio,
        bytes_per_s=len(sample) / seconds,
    )


def _jobs(sample: memoryview, found: Plan, scratch: Scratch) -> Iterator[Compression]:
    planes = split(_whole(sample, found.layout, found.phase), found.layout, scratch)
    for plane, effort in zip(planes, found.efforts, strict=True):
        yield Compression(plane.data, effort, found.settings.level)
