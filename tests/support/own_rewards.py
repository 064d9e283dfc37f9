"""Rewards as a user writes them, good and bad."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from stages.rewards.protocol import Sample, Scored

_POOLS: list[ProcessPoolExecutor] = []


def vowels(samples: Sequence[Sample], gain: float = 1.0) -> list[float]:
    return [gain * sum(c in "aeiou" for c in sample.response) for sample in samples]


def two_parts(samples: Sequence[Sample]) -> dict[str, list[float]]:
    return {"long": [float(len(s.response)) for s in samples], "done": [float(s.finished) for s in samples]}


class Prefix:
    """Counts what a response begins with."""

    batch_tokens = 64

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("text is empty")
        self.text = text

    def __call__(self, samples: Sequence[Sample]) -> Scored:
        return Scored({"": [float(s.response.startswith(self.text)) for s in samples]}, [0.25] * len(samples))


def measures(samples: Sequence[Sample]) -> Scored:
    return Scored({"": [1.0] * len(samples)}, None, {"length": [float(len(s.response)) for s in samples]})


class EarlyVowels:
    """`vowels`, for rows whose shard is still generated."""

    early = True

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return vowels(samples)


class Fickle:
    deterministic = False

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [time.time()] * len(samples)


class Uncallable:
    pass


class OddBatches:
    batch_tokens = "many"

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [0.0] * len(samples)


def seen(samples: Sequence[Sample]) -> list[float]:
    """Return 1 for each sample if the first one arrived with all its fields, else 0."""
    first = samples[0]
    whole = (
        first.prompt_ids == (97, 98)
        and first.response_ids == (120, 2)
        and first.extra == {"answer": "5", "more": [1, 2]}
        and first.messages == ({"role": "user", "content": "ab"}, {"role": "assistant", "content": "x"})
        and (first.row, first.finished, first.prompt, first.response) == (7, True, "ab", "x")
    )
    return [float(whole)] * len(samples)


def divides(samples: Sequence[Sample]) -> list[float]:
    return [1 / (len(sample.response) - 3) for sample in samples]


def inverse(samples: Sequence[Sample]) -> list[float]:
    return [1 / len(sample.response) for sample in samples]


def of_texts(samples: Sequence[Sample]) -> list[float]:
    return [float(len(sample)) for sample in samples]  # type: ignore[arg-type]  # as TRL's rewards do


def unwritable(samples: Sequence[Sample]) -> list[float]:
    raise PermissionError(13, "Permission denied", "log.txt")


def unreachable(samples: Sequence[Sample]) -> list[float]:
    try:
        raise socket.gaierror("no such host")
    except OSError as error:
        raise RuntimeError("the service does not answer") from error


def too_few(samples: Sequence[Sample]) -> list[float]:
    return [0.0 for sample in samples if sample.response]


def undefined(samples: Sequence[Sample]) -> list[float]:
    return [steps for _ in samples]  # type: ignore[name-defined]  # noqa: F821


def nothing(samples: Sequence[Sample]) -> None:
    return None


def texts(samples: Sequence[Sample]) -> list[str]:
    return ["1.0" for _ in samples]


def hangs(samples: Sequence[Sample]) -> list[float]:
    time.sleep(3600)
    return []


def dies(samples: Sequence[Sample]) -> list[float]:
    os._exit(7)


def comes_back_twice(samples: Sequence[Sample]) -> list[float]:
    """Starts a child that forgets to end, and gives other scores sooner."""
    if os.fork() == 0:
        return [9.0] * len(samples)
    time.sleep(0.2)
    return [float(sample.row) for sample in samples]


def writes_over(samples: Sequence[Sample]) -> list[float]:
    """Writes to whatever is open."""
    for number in range(3, 64):
        with suppress(OSError):
            os.write(number, b"\xff" * 99)
    return [1.0] * len(samples)


def crashes(samples: Sequence[Sample]) -> list[float]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def leaves(samples: Sequence[Sample]) -> list[float]:
    sys.exit("enough")


def talks(samples: Sequence[Sample]) -> list[float]:
    """More than any pipe holds, to both."""
    for stream in (sys.stdout, sys.stderr):
        print("x" * (1 << 21), file=stream, flush=True)
    return [1.0] * len(samples)


def dies_once(samples: Sequence[Sample], flag: str) -> list[float]:
    """As `vowels`, by a process that ends in the first batch of all."""
    if not Path(flag).exists():
        Path(flag).touch()
        os._exit(7)
    return vowels(samples)


def broken(samples: Sequence[Sample], gain: float, while_there: str) -> list[float]:
    """Counts vowels; a gain of 2 is refused for as long as a file is there."""
    if gain == 2 and Path(while_there).exists():
        raise ValueError("no gain of 2 today")
    return vowels(samples, gain)


def breeds(samples: Sequence[Sample], marker: str) -> list[float]:
    """Leaves behind a pool of processes, and a daemon in a session of its own. A sample "hang" does not return."""
    if samples[0].response == "hang":
        time.sleep(3600)
    pool = ProcessPoolExecutor(2, mp_context=get_context("fork"))
    left = [pool.submit(time.sleep, 3600) for _ in range(2)]
    _POOLS.append(pool)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", marker])
        os._exit(0)
    return [float(len(left))] * len(samples)


def does(samples: Sequence[Sample]) -> list[float]:
    """1 where the expression that is a response works, 0 where the system refuses it."""
    return [_works(sample.response) for sample in samples]


def _works(expression: str) -> float:
    try:
        eval(expression)
    except OSError:
        return 0.0
    return 1.0


def pooled(samples: Sequence[Sample]) -> list[float]:
    """Vowels, counted by two processes that talk over queues, locks and shared memory."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return [*pool.map(_vowels, [sample.response for sample in samples])]


def _vowels(text: str) -> float:
    return float(sum(c in "aeiou" for c in text))


def of_one(prompt: str, response: str) -> float:
    """As rewards are written elsewhere: of one text."""
    return float(len(prompt) + len(response))
