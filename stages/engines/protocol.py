"""The protocol every generation engine implements, and the values that cross it.

How a run uses an engine: several shards call `generate` at once, from several threads; the engine batches all of their
rows in flight and yields each row as it finishes. Every request names the version of the weights it must be sampled
with (`Request.version`); `load_weights` is called by whoever sees that the resident version differs, and waits until
the rows of the older version have finished (drain). An engine that updates in flight instead lets rows that it has
accepted go on under the new weights, and accepts rows that ask for an older version than the resident one:
`Completion.versions` says which made which token.

p is the softmax of the logits without the suppressed tokens, without EOS before `min_new_tokens`, over the temperature
(0: the arg max is taken; p is then that of temperature 1). Law 4: the token at a position, counted from the prompt's
first token, is argmax(log p + Gumbel noise keyed by (seed, step, row, position)), the noise of
stages/engines/embedded/sampling/noise.py, so a row's tokens do not depend on the batch it ran in or on the engine that
ran it. An engine of which this (or anything else) does not hold says so in its `Capabilities` (capabilities.py), which
is all that a run asks about an engine. `build_engine` (build.py) makes one of a config.

May import numpy, torch, stages.engines.capabilities, stages.models.sampling and storage.records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from stages.engines.capabilities import Capabilities, Device
from stages.models.sampling import SamplingConfig
from storage.records import FinishReason

NO_VERSION = -1
"""`GenerationEngine.version` of an engine that holds no weights."""


class RequestError(ValueError):
    """A request that cannot be served (empty, too long, token ids outside the vocabulary); names the row."""


class WeightsError(ValueError):
    """Weights that cannot be loaded (missing, extra, misshapen, NaN); names the tensor. The old weights stay."""


class EngineLost(RuntimeError):
    """The engine has stopped, with the rows in it: it must be built anew."""


class RowsLost(RuntimeError):
    """Rows of a call were in another engine and came back unfinished, and the weights that they need are not resident
    any more: the call is to be made again, with its version resident. Only of engines whose rows can migrate."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor's bytes lie on this host, in C order."""

    name: str
    file: str
    offset: int
    """Bytes."""
    shape: tuple[int, ...]
    dtype: str
    """numpy's name of the type, or "bfloat16"."""


class MappedTensors(dict[str, torch.Tensor]):
    """Owns views of files that hold tensors, by name, for `GenerationEngine.load_weights`; `places` says where they
    lie, for an engine in another process, which maps them itself."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], places: Mapping[str, TensorPlace], *, finite: bool = False
    ) -> None:
        """`finite`: whoever made this has read all numbers, and they are."""
        super().__init__(tensors)
        self.places, self.finite = dict(places), finite


@dataclass(frozen=True)
class Request:
    """One response to sample."""

    row: int
    """Echoed in the result; with `seed` and `step` the key of the noise."""
    seed: int
    step: int
    tokens: tuple[int, ...]
    """The prompt, without padding."""
    version: int
    """Of the weights that it must be sampled with; the oldest, where the engine updates in flight."""
    sampling: SamplingConfig
    forced: tuple[int, ...] = ()
    """Tokens of the response that are given and not drawn, `sampling.max_new_tokens` of them: each comes back with the
    log-prob that it has under these weights, computed as for a token that was drawn. Empty: all are drawn."""


@dataclass(frozen=True)
class Completion:
    """One finished response."""

    row: int
    tokens: np.ndarray
    """int32 [new]: sampled tokens, the EOS included."""
    logprobs: np.ndarray
    """float32 [new]: log mu of each: the log of p (see the module), given all tokens before it."""
    versions: np.ndarray
    """int32 [new]: weights that sampled each."""
    finish_reason: FinishReason


@dataclass(frozen=True)
class EngineStats:
    """Counted since the last call of `stats`."""

    tokens: int
    rows: int
    decode_steps: int
    mean_occupancy: float
    """Rows in flight per decode step / slots."""
    kv_peak_fraction: float
    preemptions: int
    """Rows sent back for want of KV memory; they were resumed."""
    refit_s: float
    """Spent on checking and packing new weights."""
    busy_s: float
    prompt_tokens: int = 0
    """Fed, those of resumed rows and of their responses included."""
    shared_tokens: int = 0
    """Prompt tokens not fed, because another row's keys and values served."""
    drafted_tokens: Mapping[str, int] = field(default_factory=dict)
    """Drafted tokens that were verified, by kind of draft."""
    accepted_tokens: Mapping[str, int] = field(default_factory=dict)
    """Those that were right, by kind of draft."""
    draft_lengths: Mapping[int, int] = field(default_factory=dict)
    """How often a decoding row had so many drafted tokens in a batch; 0: none."""
    rank_busy_s: tuple[float, ...] = ()
    """Seconds that each rank computed, where several hold the model (one number where one does): of `busy_s` it is the
    share in which the rank was of use."""
    rows_given: int = 0
    """Sent to another engine before they were finished."""
    rows_taken: int = 0
    """Come from another engine."""
    accepted_positions: Mapping[int, int] = field(default_factory=dict)
    """Drafted tokens that were right, by how many of the draft's were before them."""


@runtime_checkable
class GenerationEngine(Protocol):
    version: int
    """Of the resident weights."""
    capabilities: Capabilities

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """A generator, which yields rows as they finish. Thread-safe. A response ends with the EOS that it contains, or
        at its length. A generator that is closed early, also before its first row, takes its unfinished rows with it.
        Raises RequestError before any row of the call runs, also for a version that the resident weights will not do
        for, and RuntimeError asleep. The generator raises EngineLost (or another RuntimeError) if the engine stops,
        RowsLost, and FloatingPointError for a row whose logits are not finite."""
        ...

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refits in place, by Hugging Face name; tensors that are not named keep their values. Drains first, and keeps
        rows that arrive meanwhile waiting; or swaps between two batches. All or nothing: on WeightsError the engine
        goes on with the old weights; on any other error as `Capabilities.failed_refit` says. Raises RuntimeError
        asleep."""
        ...

    def sleep(self) -> None:
        """Gives memory back, that which `Capabilities.sleeps` names; `wake` takes it again. Only without rows in
        flight: raises RuntimeError. Where the weights go too no version is resident (`NO_VERSION`) until the next
        `load_weights`, which comes after `wake`."""
        ...

    def wake(self) -> None:
        """Takes the memory again, of an engine that sleeps."""
        ...

    def stats(self) -> EngineStats:
        """Counts begin anew. Thread-safe, also beside rows."""
        ...

    def close(self) -> None:
        """Ends it with all its processes; callers that wait get RuntimeError. Twice is harmless."""
        ...


@runtime_checkable
class NamesKernels(Protocol):
    """An engine that says which of several kernels it computes with, whose last bits differ."""

    kernels: str


@runtime_checkable
class NamesDevice(Protocol):
    """An engine that computes in another environment, and maybe on another device than this process would."""

    device: Device
