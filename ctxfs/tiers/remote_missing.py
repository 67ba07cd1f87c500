"""Keys that no member has: asked again only after a while. Bounded, the oldest goes first."""

from __future__ import annotations

from collections import OrderedDict

from ctxfs.wire.messages import Gone


class MissingKeys:
    """Times are seconds of any clock that only grows; each entry is as old as its place."""

    def __init__(self, keep_s: float, entries_max: int) -> None:
        self.keep_s = keep_s
        self._entries_max = entries_max
        # Invariant: in the order of deadlines, since all are kept for equally long: who changes
        # `keep_s` clears.
        self._entries: OrderedDict[bytes, tuple[float, Gone | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: bytes, gone: Gone | None, now_s: float) -> None:
        """Nobody has it. `gone`: some member knows that it was deleted."""
        self._entries.pop(key, None)
        while self._entries and (
            len(self._entries) >= self._entries_max
            or next(iter(self._entries.values()))[0] <= now_s
        ):
            self._entries.popitem(last=False)
        self._entries[key] = (now_s + self.keep_s, gone)

    def is_missing(self, key: bytes, now_s: float) -> bool:
        """Whether nobody is to be asked."""
        entry = self._entries.get(key)
        return entry is not None and now_s < entry[0]

    def gone(self, key: bytes, now_s: float) -> Gone | None:
        """Which deletion makes it missing, if one does."""
        return self._entries[key][1] if self.is_missing(key, now_s) else None

    def forget(self, key: bytes) -> None:
        """It may be there now."""
        self._entries.pop(key, None)

    def clear(self) -> None:
        """Others are asked from now on."""
        self._entries.clear()
