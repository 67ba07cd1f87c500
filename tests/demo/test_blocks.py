"""Keys that say what was read, and files that hold what was computed."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from demo.blocks import TOKENS, Block, Shelf, cut
from demo.check import check
from demo.transformer import Stored

SHAPE = (6, 2, TOKENS, 384)


def block_of(seed: int, parent: str = "") -> tuple[Block, Stored]:
    numbers = np.random.default_rng(seed).integers(0, 2**16, SHAPE, dtype=np.uint16)
    return Block(f"key{seed}", parent, tuple(range(TOKENS))), numbers


def test_texts_that_begin_alike_share_their_first_keys() -> None:
    one = list(cut([*range(150), *range(50)]))
    other = list(cut([*range(150), *range(50, 100)]))
    assert [block.key for block in one[:2]] == [block.key for block in other[:2]]
    assert one[2].key != other[2].key
    assert [block.parent for block in one] == ["", one[0].key, one[1].key]


def test_the_same_tokens_after_another_beginning_are_another_block() -> None:
    one, other = list(cut([*range(64), *range(64)])), list(cut([*range(1, 65), *range(64)]))
    assert one[1].tokens == other[1].tokens
    assert one[1].key != other[1].key


def test_what_does_not_fill_a_block_is_no_block() -> None:
    assert list(cut(list(range(TOKENS - 1)))) == []
    assert len(list(cut(list(range(2 * TOKENS + 1))))) == 2


def test_a_block_comes_back_bit_for_bit_with_its_attributes(tmp_path: Path) -> None:
    folder = tmp_path / "demo-1"
    folder.mkdir()
    shelf = Shelf(folder, tmp_path)
    block, kv = block_of(1, parent="key0")
    shelf.put(block, kv, ttl="1h")
    assert np.array_equal(shelf.get(block.key, SHAPE), kv)
    assert shelf.attribute(block.key, "ttl") == "1h"
    assert shelf.attribute(block.key, "dtype") == "bf16"
    assert shelf.attribute(block.key, "parent") == "demo-1/key0"
    assert os.listdir(folder) == [block.key]


def test_a_file_of_the_wrong_size_is_no_tensor(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, tmp_path)
    block, kv = block_of(2)
    shelf.put(block, kv, ttl="1h")
    with pytest.raises(ValueError, match="no tensor of shape"):
        shelf.get(block.key, (6, 2, TOKENS + 1, 384))


def test_the_other_process_finds_one_wrong_bit_and_a_missing_block(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf", tmp_path)
    shelf.path.mkdir()
    entries = []
    for seed in range(3):
        block, kv = block_of(seed)
        np.save(tmp_path / f"{seed}.npy", kv)
        if seed == 1:
            kv[3, 1, 17, 200] ^= 1
        if seed != 2:
            shelf.put(block, kv, ttl="1h")
        entries.append(
            {"key": block.key, "sha256": "", "copy": str(tmp_path / f"{seed}.npy"), "shape": SHAPE}
        )
    for seed, entry in enumerate(entries):
        entry["sha256"] = hashlib.sha256(block_of(seed)[1].tobytes()).hexdigest()
    findings = check(shelf.path, entries)
    assert findings.blocks == 2
    assert [line.split(":")[0] for line in findings.wrong] == ["key1", "key2"]
