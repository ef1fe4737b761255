from __future__ import annotations

import msgspec
import pytest

from enginehouse.engine.batching import Batching, Continuous, OneAtATime, Static
from enginehouse.engine.queue_order import FairShare, Fifo, Order, PriorityWithAgeing


def test_places() -> None:
    assert [OneAtATime().places(n) for n in (0, 1)] == [1, 0]
    assert [Static(size=4).places(n) for n in (0, 1, 4)] == [4, 0, 0]
    assert [Continuous(max_sequences=8).places(n) for n in (0, 3, 8)] == [8, 5, 0]


def test_prefill_budgets() -> None:
    continuous = Continuous(token_budget=100, max_sequences=8, prefill_budget_while_decoding=95)
    assert [continuous.prefill_budget(n) for n in (0, 1, 8)] == [100, 95, 92]
    assert Static(size=4, token_budget=10).prefill_budget(3) == 7
    assert OneAtATime(token_budget=10).prefill_budget(1) == 9


def test_only_a_continuous_batch_is_joined_late() -> None:
    assert [strategy.joins_with(0) for strategy in (OneAtATime(), Static(), Continuous())] == [
        True,
        True,
        False,
    ]
    assert Continuous().joins_with(1)


@pytest.mark.parametrize(
    ("strategy", "fields", "name"),
    [
        (OneAtATime, {"token_budget": 0}, "token_budget"),
        (Static, {"size": 0}, "size"),
        (Static, {"size": 8, "token_budget": 7}, "token_budget"),
        (Continuous, {"max_sequences": 0}, "max_sequences"),
        (Continuous, {"max_sequences": 8, "token_budget": 7}, "token_budget"),
        (Continuous, {"prefill_budget_while_decoding": 0}, "prefill_budget_while_decoding"),
    ],
)
def test_values_out_of_range_are_named(strategy: type, fields: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        strategy(**fields)


@pytest.mark.parametrize(
    "strategy", [OneAtATime(token_budget=5), Static(size=3), Continuous(max_sequences=9, token_budget=20)]
)
def test_strategies_cross_processes(strategy: Batching) -> None:
    assert msgspec.json.decode(msgspec.json.encode(strategy), type=Batching) == strategy


@pytest.mark.parametrize("order", [Fifo(), PriorityWithAgeing(ageing_s=3.0), FairShare()])
def test_orders_cross_processes(order: Order) -> None:
    assert msgspec.json.decode(msgspec.json.encode(order), type=Order) == order
