"""A user's own reward in a process of its own: what it is shown, what it may do wrong, and that it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.rewards.protocol import RewardFailed, Sample, Scored
from stages.rewards.registry import UnfitReward, build_reward
from stages.rewards.user import UserReward
from tests.support.paths import ROOT
from tests.support.waiting import TIMEOUT_S, until

OWN = "tests.support.own_rewards"
SAMPLES = [Sample("p", text, row=row) for row, text in enumerate(["ab", "xyz", "euoia"], start=30)]


@contextmanager
def reward(name: str, timeout_s: float = 60.0, **args: Any) -> Iterator[UserReward]:
    made = build_reward(f"{OWN}:{name}", args, "reward", timeout_s)
    assert isinstance(made, UserReward)
    try:
        yield made
    finally:
        made.close()


def tree(made: UserReward) -> list[psutil.Process]:
    """The processes of its sandbox, from the keeper to the one that the function runs in."""
    keeper = psutil.Process(made._sandbox._child.process.pid)
    return [keeper, *keeper.children(recursive=True)]


def test_a_function_a_class_and_named_parts() -> None:
    with reward("vowels", gain=2.0) as vowels:
        assert vowels(SAMPLES) == [2.0, 0.0, 10.0]
        assert (vowels.deterministic, vowels.batch_tokens) == (True, None)
    with reward("Prefix", text="x") as prefix:
        assert prefix(SAMPLES) == Scored({"": [0.0, 1.0, 0.0]}, [0.25] * 3)
        assert prefix.batch_tokens == 64
    with reward("two_parts") as parts:
        assert parts(SAMPLES) == Scored({"long": [2.0, 3.0, 5.0], "done": [1.0] * 3})
    with reward("measures") as measures:
        assert measures(SAMPLES) == Scored({"": [1.0] * 3}, None, {"length": [2.0, 3.0, 5.0]})
    with reward("Fickle") as fickle:
        assert not fickle.deterministic


def test_it_sees_all_of_a_sample() -> None:
    chat = ({"role": "user", "content": "ab"}, {"role": "assistant", "content": "x"})
    sample = Sample("ab", "x", True, {"answer": "5", "more": [1, 2]}, 7, (97, 98), (120, 2), chat)
    with reward("seen") as seen:
        assert seen([sample]) == [1.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("divides", ("raised ZeroDivisionError: division by zero", "row 31 (prompt 'p', response 'xyz')", "1 / (len(")),
        ("nothing", ("it returned None", "one number per sample", "rows 30 to 32")),
        ("texts", ("it returned '1.0' for sample 0",)),
        ("of_texts", ("raised TypeError", "each sample is an object with the fields prompt, response, ")),
        ("unwritable", ("raised PermissionError", "`writes: [PATH]`")),
        ("unreachable", ("raised RuntimeError", "`network: true`")),
        ("dies", ("ended with exit status 7", "rows 30 to 32 (a batch of 3)")),
        ("crashes", ("was ended by SIGSEGV", "rows 30 to 32 (a batch of 3)")),
        ("leaves", ("ended with exit status 1", "rows 30 to 32 (a batch of 3)")),
    ],
)
def test_what_goes_wrong_is_said_with_the_row(name: str, said: tuple[str, ...]) -> None:
    with reward(name) as made:
        with pytest.raises(RewardFailed) as failure:
            made(SAMPLES)
        for part in said:
            assert part in str(failure.value)


def test_a_batch_that_takes_too_long_is_ended_and_the_next_has_a_process_again() -> None:
    with reward("hangs", timeout_s=0.2) as made:
        for _ in range(2):
            with pytest.raises(RewardFailed, match=r"took longer than 0\.2 s .*rows 30 to 32"):
                made(SAMPLES)


def test_what_it_prints_stands_in_nobodys_way(capfd: pytest.CaptureFixture[str]) -> None:
    with reward("talks") as made:
        assert made(SAMPLES) == [1.0] * 3
    assert [len(text.strip()) for text in capfd.readouterr()] == [1 << 21] * 2


def test_a_process_that_was_killed_is_started_again() -> None:
    """Between two batches and in the middle of one: the batch is asked again, of a new process."""
    with reward("vowels") as made:
        before = tree(made)
        before[-1].kill()
        assert made(SAMPLES) == [1.0, 0.0, 5.0]
        after = tree(made)
        assert not {*before} & {*after}
    assert not any(process.is_running() for process in [*before, *after])


@pytest.mark.parametrize(
    ("kind", "args", "key", "said"),
    [
        ("nowhere:score", {}, "reward.kind", "there is no module nowhere in"),
        (f"{OWN}:vowls", {}, "reward.kind", "no function or class 'vowls'; it has vowels, two_parts, Prefix"),
        (f"{OWN}:vowels", {"gian": 1}, "reward.args", "no such argument: gian; tests.support.own_rewards:vowels takes"),
        (f"{OWN}:Prefix", {}, "reward.args", "text must be given"),
        (f"{OWN}:of_one", {}, "reward.args", "is called with one list of `Sample`, as its first argument (prompt)"),
        (f"{OWN}:of_one", {}, "reward.args", "response must be given"),
        ("os:path", {}, "reward.kind", "os has no function or class 'path'; it has stat_result, "),
        ("mine:", {}, "reward.kind", "given 'mine:'; your own reward must be module:function or module:Class"),
        ("__main__:f", {}, "reward.kind", "put it in a module file, my_reward.py for my_reward:f"),
        (":score", {}, "reward.kind", "given ':score'; your own reward must be module:function or module:Class"),
        (f"{OWN}:Uncallable", {}, "reward.kind", "needs a method __call__(samples)"),
        (f"{OWN}:OddBatches", {}, "reward.kind", "batch_tokens is 'many': must be an integer of 1 or more"),
        ("math:hypot", {}, "reward.kind", "cannot be inspected"),
    ],
)
def test_what_cannot_be_called_is_refused(kind: str, args: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(UnfitReward) as refusal:
        build_reward(kind, args, "reward")
    assert refusal.value.problem.key == key
    assert said in str(refusal.value)


def test_a_module_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_reward.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnfitReward, match=r"importing broken_reward raised ModuleNotFoundError.*no_such_library"):
        build_reward("broken_reward:score", {}, "reward")


OWNER = """
import sys, time
from stages.rewards.protocol import Sample
from stages.rewards.registry import build_reward
reward = build_reward("tests.support.own_rewards:{function}", {{}}, "reward", 60.0)
print(reward._sandbox._child.process.pid, flush=True)
if {busy}:
    reward([Sample("p", "r")])
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["idle", "busy", "stopped"])
def test_the_process_ends_with_its_worker(state: str) -> None:
    """A worker that is killed takes it along: idle, in the middle of a batch, or stopped."""
    code = OWNER.format(function="hangs" if state == "busy" else "vowels", busy=state == "busy")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(owner.stdout.readline()))
    if state == "stopped":
        child.suspend()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    child.wait(TIMEOUT_S)
    assert not child.is_running()


def test_a_process_that_is_gone_is_closed_too() -> None:
    with reward("vowels") as made:
        keeper, *_ = tree(made)
        keeper.kill()
        until(lambda: not keeper.is_running())
    made.close()
