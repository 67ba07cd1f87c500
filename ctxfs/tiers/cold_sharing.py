"""Which blocks of one cold device are read from records that were written for another: pure.

A content is named by the generation that its records were written for. It may outlive that block:
it stays for as long as an alias refers to it.
"""

from typing import Final

import numpy as np

from ctxfs.core.columns import U64
from ctxfs.core.numbermap import NumberMap

_ONE: Final = 1


class Sharing:
    """Aliases, and how many each content has. Two numbers an alias, no object."""

    def __init__(self) -> None:
        self._contents = NumberMap()  # by alias
        self._homes = NumberMap()  # by alias: its note, as ColdIndex keeps homes
        self._counts: dict[int, int] = {}  # by content: aliases, and claims; none that is 0
        self.unnamed: set[int] = set()  # contents whose own block is gone
        # Aliases whose note is being written, and the content of each.
        self.coming: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, generation: int) -> bool:
        return bool(len(self._contents)) and generation in self._contents

    def content_of(self, generation: int) -> int | None:
        """The content that an alias refers to; None where this is no alias."""
        return self._contents.get(generation) if len(self._contents) else None

    def home(self, generation: int) -> int | None:
        """Where the note of an alias is; None where this is no alias."""
        return self._homes.get(generation) if len(self._contents) else None

    def move(self, generation: int, home: int) -> None:
        """The note of an alias is there from now on."""
        self._homes[generation] = home

    def count(self, content: int) -> int:
        """How many refer to a content beside the block it was written for."""
        return self._counts.get(content, 0)

    def names(self, content: int) -> int:
        """How many blocks it is the content of, one at least."""
        return max(1, self.count(content) + (content not in self.unnamed))

    def claim(self, content: int) -> None:
        """The content stays until `disclaim`, whoever goes."""
        self._counts[content] = self.count(content) + _ONE

    def disclaim(self, content: int) -> None:
        left = self._counts[content] - _ONE
        if left:
            self._counts[content] = left
        else:
            del self._counts[content]

    def add(self, generation: int, content: int, home: int) -> None:
        """A new alias."""
        self._contents[generation] = content
        self._homes[generation] = home
        self.claim(content)

    def load(self, aliases: U64, contents: U64, homes: U64) -> None:
        """Many that are new."""
        self._contents.load(aliases, contents)
        self._homes.load(aliases, homes)
        for content, count in zip(*np.unique(contents, return_counts=True), strict=True):
            self._counts[int(content)] = self.count(int(content)) + int(count)

    def remove(self, generation: int) -> tuple[int, int]:
        """The content and the home of an alias that is none any more."""
        content, home = self._contents.get(generation), self._homes.get(generation)
        assert content is not None
        assert home is not None
        self._contents.remove(generation)
        self._homes.remove(generation)
        self.disclaim(content)
        return content, home

    def by_content(self) -> dict[int, list[int]]:
        """All aliases, by their content."""
        found: dict[int, list[int]] = {}
        for generation in self._contents.key_array().tolist():
            content = self._contents.get(generation)
            assert content is not None
            found.setdefault(content, []).append(generation)
        return found
