"""A gang of one rank has two calls at once: one computes, while the other reads its inputs or commits its output."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.graph.graph import Gang
from pipeline.workers import runtime as runtime_module
from pipeline.workers.messages import Call
from pipeline.workers.runtime import StageRuntime
from pipeline.workers.stages import ComputedStage, StageOutput
from pipeline.workers.turns import ComputeTurns
from pipeline.workers.versioned_engine import Clock
from stages.models.protocol import Role
from storage.address import Address
from tests.support.waiting import TIMEOUT_S

FIRST, SECOND = Address("value", 0, 0), Address("value", 0, 1)


def test_calls_compute_in_the_order_in_which_they_began() -> None:
    turns, order = ComputeTurns(), list[int]()
    with turns.queued() as first, turns.queued() as second:

        def compute_second() -> None:
            second.wait()
            order.append(2)

        thread = threading.Thread(target=compute_second)
        thread.start()
        first.wait()
        order.append(1)
        first.end()
        first.end()
        thread.join(TIMEOUT_S)
    assert order == [1, 2]


def test_a_call_that_fails_before_its_turn_lets_nobody_pass_the_one_before_it() -> None:
    turns, computed = ComputeTurns(), threading.Event()
    with turns.queued() as first:
        with pytest.raises(ValueError, match="inputs"), turns.queued():
            raise ValueError("inputs")
        with turns.queued() as third:

            def compute_third() -> None:
                third.wait()
                computed.set()

            thread = threading.Thread(target=compute_third)
            thread.start()
            first.wait()
            assert not computed.is_set()
            first.end()
            thread.join(TIMEOUT_S)
    assert computed.is_set()


class Store:
    """A store. The commit of the first node waits until the second node computes."""

    def __init__(self) -> None:
        self.second_computes = threading.Event()
        self.order: list[str] = []

    def write(self, address: Address, record: object, provenance: object, **about: object) -> Any:
        if address == FIRST:
            assert self.second_computes.wait(TIMEOUT_S), "a commit held up the next node"
        self.order.append(f"committed {address.shard}")
        return SimpleNamespace(ref=lambda: None)


def make_runtime(store: Store, looked_up: list[Address]) -> StageRuntime:
    """Return the runtime of a trainer of one rank, around `store` and nothing else."""
    runtime = object.__new__(StageRuntime)
    runtime._turns, runtime._threads = ComputeTurns(), torch.get_num_threads()
    parts: Any = SimpleNamespace(
        spec=SimpleNamespace(size=1, name="train-0", index=0),
        gang=Gang("train", frozenset({Role.CRITIC}), 1),
        clock=Clock(),
        warnings=[],
        store=store,
        read_ahead=lambda call: lambda: None,
        name_collectives=lambda call: nullcontext(),
        find_commit=lambda address, closed: looked_up.append(address),
        provenance=lambda call, started, versions: None,
        attempt_name=lambda call: call.attempt,
    )
    runtime.parts = parts
    return runtime


def test_a_node_computes_while_the_one_before_it_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both outcomes are returned after their commits. Only nodes that are handed out again look for a commit first."""
    store, looked_up = Store(), list[Address]()
    both_began = threading.Barrier(2)

    def compute(parts: Any, call: Call) -> StageOutput:
        store.order.append(f"computed {call.address.shard}")
        if call.address == SECOND:
            store.second_computes.set()
        return StageOutput(object())  # type: ignore[arg-type]

    monkeypatch.setattr(runtime_module, "binding_of", lambda stage: ComputedStage(compute))
    runtime = make_runtime(store, looked_up)
    first, second = (
        Call(address, "a0", 0, (), "train", "train-0", 0, is_first=address == FIRST) for address in (FIRST, SECOND)
    )
    outcomes = []

    def run_first() -> None:
        def began(call: Call) -> Any:
            both_began.wait(TIMEOUT_S)
            return lambda: None

        runtime.parts.read_ahead = began  # type: ignore[method-assign]
        outcomes.append(runtime.run(first))

    thread = threading.Thread(target=run_first)
    thread.start()
    both_began.wait(TIMEOUT_S)  # the first call is in the queue
    runtime.parts.read_ahead = lambda call: lambda: None  # type: ignore[method-assign]
    outcomes.append(runtime.run(second))
    thread.join(TIMEOUT_S)
    assert store.order[:2] == ["computed 0", "computed 1"]
    assert sorted(store.order[2:]) == ["committed 0", "committed 1"]
    assert len(outcomes) == 2
    assert looked_up == [SECOND]
