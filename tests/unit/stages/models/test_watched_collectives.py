"""The guard that the suites on several ranks rest on."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from tests.support.collectives import Call, one_order, run_ranks


def reduce(group: str, ranks: tuple[int, ...] = (0, 1), shape: tuple[int, ...] = (4,), thread: str = "main") -> Call:
    return Call(ranks, group, "allreduce", (shape,), -1, thread)


def message(operation: str, peer: int) -> Call:
    return Call((0, 1), "pipeline", operation, ((2,),), peer, "main")


A, B = reduce("a"), reduce("b")


@pytest.mark.parametrize(
    "calls",
    [
        ([A, B], [A, B]),
        ([A, reduce("b", thread="writer")], [reduce("b", thread="writer"), A]),
        ([message("send", 1), message("recv", 1), A], [message("send", 0), message("recv", 0), A]),
        ([reduce("c", (0, 2)), A], [A], [reduce("c", (0, 2))]),
    ],
)
def test_calls_that_fit(calls: tuple[list[Call], ...]) -> None:
    one_order(calls)


@pytest.mark.parametrize(
    "calls",
    [
        ([A, B], [B, A]),
        ([A], []),
        ([A], [reduce("a", shape=(5,))]),
        ([A], [replace(A, dtypes=(torch.bfloat16,))]),
        ([A, reduce("a", thread="writer")], [A, A]),
        ([message("recv", 1), message("send", 1)], [message("recv", 0), message("send", 0)]),
        ([message("send", 1)], []),
    ],
)
def test_calls_that_do_not_fit(calls: tuple[list[Call], ...]) -> None:
    with pytest.raises(AssertionError):
        one_order(calls)


def wait_for_ever(index: int) -> None:
    if index:
        threading.Event().wait()


@pytest.mark.processes
def test_ranks_that_wait_for_ever_are_ended_and_say_where() -> None:
    with pytest.raises(AssertionError, match=r"(?s)have not ended after 3 s.*in wait_for_ever"):
        run_ranks(wait_for_ever, 2, limit_s=3)
