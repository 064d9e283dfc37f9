"""Which signals end a run, and how."""

from __future__ import annotations

import signal

import pytest

from pipeline.driver.session import EndedEarly, interruptible

AT_ONCE = (signal.SIGTERM, signal.SIGUSR1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as interrupted, interruptible():
        signal.raise_signal(number)
    assert not isinstance(interrupted.value, EndedEarly)
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

    with pytest.raises(EndedEarly), interruptible(AT_ONCE):
        work()
    assert cleaned_up == [number]
