"""The records a process keeps: bounded, least recently used first out."""

from __future__ import annotations

import numpy as np

from storage.address import Address
from storage.records import Scores
from storage.rollouts import RecentRecords


def scores(value: float) -> Scores:
    return Scores(np.full(4, value, np.float32))  # 16 bytes


def key(step: int) -> tuple[Address, str]:
    return Address("score", step), "a0"


def test_the_least_recently_used_record_goes_first() -> None:
    recent = RecentRecords(max_bytes=40)  # room for two
    recent.put(key(0), scores(0))
    recent.put(key(1), scores(1))
    assert recent.get(key(0)) is not None  # now 1 is the older one
    recent.put(key(2), scores(2))
    assert [recent.get(key(step)) is not None for step in range(3)] == [True, False, True]


def test_another_attempt_is_another_record() -> None:
    recent = RecentRecords(max_bytes=1000)
    recent.put((Address("score", 0), "a0"), scores(0))
    assert recent.get((Address("score", 0), "a1")) is None


def test_what_is_larger_than_all_the_room_is_not_kept_and_drops_nothing() -> None:
    recent = RecentRecords(max_bytes=20)
    recent.put(key(0), scores(0))
    recent.put(key(1), Scores(np.zeros(100, np.float32)))
    assert recent.get(key(1)) is None
    assert recent.get(key(0)) is not None
    assert RecentRecords(0).get(key(0)) is None
