"""A reward from a reward model in Hugging Face layout: what `stageline reward train` exports, or any causal language
model with one score for a row.

    a row's token ids, as they were sampled ──► + EOS, where they do not end in one ──► the head at the last token

Settings are checked when the reward is built; the model itself is loaded with the first rows, in a process that scores.

May import safetensors, stages.models and stages.rewards.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from safetensors import SafetensorError

from stages.models.hf_config import read_eos_ids
from stages.models.hf_files import read_tokenizer, tensor_shape
from stages.models.reward_files import head_problem, is_classifier
from stages.models.spec import SCORE_WEIGHT, read_spec
from stages.rewards.protocol import Sample
from stages.rewards.registry import UnfitReward
from stages.rewards.resident import DTYPES, EACH_ALONE, HERE, Holds, Loading
from storage.problems import Problem

_WANTED = "give the directory of a reward model: RUN/model, which `stageline reward train` exports"


class ModelReward:
    """Owns its use of a reward model of this process. The score of prompt, response and EOS is the model's, bias
    included, of the token ids that were sampled."""

    def __init__(self, path: str, dtype: str = "float32", batch_tokens: int | None = None) -> None:
        """Raises UnfitReward, naming the argument.

        Args:
            path: the model's directory.
            dtype: of its forward.
            batch_tokens: rows are packed into passes of so many tokens; None: each row has a pass to itself, so that
                its score is the same whatever is scored beside it.
        """
        wrong = _path_problem(path)
        if wrong is not None:
            raise UnfitReward(Problem("path", path, wrong))
        if dtype not in DTYPES:
            raise UnfitReward(Problem("dtype", dtype, f"must be {' or '.join(DTYPES)}"))
        if batch_tokens is not None and (type(batch_tokens) is not int or batch_tokens < 1):
            need = "must be a number of tokens, 1 or more (4096, say), or null: every row by itself"
            raise UnfitReward(Problem("batch_tokens", batch_tokens, need))
        self.batch_tokens = batch_tokens
        self.deterministic = batch_tokens is None
        self._eos_ids = read_eos_ids(path) or read_tokenizer(path).eos_ids
        self._loading = Loading(Holds.REWARD, path, dtype, batch_tokens or EACH_ALONE)
        self._model: Any = None

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        rows = importlib.import_module("stages.models.reward_rows")
        with HERE.lock:
            if self._model is None:
                self._model = HERE.take(self._loading)
            ids = [rows.ended([*sample.prompt_ids, *sample.response_ids], self._eos_ids) for sample in samples]
            return [float(score) for score in self._model.scores(rows.TokenRows.of(ids))]

    def close(self) -> None:
        if self._model is not None:
            self._model = None
            HERE.give_back(self._loading)


def _path_problem(path: object) -> str | None:
    """Why there is no reward model at a path; None where there is one."""
    if not isinstance(path, str) or not path:
        return f"is no path: {_WANTED}"
    try:
        spec = read_spec(path)
        if not is_classifier(path):
            return f"its config.json names no model for sequence classification, so that it has no head: {_WANTED}"
        if tensor_shape(path, SCORE_WEIGHT) is None:
            return f"its files have no {SCORE_WEIGHT}: {_WANTED}"
        wrong = head_problem(path, spec)
        if wrong is None and not read_eos_ids(path):
            read_tokenizer(path)
    except (OSError, ValueError, SafetensorError) as error:
        return f"{error}. To score with a model {_WANTED}"
    return wrong
