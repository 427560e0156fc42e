from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.scheduling.block_manager import BlockManager, OutOfBlocks, block_digest, root_digest

SIZE = 4


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def fill(manager: BlockManager, salt: str, tokens: np.ndarray) -> list[int]:
    """A sequence that computed all of `tokens` and still runs."""
    blocks, chain = manager.match(salt, tokens)
    manager.share(blocks)
    blocks = blocks + manager.allocate(manager.blocks_for(len(tokens)) - len(blocks))
    for number in range(len(chain), len(tokens) // SIZE):
        manager.register(salt, chain, tokens, blocks[number])
    return blocks


def test_allocation_takes_all_or_nothing():
    manager = BlockManager(3, SIZE)
    assert len(set(manager.allocate(2))) == 2
    with pytest.raises(OutOfBlocks):
        manager.allocate(2)
    assert manager.num_free == 1


def test_a_prefix_is_found_while_shared_and_after_release():
    manager = BlockManager(8, SIZE)
    tokens = np.arange(11, dtype=np.int32)
    blocks = fill(manager, "a", tokens)
    assert manager.match("a", tokens)[0] == blocks[:2]
    manager.release(blocks)
    assert manager.num_free == 8
    assert manager.match("a", tokens)[0] == blocks[:2]


def test_the_last_token_is_never_taken_from_the_cache():
    """R28: of k full blocks, (k-1) are cached, on every call; its logits must be computed."""
    manager = BlockManager(8, SIZE)
    for length, cached in ((3 * SIZE - 1, 2), (3 * SIZE, 2), (3 * SIZE + 1, 3)):
        tokens = np.arange(length, dtype=np.int32)
        manager.release(fill(manager, "a", tokens))
        for _ in range(2):
            assert len(manager.match("a", tokens)[0]) == cached
            manager.release(fill(manager, "a", tokens))


def test_no_block_is_found_under_another_salt():
    """C38: also when caching demonstrably works for the owner."""
    manager = BlockManager(8, SIZE)
    tokens = np.arange(9, dtype=np.int32)
    fill(manager, "a", tokens)
    assert len(manager.match("a", tokens)[0]) == 2
    assert manager.match("b", tokens)[0] == []
    assert manager.match("", tokens)[0] == []


def test_keys_of_different_domains_differ():
    """C37: a salt never passes for a block, nor a border for another."""
    roots = [root_digest(salt) for salt in ("", "X", "ab", "abc", "1")]
    first = [block_digest(root, ids(1, 2, 3, 4).tobytes()) for root in roots]
    assert len({*roots, *first}) == 10
    assert block_digest(b"", b"X" * 16) != root_digest("X" * 16)


def test_a_digest_alone_is_no_hit():
    manager = BlockManager(8, SIZE)
    tokens = np.arange(5, dtype=np.int32)
    [block, _] = fill(manager, "a", tokens)
    digest = block_digest(root_digest("a"), ids(9, 9, 9, 9).tobytes())
    manager._by_digest[digest] = block  # a collision
    assert manager.match("a", ids(9, 9, 9, 9, 9))[0] == []


def test_eviction_is_least_recently_used_and_from_the_end_of_a_prefix():
    manager = BlockManager(5, SIZE)
    old, new = np.arange(9, dtype=np.int32), np.arange(100, 105, dtype=np.int32)
    manager.release(fill(manager, "a", old))
    manager.release(fill(manager, "a", new))
    held = manager.allocate(2)  # takes the two unindexed ones
    assert len(manager.match("a", old)[0]) == 2
    held += manager.allocate(1)
    assert len(manager.match("a", old)[0]) == 1
    assert len(manager.match("a", new)[0]) == 1
    manager.release(held)


def test_without_the_cache_nothing_is_found():
    manager = BlockManager(4, SIZE, prefix_cache=False)
    tokens = np.arange(9, dtype=np.int32)
    chain: list[bytes] = []
    manager.register("a", chain, tokens, manager.allocate(1)[0])
    assert manager.match("a", tokens) == ([], [])


class Blocks(RuleBasedStateMachine):
    """Against a plain model: who holds which block, and what content each block got last."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(12, SIZE)
        self.held: list[tuple[str, np.ndarray, list[int]]] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(salt=st.sampled_from("ab"), length=st.integers(1, 20), branch=st.integers(0, 2))
    def start(self, salt: str, length: int, branch: int) -> None:
        tokens = np.arange(length, dtype=np.int32)
        tokens[length // 2 :] += 100 * branch
        cached, _ = self.manager.match(salt, tokens)
        for number, block in enumerate(cached):
            prefix = tuple(tokens[: (number + 1) * SIZE].tolist())
            assert self.content[block] == (salt, prefix), "a hit on other content"
        wanted = self.manager.blocks_for(length) - len(cached)
        if wanted > self.manager.num_free - self.manager.num_evictable(cached):
            return
        blocks = fill(self.manager, salt, tokens)
        for number in range(len(cached), length // SIZE):
            self.content[blocks[number]] = (salt, tuple(tokens[: (number + 1) * SIZE].tolist()))
        self.held.append((salt, tokens, blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.manager.release(self.held.pop(index)[2])

    @invariant()
    def free_and_held_add_up(self) -> None:
        owned = {block for _, _, blocks in self.held for block in blocks}
        assert self.manager.num_free == 12 - len(owned)

    @invariant()
    def blocks_are_shared_only_with_equal_content(self) -> None:
        by_block: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
        for salt, tokens, blocks in self.held:
            for number, block in enumerate(blocks):
                prefix = tuple(tokens[: (number + 1) * SIZE].tolist())
                by_block.setdefault(block, set()).add((salt, prefix))
        assert all(len(prefixes) == 1 for prefixes in by_block.values())


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(st.text(), st.text())
def test_salts_collide_only_if_equal(a: str, b: str):
    assert (root_digest(a) == root_digest(b)) == (a == b)
