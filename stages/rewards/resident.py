"""The models that score in this process: each loaded once, whoever asks for it, with its first rows.

May import torch, stages.models and stages.rewards.registry; what needs Megatron when a model is loaded.
"""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from stages.models.config import LayoutConfig, ModelConfig, OptimizerConfig
from stages.models.protocol import ALONE, Rank
from stages.rewards.registry import closing_on_error

DTYPES = ("float32", "bfloat16")
EACH_ALONE = 1
"""Tokens of a micro-batch, at most: a longer row has one to itself."""


class Holds(StrEnum):
    """What a directory is loaded as."""

    REWARD = "reward model"
    """A `RewardModel`."""
    LANGUAGE = "language model"
    """A `NextTokens`."""


@dataclass(frozen=True)
class Loading:
    """A model, and how it is loaded."""

    holds: Holds
    path: str
    dtype: str
    micro_batch_tokens: int


class _ProcessModels:
    """Owns the scoring models of this process, each loaded once whoever asks for it, and its membership of a process
    group of one rank, which they share: Megatron keeps its groups in globals."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while a model computes: threads of one process take turns."""
        self._models: dict[Loading, Any] = {}
        self._users: dict[Loading, int] = {}
        self._membership: Any = None

    def take(self, loading: Loading) -> Any:
        """The model, until `give_back`."""
        with self.lock:
            if loading not in self._models:
                self._models[loading] = self._load(loading)
            self._users[loading] = self._users.get(loading, 0) + 1
            return self._models[loading]

    def give_back(self, loading: Loading) -> None:
        """The last user's ends the model, and the last model's the membership."""
        with self.lock:
            self._users[loading] -= 1
            if self._users[loading]:
                return
            del self._users[loading]
            self._models.pop(loading).close()
            if not self._models:
                self._leave()

    def _load(self, loading: Loading) -> Any:
        rank = Rank(0, 1, ALONE, torch.get_num_threads())
        model = ModelConfig(
            path=loading.path,
            dtype=loading.dtype,  # type: ignore[arg-type]
            critic=OptimizerConfig(micro_batch_tokens=loading.micro_batch_tokens),
        )
        with closing_on_error() as undo:
            if self._membership is None:
                self._membership = importlib.import_module("stages.models.parallel").join(rank, LayoutConfig(), seed=0)
                undo.callback(self._leave)
            if loading.holds is Holds.LANGUAGE:
                make = importlib.import_module("stages.models.next_tokens").NextTokens
                return make(model, self._membership, loading.micro_batch_tokens)
            host = importlib.import_module("stages.models.reward_host")
            return host.RewardModel(model, LayoutConfig(), rank, seed=0, joined=self._membership)

    def _leave(self) -> None:
        importlib.import_module("stages.models.parallel").leave()
        self._membership = None


HERE = _ProcessModels()
"""This process's."""
