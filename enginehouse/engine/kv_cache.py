"""Who holds which block of KV memory, and which blocks can be found again by their content.

Pure bookkeeping: block ids only, no arrays. A block holds the K/V of `block_size` consecutive tokens.

    free ──take──► referenced (1..n block tables) ──release──► free
      ▲                    │  register (full and computed)        ▲
      │                    ▼                                      │ evicted, least recently used first
      └──────────── referenced + findable ──release──► cached ────┘
                           ▲                             │
                           └─────────── acquire ─────────┘

A block that can be found by content is never written again; a block that several tables share is copied
before one of them writes to it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from enginehouse.errors import EnginehouseError

DIGEST_BYTES = 16
"""128 bits: two different prefixes will not meet in the life of the universe, so contents are not compared."""


class CacheIntegrityError(EnginehouseError):
    """The books do not balance: a bug in the engine, never the fault of a request."""


class KVCache:
    """The books of KV memory. Every operation costs O(blocks it touches).

    Callers own block tables (`list[int]`) and pass them in; the cache counts how many tables hold each block.
    A prefix is identified by chained hashes of whole blocks (the idea of vLLM's automatic prefix caching), so a
    block's hash stands for all tokens before it as well. The chain starts from a salt: what one tenant
    computed is never found by another.
    """

    def __init__(self, num_blocks: int, block_size: int = 32, *, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache needs blocks of tokens, not {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.hit_tokens_total = 0
        self.evictions_total = 0
        self.copies_total = 0
        self._num_refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones and cached ones nobody refers to."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks nobody holds whose content can still be found."""
        return len(self._cached)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when one sequence has all the blocks."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for that many tokens."""
        return -(-num_tokens // self.block_size)

    def num_refs(self, block: int) -> int:
        """How many tables hold the block."""
        return self._num_refs[block]

    def is_findable(self, block: int) -> bool:
        """Whether the block's content can be found by hash."""
        return self._hash_of[block] is not None

    # --- finding by content --------------------------------------------------------------------------------

    def extend_hashes(self, hashes: list[bytes], tokens: list[int], salt: str, num_blocks: int) -> None:
        """Continue the chain in `hashes` until it covers the first `num_blocks` whole blocks of `tokens`."""
        size = self.block_size
        while len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()
            start = len(hashes) * size
            content = array("q", tokens[start : start + size]).tobytes()
            hashes.append(blake2b(parent + content, digest_size=DIGEST_BYTES).digest())

    def match_prefix(
        self, tokens: list[int], salt: str, hashes: list[bytes] | None = None, max_tokens: int | None = None
    ) -> list[int]:
        """Blocks that hold the K/V of the longest known prefix of `tokens`. Changes nothing but `hashes`, where
        the caller may keep the chain between calls.

        Never covers all of `tokens`: the last one is always recomputed, because its logits are wanted.
        `max_tokens` bounds the match further.
        """
        limit = len(tokens) - 1 if max_tokens is None else min(max_tokens, len(tokens) - 1)
        blocks: list[int] = []
        if not self.prefix_caching:
            return blocks
        chain = [] if hashes is None else hashes
        for index in range(limit // self.block_size):
            if index >= len(chain):
                self.extend_hashes(chain, tokens, salt, index + 1)
            block = self._block_of.get(chain[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def acquire(self, matched: list[int]) -> list[int]:
        """A table that starts with `matched` blocks (from `match_prefix`, with nothing done in between)."""
        for block in matched:
            if self._num_refs[block] == 0:
                del self._cached[block]
            self._num_refs[block] += 1
        self.hit_tokens_total += len(matched) * self.block_size
        return list(matched)

    def num_available_after(self, matched: list[int]) -> int:
        """What `num_available` would be once `matched` was acquired."""
        return self.num_available - sum(self._num_refs[block] == 0 for block in matched)

    def register(self, table: list[int], hashes: list[bytes], first: int, end: int) -> None:
        """Make blocks `first` to `end` (exclusive) of `table` findable. Call it only once the step that computed
        their last token is complete. Content that is findable in another block stays there.
        """
        if not self.prefix_caching:
            return
        for index in range(first, end):
            block, digest = table[index], hashes[index]
            if self._hash_of[block] is None and digest not in self._block_of:
                self._hash_of[block] = digest
                self._block_of[digest] = block

    def forget(self, table: list[int]) -> None:
        """Make the blocks of `table`, which must be held, unfindable: their content is not to be trusted."""
        for block in table:
            digest = self._hash_of[block]
            if digest is not None:
                del self._block_of[digest]
                self._hash_of[block] = None

    # --- holding -------------------------------------------------------------------------------------------

    def reserve(self, table: list[int], start: int, end: int, copies: list[tuple[int, int]]) -> bool:
        """Let `table` be written at tokens `start` to `end` (exclusive): append the blocks it lacks, and replace
        blocks that others can see by own copies. Pairs (source, target) to copy go to `copies`; they must be
        copied in order, before anything is written. False, and nothing changed, when blocks are lacking.
        """
        size = self.block_size
        num_refs = self._num_refs
        seen = [
            index
            for index in range(start // size, min(len(table), -(-end // size)))
            if num_refs[table[index]] > 1 or self._hash_of[table[index]] is not None
        ]
        num_new = max(0, -(-end // size) - len(table))
        if num_new + len(seen) > len(self._free) + len(self._cached):
            return False
        for index in seen:
            source, target = table[index], self._take()
            copies.append((source, target))
            table[index] = target
            self._drop(source)
            self.copies_total += 1
        table.extend(self._take() for _ in range(num_new))
        return True

    def fork(self, table: list[int]) -> list[int]:
        """A second table over the same blocks; nothing is copied until one of them writes."""
        for block in table:
            self._num_refs[block] += 1
        return list(table)

    def release(self, table: list[int]) -> None:
        """Give back all blocks of `table` and empty it. The last blocks become the first to be reused, because a
        prefix is worth more than its continuation.
        """
        for block in reversed(table):
            self._drop(block)
        table.clear()

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            digest = self._hash_of[block]
            if digest is None:
                raise CacheIntegrityError(f"block {block} is cached without a hash")
            del self._block_of[digest]
            self._hash_of[block] = None
            self.evictions_total += 1
        self._num_refs[block] = 1
        return block

    def _drop(self, block: int) -> None:
        left = self._num_refs[block] - 1
        if left < 0:
            raise CacheIntegrityError(f"block {block} was given back more often than it was taken")
        self._num_refs[block] = left
        if left == 0:
            if self._hash_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    # --- checking ------------------------------------------------------------------------------------------

    def check_integrity(self, tables: Iterable[list[int]] = ()) -> None:
        """Raise `CacheIntegrityError` unless free + used + cached = total, the reference counts are those of
        `tables` (all tables there are), and hashes and blocks point at each other. O(number of blocks).
        """
        counted = [0] * self.num_blocks
        for table in tables:
            if len(set(table)) != len(table):
                raise CacheIntegrityError(f"a table holds a block twice: {table}")
            for block in table:
                counted[block] += 1
        for block, (expected, found) in enumerate(zip(counted, self._num_refs, strict=True)):
            if expected != found:
                raise CacheIntegrityError(f"block {block} is held {expected} times but counted {found} times")
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free) or free & cached:
            raise CacheIntegrityError("a block is free twice, or free and cached at once")
        used = sum(count > 0 for count in counted)
        if len(free) + len(cached) + used != self.num_blocks:
            raise CacheIntegrityError(
                f"{len(free)} free + {len(cached)} cached + {used} used blocks are not {self.num_blocks}"
            )
        for block in free:
            if self._hash_of[block] is not None or counted[block]:
                raise CacheIntegrityError(f"block {block} is free but held or findable")
        findable = {digest: block for block, digest in enumerate(self._hash_of) if digest is not None}
        if findable != self._block_of or not cached <= set(findable.values()):
            raise CacheIntegrityError("hashes and blocks do not point at each other")
