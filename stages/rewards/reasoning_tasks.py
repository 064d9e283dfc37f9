"""Tasks of `reasoning-gym` and their scorers. The scorers run in a sandbox: they may evaluate an answer as Python.

The one place that imports reasoning_gym, which takes a second: when it is needed. Loads no other part of Stageline but
rewards.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from stages.rewards.protocol import RewardFailed
from stages.rewards.rules import last_number

_OPEN, _CLOSE = "<answer>", "</answer>"
Extract = Literal["tags", "last_number", "all"]


class Answers:
    """An `AnswerScoring` (sandbox/answers.py) for the library's tasks."""

    def __init__(self, extract: Extract) -> None:
        self._extract = extract
        known_tasks()  # imports the library, before there are forks

    def evaluated(self, fields: Mapping[str, Any]) -> str:
        return self._answer(fields["response"]) or ""

    def prepare(self, fields: Mapping[str, Any]) -> Callable[[], float]:
        """Make the problem of a response (`problem`: the prompt's fields). Raises RewardFailed where it is another one
        than the run's."""
        asked = fields["problem"]
        task = make_task(asked["task"], json.dumps(asked["settings"], sort_keys=True))
        problem = _problem(task, int(asked["index"]))
        if str(problem["answer"]) != asked["answer"]:
            name = f"{asked['task']} {asked['index']}"
            need = f"its answer is {problem['answer']!r} here and was {asked['answer']!r}: another reasoning-gym"
            raise RewardFailed(f"problem {name} is not what the run's prompts were made of; {need}")
        return lambda: task.score_answer(self._answer(fields["response"]), problem)

    def _answer(self, response: str) -> str | None:
        match self._extract:
            case "tags":
                return last_tagged(response)
            case "last_number":
                return last_number(response)
            case "all":
                return response.strip()


def last_tagged(response: str) -> str | None:
    """Return what reasoning_gym.utils.extract_answer does, in time that grows with the response's length; the library's
    regular expression takes the square of it where many `<answer>` are never closed."""
    found, position = None, 0
    while (start := response.find(_OPEN, position)) >= 0 and (end := response.find(_CLOSE, start + len(_OPEN))) >= 0:
        found, position = response[start + len(_OPEN) : end].strip(), end + len(_CLOSE)
    return found


def known_tasks() -> Mapping[str, Any]:
    """Return the library's tasks: name -> (class, class of its settings)."""
    tasks: Mapping[str, Any] = importlib.import_module("reasoning_gym.factory").DATASETS
    return tasks


@functools.lru_cache(maxsize=8)
def make_task(name: str, settings: str) -> Any:
    """Return a task with its settings (JSON)."""
    return importlib.import_module("reasoning_gym").create_dataset(name, **json.loads(settings))


@functools.lru_cache(maxsize=4096)
def _problem(task: Any, index: int) -> Mapping[str, Any]:
    problem: Mapping[str, Any] = task[index]
    return problem
