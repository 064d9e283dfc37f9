"""Processes that no longer answer, by heartbeats and by the driver's clock, which may disagree."""

from __future__ import annotations

from pipeline.driver.supervision import HeartbeatWatch, stopped


def test_silence_begins_with_the_last_heartbeat_that_was_news() -> None:
    silences = HeartbeatWatch()
    assert silences.look({"a": 1000.0, "b": 1000.0}, now=5.0) == {"a": 0.0, "b": 0.0}
    assert silences.look({"a": 1000.0, "b": 1000.5}, now=9.0) == {"a": 4.0, "b": 0.0}
    assert silences.look({"a": 1000.0, "b": 1000.5}, now=12.0) == {"a": 7.0, "b": 3.0}
    assert silences.look({"a": 1000.1}, now=13.0) == {"a": 0.0}, "b is gone"
    assert silences.look({"a": 1000.1, "b": 1000.5}, now=14.0) == {"a": 1.0, "b": 0.0}, "and there again"


def test_a_process_is_stopped_after_a_third_of_its_time_and_never_before_20_s() -> None:
    assert [stopped(silent, start_timeout_s=300.0) for silent in (100.0, 100.1)] == [False, True]
    assert [stopped(silent, start_timeout_s=6.0) for silent in (20.0, 20.1)] == [False, True]
