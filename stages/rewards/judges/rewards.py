"""The rewards of kind `judge` and `local_judge`. Both kinds use the same rubric and the same scores. `judge` asks a
model behind an endpoint, `local_judge` asks a model in this process.

    rows ──► questions ──┬─ judge ──► cache ─ if not there ──► endpoint ──► likeliest tokens or text ─┐
                         └─ local_judge ──► chat template ──► model ──► likeliest tokens ─────────────┴─► scores

The likeliest tokens are the candidates for the first token of the answer, with their log-probs.
"""

from __future__ import annotations

import importlib
import ipaddress
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from stages.models.hf_files import ChatTemplateError, is_classifier, read_tokenizer, weight_files
from stages.models.spec import is_random, read_spec
from stages.rewards.config import RETRY_S, TIMEOUT_S
from stages.rewards.judges.answers import AnswerCache, question_key
from stages.rewards.judges.budget import Budget, UsageFile
from stages.rewards.judges.endpoint import Endpoint, ReceivedAnswer, Retries, SentQuestion, ask_endpoint
from stages.rewards.judges.rubric import GROUP, Answer, Question, make_rubric, score_rows
from stages.rewards.learned import (
    DTYPES,
    ONE_ROW_PER_PASS,
    PASS_TOKENS,
    PROCESS_MODELS,
    LoadSettings,
    ModelKind,
    ProcessModelReward,
)
from stages.rewards.protocol import Reward, RewardFailed, Sample, Scored
from stages.rewards.registry import UnfitReward
from storage.problems import Problem, above, at_least

ANSWERS = "judge"
"""Folder in a run's directory with the judges' answers and the counts of their requests and tokens."""
MAX_TOP_LOGPROBS = 20
"""Largest number of top log-probs per position that servers return by default."""
ReadMode = Literal["likelihood", "text"]


class JudgeReward(Reward):
    """A judge behind an endpoint. Owns the cache of its answers. `rubric.score_rows` defines the scores."""

    deterministic = False
    """False, because the last bits of a server's log-probs depend on its other requests. Cached answers never
    change."""

    def __init__(
        self,
        url: str,
        model: str,
        on_unparsed: float,
        rubric: str | None = None,
        rubric_file: str | None = None,
        answers: dict[Any, float] | None = None,
        against: str | None = None,
        system: str | None = None,
        read: ReadMode = "likelihood",
        max_tokens: int = 512,
        likeliest: int = MAX_TOP_LOGPROBS,
        key_env: str | None = None,
        concurrency: int = 16,
        timeout_s: float = TIMEOUT_S,
        retry_s: float = RETRY_S,
        cache: str | None = None,
        body: dict[str, Any] | None = None,
        delimit: bool = True,
        max_requests: int | None = None,
        max_cost: float | None = None,
        prompt_price: float = 0.0,
        completion_price: float = 0.0,
        _directory: Path | None = None,
    ) -> None:
        """Check the arguments. Raises UnfitReward, which names the argument that cannot work.

        Args:
            url: URL of the API, including its version: http://HOST:8000/v1.
            model: the model's name on the server.
            on_unparsed, rubric, rubric_file, answers, against, system, delimit: see `make_rubric`.
            read: what decides the worth of an answer. `likelihood`: the log-probs of the likeliest first tokens.
                `text`: the answer's last word.
            max_tokens: maximum number of tokens of an answer that is read as text.
            likeliest: number of tokens whose log-probs are requested.
            key_env: environment variable with the server's key; None: the server needs no key.
            concurrency: maximum number of simultaneous requests of each scoring worker.
            timeout_s: time-out of a request, in seconds.
            retry_s: longest time without an answer before the run stops, in seconds.
            cache: directory of stored answers. None: `judge` in the run's directory; outside a run, a temporary file.
            body: further fields of the request. A field that is null is left out.
            max_requests, max_cost: the run's budget for this judge; None: no limit.
            prompt_price, completion_price: price of a million tokens, in the unit of `max_cost`.
        """
        self.rubric = make_rubric(rubric, rubric_file, answers, on_unparsed, against, system, delimit)
        self.fields = self.rubric.fields
        _check_url(url)
        _check_key_variable(key_env)
        _check_key_is_encrypted(url, key_env)
        if read not in get_args(ReadMode):
            raise UnfitReward(Problem("read", read, f"must be {' or '.join(get_args(ReadMode))}"))
        counts = {"max_tokens": max_tokens, "likeliest": likeliest, "concurrency": concurrency}
        waits = {"timeout_s": timeout_s, "retry_s": retry_s}
        prices = {"prompt_price": prompt_price, "completion_price": completion_price}
        for problem in (
            *at_least(1).problems({**counts, "max_requests": max_requests}),
            *above(0, " seconds").problems(waits),
            *above(0).problems({"max_cost": max_cost}),
            *at_least(0).problems(prices),
        ):
            raise UnfitReward(problem)
        budget = Budget(max_requests, max_cost, prompt_price, completion_price)
        if max_cost is not None and not budget.has_prices:
            raise UnfitReward(Problem("max_cost", max_cost, "needs prompt_price or completion_price above 0"))
        _check_body(body or {})
        if retry_s < timeout_s:
            raise UnfitReward(Problem("retry_s", retry_s, f"must be timeout_s ({timeout_s:g}) or more"))
        limit, retries = threading.Semaphore(concurrency), Retries(retry_s)
        self._endpoint = Endpoint(url.rstrip("/"), key_env, concurrency, timeout_s, limit, retries)
        how = {"max_tokens": max_tokens}
        if read == "likelihood":
            how = {"max_tokens": 1, "logprobs": True, "top_logprobs": likeliest}
        request = {"model": model, "temperature": 0, **how, **(body or {})}
        self._body = {name: value for name, value in request.items() if value is not None}
        own = None if _directory is None else _directory / ANSWERS
        self._cache = AnswerCache(own if cache is None else Path(cache))
        self.early = against != GROUP
        self.concurrent_calls = concurrency
        self._lock = threading.Lock()
        """Guards `_asked`."""
        self._asked: dict[str, Future[dict[str, Answer]]] = {}
        """Key of a question that a call is asking -> the answers of that call."""
        judge = {**self._body, "rubric": self.rubric.template_pieces, "system": system, "against": against}
        self._spending = UsageFile(budget, own, question_key(judge)[:12])

    def __call__(self, samples: Sequence[Sample]) -> Scored:
        return score_rows(self.rubric, self.ask, samples)

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Return the answers, in the order of the questions. The judge is asked once for each question that is not in
        the cache and that no other call is asking. Raises the errors of `ask_endpoint`."""
        asked = [SentQuestion(question, {**self._body, "messages": list(question.messages)}) for question in questions]
        keys = [question_key(one.body) for one in asked]
        self._cache.refresh()
        answers = {key: answer for key in dict.fromkeys(keys) if (answer := self._cache.find(key)) is not None}
        missing = {key: one for key, one in zip(keys, asked, strict=True) if key not in answers}

        def keep(key: str, received: ReceivedAnswer) -> None:
            about = {
                "model": self._body["model"],
                "messages": missing[key].body["messages"],
                "time": round(time.time(), 3),
                "seconds": received.seconds,
                "attempts": received.tries,
            }
            self._cache.add(key, received.answer, about)

        with self._lock:
            elsewhere = {key: self._asked[key] for key in missing if key in self._asked}
            mine: Future[dict[str, Answer]] = Future()
            asking = {key: one for key, one in missing.items() if key not in elsewhere}
            self._asked |= dict.fromkeys(asking, mine)
        try:
            if asking:
                mine.set_result(ask_endpoint(self._endpoint, asking, keep, self._spending))
                answers |= mine.result()
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                for key in asking:
                    del self._asked[key]
        for key, other in elsewhere.items():  # raises the other call's error
            answers[key] = other.result()[key]
        return [answers[key] for key in keys]

    def counts(self) -> Mapping[str, float]:
        """Return the number of requests of all processes of the run so far, and the cost of these requests if tokens
        have prices."""
        total, budget = self._spending.total(), self._spending.budget
        return {"requests": total.requests} | ({"cost": budget.cost(total)} if budget.has_prices else {})

    def close(self) -> None:
        self._cache.close()


class LocalJudgeReward(ProcessModelReward):
    """A judge that is a language model in this process. Its answer is the distribution of the first token after the
    chat prompt. So a `JudgeReward` with `read: likelihood` gives the same verdicts if its server has the same model."""

    def __init__(
        self,
        path: str,
        on_unparsed: float,
        rubric: str | None = None,
        rubric_file: str | None = None,
        answers: dict[Any, float] | None = None,
        against: str | None = None,
        system: str | None = None,
        likeliest: int = MAX_TOP_LOGPROBS,
        dtype: str = "float32",
        pass_tokens: int | None = PASS_TOKENS,
        delimit: bool = True,
    ) -> None:
        """Check the arguments. Raises UnfitReward, which names the argument that cannot work.

        Args:
            path: the model's directory, with a chat template.
            on_unparsed, rubric, rubric_file, answers, against, system, delimit: see `make_rubric`.
            likeliest: number of likeliest tokens that are considered. An answer that is not among them does not count.
            dtype: dtype of the forward pass.
            pass_tokens: maximum number of tokens of a forward pass, which packs several questions. None: one question
                per pass, so that the verdict on a question does not depend on other questions.
        """
        self.rubric = make_rubric(rubric, rubric_file, answers, on_unparsed, against, system, delimit)
        self.fields = self.rubric.fields
        wrong = _model_problem(path)
        if wrong is not None:
            raise UnfitReward(Problem("path", path, wrong))
        if dtype not in DTYPES:
            raise UnfitReward(Problem("dtype", dtype, f"must be {' or '.join(DTYPES)}"))
        counts = {"likeliest": likeliest, "pass_tokens": 1 if pass_tokens is None else pass_tokens}
        for problem in at_least(1).problems(counts):
            raise UnfitReward(problem)
        self._tokenizer = read_tokenizer(path)
        first = [] if system is None else [{"role": "system", "content": system}]
        try:
            self._tokenizer.apply_chat_template([*first, {"role": "user", "content": "x"}])
        except ChatTemplateError as error:
            need = f"it cannot be asked the rubric's questions: {error}: give an instruction-tuned model"
            raise UnfitReward(Problem("path", path, need)) from error
        self.deterministic = pass_tokens is None and against != GROUP
        self._likeliest = likeliest
        self._context = read_spec(path).max_positions
        self._loading = LoadSettings(ModelKind.LANGUAGE, path, dtype, pass_tokens or ONE_ROW_PER_PASS)

    def __call__(self, samples: Sequence[Sample]) -> Scored:
        return score_rows(self.rubric, self.ask, samples)

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Return the answers, in the order of the questions. Raises RewardFailed for a question that is longer than the
        model's context."""
        rows = [self._tokenizer.apply_chat_template(question.messages) for question in questions]
        for question, row in zip(questions, rows, strict=True):
            if len(row) > self._context:
                need = f"its question has {len(row)} tokens, the judge's context is {self._context}"
                raise RewardFailed(f"{question}: {need}")
        of_rows = importlib.import_module("stages.models.reward_model").TokenRows.of(rows)
        with PROCESS_MODELS.lock:
            likeliest_of = self.loaded_model().likeliest(of_rows, self._likeliest)
        return [self._answer(likeliest) for likeliest in likeliest_of]

    def _answer(self, likeliest: Sequence[tuple[int, float]]) -> Answer:
        named = tuple((self._tokenizer.decode([token], skip_special=False), p) for token, p in likeliest)
        return Answer(named[0][0], named)


_KEY_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        odd = parts.scheme not in ("http", "https") or not parts.hostname or (parts.port or 1) < 1
    except ValueError:
        odd = True
    if odd:
        need = "must be the URL of an API, including its version: http://HOST:8000/v1"
        raise UnfitReward(Problem("url", url if "@" not in url else "(not shown)", need))
    if "@" in parts.netloc or parts.query or parts.fragment:
        need = "must hold no user, password or query, since configs are logged: key_env names a variable with the key"
        raise UnfitReward(Problem("url", "(not shown)", need))
    if parts.path.rstrip("/").endswith("/chat/completions"):
        raise UnfitReward(Problem("url", url, "must be without /chat/completions, which is added"))


_NOT_IN_BODY = {
    "messages": "the messages come from the rubric and `system`: leave it out",
    "stream": "answers are read as a whole: leave it out",
    "n": "one answer is read: leave it out",
}


def _check_body(body: Mapping[str, Any]) -> None:
    """Raise UnfitReward if `body` sets a field of Stageline's, or one that makes the answer unreadable (`stream`)."""
    for name, need in _NOT_IN_BODY.items():
        if body.get(name):
            raise UnfitReward(Problem(f"body.{name}", body[name], need))


def _check_key_variable(key_env: str | None) -> None:
    if key_env is None:
        return
    if not _KEY_NAME.fullmatch(key_env):
        need = "must be the name of an environment variable, and not the key itself"
        raise UnfitReward(Problem("key_env", "(not shown)", need))
    if not os.environ.get(key_env, "").strip():
        shown = key_env if key_env.isupper() else "(not shown)"  # it may be the key itself
        raise UnfitReward(Problem("key_env", shown, "there is no such environment variable here, or it is empty"))
    if not os.environ[key_env].isprintable():
        raise UnfitReward(
            Problem("key_env", key_env, "its value has characters that a header cannot have (a newline?)")
        )


def _check_key_is_encrypted(url: str, key_env: str | None) -> None:
    """Raise UnfitReward if the key would be sent over plain http to another host, where everybody on the way could read
    it."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        here = False
    if key_env is not None and parts.scheme == "http" and not here:
        need = "would send the key over plain http to another host: use https, a tunnel to 127.0.0.1, or no key_env"
        raise UnfitReward(Problem("url", url, need))


def _model_problem(path: str) -> str | None:
    """Return why there is no language model at a path, or None if there is one."""
    try:
        read_spec(path)
        if not is_random(path):
            weight_files(path)
        if is_classifier(path):
            return "it is a reward model, which cannot answer questions; use kind: model to score with it"
        read_tokenizer(path)
    except (OSError, ValueError) as error:
        return f"{error}: give the directory of an instruction-tuned language model in Hugging Face layout"
    return None
