"""The reach of code in a sandbox: a model's text, which some scorers evaluate, and a user's own reward."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from reasoning_gym.utils import extract_answer

from pipeline.config.paths import RunPaths
from stages.prompts import read_source
from stages.rewards.config import NO_PERMISSIONS, PartConfig, Permissions, RewardPartsConfig, parts_problems
from stages.rewards.protocol import RewardFailed, Sample, Scored
from stages.rewards.reasoning import ReasoningReward
from stages.rewards.reasoning_tasks import last_tagged
from stages.rewards.registry import UnfitReward, build_parts, build_reward, close_parts
from stages.rewards.sandbox import kernel, process
from stages.rewards.sandbox.answers import may_run_code
from stages.rewards.user import UserReward
from storage.config import PromptsConfig
from tests.support.paths import ROOT
from tests.support.waiting import until

OWN = "tests.support.own_rewards"
KEY = "CANARY_OF_A_KEY"
WAYS = {"all": process.USED, "no namespaces": ("landlock", "seccomp")}
"""Protections that a host may offer for scoring evaluated text."""

pytestmark = pytest.mark.skipif(kernel.landlock_version() < 6, reason="this kernel cannot confine what is shown here")


@pytest.fixture(scope="module", params=WAYS, ids=lambda name: name.replace(" ", "_"))
def way(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "USED", WAYS[request.param])
        patch.setenv(KEY, "secret")
        yield WAYS[request.param]


@pytest.fixture(scope="module")
def reasoning(way: tuple[str, ...]) -> Iterator[ReasoningReward]:
    with closing(ReasoningReward(timeout_s=3.0)) as made:
        yield made


def problem(task: str, answer: str, row: int = 0) -> Sample:
    (item, *_) = read_source(PromptsConfig(url=f"reasoning-gym:{task}?size=1&seed=5"))
    return Sample(item.text or "", f"<answer>{answer}</answer>", extra=json.loads(json.dumps(item.extra)), row=row)


def evaluated(expression: str) -> Sample:
    """An answer to `spiral_matrix` that is the right list if the expression is true. It is evaluated as Python."""
    right = str(problem("spiral_matrix", "").extra["answer"]).split()
    return problem("spiral_matrix", f"{right} if ({expression}) else ()")


@pytest.mark.parametrize("task", ["countdown", "puzzle24", "simple_integration", "string_insertion", "n_queens"])
def test_an_answer_that_starts_a_program_leaves_nothing(reasoning: ReasoningReward, task: str, tmp_path: Path) -> None:
    """The scorers of these tasks run it: `eval`, or `sympy.parse_expr`."""
    reasoning([problem(task, f"__import__('os').system('touch {tmp_path}/touched')")])
    assert not (tmp_path / "touched").exists()


def test_an_answer_that_is_evaluated_reaches_nothing(reasoning: ReasoningReward, tmp_path: Path) -> None:
    """Each of these works for the worker, and for no answer."""
    (tmp_path / "file").write_text("x")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        tries = [
            f"open('{tmp_path}/file').read()",
            f"open('{tmp_path}/file', 'w') is not None",
            f"__import__('os').chmod('{tmp_path}/file', 0o777) is None",
            "open('/dev/shm/left', 'w') is not None",
            f"open('/proc/{os.getpid()}/environ', 'rb').read()",
            f"open('/proc/{os.getpid()}/mem', 'rb') is not None",
            f"__import__('os').kill({os.getpid()}, 0) is None",
            f"__import__('fcntl').fcntl(0, 8, {os.getpid()}) is not None",  # F_SETOWN: whom a file signals
            f"{KEY!r} in __import__('os').environ",
            f"__import__('socket').create_connection(('127.0.0.1', {port}))",
            "__import__('socket').socket(__import__('socket').AF_UNIX)",
            "__import__('os').fork() + 1",
            "__import__('subprocess').run(['true']).returncode == 0",
        ]
        found = reasoning([evaluated(expression) for expression in ("1 + 1 == 2", *tries)])
    assert found.parts[""] == [0.1] + [0.0] * len(tries)


def test_a_runaway_answer_is_stopped_and_wrong(reasoning: ReasoningReward, capfd: pytest.CaptureFixture[str]) -> None:
    right = problem("countdown", "")
    answers = ["9**9**9**9", str(right.extra["answer"]), "__import__('sys').exit(0)", str(right.extra["answer"])]
    found = reasoning([problem("countdown", answer, row) for row, answer in enumerate(answers)])
    assert found == Scored({"": [0.0, 1.0, 0.0, 1.0]}, None, {"stopped": [1.0, 0.0, 1.0, 0.0]})
    assert "2 of 4 answers were stopped and count as wrong; the first: row 0" in capfd.readouterr().err


def test_an_answer_that_fills_the_memory_is_wrong_and_the_next_is_scored(reasoning: ReasoningReward) -> None:
    hog = "bytearray(1 << 33) and True"
    assert reasoning([evaluated(hog), evaluated("True")]).parts == {"": [0.0, 0.1]}


def test_an_answer_changes_the_score_of_no_other(reasoning: ReasoningReward) -> None:
    """One that replaces its scorer by one that always says 1 gets that itself at most."""
    where = "__import__('reasoning_gym.algorithmic.spiral_matrix', fromlist=['x']).SpiralMatrixDataset"
    patch = f"[setattr({where}, 'score_answer', lambda *a: 1.0)]"
    comprehended = f"[0 for {where}.score_answer in [lambda *a: 1.0]]"
    answers = [problem("spiral_matrix", text) for text in (patch, "no", comprehended, "no")]
    assert reasoning(answers).parts[""][1::2] == [0.0, 0.0]


def test_a_string_that_is_evaluated_again_changes_the_score_of_no_other(reasoning: ReasoningReward) -> None:
    """sympy evaluates a string that an answer comes to, and a string can spell a call without a parenthesis."""
    where = '__import__("reasoning_gym.algebra.simple_integration", fromlist=["x"]).SimpleIntegrationDataset'
    always = '__import__("unittest.mock", fromlist=["x"]).Mock(return_value=1.0)'
    patch = f'setattr({where}, "score_answer", {always})'.replace("(", r"\x28")
    answers = [problem("simple_integration", text) for text in (f"'{patch}'", "no")]
    assert reasoning(answers).parts[""][1] == 0.0


def test_a_flooding_answer_is_stopped_at_once(reasoning: ReasoningReward, capfd: pytest.CaptureFixture[str]) -> None:
    """Its own memory is limited; the memory of the process that reads its score is not."""
    write = "[{os}.write(3, b) for b in [(1 << 62).to_bytes(8, 'big'), *[bytes(1 << 20)] * 10**6]]"
    levels = "{os}.write(3, (10**5).to_bytes(8, 'big') + b'[' * 10**5) and [0][1]"
    for text in (write, levels):
        found = reasoning([evaluated(text.format(os="__import__('os')")), evaluated("True")])
        assert found == Scored({"": [0.0, 0.1]}, None, {"stopped": [1.0, 0.0]})
        assert "row 0 wrote over its score" in capfd.readouterr().err


def test_tags_that_never_close_take_no_time(reasoning: ReasoningReward) -> None:
    """The library looks for them in the square of their number, outside the time for an answer."""
    begun = time.thread_time()
    reasoning([dataclasses.replace(problem("countdown", ""), response="<answer>" * 50_000)])
    assert time.thread_time() - begun < 5


def test_answers_are_where_the_library_finds_them() -> None:
    draw = random.Random(0)
    for _ in range(2_000):
        text = "".join(draw.choices(["<answer>", "</answer>", " ", "\n", "a", "<"], k=draw.randrange(10)))
        assert last_tagged(text) == extract_answer(text)


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("(3 + 4) * [5][0]", False),
        ("knight and knave", False),
        (r"\frac{3}{4}", False),
        ("it's 5% more, e.g. 3.5 kg", True),
        ("Zoey's a knave. Riley is a knight", False),
        ("f(x)", True),
        (r"'print\x285\x29'", True),
        ("'print%c5%c' % 40", True),
        ("__doc__[3]", True),
        ("[0 for np.x in [1]]", True),
        ("[x := 1]", True),
    ],
)
def test_only_a_name_with_a_call_or_an_assignment_runs_code(text: str, may: bool) -> None:
    assert may_run_code(text) is may


@pytest.mark.parametrize("used", [(), ("namespaces",), ("landlock",), ("namespaces", "seccomp")])
def test_unprotected_answers_are_evaluated_only_if_trusted(
    used: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "USED", used)
    with pytest.raises(UnfitReward, match="may evaluate sampled text, and this host cannot keep") as refusal:
        build_parts(RewardPartsConfig(kind="reasoning_gym"), "evaluate.reward")
    assert refusal.value.problem.key == "reward.trust_answers"
    parts = build_parts(RewardPartsConfig(kind="reasoning_gym"), "evaluate.reward", trust_answers=True)
    close_parts(parts)


# ---- users' own ------------------------------------------------------------------------------------------------------


def own(name: str, allowed: Permissions = NO_PERMISSIONS, directory: Path | None = None, **args: object) -> UserReward:
    made = build_reward(f"{OWN}:{name}", args, "reward", 60.0, directory, allowed)
    assert isinstance(made, UserReward)
    return made


def works(reward: UserReward, *expressions: str) -> list[float]:
    found = reward([Sample("", text) for text in expressions])
    assert isinstance(found, list)
    return found


def test_a_users_own_reads_but_reaches_neither_network_nor_worker(way: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with socket.socket() as listening, closing(own("does")) as reward:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert works(reward, f"open('{tmp_path}/file').read()", "open(os.environ['TMPDIR'] + '/x', 'w')") == [1, 1]
        refused = [
            f"open('{tmp_path}/new', 'w')",
            f"open('/proc/{os.getpid()}/environ', 'rb').read()",
            f"open('/proc/{os.getpid()}/mem', 'rb')",
            f"os.kill({os.getpid()}, 0)",
            f"__import__('socket').create_connection(('127.0.0.1', {port}))",
            "__import__('socket').socket(__import__('socket').AF_NETLINK, __import__('socket').SOCK_RAW)",
        ]
        assert works(reward, *refused) == [0.0] * len(refused)
    assert not (tmp_path / "new").exists()


def test_a_users_own_has_what_its_part_names(way: tuple[str, ...], tmp_path: Path) -> None:
    """The network, a variable and a folder; the run's keys stay hidden, where a folder can be hidden."""
    keys = RunPaths(tmp_path / "run").attached
    keys.mkdir(parents=True)
    (keys / "key").write_text("secret")
    allowed = Permissions(network=True, environment=(KEY,), writes=(str(tmp_path),))
    with socket.socket() as listening, closing(own("does", allowed, tmp_path / "run")) as reward:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        connects = f"__import__('socket').create_connection(('127.0.0.1', {listening.getsockname()[1]}))"
        assert works(reward, connects, f"open('{tmp_path}/new', 'w')", f"1 / ({KEY!r} in os.environ)") == [1, 1, 1]
        assert works(reward, f"open('{keys}/key')") == [float("namespaces" not in way)]
    assert (tmp_path / "new").exists()


def test_a_users_own_has_no_variable_that_it_was_not_promised(way: tuple[str, ...]) -> None:
    with closing(own("does")) as reward, pytest.raises(RewardFailed, match="KeyError"):
        works(reward, f"os.environ[{KEY!r}]")


def test_a_users_own_may_use_processes(way: tuple[str, ...]) -> None:
    with closing(own("pooled")) as reward:
        assert reward([Sample("", "aei"), Sample("", "x")]) == [3.0, 0.0]


def test_only_the_process_that_was_asked_answers(way: tuple[str, ...]) -> None:
    """A child that comes back from the function answered first, and the other answer was the next batch's."""
    with closing(own("comes_back_twice")) as reward:
        assert [reward([Sample("", "x", row=row)]) for row in (1, 2)] == [[1.0], [2.0]]


def test_what_is_no_message_ends_the_batch_with_a_word(way: tuple[str, ...]) -> None:
    with closing(own("writes_over")) as reward, pytest.raises(RewardFailed, match="answered is no message"):
        reward([Sample("", "x")])


@pytest.mark.parametrize(
    ("allowed", "key"),
    [
        (Permissions(environment=("NO_SUCH_VARIABLE",)), "environment"),
        (Permissions(writes=("/no/such/folder",)), "writes"),
    ],
)
def test_what_cannot_be_granted_is_refused(allowed: Permissions, key: str) -> None:
    with pytest.raises(UnfitReward, match="there is no such") as refusal:
        own("vowels", allowed)
    assert refusal.value.problem.key == f"reward.{key}"


def test_only_code_of_ones_own_is_granted_anything() -> None:
    config = RewardPartsConfig(parts={"a": PartConfig("vader", network=True), "b": PartConfig("m:f", network=True)})
    assert [problem.key for problem in parts_problems(config, "reward")] == ["reward.parts.a.network"]


def started(marker: str) -> list[psutil.Process]:
    """The processes with a number of a test's own among their arguments."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        if marker in (one.info["cmdline"] or ()):
            found.append(one)
    return found


def bred(reward: UserReward, marker: str) -> list[psutil.Process]:
    """All that its sandbox runs, once it has left things behind."""
    assert reward([Sample("", "x")]) == [2.0]
    keeper = psutil.Process(reward._sandbox._child.process.pid)  # type: ignore[union-attr]
    until(lambda: started(marker))
    found = [keeper, *keeper.children(recursive=True), *started(marker)]
    assert len({*found}) >= 5  # keeper, code, two of the pool, the daemon
    return found


@pytest.mark.parametrize("end", ["timeout", "close"])
def test_nothing_that_it_started_is_left(way: tuple[str, ...], end: str) -> None:
    """A pool's processes hold the code's end of the channel; a daemon has a session and a parent of its own."""
    marker = f"36{os.getpid()}"
    with closing(own("breeds", marker=marker)) as reward:
        found = bred(reward, marker)
        if end == "timeout":
            reward._timeout_s = 0.2
            with pytest.raises(RewardFailed, match=r"took longer than 0\.2 s"):
                reward([Sample("", "hang")])
        else:
            reward.close()
        assert [one for one in found if one.is_running()] == []


OWNER = """
import sys, time
from stages.rewards.protocol import Sample
from stages.rewards.registry import build_reward
from stages.rewards.sandbox import process
process.USED = {used}
reward = build_reward("tests.support.own_rewards:breeds", {{"marker": "{marker}"}}, "reward")
reward([Sample("", "x")])
print(reward._sandbox._child.process.pid, flush=True)
time.sleep(600)
"""


def test_nothing_is_left_of_a_worker_that_was_killed(way: tuple[str, ...]) -> None:
    marker = f"37{os.getpid()}"
    code, environment = OWNER.format(used=way, marker=marker), {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    keeper = psutil.Process(int(owner.stdout.readline()))
    until(lambda: started(marker))
    found = [keeper, *keeper.children(recursive=True), *started(marker)]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until(lambda: not any(one.is_running() for one in found))
