"""Ask a judge behind an OpenAI-compatible endpoint (`POST URL/chat/completions`): vLLM, trtllm-serve and others.

    questions ──► at most `concurrency` at once ──► answer ──► stored at once
                        ▲        │ 429, 5xx, no connection, too slow, no JSON
                        └─ wait ─┘ as long as Retry-After says (for all questions), or longer each time

The function `ask_endpoint` fails in three cases, and no row is scored. Answers that arrived before are kept.

- A request fails, and the judge has given no answer to any question for `retry_s` seconds. The wait before the next try
  counts towards this time.
- The judge refuses a request, or its answer lacks data that the settings need (log-probs, token counts).
- The judge's budget is used up. Requests under way still end, since they are paid for.

Only this module imports aiohttp, when the first question is asked.
"""

from __future__ import annotations

import asyncio
import email.utils
import importlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from stages.rewards.judges.budget import UsageFile
from stages.rewards.judges.rubric import Answer, Question
from stages.rewards.protocol import BudgetSpent, RewardFailed

_RETRY_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
"""HTTP statuses of errors that may be temporary. Gateways use codes of their own above 504."""
_MIN_WAIT_S, _MAX_WAIT_S = 0.5, 30.0
_SLOT_S = 0.01
"""Seconds between two looks for a free slot."""
_LOG_INTERVAL_S = 10.0
_MAX_SHOWN_CHARS = 300
"""Maximum number of characters of a server's message that an error message quotes."""
_MAX_RESPONSE_BYTES = 16 << 20
"""Maximum number of bytes of an answer."""


@dataclass(frozen=True)
class Endpoint:
    """Address of a judge and settings of its requests."""

    url: str
    key_env: str | None
    """Name of the environment variable with the API key. The key is read for each call and stored nowhere. None: no
    key."""
    concurrency: int
    timeout_s: float
    """Longest time of one request, in seconds."""
    slots: threading.Semaphore
    """Limits the requests of all calls to `concurrency` at a time."""
    retries: Retries


@dataclass(frozen=True)
class SentQuestion:
    """A question, and the body of the request that asks it."""

    question: Question
    body: Mapping[str, Any]


@dataclass(frozen=True)
class ReceivedAnswer:
    """An answer, its duration and its number of tries."""

    answer: Answer
    seconds: float
    """Duration of the try that was answered."""
    tries: int


@dataclass(frozen=True)
class _Refusal:
    """A request that failed, but may succeed in a later try."""

    reason: str
    wait_s: float | None
    """Seconds that the server asks to wait. None: it does not ask."""


@dataclass(frozen=True)
class _Completion:
    """A chat completion."""

    answer: Answer
    tokens: tuple[int, int] | None
    """Tokens of the prompt and of the completion, if the server counted them."""


class Retries:
    """Time of the judge's last answer, and the time until which the judge wants no requests. All calls share both
    times, also those that run at once in several threads."""

    def __init__(self, retry_s: float) -> None:
        self.retry_s = retry_s
        """Longest time without an answer from the judge to any question, in seconds. During this time, failed requests
        are tried again. If the next try would come later, the call fails."""
        self.answered = self.quiet_until = self._said = -math.inf
        self._calls = 0
        self._lock = threading.Lock()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call. The time without an answer begins with the first of the calls that run."""
        with self._lock:
            if not self._calls:
                self.answered = max(self.answered, time.monotonic())
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1

    def log_rarely(self, now: float, text: str) -> None:
        """Write `text` to the worker's log, unless a text was written in the last `_LOG_INTERVAL_S` seconds. Without
        this limit, every question would write the same line while the judge is down."""
        if now - self._said > _LOG_INTERVAL_S:
            self._said = now
            print(text, file=sys.stderr, flush=True)

    def seconds_left(self, now: float) -> float:
        return self.answered + self.retry_s - now


def ask_endpoint(
    endpoint: Endpoint,
    questions: Mapping[str, SentQuestion],
    on_answer: Callable[[str, ReceivedAnswer], None],
    spending: UsageFile,
) -> dict[str, Answer]:
    """Return a dictionary: key of a question -> its answer. `on_answer` is called with the key and the answer when an
    answer arrives. `spending` counts the requests and checks the budget. Inside a running event loop (a notebook), the
    loop is blocked until all questions are answered.

    Raises:
        RewardFailed: the judge refuses a request (an HTTP status outside `_RETRY_STATUSES`), gives no answer for
            `retry_s`, or leaves out log-probs or token counts that the settings need. The message names a row.
        BudgetSpent: the budget is used up. The answers of requests under way are kept.
    """
    try:
        with endpoint.retries.call():
            return _run_to_end(_ask_all(endpoint, questions, on_answer, spending))
    except ExceptionGroup as group:
        first = group.exceptions[0]
    first.__context__ = None  # it would be the group, which holds `first`: such a cycle cannot be pickled
    raise first


def _run_to_end(work: Coroutine[Any, Any, dict[str, Answer]]) -> dict[str, Answer]:
    """Run `work` and return its result. The work runs in this thread, or in another thread if this thread has a running
    event loop. Ctrl-C ends the work."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def cancellable() -> dict[str, Answer]:
        task = asyncio.create_task(work)
        begun.set_result((asyncio.get_running_loop(), task))
        return await task

    with ThreadPoolExecutor(1, "judge") as beside:
        future = beside.submit(asyncio.run, cancellable())
        try:
            return future.result()
        except KeyboardInterrupt:
            loop, task = begun.result()
            loop.call_soon_threadsafe(task.cancel)
            raise


async def _ask_all(
    endpoint: Endpoint,
    questions: Mapping[str, SentQuestion],
    on_answer: Callable[[str, ReceivedAnswer], None],
    spending: UsageFile,
) -> dict[str, Answer]:
    aiohttp = importlib.import_module("aiohttp")
    key = None if endpoint.key_env is None else os.environ.get(endpoint.key_env)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answers: dict[str, Answer] = {}
    slots = asyncio.Semaphore(endpoint.concurrency)
    retries = endpoint.retries
    ends: list[BudgetSpent] = []
    # aiohttp's default is 100 connections, and a request's time-out also runs while it waits for a connection.
    connector = aiohttp.TCPConnector(limit=endpoint.concurrency)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:

        async def one(name: str, of: SentQuestion) -> None:
            async with slots:
                if ends:
                    return
                while not endpoint.slots.acquire(blocking=False):  # calls in other threads have taken them
                    await asyncio.sleep(_SLOT_S)
                try:
                    received = await _ask_until_answered(session, endpoint, of, retries, key, spending)
                except BudgetSpent as end:
                    ends.append(end)
                    return
                finally:
                    endpoint.slots.release()
            on_answer(name, received)
            answers[name] = received.answer

        async with asyncio.TaskGroup() as group:
            for name, of in questions.items():
                group.create_task(one(name, of))
    if ends:
        raise BudgetSpent(f"the judge at {endpoint.url}: {ends[0]}")
    return answers


async def _ask_until_answered(
    session: Any, endpoint: Endpoint, question: SentQuestion, retries: Retries, key: str | None, spending: UsageFile
) -> ReceivedAnswer:
    tries = 0
    while True:
        await asyncio.sleep(max(0.0, retries.quiet_until - time.monotonic()))
        tries += 1
        spending.count_request()
        started = time.monotonic()
        outcome = await _request(session, endpoint.url, question, endpoint.timeout_s, key)
        now = time.monotonic()
        if isinstance(outcome, _Completion):
            retries.answered = now
            if outcome.tokens is not None:
                spending.count_tokens(*outcome.tokens)
            elif spending.budget.has_prices:
                need = "its server counts no tokens (`usage`), so they cannot be priced: leave prices and max_cost out"
                raise RewardFailed(f"the judge at {endpoint.url} answered {question.question}, but {need}")
            return ReceivedAnswer(outcome.answer, round(now - started, 3), tries)
        longer_s = min(_MAX_WAIT_S, _MIN_WAIT_S * 2.0 ** min(tries - 1, 30))
        wait_s = longer_s if outcome.wait_s is None else max(outcome.wait_s, _MIN_WAIT_S)
        if wait_s >= retries.seconds_left(now):
            asks = "" if outcome.wait_s is None else f" It asks to be left alone for {wait_s:g} s."
            raise RewardFailed(
                f"the judge at {endpoint.url} has answered nothing for {now - retries.answered:.0f} s of retry_s = "
                f"{retries.retry_s:g}; the last error, for {question.question}, try {tries}: {outcome.reason}."
                f"{asks} Nothing is scored without it; all answers so far are kept"
            )
        retries.log_rarely(
            now, f"judge at {endpoint.url}: {outcome.reason}; {question.question} is asked again in {wait_s:g} s"
        )
        if outcome.wait_s is not None:
            retries.quiet_until = max(retries.quiet_until, now + wait_s)
        else:
            await asyncio.sleep(wait_s)


async def _request(
    session: Any, url: str, question: SentQuestion, limit_s: float, key: str | None
) -> _Completion | _Refusal:
    """Send a request and return its completion, or a `_Refusal` if a later try may succeed. Raises RewardFailed if no
    later try can succeed."""
    aiohttp = importlib.import_module("aiohttp")
    try:
        async with session.post(
            f"{url}/chat/completions",
            json=dict(question.body),
            timeout=aiohttp.ClientTimeout(total=limit_s),
            allow_redirects=False,
        ) as response:
            status, asks = response.status, response.headers.get("Retry-After")
            text = await _read_text(response)
    except TimeoutError:
        return _Refusal(f"no answer within {limit_s:g} s", None)
    except (aiohttp.ClientError, OSError) as error:
        return _Refusal(_without_key(key, f"{type(error).__name__}: {error}"), None)
    except ValueError as error:
        return _Refusal(_without_key(key, f"its answer is not text: {error}"), None)
    if text is None:
        return _Refusal(f"HTTP {status}, and more than {_MAX_RESPONSE_BYTES >> 20} MiB", None)
    reason = f"HTTP {status}: {_without_key(key, ' '.join(text.split()))[:_MAX_SHOWN_CHARS]}"
    if status in _RETRY_STATUSES:
        return _Refusal(reason, None if asks is None else retry_after_s(asks, time.time()))
    if status != 200:
        raise RewardFailed(f"the judge at {url} refuses {question.question}: {reason}")
    wants = bool(question.body.get("logprobs"))
    try:
        completion = json.loads(text)
        choice = completion["choices"][0]
        answer = Answer(
            _without_key(key, str(choice["message"].get("content") or "")), _likeliest(choice) if wants else None
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError):
        return _Refusal(f"it is no chat completion: {reason}", None)
    if wants and answer.likeliest == ():
        need = "its server offers no top_logprobs, which read: likelihood needs; use read: text"
        raise RewardFailed(f"the judge at {url} answered {question.question} without them: {need}")
    return _Completion(answer, _tokens(completion))


async def _read_text(response: Any) -> str | None:
    """Return the text of a response, or None if it is too large. If the status is 200, the text must be UTF-8,
    otherwise ValueError is raised. With any other status, bytes that are not UTF-8 are replaced."""
    data = bytearray()
    async for part in response.content.iter_chunked(1 << 16):
        data += part
        if len(data) > _MAX_RESPONSE_BYTES:
            return None
    return data.decode("utf8", "strict" if response.status == 200 else "replace")


def retry_after_s(header: str, now: float) -> float | None:
    """Return how many seconds a Retry-After header asks to wait. The header has a number of seconds or a date. Return
    None if it has neither. `now`: seconds since the epoch."""
    with suppress(ValueError):
        return max(0.0, float(header))
    with suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    return None


def _tokens(completion: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the numbers of prompt and completion tokens, or None if the server did not count them."""
    usage = completion.get("usage")
    counted = [usage.get(f"{of}_tokens") for of in ("prompt", "completion")] if isinstance(usage, Mapping) else []
    numbers = [number for number in counted if isinstance(number, int) and number >= 0]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def _likeliest(choice: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Return the likeliest first tokens as (text, log-prob), without impossible ones; empty if the server gave none.
    Raises ValueError if a log-prob is NaN or +inf, or if every token is impossible."""
    content = (choice.get("logprobs") or {}).get("content") or ()
    top = content[0].get("top_logprobs") or () if content else ()
    named = [(str(one["token"]), float(one["logprob"])) for one in top]
    if any(math.isnan(log_prob) or log_prob == math.inf for _, log_prob in named):
        raise ValueError("log-probs that are not numbers")
    possible = tuple((token, log_prob) for token, log_prob in named if log_prob > -math.inf)
    if named and not possible:
        raise ValueError("no token is possible")
    return possible


def _without_key(key: str | None, text: str) -> str:
    """Return a server's text with `***` in place of the API key, since the server may have repeated the key."""
    return text if not key else text.replace(key, "***")
