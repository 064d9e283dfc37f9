"""Tasks of `reasoning-gym` and their scorers. The scorers run in a sandbox, since they may evaluate an answer as
Python.

Only this module imports reasoning_gym. It does so when a task is needed, because the import takes a second.
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


class TaskScorer:
    """Scores answers to the tasks of the package `reasoning-gym`. Implements `AnswerScoring` (sandbox/answers.py)."""

    def __init__(self, extract: Extract) -> None:
        self._extract = extract
        known_tasks()  # imports the library, before there are forks

    def text_to_evaluate(self, fields: Mapping[str, Any]) -> str:
        return self._answer(fields["response"]) or ""

    def prepare(self, fields: Mapping[str, Any]) -> Callable[[], float]:
        """Generate the problem of a prompt again, and return a function that scores the response. `fields`:
        `response`, and `problem` with the prompt's fields. Raises RewardFailed if the answer of the generated problem
        differs from the field `answer` of the prompt."""
        asked = fields["problem"]
        task = make_task(asked["task"], json.dumps(asked["settings"], sort_keys=True))
        problem = _problem(task, int(asked["index"]))
        if str(problem["answer"]) != asked["answer"]:
            name = f"{asked['task']} {asked['index']}"
            need = f"its answer is {problem['answer']!r} here and was {asked['answer']!r} (another version?)"
            raise RewardFailed(f"problem {name} differs from the run's prompt; {need}")
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
    """Return the last text between `<answer>` and `</answer>`, or None if there is none.
    reasoning_gym.utils.extract_answer returns the same, but its regular expression takes quadratic time if many
    `<answer>` are never closed. This function takes linear time."""
    text, position = None, 0
    while (start := response.find(_OPEN, position)) >= 0 and (end := response.find(_CLOSE, start + len(_OPEN))) >= 0:
        text, position = response[start + len(_OPEN) : end].strip(), end + len(_CLOSE)
    return text


def known_tasks() -> Mapping[str, Any]:
    """Return the tasks that the package `reasoning-gym` offers: name -> (class, class of its settings)."""
    tasks: Mapping[str, Any] = importlib.import_module("reasoning_gym.factory").DATASETS
    return tasks


@functools.lru_cache(maxsize=8)
def make_task(name: str, settings: str) -> Any:
    """Return the task `name` with these settings, given as JSON."""
    return importlib.import_module("reasoning_gym").create_dataset(name, **json.loads(settings))


@functools.lru_cache(maxsize=4096)
def _problem(task: Any, index: int) -> Mapping[str, Any]:
    problem: Mapping[str, Any] = task[index]
    return problem
