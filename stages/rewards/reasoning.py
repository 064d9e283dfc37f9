"""Tasks of `reasoning-gym`: prompts made by seed, and their answers checked by the library's own scorers.

    prompts.url: reasoning-gym:chain_sum?size=500&seed=1&max_terms=3&instruction=tags

names a task, how many problems and of which seed, the task's own settings, and what is said after each question. A
prompt's fields say which problem it is; the scorer makes the problem again from them, since what a task knows of a
problem (fractions, graphs, boards) is not always what JSON gives back.

The one place that imports reasoning_gym, which takes a second: when it is needed. May import stages.rewards and
storage.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl

from stages.rewards.config import REASONING_SCHEME
from stages.rewards.protocol import RewardFailed, Sample
from stages.rewards.rules import last_number
from storage.config import PromptsConfig
from storage.prompts import PromptItem, PromptsError

INSTRUCTIONS = {
    "none": "",
    "tags": "\nGive the final answer between <answer> and </answer>, and nothing after it.",
}
"""What may be said after a question: `instruction=`; any other text is said as it is."""
Extract = Literal["tags", "last_number", "all"]


@dataclass(frozen=True)
class ReasoningReward:
    """What the task's own scorer makes of the response's answer: 1 for the right one, 0 for none; some tasks give a
    part for what is nearly right. For prompts of `reasoning-gym:`."""

    extract: Extract = "tags"
    """What of a response is its answer: the last text between <answer> and </answer>, its last number, or all of it."""
    deterministic = True

    def __post_init__(self) -> None:
        if self.extract not in get_args(Extract):
            raise ValueError(f"extract is {self.extract!r}: must be one of {', '.join(get_args(Extract))}")

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float:
        if not {"task", "index", "settings"} <= sample.extra.keys():
            need = f"no problem of reasoning-gym (prompts.url={REASONING_SCHEME}TASK): {sample.prompt[:60]!r}"
            raise ValueError(f"row {sample.row} is {need}")
        task = _task(sample.extra["task"], json.dumps(sample.extra["settings"], sort_keys=True))
        problem = _problem(task, int(sample.extra["index"]))
        if str(problem["answer"]) != sample.extra["answer"]:
            name = f"{sample.extra['task']} {sample.extra['index']}"
            need = f"its answer is {problem['answer']!r} here and was {sample.extra['answer']!r}: another reasoning-gym"
            raise RewardFailed(f"row {sample.row}: problem {name} is not what the run's prompts were made of; {need}")
        state = random.getstate()  # a scorer may draw, or seed
        try:
            return float(task.score_answer(self._answer(sample.response), problem))
        finally:
            random.setstate(state)

    def _answer(self, response: str) -> str | None:
        match self.extract:
            case "tags":
                found: str | None = importlib.import_module("reasoning_gym.utils").extract_answer(response)
                return found
            case "last_number":
                return last_number(response)
            case "all":
                return response.strip()


def problems(config: PromptsConfig) -> list[PromptItem]:
    """The prompts of a `reasoning-gym:` source. Each has the fields answer, task, index, settings. Raises PromptsError,
    naming what there is, for a task or a setting that there is not."""
    name, _, query = config.url.removeprefix(REASONING_SCHEME).partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    settings = {key: _value(text) for key, text in pairs if key != "instruction"}
    instruction = dict(pairs).get("instruction", "none")
    settings = {"seed": 0, "size": 500} | settings
    _check(config.url, name, settings)
    try:
        task = _task(name, json.dumps(settings, sort_keys=True))
        made = [task[index] for index in range(int(settings["size"]))]
    except (AssertionError, ValueError, TypeError) as error:  # what the library's own checks raise
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
    tasks = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in tasks:
        near = difflib.get_close_matches(name, tasks, n=5, cutoff=0.4)
        some = f"near it: {', '.join(near)}; " if near else ""
        need = f"no such task; {some}all {len(tasks)} are in reasoning_gym.factory.DATASETS"
        raise PromptsError(f"prompts.url: given {url!r}; {name!r}: {need}")
    known = [field.name for field in dataclasses.fields(tasks[name][1])]
    for setting in settings:
        if setting not in known:
            need = f"{name} has no {setting!r}, but {', '.join(known)}, and instruction"
            raise PromptsError(f"prompts.url: given {url!r}; {need}")
    if not isinstance(settings["size"], int) or settings["size"] < 1 or not isinstance(settings["seed"], int):
        raise PromptsError(f"prompts.url: given {url!r}; size must be 1 or more, seed a whole number")


@functools.lru_cache(maxsize=8)
def _task(name: str, settings: str) -> Any:
    """A task with its settings (JSON)."""
    return importlib.import_module("reasoning_gym").create_dataset(name, **json.loads(settings))


@functools.lru_cache(maxsize=4096)
def _problem(task: Any, index: int) -> Mapping[str, Any]:
    problem: Mapping[str, Any] = task[index]
    return problem


def _value(text: str) -> Any:
    """A number, a truth value or a list where it is one, as JSON writes them; else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
