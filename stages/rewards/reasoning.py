"""Prompts from tasks of `reasoning-gym`, generated from a seed, and a reward that uses the library's own scorers.

    prompts.url: reasoning-gym:chain_sum?size=500&seed=1&max_terms=3&instruction=tags

The URL has the task, the number of problems and their seed, the task's own settings, and the instruction after each
question. A prompt's fields identify its problem, and the scorer generates the problem again from them. The problem
itself is not stored, since its data (fractions, graphs, boards) does not always survive JSON. Scorers run in a sandbox
(reasoning_tasks.py).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args
from urllib.parse import parse_qsl

from stages.rewards.config import NO_PERMISSIONS, REASONING_SCHEME, Permissions
from stages.rewards.protocol import Reward, Sample, Scored
from stages.rewards.reasoning_tasks import Extract, known_tasks, make_task
from stages.rewards.sandbox.answers import ANSWER_S, STOPPED, AnswerScorer
from storage.config import PromptsConfig
from storage.prompts import PromptItem, PromptsError

INSTRUCTIONS = {
    "none": "",
    "tags": "\nGive the final answer between <answer> and </answer>, and nothing after it.",
}
"""Value of `instruction=` in the URL -> text that follows each question. Any other value is itself the text that
follows."""


class ReasoningReward(Reward):
    """The score that a task's own scorer gives to the response's answer: 1 for the right answer, 0 for no answer. Some
    tasks give partial scores. Only for prompts of `reasoning-gym:`.

    The scorer runs in a sandbox, because many of the library's scorers evaluate the answer as Python.
    """

    deterministic = True
    early = True  # an answer that is evaluated may take seconds

    def __init__(
        self, extract: Extract = "tags", timeout_s: float = ANSWER_S, _allowed: Permissions = NO_PERMISSIONS
    ) -> None:
        """`extract`: the part of a response that counts as its answer. `tags`: the last text between <answer> and
        </answer>. `last_number`: the last number. `all`: the whole response. `timeout_s`: time limit of one answer, in
        seconds; a slower answer counts as wrong. Raises UnconfinedAnswers if this host cannot confine evaluated text,
        unless the config trusts answers."""
        if extract not in get_args(Extract):
            raise ValueError(f"extract is {extract!r}: must be one of {', '.join(get_args(Extract))}")
        args = {"extract": extract}
        trust = _allowed.trust_answers
        self._scorer = AnswerScorer("stages.rewards.reasoning_tasks:TaskScorer", args, timeout_s, trust=trust)
        self.protections = self._scorer.protections

    def __call__(self, samples: Sequence[Sample]) -> Scored:
        for sample in samples:
            if not {"task", "index", "settings"} <= sample.extra.keys():
                need = f"no problem of reasoning-gym (prompts.url={REASONING_SCHEME}TASK): {sample.prompt[:60]!r}"
                raise ValueError(f"row {sample.row} is {need}")
        asked = [{"row": s.row, "response": s.response, "problem": s.extra} for s in samples]
        scores, stopped = self._scorer(asked)
        return Scored({"": scores}, None, {STOPPED: stopped})

    def close(self) -> None:
        self._scorer.close()


def load_problems(config: PromptsConfig) -> list[PromptItem]:
    """Return the prompts of a `reasoning-gym:` source. Each prompt has the fields answer, task, index and settings.

    Raises:
        PromptsError: the task is unknown (the message lists similar names), a setting is unknown (the message lists the
            task's settings), or the library refuses the settings."""
    name, _, query = config.url.removeprefix(REASONING_SCHEME).partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    settings = {key: _value(text) for key, text in pairs if key != "instruction"}
    instruction = dict(pairs).get("instruction", "none")
    settings = {"seed": 0, "size": 500} | settings
    _check(config.url, name, settings)
    try:
        task = make_task(name, json.dumps(settings, sort_keys=True))
        made = [task[index] for index in range(int(settings["size"]))]
    except (AssertionError, ValueError, TypeError) as error:  # raised by the library's own checks
        why = str(error) or type(error).__name__
        raise PromptsError(f"prompts.url: given {config.url!r}; {name} refuses {settings}: {why}") from error
    items = []
    for index, problem in enumerate(made):
        text = problem["question"] + INSTRUCTIONS.get(instruction, f"\n{instruction}")
        extra = {"answer": str(problem["answer"]), "task": name, "index": index, "settings": settings}
        chat = [{"role": "user", "content": text}] if config.format == "chat" else None
        items.append(PromptItem(None if chat else text, chat, extra))
    return items


def _check(url: str, name: str, settings: Mapping[str, Any]) -> None:
    tasks = known_tasks()
    if name not in tasks:
        near = difflib.get_close_matches(name, tasks, n=5, cutoff=0.4)
        some = f"near it: {', '.join(near)}; " if near else ""
        need = f"no such task; {some}all {len(tasks)} are in reasoning_gym.factory.DATASETS"
        raise PromptsError(f"prompts.url: given {url!r}; {name!r}: {need}")
    known = [field.name for field in dataclasses.fields(tasks[name][1])]
    for setting in settings:
        if setting not in known:
            need = f"{name} has no {setting!r}; it has {', '.join(known)}, and instruction"
            raise PromptsError(f"prompts.url: given {url!r}; {need}")
    if not isinstance(settings["size"], int) or settings["size"] < 1 or not isinstance(settings["seed"], int):
        raise PromptsError(f"prompts.url: given {url!r}; size must be 1 or more, seed a whole number")


def _value(text: str) -> Any:
    """Return the value of a text that is JSON (a number, `true`, a list). Return any other text unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text
