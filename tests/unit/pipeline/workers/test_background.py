"""The thread that writes in the background: in order, one of a name at a time, never silent about an error."""

from __future__ import annotations

import threading

import pytest

from pipeline.workers.exports import BackgroundWriter


def test_work_is_done_in_order_and_not_waited_for() -> None:
    writer, gate, done = BackgroundWriter(), threading.Event(), list[str]()

    def held() -> None:
        assert gate.wait(timeout=60)
        done.append("policy")

    writer.submit("policy", held)
    writer.submit("critic", lambda: done.append("critic"))
    assert done == []
    gate.set()
    writer.wait_for("critic")
    assert done == ["policy", "critic"]
    writer.close()


def test_the_next_of_a_name_waits_for_the_one_before() -> None:
    writer, gate, done = BackgroundWriter(), threading.Event(), list[int]()

    def held() -> None:
        assert gate.wait(timeout=60)
        done.append(0)

    writer.submit("policy", held)
    opener = threading.Thread(target=gate.set)
    opener.start()
    writer.submit("policy", lambda: done.append(1))
    assert done[:1] == [0]
    writer.close()
    assert done == [0, 1]
    opener.join()


def fail() -> None:
    raise OSError("disk full")


def test_an_error_is_raised_by_the_next_call_of_its_name_and_once() -> None:
    writer = BackgroundWriter()
    writer.submit("policy", fail)
    writer.submit("critic", lambda: None)
    writer.wait_for("critic")
    with pytest.raises(OSError, match="disk full"):
        writer.submit("policy", lambda: None)
    writer.wait_for("policy")
    writer.close()


def test_an_error_is_raised_by_close_after_all_is_done() -> None:
    writer, done = BackgroundWriter(), list[str]()
    writer.submit("policy", fail)
    writer.submit("critic", lambda: done.append("critic"))
    with pytest.raises(OSError, match="disk full"):
        writer.close()
    assert done == ["critic"]
