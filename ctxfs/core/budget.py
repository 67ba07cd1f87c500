"""How much may be written to devices that wear: a bucket that fills evenly over a day. Pure."""

DAY_NS = 24 * 3600 * 1_000_000_000
FIRST_SHARE = 24  # an hour's worth is there from the start, so that a restart gives no day away


class WriteBudget:
    """`bytes_per_day` None: no limit. What is not used is saved up, for a day at most."""

    def __init__(self, bytes_per_day: int | None, now_ns: int, written_bytes: int = 0) -> None:
        self._seen_ns = now_ns
        self._seen_bytes = written_bytes
        self.bytes_per_day = bytes_per_day
        self._left = (bytes_per_day or 0) / FIRST_SHARE

    def change(self, bytes_per_day: int | None) -> None:
        """Another limit from now on."""
        if bytes_per_day != self.bytes_per_day:
            self.bytes_per_day = bytes_per_day
            self._left = min(self._left, bytes_per_day or 0) or (bytes_per_day or 0) / FIRST_SHARE

    def allows(self, now_ns: int, written_bytes: int) -> bool:
        """Whether more may be written; `written_bytes` is the sum of all that was so far."""
        if self.bytes_per_day is None:
            return True
        passed = max(0, now_ns - self._seen_ns) / DAY_NS
        self._left = min(self.bytes_per_day, self._left + self.bytes_per_day * passed)
        self._left -= written_bytes - self._seen_bytes
        self._seen_ns, self._seen_bytes = now_ns, written_bytes
        return self._left >= 1
