"""What stands between the server's loop and an engine of another project: one file per engine implements it.

Runs in the engine's own Python environment. May import the standard library, numpy and torch (for types).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True)
class Settings:
    """What the engine is started with; `extra` is the section of the config that only this engine has."""

    model: str
    """A Hugging Face directory."""
    dtype: str
    max_seq: int
    """Longest prompt plus response, in tokens."""
    slots: int
    kv_budget_mb: int
    tensor_parallel: int
    pipeline_parallel: int
    threads: int
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class ServedRow:
    """One response to make. The token at a position is drawn from p, the softmax of the logits less the banned tokens,
    over the temperature (0: the arg max, its log-prob at temperature 1): as the arg max of log p + noise keyed by
    (seed, step, row, position), or otherwise, as the engine's `Capabilities.draws` say. Rows that an engine cannot make
    by its capabilities (`distributions`, `scores`) do not come here."""

    id: int
    row: int
    seed: int
    step: int
    tokens: tuple[int, ...]
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    suppress: tuple[int, ...]
    stop: tuple[int, ...]
    """Tokens that end the response; banned before `min_new_tokens`."""
    forced: tuple[int, ...]
    """Tokens that are given instead of drawn; empty: none are."""


@dataclass(frozen=True)
class Finished:
    """A response; `logprobs` as in `ServedRow`."""

    id: int
    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class Ready:
    """What the engine says of itself once it is up."""

    engine: str
    version: str
    facts: Mapping[str, str]
    """What the last bits of its results depend on, beside the machine's own (`facts.py`)."""
    device: str
    """What it computes on: cpu or cuda."""


class EngineAdapter(Protocol):
    """Owns an engine; called by one thread. A method that raises ends the server, unless it says otherwise."""

    ready: Ready

    def add(self, row: ServedRow) -> None:
        """Queues a row; it runs in the next `step`s."""
        ...

    def abort(self, ids: Sequence[int]) -> None:
        """Forgets rows, finished or not."""
        ...

    def step(self) -> list[Finished]:
        """Makes a token of each running row. Returns those that are finished now."""
        ...

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the weights of the whole model in; the tensors are mapped, read only, and gone when it returns.
        Whatever was cached under the old ones is forgotten. Rows in flight, which there are only where
        `Capabilities.updates` has `inflight`, go on from the tokens that they have."""
        ...

    def made(self) -> Mapping[int, int]:
        """How many tokens of its response each row in flight has, by id. Asked of an engine that updates in flight."""
        ...

    def sleep(self) -> None:
        """Gives back the memory that `Capabilities.sleeps` says, without rows in flight; `wake` takes it again. Where
        that is the weights' too, `load` follows before the next row."""
        ...

    def wake(self) -> None: ...

    def load_now(self) -> tuple[float, int]:
        """Share of the memory of keys and values that is taken now, and how many rows were sent back for want of it
        since the last call."""
        ...

    def close(self) -> None: ...
