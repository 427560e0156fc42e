"""Which KV blocks are free, shared or cached. Counts and ids only: no tensors.

A block is a fixed number of token positions in the KV pool. Blocks are reference-counted; full
blocks are found again by a chained hash over (salt, ids so far). A block whose last reference
goes keeps its content until it is evicted, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from replica.scheduling.sequence import TokenIds


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for. Nothing was taken."""


@dataclass(frozen=True, slots=True)
class _Content:
    """What a cached block holds; compared on a hit, since a digest alone is not proof."""

    digest: bytes
    parent: bytes
    ids: bytes


def root_digest(salt: str) -> bytes:
    """The parent of a sequence's first block. Tagged, so that no salt equals a block's digest."""
    return blake2b(salt.encode(), digest_size=16, person=b"cache salt").digest()


def block_digest(parent: bytes, ids: bytes) -> bytes:
    """Chained hash: equal digests mean equal salt and equal ids from the first token on."""
    return blake2b(parent + ids, digest_size=16, person=b"block").digest()


class BlockManager:
    """Owner of `num_blocks` blocks of `block_size` tokens each.

    `allocate` and `share` take references, `release` gives them back. The caller releases a
    block only once the newest step that names it is over.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._by_digest: dict[bytes, int] = {}
        self._content: dict[int, _Content] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached ones without owner included."""
        return len(self._free) + len(self._evictable)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, salt: str, token_ids: TokenIds) -> tuple[list[int], list[bytes]]:
        """The longest cached prefix in full blocks: (blocks, their digests). Takes nothing.

        The last token is never part of it: its logits must be computed.
        """
        blocks: list[int] = []
        chain: list[bytes] = []
        if not self._prefix_cache:
            return blocks, chain
        parent = root_digest(salt)
        for index in range((len(token_ids) - 1) // self.block_size):
            ids = self._ids(token_ids, index)
            digest = block_digest(parent, ids)
            block = self._by_digest.get(digest)
            if block is None or self._content[block] != _Content(digest, parent, ids):
                break
            blocks.append(block)
            chain.append(digest)
            parent = digest
        return blocks, chain

    def num_evictable(self, blocks: list[int]) -> int:
        """How many of `blocks` count as free: sharing them leaves that many fewer."""
        return sum(block in self._evictable for block in blocks)

    def share(self, blocks: list[int]) -> None:
        """One more reference to each of these cached blocks."""
        for block in blocks:
            self._evictable.pop(block, None)
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises OutOfBlocks."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} free")
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def register(self, salt: str, chain: list[bytes], token_ids: TokenIds, block: int) -> None:
        """Make `block`, the next full one of a sequence, findable; its digest joins `chain`.

        Call it once the step that filled the block is over, blocks of a sequence in order.
        """
        if not self._prefix_cache:
            return
        parent = chain[-1] if chain else root_digest(salt)
        ids = self._ids(token_ids, len(chain))
        digest = block_digest(parent, ids)
        chain.append(digest)
        if digest not in self._by_digest and block not in self._content:
            self._by_digest[digest] = block
            self._content[block] = _Content(digest, parent, ids)

    def release(self, blocks: list[int]) -> None:
        """Give back one reference to each. The end of a prefix is evicted before its beginning."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if block in self._content:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def _ids(self, token_ids: TokenIds, index: int) -> bytes:
        return token_ids[index * self.block_size : (index + 1) * self.block_size].tobytes()

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._evictable.popitem(last=False)
        del self._by_digest[self._content.pop(block).digest]
        return block
