"""Contents by digest and size: the newest of each is found, and nothing else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.columns import U64
from ctxfs.core.contentindex import ContentIndex

_contents = st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, 3))


class _Contents:
    """Generations that are gone, and an index that may be told so."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.index = ContentIndex(lambda count: bytes(range(1, count + 1)), self._are_gone)

    def _are_gone(self, generations: U64) -> np.typing.NDArray[np.bool]:
        return np.array([each in self.gone for each in generations.tolist()], bool)


@given(st.lists(_contents), st.lists(_contents))
def test_the_newest_generation_of_each_content_is_found(
    contents: list[tuple[bytes, int]], others: list[tuple[bytes, int]]
) -> None:
    index = _Contents().index
    newest = {}
    for generation, (digest, size) in enumerate(contents, 1):
        index.put(digest, size, generation)
        newest[digest, size] = generation
    for digest, size in [*contents, *others]:
        assert index.find(digest, size) == newest.get((digest, size))
    assert len(index) == len(newest)


@given(st.lists(_contents, unique=True))
def test_contents_that_come_all_at_once_are_found_as_each_alone(
    contents: list[tuple[bytes, int]],
) -> None:
    index = _Contents().index
    digests = np.frombuffer(b"".join(digest for digest, _ in contents), np.uint8).reshape(-1, 16)
    sizes = np.array([size for _, size in contents], np.uint64)
    index.load(digests, sizes, np.arange(1, len(contents) + 1, dtype=np.uint64))
    for generation, (digest, size) in enumerate(contents, 1):
        assert index.find(digest, size) == generation
    index.put(b"x" * 16, 4, 7)
    assert index.find(b"x" * 16, 4) == 7


def test_what_is_gone_does_not_make_it_longer_for_ever() -> None:
    contents = _Contents()
    for generation in range(1, 5001):
        contents.index.put(generation.to_bytes(16, "big"), 9, generation)
        contents.gone.add(generation - 20)
    assert len(contents.index) < 200
    for generation in range(4985, 5001):
        assert contents.index.find(generation.to_bytes(16, "big"), 9) == generation
