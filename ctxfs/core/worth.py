"""Whether compressing pays: learned from what was tried and what it took. Pure."""

from __future__ import annotations

RATIO_MIN = 1.1  # content to what is stored; below, DRAM is not worth the processor's time
WEIGHT = 0.1  # of the newest sample in a moving average
PROBE_EVERY = 32  # of blocks of a kind that does not pay, one is tried again
KINDS_MAX = 256


class Worth:
    """Ratios by kind of block (its dtype), and how fast copies come up from where."""

    def __init__(self) -> None:
        self._ratios: dict[bytes, float] = {}
        self._passed: dict[bytes, int] = {}
        self._inflate_s = 0.0  # seconds for a byte, moving averages
        self._cold_s = 0.0

    def is_promising(self, kind: bytes, ratio_min: float = RATIO_MIN) -> bool:
        """Whether one more block of this kind is worth a try. Asking counts."""
        if self._ratios.get(kind, ratio_min) >= ratio_min:
            return True
        passed = self._passed.get(kind, 0) + 1
        self._passed[kind] = passed % PROBE_EVERY
        return passed == PROBE_EVERY

    def tried(self, kind: bytes, size: int, stored: int | None) -> None:
        """A block of `size` bytes came down to `stored`; None: it did not get smaller."""
        ratio = size / stored if stored else 1.0
        if len(self._ratios) >= KINDS_MAX and kind not in self._ratios:
            self._ratios.clear()
            self._passed.clear()
        self._ratios[kind] = _averaged(self._ratios.get(kind, 0.0), ratio)

    def inflated(self, size: int, seconds: float) -> None:
        """A warm copy came up."""
        if size:
            self._inflate_s = _averaged(self._inflate_s, seconds / size)

    def read_cold(self, size: int, seconds: float) -> None:
        """A cold copy came up, inflating included if it was compressed."""
        if size:
            self._cold_s = _averaged(self._cold_s, seconds / size)

    def inflates_faster_than_cold(self) -> bool:
        """Whether a warm copy beats the cold one; unknown is yes, so that it becomes known."""
        return not self._inflate_s or not self._cold_s or self._inflate_s < self._cold_s


def _averaged(known: float, sample: float) -> float:
    return sample if not known else known + WEIGHT * (sample - known)
