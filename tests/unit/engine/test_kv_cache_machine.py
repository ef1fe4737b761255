"""The books of the cache against memory that remembers what was really written where."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from enginehouse.engine.kv_cache import KVCache


@dataclass(eq=False)
class Owner:
    """Someone with a block table: knows its tokens, and how many of them it has written."""

    tokens: list[int]
    salt: str
    table: list[int]
    num_written: int
    num_registered: int
    hashes: list[bytes] = field(default_factory=list)
    is_gone: bool = False


# Beginnings of a few texts: most prompts share blocks with others, many are the same.
tokens_lists = st.builds(
    lambda text, length, tail: (text * 14)[:length] + tail,
    st.sampled_from([[1], [1], [1, 1, 1, 2], [2]]),
    st.integers(1, 14),
    st.sampled_from([[], [], [0]]),
)
prefixes = tuple[str, tuple[int, ...]]


class KVCacheMachine(RuleBasedStateMachine):
    """`memory[block][offset]` is the salted prefix up to that token: what its K/V depends on."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Owner] = []

    @initialize(num_blocks=st.integers(2, 12), block_size=st.integers(1, 4))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.cache = KVCache(num_blocks, block_size)
        self.memory: list[list[prefixes | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.num_hits = 0

    @rule(target=owners, tokens=tokens_lists, salt=st.sampled_from(["", "", "other"]))
    def begin(self, tokens: list[int], salt: str) -> Owner:
        owner = Owner(tokens, salt, [], 0, 0)
        matched = self.cache.match_prefix(tokens, salt, owner.hashes)
        num_matched = len(matched) * self.cache.block_size
        assert num_matched < len(tokens), "the last token must be left to compute"
        available = self.cache.num_available_after(matched)
        owner.table = self.cache.acquire(matched)
        assert self.cache.num_available == available
        owner.num_written = owner.num_registered = num_matched
        self.num_hits += num_matched
        assert self.cache.hit_tokens_total == self.num_hits
        self.alive.append(owner)
        return owner

    @rule(target=owners, tokens=tokens_lists, salt=st.sampled_from(["", "", "other"]))
    def compute_all(self, tokens: list[int], salt: str) -> Owner:
        owner = self.begin(tokens, salt)
        self.write(owner, len(tokens))
        self.complete(owner)
        return owner

    @rule(owner=owners, num_tokens=st.integers(1, 9))
    def write(self, owner: Owner, num_tokens: int) -> None:
        """Compute more tokens, as a step does; they are not registered yet."""
        if owner.is_gone:
            return
        start = owner.num_written
        end = min(start + num_tokens, len(owner.tokens))
        if start == end:
            return
        size, copies = self.cache.block_size, []
        before, available = list(owner.table), self.cache.num_available
        touched = before[start // size : -(-end // size)]
        num_shared = sum(self.cache.num_refs(block) > 1 for block in touched)
        num_needed = num_shared + max(0, -(-end // size) - len(before))
        could = self.cache.reserve(owner.table, start, end, copies)
        assert could == (num_needed <= available)
        if not could:
            assert (owner.table, copies, self.cache.num_available) == (before, [], available)
            return
        assert len(copies) == num_shared
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        for position in range(start, end):
            block = owner.table[position // size]
            assert self.cache.num_refs(block) == 1
            assert not self.cache.is_findable(block)
            self.memory[block][position % size] = (owner.salt, tuple(owner.tokens[: position + 1]))
        owner.num_written = end

    @rule(owner=owners)
    def complete(self, owner: Owner) -> None:
        if owner.is_gone:
            return
        first, end = owner.num_registered // self.cache.block_size, owner.num_written // self.cache.block_size
        self.cache.extend_hashes(owner.hashes, owner.tokens, owner.salt, end)
        self.cache.register(owner.table, owner.hashes, first, end)
        owner.num_registered = owner.num_written

    @rule(target=owners, owner=owners, tail=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def fork(self, owner: Owner, tail: list[int]) -> Owner:
        if owner.is_gone:
            return multiple()
        self.complete(owner)
        available = self.cache.num_available
        fork = Owner(
            owner.tokens[: owner.num_written] + tail,
            owner.salt,
            self.cache.fork(owner.table),
            owner.num_written,
            owner.num_written,
            owner.hashes[: owner.num_written // self.cache.block_size],
        )
        assert self.cache.num_available == available, "a fork costs nothing until it writes"
        self.alive.append(fork)
        return fork

    @rule(owner=consumes(owners))
    def release(self, owner: Owner) -> None:
        self._release(owner)

    @rule(owner=owners)
    def fail(self, owner: Owner) -> None:
        if not owner.is_gone:
            self.cache.forget(owner.table)
            assert not any(self.cache.is_findable(block) for block in owner.table)

    def _release(self, owner: Owner) -> None:
        if not owner.is_gone:
            owner.is_gone = True
            self.alive.remove(owner)
            self.cache.release(owner.table)

    @invariant()
    def everyone_reads_its_own_tokens(self) -> None:
        size = self.cache.block_size if self.alive else 1
        for owner in self.alive:
            for position in range(owner.num_written):
                found = self.memory[owner.table[position // size]][position % size]
                assert found == (owner.salt, tuple(owner.tokens[: position + 1]))

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity([owner.table for owner in self.alive])

    def teardown(self) -> None:
        for owner in list(self.alive):
            self._release(owner)
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            assert self.cache.num_available == self.cache.num_blocks


def test_the_cache_never_gives_anyone_other_tokens() -> None:
    run_state_machine_as_test(
        KVCacheMachine, settings=settings(max_examples=200, stateful_step_count=40, deadline=None)
    )
