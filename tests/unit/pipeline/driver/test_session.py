"""Signals that end a run, and their effects."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.paths import RunPaths
from pipeline.driver.session import TerminatedEarly, handle_signals, hold_driver_lock
from pipeline.errors import ConfigError

AT_ONCE = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _hang_ups_arrive() -> Iterator[None]:
    """The tests may run under `nohup`, which has hang-ups ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as interrupted, handle_signals():
        signal.raise_signal(number)
    assert not isinstance(interrupted.value, TerminatedEarly)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", AT_ONCE)
def test_a_job_ends_at_once_and_whatever_comes_then_does_not_disturb_its_end(number: signal.Signals) -> None:
    cleaned_up = []

    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            for other in AT_ONCE:
                signal.raise_signal(other)
            cleaned_up.append(number)

    with pytest.raises(TerminatedEarly), handle_signals(AT_ONCE):
        work()
    assert cleaned_up == [number]


def test_of_several_hang_ups_the_first_counts() -> None:
    """A closed terminal sends one, and its shell another, in the middle of the run's end."""

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGHUP)
            cleaned_up.append(True)

    cleaned_up: list[bool] = []
    with pytest.raises(KeyboardInterrupt), handle_signals():
        work()
    assert cleaned_up


def test_what_nohup_has_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_signals():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_driver_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with (
        hold_driver_lock(paths),
        pytest.raises(ConfigError, match=r"process \d+ on .* is running"),
        hold_driver_lock(paths),
    ):
        pass
