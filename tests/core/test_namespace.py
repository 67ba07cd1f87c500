"""Names: published for all, private to their writer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core.block import Block, Directory
from ctxfs.core.key import check_name, is_temporary, split_key
from ctxfs.core.namespace import Namespace
from ctxfs.errors import BadValue, BlockExists, BlockNotFound, DirectoryNotEmpty, NameTooLong

names = st.binary(min_size=1, max_size=255).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)


def private(space: Namespace, generation: int, directory: Directory, name: bytes) -> Block:
    block = Block(generation, directory, name)
    space.add_private(block)
    return block


@given(st.lists(names, min_size=1, max_size=6))
def test_a_key_is_the_path_of_names_that_leads_to_it(parts: list[bytes]) -> None:
    space = Namespace()
    directory = space.root
    for depth, name in enumerate(parts[:-1]):
        directory = space.make_directory(directory, name, 2000 + depth)
    block = private(space, 5000, directory, parts[-1])
    space.publish(block, directory, parts[-1])
    assert space.key_of(block) == b"/".join(parts)
    assert space.resolve(b"/".join(parts)) is block
    assert split_key(space.key_of(block)) == parts


def test_an_unpublished_name_leads_nobody_anywhere() -> None:
    space = Namespace()
    block = private(space, 1, space.root, b"k")
    assert space.find(space.root, b"k") is None
    assert space.private_of(space.root, b"k") == [block]


def test_publishing_replaces_in_one_step_and_returns_what_was_there() -> None:
    space = Namespace()
    old, new = private(space, 1, space.root, b"k"), private(space, 2, space.root, b"k")
    assert space.publish(old, space.root, b"k") is None
    assert space.publish(new, space.root, b"k") is old
    assert space.find(space.root, b"k") is new
    assert not old.published
    assert space.private_of(space.root, b"k") == []


def test_renaming_a_published_block_leaves_its_old_name_free() -> None:
    space = Namespace()
    block = private(space, 1, space.root, b"a.tmp")
    space.publish(block, space.root, b"a.tmp")
    space.publish(block, space.root, b"a")
    assert space.find(space.root, b"a.tmp") is None
    assert space.find(space.root, b"a") is block


def test_a_prefix_with_keys_beneath_cannot_be_removed() -> None:
    space = Namespace()
    directory = space.make_directory(space.root, b"d", 2000)
    block = private(space, 1, directory, b"k")
    space.publish(block, directory, b"k")
    with pytest.raises(DirectoryNotEmpty):
        space.remove_directory(directory)
    space.unname(block)
    space.remove_directory(directory)
    with pytest.raises(BlockNotFound):
        space.publish(block, directory, b"k")


def test_a_prefix_is_made_once() -> None:
    space = Namespace()
    space.make_directory(space.root, b"d", 2000)
    with pytest.raises(BlockExists):
        space.make_directory(space.root, b"d", 2001)


def test_the_outermost_together_directory_goes_as_one() -> None:
    space = Namespace()
    outer = space.make_directory(space.root, b"o", 2000)
    inner = space.make_directory(outer, b"i", 2001)
    block = private(space, 1, inner, b"k")
    space.publish(block, inner, b"k")
    assert space.together_root(block) is None
    inner.together = True
    assert space.together_root(block) is inner
    outer.together = True
    assert space.together_root(block) is outer


def test_the_nearest_default_ttl_counts() -> None:
    space = Namespace()
    outer = space.make_directory(space.root, b"o", 2000)
    inner = space.make_directory(outer, b"i", 2001)
    assert space.default_ttl_ns(inner) == -1
    outer.default_ttl_ns = 7
    assert space.default_ttl_ns(inner) == 7
    inner.default_ttl_ns = 0
    assert space.default_ttl_ns(inner) == 0


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0"])
def test_what_is_no_file_name_is_no_name(name: bytes) -> None:
    with pytest.raises(BadValue):
        check_name(name)


def test_a_name_has_at_most_255_bytes() -> None:  # LMCache#4827
    assert check_name(b"n" * 255)
    with pytest.raises(NameTooLong):
        check_name(b"n" * 256)
    with pytest.raises(NameTooLong):
        split_key(b"/".join([b"n" * 255] * 17))


@pytest.mark.parametrize(
    ("name", "temporary"),
    [(b".uuid.tmp", True), (b"k.tmp.3", True), (b".hidden", True), (b"k", False), (b"tmp", False)],
)
def test_temporary_names_are_those_that_clients_rename(name: bytes, temporary: bool) -> None:
    assert is_temporary(name) is temporary
