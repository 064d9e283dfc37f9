"""Rewards from reward models, and ensembles of rewards. Reward models are in Hugging Face layout. They are exports of
`stageline reward train`, or other causal language models with a head that gives a row one score.

    a row's token ids, as they were sampled ──► + EOS, if they do not end in one ──► the head at the last token

Settings are checked when the reward is built. The model is loaded when the first rows are scored, once per process.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from stages.models.config import LayoutConfig, ModelConfig, OptimizerConfig
from stages.models.hf_files import head_problem, is_classifier, read_tokenizer, tensor_shape
from stages.models.protocol import ALONE, Rank
from stages.models.spec import SCORE_WEIGHT, read_eos_ids, read_spec
from stages.rewards.config import NO_PERMISSIONS, Permissions, members_problems
from stages.rewards.protocol import Reward, Sample, Scored
from stages.rewards.registry import UnfitReward, build_reward, closing_on_error
from storage.problems import Problem

_WANTED = "give the directory of a reward model: RUN/model, which `stageline reward train` exports"

PASS_TOKENS = 4096
"""Default limit of the tokens in one forward pass of a scoring model."""


class ProcessModelReward(Reward):
    """Base class of rewards that score with a model in this process. The model is loaded when the first rows are
    scored."""

    _loading: LoadSettings
    _model: Any = None

    def loaded_model(self) -> Any:
        """Return the model, which is loaded at the first call. The caller must hold `PROCESS_MODELS.lock`."""
        if self._model is None:
            self._model = PROCESS_MODELS.acquire(self._loading)
        return self._model

    def follow(self, samples: Sequence[Sample]) -> None:
        self(samples)

    def close(self) -> None:
        if self._model is not None:
            self._model = None
            PROCESS_MODELS.release(self._loading)


class ModelReward(ProcessModelReward):
    """A reward model. It scores the token ids of prompt and response as they were sampled, with an EOS at the end. The
    score includes `reward_bias` of the model's config.json."""

    def __init__(self, path: str, dtype: str = "float32", batch_tokens: int | None = PASS_TOKENS) -> None:
        """Check the arguments. Raises UnfitReward, which names the argument that cannot work.

        Args:
            path: the model's directory.
            dtype: dtype of the forward pass.
            batch_tokens: maximum number of tokens of a forward pass, which packs several rows. None: one row per pass,
                so that a row's score does not depend on other rows.
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
        self._loading = LoadSettings(ModelKind.REWARD, path, dtype, batch_tokens or ONE_ROW_PER_PASS)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        rows = importlib.import_module("stages.models.reward_model")
        with PROCESS_MODELS.lock:
            ids = [rows.ended([*sample.prompt_ids, *sample.response_ids], self._eos_ids) for sample in samples]
            return [float(score) for score in self.loaded_model().scores(rows.TokenRows.of(ids))]


def _path_problem(path: object) -> str | None:
    """Return why there is no reward model at a path, or None if there is one."""
    if not isinstance(path, str) or not path:
        return f"is no path: {_WANTED}"
    try:
        spec = read_spec(path)
        if not is_classifier(path):
            return f"its config.json names no model for sequence classification, so it has no score head: {_WANTED}"
        if tensor_shape(path, SCORE_WEIGHT) is None:
            return f"its files have no {SCORE_WEIGHT}: {_WANTED}"
        wrong = head_problem(path, spec)
        if wrong is None and not read_eos_ids(path):
            read_tokenizer(path)
    except (OSError, ValueError, SafetensorError) as error:
        return f"{error}. To score with a model {_WANTED}"
    return wrong


# ---- resident --------------------------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16")
ONE_ROW_PER_PASS = 1
"""Value of `micro_batch_tokens` that gives each row a micro-batch of its own. A row with more tokens than the limit is
always alone in a micro-batch."""


class ModelKind(StrEnum):
    """Kind of a loaded model."""

    REWARD = "reward model"
    """A `RewardModel`."""
    LANGUAGE = "language model"
    """A language model that gives the likeliest next tokens after a prompt (class `NextTokens`)."""


@dataclass(frozen=True)
class LoadSettings:
    """A model, and the settings with which it is loaded."""

    kind: ModelKind
    path: str
    dtype: str
    micro_batch_tokens: int


class _ProcessModels:
    """The scoring models of this process, and their process group. Each model is loaded once for all its users. The
    models share the group, because Megatron keeps its groups in globals. The group has one rank, unless this process is
    a rank of a gang."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while a model computes: threads of one process take turns."""
        self._models: dict[LoadSettings, Any] = {}
        self._users: dict[LoadSettings, int] = {}
        self._membership: Any = None
        self._layout = LayoutConfig()
        self._rank: Rank | None = None
        """The process's rank in its gang; None: it belongs to no gang."""

    def join_gang(self, rank: Rank, layout: LayoutConfig) -> Any:
        """Join a gang until `leave_gang`, and return the membership (a `ParallelRank`). The ranks of the gang divide
        every model as `layout` says. Blocks until all ranks have joined. Afterwards every rank must acquire and use the
        same models in the same order."""
        assert self._membership is None, "this process holds scoring models already"
        self._membership = importlib.import_module("stages.models.parallel").join(rank, layout, seed=0)
        self._rank, self._layout = rank, layout
        return self._membership

    def leave_gang(self) -> None:
        """Leave the gang, if the process belongs to one. All rewards must be closed before."""
        if self._rank is not None:
            assert not self._models, "rewards still hold models of the gang"
            self._rank, self._layout = None, LayoutConfig()
            self._close_group()

    def sleep(self) -> None:
        """Move the models' weights off the devices until they are used again."""
        with self.lock:
            for model in self._models.values():
                model.sleep()

    def acquire(self, loading: LoadSettings) -> Any:
        """Return a model, which is loaded if necessary. The caller gives it back with `release`."""
        with self.lock:
            if loading not in self._models:
                self._models[loading] = self._load(loading)
            self._users[loading] = self._users.get(loading, 0) + 1
            return self._models[loading]

    def release(self, loading: LoadSettings) -> None:
        """Give a model back. The model is unloaded when its last user gives it back. If no model is left and the
        process belongs to no gang, the process also leaves its process group."""
        with self.lock:
            self._users[loading] -= 1
            if self._users[loading]:
                return
            del self._users[loading]
            self._models.pop(loading).close()
            if not self._models and self._rank is None:
                self._close_group()

    def _load(self, loading: LoadSettings) -> Any:
        rank = self._rank or Rank(0, 1, ALONE, torch.get_num_threads())
        model = ModelConfig(
            path=loading.path,
            dtype=loading.dtype,  # type: ignore[arg-type]
            critic=OptimizerConfig(micro_batch_tokens=loading.micro_batch_tokens),
        )
        with closing_on_error() as undo:
            if self._membership is None:
                self._membership = importlib.import_module("stages.models.parallel").join(rank, self._layout, seed=0)
                undo.callback(self._close_group)
            if loading.kind is ModelKind.LANGUAGE:
                make = importlib.import_module("stages.models.reward_model").NextTokens
                return make(model, self._layout, self._membership, loading.micro_batch_tokens)
            host = importlib.import_module("stages.models.reward_model")
            return host.RewardModel(model, self._layout, rank, seed=0, joined=self._membership)

    def _close_group(self) -> None:
        importlib.import_module("stages.models.parallel").leave()
        self._membership = None


PROCESS_MODELS = _ProcessModels()
"""The scoring models of this process."""


# ---- ensemble --------------------------------------------------------------------------------------------


class EnsembleReward(Reward):
    """An ensemble of rewards. Owns its members. The score is the mean of the members' scores, and the disagreement is
    their standard deviation (with divisor n). If the disagreement is large, the policy has left the region of the
    members' training data (Coste et al., arXiv 2310.02743)."""

    def __init__(
        self,
        members: Mapping[str, Mapping[str, Any]],
        timeout_s: float = 60.0,
        _directory: Path | None = None,
        _allowed: Permissions = NO_PERMISSIONS,
    ) -> None:
        """`members`: name -> {kind, args}. `timeout_s`: time limit of a batch in seconds, only for members that are
        users' own functions or classes."""
        for problem in members_problems(members, "members"):
            raise UnfitReward(problem)
        with closing_on_error() as undo:
            self._members, self._names = [], list(members)
            for name, member in members.items():
                kind, args = str(member["kind"]), member.get("args", {})
                reward = build_reward(kind, args, f"members.{name}", timeout_s, _directory, _allowed)
                undo.callback(reward.close)
                self._members.append(reward)
        self.deterministic = all(member.deterministic for member in self._members)
        budgets = [m.batch_tokens for m in self._members if m.batch_tokens is not None]
        self.batch_tokens = min(budgets, default=None)
        self.early = all(member.early for member in self._members)
        self.concurrent_calls = min(member.concurrent_calls for member in self._members)
        self.fields = frozenset[str]().union(*(member.fields for member in self._members))
        confined = [member.protections for member in self._members]
        self.protections = {name: how for one in confined for name, how in one.items()}
        self.protections |= {name: None for one in confined for name, how in one.items() if how is None}

    def __call__(self, samples: Sequence[Sample]) -> Scored:
        answers = [member(samples) for member in self._members]
        scores = [_member_scores(one, len(samples)) for one in answers]
        mean = _added(scores) / len(scores)
        deviation = np.sqrt(_added([(one - mean) ** 2 for one in scores]) / len(scores))
        measured = {
            f"{name}-{of}": numbers
            for name, one in zip(self._names, answers, strict=True)
            if isinstance(one, Scored)
            for of, numbers in one.measured.items()
        }
        return Scored({"": mean.tolist()}, deviation.tolist(), measured)

    def follow(self, samples: Sequence[Sample]) -> None:
        for member in self._members:
            member.follow(samples)

    def counts(self) -> Mapping[str, float]:
        """Return the sums of the members' counts."""
        total: dict[str, float] = {}
        for member in self._members:
            for name, value in member.counts().items():
                total[name] = total.get(name, 0) + value
        return total

    def close(self) -> None:
        for member in self._members:
            member.close()


def _member_scores(answer: Sequence[float] | Scored, rows: int) -> np.ndarray:
    """Return the scores of one member of the ensemble, float64 [rows]. If the member gives a `Scored`, a row's score is
    the sum of its parts. Raises ValueError for a wrong number of scores."""
    parts = answer.parts.values() if isinstance(answer, Scored) else [answer]
    arrays = [np.asarray(part, np.float64) for part in parts]
    for array in arrays:
        if array.shape != (rows,):
            raise ValueError(f"a member gave {array.shape} scores for {rows} rows")
    return _added(arrays)


def _added(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of arrays, one added after another. numpy's sum along an axis adds in an order that depends on the
    number of rows."""
    return reduce(np.add, arrays)
