"""The judge behind an endpoint, against a real server on loopback: what is sent, what is kept, and what becomes of a
judge that answers rubbish, is slow, rate-limits or vanishes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages.rewards.judges import endpoint
from stages.rewards.judges.answers import AnswerCache, question_key
from stages.rewards.judges.budget import Budget, JudgeUsage, UsageFile
from stages.rewards.judges.endpoint import retry_after_s
from stages.rewards.judges.rewards import JudgeReward
from stages.rewards.judges.rubric import Answer
from stages.rewards.protocol import BudgetSpent, RewardFailed, Sample, Scored
from stages.rewards.registry import UnfitReward, build_reward
from tests.support.judge_server import Reply, Served, asked_text, completion, serving

RUBRIC = "{prompt} -> {response}"
KEY = "sk-very-secret-0123456789"
LIKELIEST = [("5", -0.5), ("1", -1.5), ("the", -3.0)]


_MADE: list[JudgeReward] = []
"""The judges of a test."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_MIN_WAIT_S", 0.002)


@pytest.fixture
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses take no time and move the clock that decides how long the judge has been silent, and nothing else does."""
    now = [0.0]

    async def pause(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(endpoint, "time", SimpleNamespace(time=lambda: 0.0, monotonic=lambda: now[0]))
    monkeypatch.setattr(endpoint, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": pause}))


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every judge's cache, also of judges inside an ensemble and of judges that were refused."""
    caches: list[AnswerCache] = []
    begin = AnswerCache.__init__

    def noted(self: AnswerCache, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        caches.append(self)

    monkeypatch.setattr(AnswerCache, "__init__", noted)
    yield
    while _MADE:
        _MADE.pop().close()
    for cache in caches:
        cache.close()


def judge_of(served: Served | str, **given: Any) -> JudgeReward:
    _MADE.append(JudgeReward(**judge_args(served, **given)))
    return _MADE[-1]


def judge_args(served: Served | str, **given: Any) -> dict[str, Any]:
    args = {"model": "m", "rubric": RUBRIC, "on_unparsed": -1.0, "read": "text", "timeout_s": 120, "retry_s": 120}
    args["delimit"] = False  # the servers here read what follows the arrow
    return args | {"url": served if isinstance(served, str) else served.url} | given


def samples(*responses: str) -> list[Sample]:
    return [Sample("p", response, row=row) for row, response in enumerate(responses)]


def scores(judge: JudgeReward, *responses: str) -> list[float]:
    given = judge(samples(*responses))
    assert isinstance(given, Scored)
    return list(given.parts[""])


def by_length(body: Mapping[str, Any]) -> Reply:
    return completion(f"Grade: {min(5, len(asked_text(body).partition('-> ')[2]))}")


def in_turn(*replies: Reply | Callable[[Mapping[str, Any]], Reply]) -> Callable[[Mapping[str, Any]], Reply]:
    """One after another, whoever asks; the last for ever."""
    left, lock = list(replies), threading.Lock()

    def answer(body: Mapping[str, Any]) -> Reply:
        with lock:
            reply = left.pop(0) if len(left) > 1 else left[0]
        return reply(body) if callable(reply) else reply

    return answer


def test_what_is_sent_and_what_comes_back() -> None:
    with serving(by_length) as served:
        judge = judge_of(served, system="Grade.", body={"seed": 3, "temperature": None})
        assert scores(judge, "a", "bbb", "a") == [1.0, 3.0, 1.0]
    assert len(served.asked) == 2, "the same question is asked once"
    assert {body["messages"][1]["content"] for body in served.asked} == {"p -> a", "p -> bbb"}
    body = served.asked[0]
    assert {**body, "messages": body["messages"][:1]} == {
        "model": "m",
        "max_tokens": 512,
        "seed": 3,
        "messages": [{"role": "system", "content": "Grade."}],
    }
    assert "Authorization" not in served.headers[0]


def test_likelihoods_are_asked_for_and_read() -> None:
    with serving(lambda body: completion("5", LIKELIEST)) as served:
        found = scores(judge_of(served, read="likelihood"), "a")
    p = 1 / (1 + 2.718281828459045**-1)
    assert found == [pytest.approx(5 * p + 1 * (1 - p))]
    body = served.asked[0]
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"], body["temperature"]) == (1, True, 20, 0)
    with (
        serving(lambda body: completion("5")) as served,
        pytest.raises(RewardFailed, match=r"top_logprobs.*read: text"),
    ):
        judge_of(served, read="likelihood")(samples("a"))


@pytest.mark.parametrize("limit", [4, 110])
def test_as_many_requests_at_once_as_the_limit_and_no_more(limit: int) -> None:
    """The server answers no request before that many are present together. An HTTP pool has a limit of its own, often
    100. Two calls at once share the limit."""
    together = threading.Barrier(limit)

    def judge(body: Mapping[str, Any]) -> Reply:
        together.wait(120)
        return by_length(body)

    with serving(judge) as served:
        asked = [str(number) for number in range(100, 100 + 4 * limit)]
        ask, halves = partial(scores, judge_of(served, concurrency=limit)), (asked[: 2 * limit], asked[2 * limit :])
        with ThreadPoolExecutor(2) as threads:
            assert [*threads.map(lambda half: ask(*half), halves)] == [[3.0] * (2 * limit)] * 2
    assert served.most_at_once == limit


def test_a_question_of_several_calls_at_once_is_asked_once() -> None:
    asked, answer = threading.Event(), threading.Event()

    def judge(body: Mapping[str, Any]) -> Reply:
        asked.set()
        answer.wait(120)
        return by_length(body)

    with serving(judge) as served, ThreadPoolExecutor(2) as threads:
        reward = judge_of(served)
        first = threads.submit(scores, reward, "a", "bb")
        asked.wait(120)
        second = threads.submit(scores, reward, "bb", "ccc")
        while len(served.asked) < 3:
            time.sleep(0.001)
        answer.set()
        assert (first.result(), second.result()) == ([1.0, 2.0], [2.0, 3.0])
    assert sorted(map(asked_text, served.asked)) == ["p -> a", "p -> bb", "p -> ccc"]


def test_a_judges_failure_can_be_sent_to_the_driver() -> None:
    with serving(lambda _: Reply("no", 404)) as served, pytest.raises(RewardFailed) as failure:
        scores(judge_of(served), "a", "bb")
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)
    assert failure.value.__context__ is None


def test_rubbish_is_counted_and_gets_the_stated_score() -> None:
    with serving(in_turn(completion("no idea"), completion("4"))) as served:
        found = judge_of(served, concurrency=1)(samples("a", "b"))
    assert found == Scored({"": [-1.0, 4.0]}, None, {"unparsed": [1.0, 0.0]})


@pytest.mark.parametrize(
    "passing",
    [
        Reply("slow down", 429, {"Retry-After": "0.001"}),
        Reply("slow down", 429),
        Reply("loading", 503, {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}),
        Reply("<html>gateway</html>", 502),
        Reply("overloaded", 529),
        Reply("", cut=True),
        Reply("<html>hello</html>"),
        Reply('{"choices": []}'),
        Reply('{"error": "overloaded"}'),
        Reply("[1]"),
        Reply("[" * 100_000),
        Reply("x" * (endpoint._MAX_RESPONSE_BYTES + 1)),
        Reply("slow down", 429, {"Retry-After": "nan"}),
    ],
    ids=lambda reply: f"{reply.status} {reply.body[:40] or 'cut'} {dict(reply.headers)}",
)
@pytest.mark.usefixtures("own_clock")
def test_what_may_pass_is_tried_again(passing: Reply, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(in_turn(passing, passing, by_length)) as served:
        assert scores(judge_of(served, cache=str(tmp_path)), "aa") == [2.0]
    assert len(served.asked) == 3
    (record,) = records(tmp_path)
    assert record["attempts"] == 3
    assert capsys.readouterr().err.count("row 0 (prompt 'p') is asked again in ") == 1, "twice within 10 s is said once"


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_log_probs_that_are_no_numbers_are_no_answer(odd: float, tmp_path: Path) -> None:
    """Kept, they would be met again by every resume."""
    with serving(in_turn(completion("5", [("5", odd), ("1", -1.0)]), completion("5", LIKELIEST))) as served:
        assert 3.9 < scores(judge_of(served, read="likelihood", cache=str(tmp_path)), "a")[0] < 4.0
    assert len(records(tmp_path)) == 1


def test_a_token_that_is_impossible_is_none_of_the_likeliest() -> None:
    with serving(lambda body: completion("the", [("the", -0.1), ("5", -math.inf)])) as served:
        assert scores(judge_of(served, read="likelihood"), "a") == [-1.0]


@pytest.mark.usefixtures("own_clock")
def test_a_server_that_asks_for_no_pause_is_not_hammered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_MIN_WAIT_S", 20.0)
    busy = Reply("later", 429, {"Retry-After": "0"})
    with serving(lambda body: busy) as served, pytest.raises(RewardFailed, match="HTTP 429"):
        judge_of(served)(samples("a"))
    assert len(served.asked) == 120 / 20


def test_what_cannot_pass_ends_it_at_once_and_names_the_row() -> None:
    refused = pytest.raises(RewardFailed, match=r"refuses row 0 \(prompt 'p'\): HTTP 404: .*no such model")
    with serving(lambda body: Reply('{"error": "no such model"}', 404)) as served, refused:
        judge_of(served)(samples("a"))
    assert len(served.asked) == 1
    elsewhere = Reply("", 302, {"Location": "http://elsewhere/"})
    with serving(lambda body: elsewhere) as served, pytest.raises(RewardFailed, match="HTTP 302"):
        judge_of(served)(samples("a"))


def test_a_judge_that_asks_to_be_left_alone_for_too_long_is_given_up_at_once() -> None:
    with (
        serving(lambda body: Reply("quota", 429, {"Retry-After": "3600"})) as served,
        pytest.raises(RewardFailed, match=r"HTTP 429: quota\. It asks to be left alone for 3600 s\. Nothing is sco"),
    ):
        judge_of(served)(samples("a"))
    assert len(served.asked) == 1


@pytest.mark.usefixtures("own_clock")
@pytest.mark.parametrize(
    ("vanished", "retry_s", "came"),
    [
        ("never there", 60, "ClientConnectorError"),
        ("slow", 0.15, "no answer within 0.05 s"),
        ("limits", 60, "HTTP 429"),
    ],
)
def test_a_judge_that_vanishes_is_waited_for_and_then_is_an_error(vanished: str, retry_s: float, came: str) -> None:
    """Never a zero. The message names the limit, the row and what came last."""
    over = threading.Event()
    limits = in_turn(*(Reply("later", 429, {"Retry-After": wait}) for wait in ("0.001", "0.001", "3600")))

    def judge(body: Mapping[str, Any]) -> Reply:
        if vanished == "slow":
            over.wait(120)
        return limits(body)

    with serving(judge) as served:
        url = "http://127.0.0.1:9/v1" if vanished == "never there" else served.url
        timeout_s = 0.05 if vanished == "slow" else retry_s
        with pytest.raises(RewardFailed) as failed:
            judge_of(url, timeout_s=timeout_s, retry_s=retry_s)(samples("a", "b"))
        over.set()
    said = str(failed.value)
    assert "has answered nothing for" in said
    assert f"retry_s = {retry_s:g}" in said
    assert "row 0" in said or "row 1" in said
    assert came in said


def test_answers_survive_and_only_the_rest_is_asked_again(tmp_path: Path) -> None:
    """The judge vanishes after two answers; a later process asks for the third alone, and then nothing."""
    refuse = Reply("gone", 410)
    with serving(in_turn(by_length, by_length, refuse)) as served, pytest.raises(RewardFailed, match="HTTP 410"):
        judge_of(served, cache=str(tmp_path), concurrency=1)(samples("a", "bb", "ccc"))
    with serving(by_length) as served:
        again = judge_of(served, cache=str(tmp_path))
        assert scores(again, "a", "bb", "ccc") == [1.0, 2.0, 3.0]
        again.close()
        assert len(served.asked) == 1
        assert scores(judge_of(served, cache=str(tmp_path)), "a", "bb", "ccc") == [1.0, 2.0, 3.0]
        assert len(served.asked) == 1
        scores(judge_of(served, cache=str(tmp_path), model="other"), "a")
        scores(judge_of(served, cache=str(tmp_path), system="Be kind."), "a")
        assert len(served.asked) == 3, "another model, or another question, is no hit"
    assert len(list(tmp_path.glob("answers-*.jsonl"))) == 4


def test_a_torn_or_damaged_line_is_asked_again_and_others_answers_are_seen(tmp_path: Path) -> None:
    with serving(by_length) as served:
        first, second = (judge_of(served, cache=str(tmp_path), concurrency=1) for _ in range(2))
        scores(first, "a", "bb")
        (file,) = tmp_path.glob("answers-*.jsonl")
        lines = file.read_text().splitlines(keepends=True)
        file.write_text(lines[0] + lines[1][:40])
        assert scores(second, "a", "bb") == [1.0, 2.0], "it was made before these answers were"
        assert len(served.asked) == 3
        file.write_text('{"key": 1}\n{"key": "x", "text": "5", "likeliest": [["a"]]}\nnonsense\n' + lines[0])
        assert scores(judge_of(served, cache=str(tmp_path)), "a", "bb") == [1.0, 2.0]
        assert len(served.asked) == 3
        assert scores(first, "a", "bb", "ccc") == [1.0, 2.0, 3.0]
        assert [asked_text(body) for body in served.asked[3:]] == ["p -> a", "p -> ccc"], "its own line is damaged too"


def test_damage_is_said_and_nobody_else_may_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "answers"
    with serving(by_length) as served:
        scores(judge_of(served, cache=str(folder)), "a", "bb")
        (file,) = folder.iterdir()
        assert (file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
        lines = file.read_bytes().splitlines(keepends=True)
        damaged = [line[:60] + b"\0" * (len(line) - 61) + b"\n" for line in lines]
        (folder / "answers-0-garbage.jsonl").write_bytes(b"\xff\0garbage\n" * 3)
        file.write_bytes(lines[0] + damaged[1])
        again = judge_of(served, cache=str(folder))
        assert scores(again, "a", "bb") == [1.0, 2.0]
        assert len(served.asked) == 3
    said = capsys.readouterr().err
    assert "answers-0-garbage.jsonl: 3 lines are damaged" in said
    assert f"{file}: the line at byte {len(lines[0])} is damaged; its question is asked again" in said


def test_answers_are_not_held_in_memory(tmp_path: Path) -> None:
    """20 MB of them, as some steps of a run have; the index may have 2 MB in memory, which SQLite takes by itself."""
    written, cache = AnswerCache(tmp_path), AnswerCache(tmp_path)
    tracemalloc.start()
    try:
        for number in range(5000):
            written.add(question_key({"n": number}), Answer("4" * 4000), {})
        cache.refresh()
        assert cache.find(question_key({"n": 4999})) == Answer("4" * 4000)
        assert written.find(question_key({"n": 17})) == Answer("4" * 4000)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
        written.close()
        cache.close()


def test_a_budget_ends_the_asking_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    """Requests under way are answered and kept; a continued run counts the earlier requests."""
    with serving(in_turn(Reply("later", 503), by_length)) as served:
        judge = judge_of(served, max_requests=6, concurrency=3, _directory=tmp_path)
        with pytest.raises(BudgetSpent, match=r"max_requests = 6 is used up; all answers so far are kept"):
            judge(samples(*"abcdefgh"))
        assert len(served.asked) == 6, "the one that was refused counts too"
        assert len(records(tmp_path / "judge")) == 5
        assert judge.counts() == {"requests": 6}
        again = judge_of(served, max_requests=9, _directory=tmp_path)
        assert scores(again, *"abcdefgh") == [1.0] * 8
        assert len(served.asked) == 9
        assert scores(judge_of(served, max_requests=1, _directory=tmp_path), *"abcdefgh") == [1.0] * 8, "all is kept"
        other = judge_of(served, model="other", max_requests=1, _directory=tmp_path)
        assert scores(other, "a") == [1.0], "another judge has another budget"
        assert other.counts() == {"requests": 1}
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "judge").iterdir()} == {0o600}


def test_workers_share_a_budget(tmp_path: Path) -> None:
    """Neither worker can send a request that the other has reserved; at the end each may count the other's try as a
    request."""
    budget = Budget(max_requests=200)
    spendings = [UsageFile(budget, tmp_path, "x") for _ in range(4)]

    def send(spending: UsageFile) -> int:
        sent = 0
        with suppress(BudgetSpent):
            while True:
                spending.count_request()
                sent += 1
        return sent

    with ThreadPoolExecutor(4) as pool:
        sent = sum(pool.map(send, spendings))
    assert 200 - 3 <= sent <= 200
    assert spendings[0].total() == UsageFile(budget, tmp_path, "x").total() == JudgeUsage(requests=sent)


def test_a_budget_of_money_counts_the_servers_tokens(tmp_path: Path) -> None:
    prices = {"prompt_price": 2.0, "completion_price": 10.0, "_directory": tmp_path}
    with serving(lambda body: completion("4", tokens=(100, 10))) as served:
        judge = judge_of(served, concurrency=1, max_cost=0.0007, **prices)
        with pytest.raises(BudgetSpent, match=r"max_cost = 0\.0007 is used up \(3 requests cost 0\.0009\)"):
            judge(samples(*"abcde"))
        assert judge.counts() == {"requests": 3, "cost": pytest.approx(3 * (100 * 2 + 10 * 10) / 1e6)}
        assert scores(judge_of(served, max_cost=1.0, **prices), *"abcde") == [4.0] * 5
        assert len(served.asked) == 5
        members = {n: {"kind": "judge", "args": judge_args(served, model=n, prompt_price=2.0)} for n in "xy"}
        both = build_reward("ensemble", {"members": members}, "reward")
        both(samples("a"))
        assert both.counts() == {"requests": 2, "cost": pytest.approx(2 * 100 * 2 / 1e6)}
    with serving(by_length) as served, pytest.raises(RewardFailed, match="its server counts no tokens"):
        judge_of(served, max_cost=1.0, prompt_price=1.0)(samples("a"))
    (file, *_) = (tmp_path / "judge").glob("spent-*")
    file.write_bytes(b"\0" * 50)
    with pytest.raises(RewardFailed, match=r"spent-.* is damaged; write the numbers"):
        judge_of("http://127.0.0.1:9/v1", max_cost=1.0, **prices).counts()


def test_the_key_is_sent_and_kept_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server that repeats it wherever it can."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving(in_turn(completion(f"{KEY} 5"), Reply(f"bad key {KEY}", 401))) as served:
        judge = judge_of(served, key_env="JUDGE_KEY", cache=str(tmp_path))
        assert scores(judge, "a") == [5.0]
        with pytest.raises(RewardFailed, match=r"HTTP 401: bad key \*\*\*") as failed:
            judge(samples("b"))
    assert served.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in str(failed.value) + "".join(file.read_text() for file in tmp_path.iterdir())
    assert KEY not in repr(judge.__dict__)


def test_answers_are_kept_with_what_was_asked(tmp_path: Path) -> None:
    with serving(lambda body: completion("5", LIKELIEST)) as served:
        judge_of(served, read="likelihood", cache=str(tmp_path))(samples("é"))
    (record,) = records(tmp_path)
    assert record["model"] == "m"
    assert record["messages"] == [{"role": "user", "content": "p -> é"}]
    assert record["text"] == "5"
    assert record["likeliest"] == [list(pair) for pair in LIKELIEST]
    assert record["attempts"] == 1


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("answers-*.jsonl")) for line in file.open()]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3.0), ("-1", 0.0), ("Thu, 01 Jan 1970 00:01:40 GMT", 60.0), ("soon", None), ("", None)],
)
def test_retry_after_is_seconds_or_a_date(header: str, seconds: float | None) -> None:
    assert retry_after_s(header, now=40.0) == seconds


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    return


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": "localhost:8000"}, r"args\.url: given 'localhost:8000'; must be the URL of an API"),
        ({"url": "http://h:99999/v1"}, r"args\.url: .*must be the URL"),
        ({"url": f"http://me:{KEY}@h/v1"}, r"args\.url: given '\(not shown\)'; must hold no user, password or query"),
        ({"url": f"http://h/v1?key={KEY}"}, r"args\.url: given '\(not shown\)'; must hold no user"),
        ({"url": "http://h/v1/chat/completions"}, r"args\.url: given .*; must be without /chat/completions"),
        ({"key_env": KEY}, r"args\.key_env: given '\(not shown\)'; must be the name of an environment variable"),
        ({"key_env": "JUDGE_KEY"}, r"args\.key_env: given 'JUDGE_KEY'; there is no such environment variable"),
        ({"key_env": "abcdef0123"}, r"args\.key_env: given '\(not shown\)'; there is no such environment variable"),
        ({"api_key": KEY}, r"args\.api_key: given '\(not shown\)'; no such argument; judge takes url"),
        ({"on_unparsed": None}, r"args\.on_unparsed: given null; must be a number"),
        ({"read": "tea leaves"}, r"args\.read: given 'tea leaves'; must be likelihood or text"),
        ({"timeout_s": 0.0}, r"args\.timeout_s: given 0"),
        ({"retry_s": 1.0, "timeout_s": 2.0}, r"args\.retry_s: given 1; must be timeout_s \(2\) or more"),
        ({"retry_s": math.nan}, r"args\.retry_s: given nan; must be finite, and above 0 seconds"),
        ({"body": {"stream": True}}, r"args\.body\.stream: given true; answers are read as a whole: leave it out"),
        ({"body": {"messages": ["x"]}}, r"args\.body\.messages: given .*the messages come from the rubric"),
        ({"max_requests": 0}, r"args\.max_requests: given 0; must be 1 or more"),
        ({"max_cost": 1.0}, r"args\.max_cost: given 1; needs prompt_price or completion_price above 0"),
        ({"max_cost": math.nan, "prompt_price": 1.0}, r"args\.max_cost: given nan; must be finite, and above 0"),
        ({"prompt_price": -1.0}, r"args\.prompt_price: given -1; must be 0 or more"),
    ],
)
@pytest.mark.usefixtures("no_key")
def test_settings_that_cannot_work_are_refused_by_their_key(given: dict[str, Any], said: str) -> None:
    args = {"url": "http://h/v1", "model": "m", "rubric": RUBRIC, "on_unparsed": 0.0} | given
    with pytest.raises(UnfitReward, match=r"reward\.parts\.judge\." + said) as refused:
        build_reward("judge", args, "reward.parts.judge")
    assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://[::1]/v1", True),
        ("http://localhost/v1", True),
        ("https://judge.example/v1", True),
        ("http://judge.example/v1", False),
        ("http://10.0.0.7:8000/v1", False),
        ("http://127.0.0.1.example/v1", False),
    ],
)
def test_a_key_is_not_sent_in_the_clear_to_another_host(url: str, sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    build_reward("judge", judge_args(url), "reward.parts.judge")
    if sent:
        build_reward("judge", judge_args(url, key_env="JUDGE_KEY"), "reward.parts.judge")
        return
    with pytest.raises(UnfitReward, match=r"reward\.parts\.judge\.args\.url: given .*plain http to another host"):
        build_reward("judge", judge_args(url, key_env="JUDGE_KEY"), "reward.parts.judge")


def test_an_ensemble_of_judges_keeps_what_each_measured() -> None:
    with serving(in_turn(completion("4"), completion("what?"))) as served:
        args = judge_args(served, on_unparsed=2.0)
        members = {"a": {"kind": "judge", "args": args}, "b": {"kind": "judge", "args": args}}
        given = build_reward("ensemble", {"members": members}, "reward")(samples("x"))
    assert given == Scored({"": [3.0]}, [1.0], {"a-unparsed": [0.0], "b-unparsed": [1.0]})


def test_it_is_asked_where_an_event_loop_runs_already() -> None:
    """In a notebook, whose cells are run by one; what goes wrong is said as elsewhere."""

    async def cell(url: str, response: str) -> list[float]:
        return scores(judge_of(url), response)

    with serving(in_turn(by_length, Reply("no such model", 404))) as served:
        assert asyncio.run(cell(served.url, "aaa")) == [3.0]
        with pytest.raises(RewardFailed, match="HTTP 404"):
            asyncio.run(cell(served.url, "b"))


def test_an_interrupt_where_an_event_loop_runs_ends_the_asking_too(request: pytest.FixtureRequest) -> None:
    """Otherwise a notebook would hang for all of `retry_s`."""
    # Who starts the tests in the background of a script has them ignore SIGINT.
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)

    ended = threading.Event()

    def judge(body: Mapping[str, Any]) -> Reply:
        os.kill(os.getpid(), signal.SIGINT)
        ended.wait(60)  # an answer that came before the interrupt would be asked for again
        return Reply("", cut=True)

    async def cell(url: str) -> None:
        judge_of(url, timeout_s=200, retry_s=200)(samples("a"))

    loop = asyncio.new_event_loop()
    with serving(judge) as served:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell(served.url))
        ended.set()
    loop.close()
    assert len(served.asked) == 1
