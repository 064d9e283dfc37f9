"""Count a judge's requests and tokens over all processes of a run, and enforce its budget.

    DIRECTORY/spent-JUDGE-*.txt    one file for each process: requests, prompt tokens, completion tokens

Each process writes its own file and adds up all files. Before a process sends a request, it adds the request to its own
file and compares the sum with the budget. If the budget is used up, the process removes the request from the file and
does not send the request. If two processes want the last request, at most one of them may send it. On one host,
processes see each other's writes at once, so the sum never exceeds `max_requests`. On several hosts the sum may exceed
`max_requests`, because a network filesystem can show writes seconds late.
"""

from __future__ import annotations

import os
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path

from stages.rewards.judges.answers import RETRY_S
from stages.rewards.protocol import BudgetSpent, RewardFailed
from storage.files import retried


@dataclass(frozen=True)
class JudgeUsage:
    """Number of requests to a judge, and number of tokens in the requests and answers."""

    requests: int = 0
    """Requests that were sent, answered or not."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """`prompt_tokens` and `completion_tokens` count the tokens of the answered requests. The numbers come from the
    server."""

    def __add__(self, other: JudgeUsage) -> JudgeUsage:
        return JudgeUsage(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True)
class Budget:
    """Limits of a judge's requests and cost, and the prices of its tokens."""

    max_requests: int | None = None
    max_cost: float | None = None
    prompt_price: float = 0.0
    completion_price: float = 0.0
    """Prices of a million prompt or completion tokens, in the unit of `max_cost`."""

    @property
    def is_limited(self) -> bool:
        return self.max_requests is not None or self.max_cost is not None

    @property
    def has_prices(self) -> bool:
        return self.prompt_price > 0 or self.completion_price > 0

    def cost(self, usage: JudgeUsage) -> float:
        return (usage.prompt_tokens * self.prompt_price + usage.completion_tokens * self.completion_price) / 1e6

    def reached_limit(self, usage: JudgeUsage) -> str | None:
        """Return a text about the limit that `usage` has reached, or None if `usage` is below all limits. At a limit,
        no further request is allowed."""
        if self.max_requests is not None and usage.requests >= self.max_requests:
            return f"max_requests = {self.max_requests} is used up"
        if self.max_cost is not None and self.cost(usage) >= self.max_cost:
            return f"max_cost = {self.max_cost:g} is used up ({usage.requests} requests cost {self.cost(usage):.4g})"
        return None


class UsageFile:
    """Counter of a judge's requests and tokens, with one file per process. Enforces the judge's budget over all
    processes. Thread-safe."""

    def __init__(self, budget: Budget, directory: Path | None, judge: str) -> None:
        """`judge`: a name of the judge, the same in every process. `directory`: folder of the files of all processes.
        None: there are no files, and the budget limits this process alone. No file is created before the first
        request."""
        self.budget = budget
        self._directory, self._judge = directory, judge
        self._file = f"spent-{judge}-{os.getpid()}-{uuid.uuid4().hex[:8]}.txt"
        self._lock = threading.Lock()
        self._own = JudgeUsage()

    def count_request(self) -> None:
        """Count a request before it is sent. Raises BudgetSpent if the budget allows no further request, and
        RewardFailed if another process's file is damaged."""
        with self._lock:
            before = self._own
            self._write(before + JudgeUsage(requests=1))
            end = self.budget.reached_limit(before + self._usage_of_others()) if self.budget.is_limited else None
            if end is not None:
                self._write(before)
                raise BudgetSpent(f"{end}; all answers so far are kept")

    def count_tokens(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of an answer."""
        with self._lock:
            self._write(self._own + JudgeUsage(0, prompt_tokens, completion_tokens))

    def total(self) -> JudgeUsage:
        """Return the usage of all processes together. Raises RewardFailed if another process's file is damaged."""
        with self._lock:
            return self._own + self._usage_of_others()

    def _write(self, spent: JudgeUsage) -> None:
        self._own = spent
        if self._directory is None:
            return
        directory = self._directory
        data = f"{spent.requests:15d} {spent.prompt_tokens:19d} {spent.completion_tokens:19d}\n".encode()

        def write() -> None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(directory / self._file, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(descriptor, data, 0)  # always the same length: a reader sees the old numbers or the new ones
            finally:
                os.close(descriptor)  # on a network filesystem, closing makes the numbers visible to others

        retried(write, str(directory), RETRY_S)

    def _usage_of_others(self) -> JudgeUsage:
        total = JudgeUsage()
        if self._directory is None or not self._directory.is_dir():
            return total
        for path in self._directory.glob(f"spent-{self._judge}-*.txt"):
            numbers = path.read_text("utf8", errors="replace").split() if path.name != self._file else []
            if len(numbers) not in (0, 3) or not all(number.isdecimal() for number in numbers):
                need = "write the numbers that it had: requests, prompt tokens, completion tokens"
                raise RewardFailed(f"{path} is damaged; {need}")
            total += JudgeUsage(*map(int, numbers))
        return total
