"""Blocks that nobody uses live as rows, and nobody can tell."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.core import blocktable
from ctxfs.core.block import Block, Directory, State
from ctxfs.core.blockrow import ROW, ROW_COLUMNS
from ctxfs.core.namespace import Namespace

FACTS_OF_A_BLOCK = sorted(set(Block.__slots__) - {"directory", "row", "extras", "writing"})


def few_awake(count: int) -> Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocktable, "AWAKE_MAX", count)
        return Namespace()


def publish(space: Namespace, generation: int, directory: Directory, name: bytes) -> Block:
    """A sealed block with facts of its own."""
    block = Block(generation, directory, name)
    space.add_private(block)
    space.publish(block, directory, name)
    numbers = random.Random(generation)
    block.state = State.SEALED
    block.digest = numbers.randbytes(16)
    block.stamp, block.size = numbers.getrandbits(64), numbers.getrandbits(64)
    block.created_ns, block.mtime_ns = numbers.getrandbits(60), -numbers.getrandbits(60)
    block.ctime_ns, block.atime_ns = numbers.getrandbits(60), numbers.getrandbits(60)
    block.used_ns, block.expires_ns = numbers.getrandbits(60), numbers.getrandbits(64)
    block.hits, block.lookups = numbers.getrandbits(32), numbers.getrandbits(32)
    block.mode, block.uid = numbers.getrandbits(12), numbers.getrandbits(32)
    block.gid, block.hot_bytes = numbers.getrandbits(32), numbers.getrandbits(40)
    if numbers.random() < 0.3:
        block.more().dtype = b"bf16"
    return block


def facts(block: Block) -> tuple[object, ...]:
    extras = block.extras
    return (
        *(getattr(block, name) for name in FACTS_OF_A_BLOCK),
        block.directory,
        extras.dtype if extras is not None else None,
    )


def test_a_row_is_the_same_to_struct_and_to_numpy() -> None:
    assert ROW.size == ROW_COLUMNS.itemsize
    values = (*range(1, len(ROW_COLUMNS.names or ())), b"0123456789abcdef")
    row = np.frombuffer(ROW.pack(*values), ROW_COLUMNS)[0]
    assert tuple(row.tolist())[:-1] == values[:-1]
    assert bytes(row["digest"]) == values[-1]


def test_a_block_that_nobody_uses_is_let_go_and_comes_back_as_it_was() -> None:
    space = few_awake(0)
    known = {n: facts(publish(space, n, space.root, b"k%d" % n)) for n in range(10, 40)}
    assert len(space.table.awake) < len(known)
    for n, known_facts in known.items():
        by_inode = space.by_inode.get(n)
        assert isinstance(by_inode, Block)
        assert facts(by_inode) == known_facts
        assert space.find(space.root, b"k%d" % n) is by_inode


def test_a_block_that_somebody_refers_to_stays_one_object() -> None:
    space = few_awake(0)
    block = publish(space, 1, space.root, b"mine")
    block.hits = 7
    for n in range(10, 40):
        publish(space, n, space.root, b"k%d" % n)
    assert space.by_inode.get(1) is block
    block.hits = 8
    del block
    for n in range(50, 90):
        publish(space, n, space.root, b"k%d" % n)
    assert 1 not in space.table.awake
    again = space.find(space.root, b"mine")
    assert isinstance(again, Block)
    assert again.hits == 8


@pytest.mark.parametrize("change", ["open", "writing", "unpublished", "many lookups"])
def test_what_a_row_cannot_say_keeps_a_block_awake(change: str) -> None:
    space = few_awake(0)
    block = publish(space, 1, space.root, b"k")
    if change == "open":
        block.opens = 1
    elif change == "writing":
        block.state = State.WRITING
    elif change == "unpublished":
        space.unname(block)
    else:
        block.lookups = 2**32
    del block
    for n in range(10, 40):
        publish(space, n, space.root, b"k%d" % n)
    assert 1 in space.table.awake


def test_a_glance_wakes_nobody() -> None:
    space = few_awake(0)
    known = {n: facts(publish(space, n, space.root, b"k%d" % n)) for n in range(10, 40)}
    awake = set(space.table.awake)
    seen = {b.generation: facts(b) for b in space.root.entries.peek() if isinstance(b, Block)}
    assert seen == known
    glanced = space.by_inode.peek(10)
    assert isinstance(glanced, Block)
    assert facts(glanced) == known[10]
    with_extras = {block.generation for block in space.table.peek_with_extras()}
    assert with_extras == {n for n, each in known.items() if each[-1] is not None}
    assert set(space.table.awake) == awake


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "rename", "drop", "look", "change", "exchange"]),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    max_size=60,
)


@given(STEPS, st.integers(0, 3))
def test_names_lead_where_a_plain_dict_would(
    steps: list[tuple[str, int, int]], awake_max: int
) -> None:
    space = few_awake(awake_max)
    folders = [space.root, space.make_directory(space.root, b"d", 5)]
    places = [(folders[n % 2], b"name%d" % (n // 2) * (1 + 3 * n)) for n in range(10)]
    model: dict[int, int] = {}  # place → generation
    known: dict[int, tuple[object, ...]] = {}
    for generation, (step, at, to) in enumerate(steps, 100):
        node = space.find(*places[at])
        assert (node.generation if isinstance(node, Block) else None) == model.get(at)
        if step == "publish":
            if isinstance(node, Block):
                bury(space, node)
            model[at] = generation
            known[generation] = facts(publish(space, generation, *places[at]))
        elif isinstance(node, Block):
            assert facts(node) == known[node.generation]
            other = space.find(*places[to])
            if step == "rename":
                old = space.publish(node, *places[to])
                model[to] = model.pop(at)
                if old is not None:
                    bury(space, old)
            elif step == "exchange" and isinstance(other, Block) and other is not node:
                space.unname(node)
                space.unname(other)
                space.publish(node, *places[to])
                space.publish(other, *places[at])
                model[at], model[to] = model[to], model[at]
                known[other.generation] = facts(other)
            elif step == "drop":
                bury(space, node)
                del model[at]
            elif step == "change":
                node.size = generation
            known[node.generation] = facts(node)
        del node
    for folder in folders:
        names = {places[at][1] for at in model if places[at][0] is folder}
        subdirectories = {b"d"} if folder is space.root else set()
        assert set(folder.entries) == names | subdirectories
        assert len(folder.entries) == len(names | subdirectories)
    live = set(model.values())
    assert {g for g in range(100, 100 + len(steps)) if g in space.by_inode} == live
    assert len(space.table) == len(live)


def bury(space: Namespace, block: Block) -> None:
    block.state = State.GONE
    space.unname(block)
    space.bury(block)
    space.forget(block)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 7))
def test_blocks_that_are_loaded_are_as_those_that_were_published(
    before: int, loaded: int, folder_count: int
) -> None:
    space, other = few_awake(0), few_awake(0)
    folders = [
        [each.make_directory(each.root, b"%d" % n, 2 + n) for n in range(folder_count)]
        for each in (space, other)
    ]
    names = [b"n%d" % n * (1 + n % 30) for n in range(before + loaded)]
    for n in range(before):
        publish(space, 100 + n, folders[0][n % folder_count], names[n])
    made = range(before, before + loaded)
    rows = np.zeros(loaded, ROW_COLUMNS)
    for at, n in enumerate(made):
        block = publish(other, 100 + n, folders[1][n % folder_count], names[n])
        block.extras = None
        rows[at] = tuple(
            np.frombuffer(block.digest, np.uint8) if name == "digest" else getattr(block, name)
            for name in ROW_COLUMNS.names or ()
        )
    ends = np.cumsum([len(names[n]) for n in made], dtype=np.int64)
    starts = ends - np.array([len(names[n]) for n in made], np.int64)
    homes = [space.number_for(folders[0][n % folder_count]) for n in made]
    space.table.load(
        np.array([100 + n for n in made], np.uint64),
        np.array(homes, np.uint32),
        b"".join(names[n] for n in made),
        (starts, ends),
        rows,
    )
    for n in made:
        found, like = space.by_inode.get(100 + n), other.by_inode.get(100 + n)
        assert isinstance(found, Block)
        assert isinstance(like, Block)
        folder = folders[0][n % folder_count]
        assert found.directory is folder
        assert folder.entries[names[n]] is found
        assert all(getattr(found, f) == getattr(like, f) for f in FACTS_OF_A_BLOCK)
    for at, folder in enumerate(folders[0]):
        assert set(folder.entries) == set(names[at::folder_count])
