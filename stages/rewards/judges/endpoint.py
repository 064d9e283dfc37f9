"""Asking a judge behind an OpenAI-compatible endpoint (`POST URL/chat/completions`): vLLM, trtllm-serve and others.

    questions ──► at most `concurrency` at once ──► answer ──► kept at once
                        ▲        │ 429, 5xx, no connection, too slow, no JSON
                        └─ wait ─┘ as long as Retry-After says (all questions do), or longer each time

The judge is given up when a request fails that would be tried again later than `patience_s` after its last answer;
then nothing is scored, and what was answered until then is kept. The one place that imports aiohttp, when the first
question is asked. May import stages.rewards.protocol and this folder.
"""

from __future__ import annotations

import asyncio
import email.utils
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from stages.rewards.judges.rubric import Question
from stages.rewards.judges.verdicts import Answer
from stages.rewards.protocol import RewardFailed

_AGAIN = frozenset({408, 425, 429, *range(500, 600)})
"""HTTP statuses that may pass (gateways have their own beyond 504)."""
_SHORTEST_S, _LONGEST_S = 0.5, 30.0
_SAID_EVERY_S = 10.0
_SHOWN = 300
"""Characters of a server's message that a person is shown."""
_LARGEST = 16 << 20
"""Bytes of an answer: more is none."""


@dataclass(frozen=True)
class Endpoint:
    """Where and how a judge is asked."""

    url: str
    key_env: str | None
    """Environment variable with the key; its value is read when it is sent, and is kept nowhere."""
    concurrency: int
    timeout_s: float
    """Of one request."""
    patience_s: float
    """How long the judge may answer nothing; a request that is under way then may take its time."""


@dataclass(frozen=True)
class Asked:
    """A question as it is sent."""

    question: Question
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Received:
    """An answer, and what it took."""

    answer: Answer
    seconds: float
    """Of the request that was answered."""
    attempts: int


@dataclass(frozen=True)
class _Refusal:
    """A request that had no answer, and may have one later."""

    why: str
    wait_s: float | None
    """As the server asked for; None: it did not."""


class _Patience:
    """Owns what all questions of a call know of the judge: when it last answered, and until when it wants to be left
    alone."""

    def __init__(self, now: float, patience_s: float) -> None:
        self._patience_s, self.answered, self.quiet_until = patience_s, now, now
        self._said = -math.inf

    def say(self, now: float, text: str) -> None:
        """In the worker's log, now and then: all questions meet the same."""
        if now - self._said > _SAID_EVERY_S:
            self._said = now
            print(text, file=sys.stderr, flush=True)

    def left_s(self, now: float) -> float:
        return self.answered + self._patience_s - now


def ask_endpoint(
    endpoint: Endpoint, asked: Mapping[str, Asked], keep: Callable[[str, Received], None]
) -> dict[str, Answer]:
    """The answer to each question, by its key. `keep` is called with each as it comes. May be called where an event
    loop runs, as in a notebook, which then stands still until all is answered.

    Raises RewardFailed, naming a row, where the judge refuses a request for good, or has answered nothing for
    `patience_s`.
    """
    try:
        return _finished(_ask_all(endpoint, asked, keep))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def _finished(work: Coroutine[Any, Any, dict[str, Answer]]) -> dict[str, Answer]:
    """What it comes to, in this thread, or in one beside it where this one has a loop already. What Ctrl-C does to the
    waiting it does to the work."""
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
        found = beside.submit(asyncio.run, cancellable())
        try:
            return found.result()
        except KeyboardInterrupt:
            loop, task = begun.result()
            loop.call_soon_threadsafe(task.cancel)
            raise


async def _ask_all(
    endpoint: Endpoint, asked: Mapping[str, Asked], keep: Callable[[str, Received], None]
) -> dict[str, Answer]:
    aiohttp = importlib.import_module("aiohttp")
    key = None if endpoint.key_env is None else os.environ.get(endpoint.key_env)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    found: dict[str, Answer] = {}
    slots = asyncio.Semaphore(endpoint.concurrency)
    patience = _Patience(time.monotonic(), endpoint.patience_s)
    async with aiohttp.ClientSession(headers=headers) as session:

        async def one(name: str, of: Asked) -> None:
            async with slots:
                received = await _until_answered(session, endpoint, of, patience, key)
            keep(name, received)
            found[name] = received.answer

        async with asyncio.TaskGroup() as group:
            for name, of in asked.items():
                group.create_task(one(name, of))
    return found


async def _until_answered(
    session: Any, endpoint: Endpoint, asked: Asked, patience: _Patience, key: str | None
) -> Received:
    attempts = 0
    while True:
        await asyncio.sleep(max(0.0, patience.quiet_until - time.monotonic()))
        attempts += 1
        started = time.monotonic()
        outcome = await _request(session, endpoint.url, asked, endpoint.timeout_s, key)
        now = time.monotonic()
        if isinstance(outcome, Answer):
            patience.answered = now
            return Received(outcome, round(now - started, 3), attempts)
        longer_s = min(_LONGEST_S, _SHORTEST_S * 2.0 ** min(attempts - 1, 30))
        wait_s = longer_s if outcome.wait_s is None else max(outcome.wait_s, _SHORTEST_S)
        if wait_s >= patience.left_s(now):
            asks = "" if outcome.wait_s is None else f" It asks to be left alone for {wait_s:g} s."
            raise RewardFailed(
                f"the judge at {endpoint.url} has answered nothing for {now - patience.answered:.0f} s of patience_s = "
                f"{endpoint.patience_s:g}; the last that came of {asked.question}, attempt {attempts}: {outcome.why}."
                f"{asks} Nothing is scored without it; all answers so far are kept"
            )
        patience.say(now, f"judge at {endpoint.url}: {outcome.why}; {asked.question} is asked again in {wait_s:g} s")
        if outcome.wait_s is not None:
            patience.quiet_until = max(patience.quiet_until, now + wait_s)
        else:
            await asyncio.sleep(wait_s)


async def _request(session: Any, url: str, asked: Asked, limit_s: float, key: str | None) -> Answer | _Refusal:
    """Raises RewardFailed for what no later request would change."""
    aiohttp = importlib.import_module("aiohttp")
    try:
        async with session.post(
            f"{url}/chat/completions",
            json=dict(asked.body),
            timeout=aiohttp.ClientTimeout(total=limit_s),
            allow_redirects=False,
        ) as response:
            status, asks = response.status, response.headers.get("Retry-After")
            text = await _read_text(response)
    except TimeoutError:
        return _Refusal(f"no answer within {limit_s:g} s", None)
    except (aiohttp.ClientError, OSError) as error:
        return _Refusal(_without(key, f"{type(error).__name__}: {error}"), None)
    except ValueError as error:
        return _Refusal(_without(key, f"its answer is no text: {error}"), None)
    if text is None:
        return _Refusal(f"HTTP {status}, and more than {_LARGEST >> 20} MiB", None)
    said = f"HTTP {status}: {_without(key, ' '.join(text.split()))[:_SHOWN]}"
    if status in _AGAIN:
        return _Refusal(said, None if asks is None else retry_after_s(asks, time.time()))
    if status != 200:
        raise RewardFailed(f"the judge at {url} refuses {asked.question}: {said}")
    wants = bool(asked.body.get("logprobs"))
    try:
        choice = json.loads(text)["choices"][0]
        answer = Answer(
            _without(key, str(choice["message"].get("content") or "")), _likeliest(choice) if wants else None
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError):
        return _Refusal(f"no chat completion, but {said}", None)
    if wants and answer.likeliest == ():
        need = "its server offers no top_logprobs, by which read: likelihood judges: read: text"
        raise RewardFailed(f"the judge at {url} answered {asked.question} without them: {need}")
    return answer


async def _read_text(response: Any) -> str | None:
    """None where it is larger than any answer. JSON is UTF-8; what comes with an error's status may be anything."""
    data = bytearray()
    async for part in response.content.iter_chunked(1 << 16):
        data += part
        if len(data) > _LARGEST:
            return None
    return data.decode("utf8", "strict" if response.status == 200 else "replace")


def retry_after_s(header: str, now: float) -> float | None:
    """Seconds that a Retry-After asks for, which is a number of them or a date; None where it is neither. `now`: in
    seconds since the epoch."""
    with suppress(ValueError):
        return max(0.0, float(header))
    with suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    return None


def _likeliest(choice: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Of the first token, those that it may be; empty where the server gave none. Raises ValueError for log-probs that
    are no numbers."""
    content = (choice.get("logprobs") or {}).get("content") or ()
    top = content[0].get("top_logprobs") or () if content else ()
    named = [(str(one["token"]), float(one["logprob"])) for one in top]
    if any(math.isnan(log_prob) or log_prob == math.inf for _, log_prob in named):
        raise ValueError("log-probs that are no numbers")
    possible = tuple((token, log_prob) for token, log_prob in named if log_prob > -math.inf)
    if named and not possible:
        raise ValueError("no token is possible")
    return possible


def _without(key: str | None, text: str) -> str:
    """A text from outside, in which a server may have repeated the key."""
    return text if not key else text.replace(key, "***")
