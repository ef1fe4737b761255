from __future__ import annotations

import pytest

from enginehouse.engine.kv_cache import CacheIntegrityError, KVCache

SIZE = 4


def computed(cache: KVCache, tokens: list[int], salt: str = "") -> list[int]:
    """A table whose tokens were all computed, and whose full blocks can be found."""
    hashes: list[bytes] = []
    table = cache.acquire(cache.match_prefix(tokens, salt, hashes))
    first = len(table)
    assert cache.reserve(table, first * SIZE, len(tokens), [])
    end = len(tokens) // SIZE
    cache.extend_hashes(hashes, tokens, salt, end)
    cache.register(table, hashes, first, end)
    return table


def test_blocks_are_taken_and_given_back() -> None:
    cache, table = KVCache(4, SIZE), []
    assert cache.reserve(table, 0, 5, [])
    assert (len(table), cache.num_used, cache.num_available) == (2, 2, 2)
    assert cache.reserve(table, 5, 8, [])
    assert len(table) == 2
    cache.check_integrity([table])
    cache.release(table)
    assert (table, cache.num_used, cache.num_available) == ([], 0, 4)
    cache.check_integrity()


def test_too_much_changes_nothing() -> None:
    cache, table, copies = KVCache(4, SIZE), [], []
    assert cache.reserve(table, 0, 12, copies)
    before = list(table)
    assert not cache.reserve(table, 12, 21, copies)
    assert (table, copies, cache.num_available) == (before, [], 1)
    assert cache.reserve(table, 12, 16, copies)


def test_a_full_hit_leaves_the_last_token_to_compute() -> None:
    cache = KVCache(8, SIZE)
    tokens = list(range(8))
    table = computed(cache, tokens)
    assert cache.match_prefix(tokens, "") == table[:1]
    assert cache.match_prefix([*tokens, 99], "") == table
    assert cache.match_prefix(tokens[:4], "") == []
    assert cache.match_prefix(tokens[:5], "") == table[:1]


def test_a_match_can_be_bounded() -> None:
    cache = KVCache(8, SIZE)
    table = computed(cache, list(range(13)))
    assert [len(cache.match_prefix(list(range(13)), "", max_tokens=n)) for n in (0, 3, 4, 8, 11, 99)] == [
        0,
        0,
        1,
        2,
        2,
        3,
    ]
    assert len(table) == 4


def test_the_same_block_after_another_beginning_is_another_block() -> None:
    cache = KVCache(8, SIZE)
    computed(cache, [1, 1, 1, 1, 5, 5, 5, 5, 0])
    assert len(cache.match_prefix([1, 1, 1, 1, 5, 5, 5, 5, 0], "")) == 2
    assert cache.match_prefix([2, 2, 2, 2, 5, 5, 5, 5, 0], "") == []
    assert cache.match_prefix([5, 5, 5, 5, 0], "") == []


def test_tenants_do_not_find_each_others_blocks() -> None:
    cache = KVCache(8, SIZE)
    computed(cache, list(range(9)), salt="a")
    assert cache.match_prefix(list(range(9)), "b") == []
    assert len(cache.match_prefix(list(range(9)), "a")) == 2


def test_nothing_is_found_before_it_was_registered_or_when_caching_is_off() -> None:
    cache, table = KVCache(8, SIZE), []
    cache.reserve(table, 0, 9, [])
    assert cache.match_prefix(list(range(9)), "") == []
    off = KVCache(8, SIZE, prefix_caching=False)
    computed(off, list(range(9)))
    assert off.match_prefix(list(range(9)), "") == []


def test_a_hit_shares_and_counts() -> None:
    cache = KVCache(8, SIZE)
    first, second = computed(cache, list(range(9))), computed(cache, list(range(9)))
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert [cache.num_refs(block) for block in first] == [2, 2, 1]
    assert cache.hit_tokens_total == 8
    cache.check_integrity([first, second])
    cache.release(first)
    assert cache.num_cached == 0
    cache.release(second)
    assert (cache.num_cached, cache.num_used, cache.num_available) == (2, 0, 8)


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    cache = KVCache(4, SIZE)
    old, new = computed(cache, [1] * 8), computed(cache, [2] * 8)
    new_blocks = list(new)
    cache.release(new)
    cache.release(old)
    computed(cache, [2] * 8 + [0])  # takes both blocks of `new` and one of `old`, its tail
    assert cache.evictions_total == 1
    assert cache.match_prefix([2] * 9, "") == new_blocks
    assert len(cache.match_prefix([1] * 9, "")) == 1


def test_free_blocks_go_before_cached_ones() -> None:
    cache, table = KVCache(4, SIZE), []
    cache.release(computed(cache, [1] * 8))
    cache.reserve(table, 0, 8, [])
    assert cache.evictions_total == 0
    assert len(cache.match_prefix([1] * 9, "")) == 2
    cache.reserve(table, 8, 12, [])
    assert cache.evictions_total == 1


def test_matched_blocks_are_not_available_twice() -> None:
    cache = KVCache(3, SIZE)
    cache.release(computed(cache, [1] * 8))
    matched = cache.match_prefix([1] * 9, "")
    assert (cache.num_available, cache.num_available_after(matched)) == (3, 1)
    table = cache.acquire(matched)
    assert cache.num_available == 1
    assert not cache.reserve(table, 8, 20, [])


def test_fork_shares_all_and_copies_only_what_is_written() -> None:
    cache, table, copies = KVCache(8, SIZE), [], []
    cache.reserve(table, 0, 10, copies)
    forks = [cache.fork(table) for _ in range(2)]
    assert (cache.num_used, copies) == (3, [])
    partial = table[2]
    for writer in (table, forks[0], forks[1]):
        assert cache.reserve(writer, 10, 11, copies)
    assert [source for source, _ in copies] == [partial, partial]
    assert forks[1][2] == partial, "the last writer needs no copy"
    assert table[:2] == forks[0][:2] == forks[1][:2]
    assert cache.num_used == 5
    cache.check_integrity([table, *forks])


def test_fork_at_a_block_boundary_copies_nothing() -> None:
    cache, table, copies = KVCache(8, SIZE), [], []
    cache.reserve(table, 0, 8, copies)
    fork = cache.fork(table)
    assert cache.reserve(table, 8, 9, copies)
    assert cache.reserve(fork, 8, 9, copies)
    assert copies == []
    assert table[2] != fork[2]


def test_a_copy_needs_a_block() -> None:
    cache, table = KVCache(2, SIZE), []
    cache.reserve(table, 0, 6, [])
    fork = cache.fork(table)
    assert not cache.reserve(fork, 6, 7, [])
    cache.release(table)
    copies: list[tuple[int, int]] = []
    assert cache.reserve(fork, 6, 7, copies)
    assert copies == []


def test_findable_blocks_are_not_written() -> None:
    cache, copies = KVCache(4, SIZE), []
    table = computed(cache, list(range(4)))
    original = table[0]
    assert cache.reserve(table, 3, 4, copies)
    assert copies == [(original, table[0])]
    assert cache.match_prefix(list(range(5)), "") == [original]


def test_what_is_forgotten_is_not_found() -> None:
    cache = KVCache(4, SIZE)
    table = computed(cache, list(range(9)))
    cache.forget(table)
    assert cache.match_prefix(list(range(9)), "") == []
    cache.check_integrity([table])
    cache.release(table)
    assert cache.num_cached == 0


def test_giving_back_twice_is_noticed() -> None:
    cache, table = KVCache(4, SIZE), []
    cache.reserve(table, 0, 4, [])
    again = list(table)
    cache.release(table)
    with pytest.raises(CacheIntegrityError, match="more often"):
        cache.release(again)


def test_integrity_names_what_is_wrong() -> None:
    cache, table = KVCache(4, SIZE), []
    cache.reserve(table, 0, 8, [])
    with pytest.raises(CacheIntegrityError, match="held 0 times but counted 1"):
        cache.check_integrity()
    with pytest.raises(CacheIntegrityError, match="held 2 times but counted 1"):
        cache.check_integrity([table, table[:1]])
    with pytest.raises(CacheIntegrityError, match="twice"):
        cache.check_integrity([table + table[:1]])
    cache._free.append(cache._free[0])
    with pytest.raises(CacheIntegrityError, match="free twice"):
        cache.check_integrity([table])
    cache._free.pop()
    lost = cache._free.pop()
    with pytest.raises(CacheIntegrityError, match="are not 4"):
        cache.check_integrity([table])
    cache._free.append(lost)
    cache._hash_of[table[0]] = b"x"
    with pytest.raises(CacheIntegrityError, match="point at each other"):
        cache.check_integrity([table])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="needs blocks"):
        KVCache(num_blocks, block_size)


@pytest.mark.parametrize("token", [-1, 0, 2**40])
def test_hashes_take_any_token_id(token: int) -> None:
    hashes: list[bytes] = []
    KVCache(4, SIZE).extend_hashes(hashes, [token] * 8, "", 2)
    assert len(set(hashes)) == 2
    assert all(len(digest) == 16 for digest in hashes)
