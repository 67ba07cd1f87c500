"""The warm tier: blocks as a codec made them, one file each in a private tmpfs of its own.

It is DRAM like the hot tier, and outlives the daemon like it. What a file holds says itself what
it is (docs/codec.md); who puts it there and who reads it needs the codec, the tier does not.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ctxfs.device.mapping import Mapping
from ctxfs.errors import BlockNotFound, CopyCorrupt, TierTrouble
from ctxfs.ondisk.layout import padded

_ARRIVING = ".arriving"
_METHOD_DIGITS = 2


@dataclass(frozen=True, slots=True)
class WarmCopy:
    """What is known of one: its exact length, and how the codec made it (1 to 31)."""

    length_bytes: int
    method: int

    @property
    def physical_bytes(self) -> int:
        return padded(self.length_bytes)


class WarmTier:
    """Copies by generation. Room is set aside before a copy is written, so the cap holds."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.reserved_bytes = 0
        self._dirfd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._copies: dict[int, WarmCopy] = {}
        # Invariant: used_bytes is the sum of the copies' physical bytes.

    def __contains__(self, generation: int) -> bool:
        return generation in self._copies

    def __len__(self) -> int:
        return len(self._copies)

    def copy(self, generation: int) -> WarmCopy | None:
        """What is here of a generation."""
        return self._copies.get(generation)

    @property
    def room_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes - self.reserved_bytes

    # -- coming

    def try_reserve(self, length_bytes: int) -> bool:
        """Set room aside for a copy; False where there is not so much."""
        need = padded(length_bytes)
        if need > self.room_bytes:
            return False
        self.reserved_bytes += need
        return True

    def unreserve(self, length_bytes: int) -> None:
        self.reserved_bytes -= padded(length_bytes)

    def write(self, generation: int, method: int, data: memoryview) -> None:
        """Write a copy into room that was set aside, to be told of by `arrived`. For a thread.

        Raises TierTrouble.
        """
        name = _name(generation, method)
        try:
            fd = os.open(
                name + _ARRIVING,
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC,
                0o600,
                dir_fd=self._dirfd,
            )
            try:
                done = 0
                while done < len(data):
                    done += os.write(fd, data[done:])
            finally:
                os.close(fd)
            # Whole or not there at all: the next daemon takes what has this name.
            os.rename(name + _ARRIVING, name, src_dir_fd=self._dirfd, dst_dir_fd=self._dirfd)
        except OSError as error:
            self._unlink(name + _ARRIVING)
            raise TierTrouble(f"the warm tier takes no copy: {error.strerror}") from error

    def arrived(self, generation: int, copy: WarmCopy) -> None:
        """It was written, and counts from now on. Its room is not set aside any more."""
        self.unreserve(copy.length_bytes)
        self._add(generation, copy)

    def _add(self, generation: int, copy: WarmCopy) -> None:
        former = self._copies.get(generation)
        if former is not None:
            self.used_bytes -= former.physical_bytes
            if former.method != copy.method:  # else the new file has taken its place
                self._unlink(_name(generation, former.method))
        self._copies[generation] = copy
        self.used_bytes += copy.physical_bytes

    # -- there

    def open(self, generation: int) -> Mapping:
        """Map a copy; whoever closes it may see it dropped meanwhile, and keeps the bytes.

        Raises BlockNotFound, CopyCorrupt, TierTrouble.
        """
        copy = self._copies.get(generation)
        if copy is None:
            raise BlockNotFound(f"generation {generation} is not in the warm tier")
        try:
            fd = os.open(
                _name(generation, copy.method), os.O_RDWR | os.O_CLOEXEC, dir_fd=self._dirfd
            )
            try:
                if os.fstat(fd).st_size != copy.length_bytes:
                    raise CopyCorrupt("a warm copy has another length")
                return Mapping(fd, copy.length_bytes)
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise CopyCorrupt("a warm copy is gone") from None
        except OSError as error:
            raise TierTrouble(f"a warm copy cannot be read: {error.strerror}") from error

    # -- going

    def drop(self, generation: int) -> None:
        """Its room is free at once; nothing happens where it is not here."""
        copy = self._copies.pop(generation, None)
        if copy is not None:
            self.used_bytes -= copy.physical_bytes
            self._unlink(_name(generation, copy.method))

    def _unlink(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._dirfd)
        except FileNotFoundError:
            return  # removed behind our back

    # -- of a daemon before us

    def scan(self) -> Iterator[tuple[int, WarmCopy]]:
        """Take over what is there, and yield it; what has no good name goes."""
        for name in os.listdir(self._dirfd):
            known = _parsed(name)
            facts = os.stat(name, dir_fd=self._dirfd, follow_symlinks=False)
            if known is None or known[0] in self._copies:
                self._unlink(name)
                continue
            generation, method = known
            copy = WarmCopy(facts.st_size, method)
            self._add(generation, copy)
            yield generation, copy

    def close(self) -> None:
        """Let go of the directory; the files stay."""
        os.close(self._dirfd)


def _name(generation: int, method: int) -> str:
    return f"{generation:016x}.{method:0{_METHOD_DIGITS}d}"


def _parsed(name: str) -> tuple[int, int] | None:
    generation, dot, method = name.partition(".")
    if not dot or len(method) != _METHOD_DIGITS or not method.isdigit():
        return None
    try:
        return int(generation, 16), int(method)
    except ValueError:
        return None
