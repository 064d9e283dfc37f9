"""The protocol that every generation engine implements, and the records that it uses.

A run uses an engine as follows. Several shards (parts of a step's rows) call `generate` at the same time, from several
threads. The engine batches the rows of all calls, and yields each row as it finishes. Every request names the version
of the weights that it must be sampled with (`Request.version`). If another version is resident, the caller first calls
`load_weights`. By default `load_weights` waits until the rows of the older version have finished (drain). An engine
that updates in flight does not wait: its accepted rows continue under the new weights. It also accepts rows that ask
for an older version than the resident one. `Completion.versions` tells which version sampled each token.

Let p be the softmax of logits / temperature, without the suppressed tokens, and without EOS before `min_new_tokens`. If
draws are keyed, the token at a position is argmax(log p + Gumbel noise). Positions are counted from the prompt's first
token. The noise comes from stages/engines/embedded/sampling.py, and its key is (seed, step, row, position). So a row's
tokens depend neither on the other rows of its batch nor on the engine. At temperature 0 the token is the arg max of the
logits, and p is computed as at temperature 1.

If an engine differs from this description, its `Capabilities` (capabilities.py) say how. A run learns about an engine's
abilities only from its `Capabilities`. `build_engine` (build.py) builds an engine from a config.

The functions at the end check requests and new weights. An engine calls the ones that it needs before it accepts a
request or weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import torch

from stages.engines.capabilities import Capabilities
from stages.models.config import SamplingConfig
from stages.models.spec import EMBEDDING, LM_HEAD, ModelSpec, tensor_shapes
from storage.records import FinishReason

NO_VERSION = -1
"""`GenerationEngine.version` of an engine that holds no weights."""


class RequestError(ValueError):
    """A request cannot be served. For example, its prompt is empty or too long, a token id is outside the vocabulary,
    or the resident version of the weights cannot serve it. The message names the row."""


class WeightsError(ValueError):
    """Weights cannot be loaded: tensors are missing, unknown, of the wrong shape or not finite, or a rank lacks memory.
    The message names the tensor or the rank. The old weights stay."""


class EngineLost(RuntimeError):
    """The engine has stopped, and its rows are lost. The engine must be built anew."""


class RowsLost(RuntimeError):
    """Rows of a call came back unfinished from another engine, but the weights that they need are no longer resident.
    The caller must load these weights and repeat the call. Only engines whose rows can migrate raise this."""


@dataclass(frozen=True)
class TensorPlace:
    """Place of a tensor in a file of this host. The tensor's bytes are in C order."""

    name: str
    file: str
    offset: int
    """Offset in the file, in bytes."""
    shape: tuple[int, ...]
    dtype: str
    """numpy's name of the dtype, or "bfloat16"."""


class MappedTensors(dict[str, torch.Tensor]):
    """Tensors by name, as views of mapped files, for `GenerationEngine.load_weights`. `places` holds the file and the
    offset of each tensor, so that an engine in another process can map the files itself."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], places: Mapping[str, TensorPlace], *, finite: bool = False
    ) -> None:
        """`finite`: True if the caller has checked that all numbers are finite."""
        super().__init__(tensors)
        self.places, self.finite = dict(places), finite


@dataclass(frozen=True)
class Request:
    """A request to sample one response."""

    row: int
    """Number of the row, which `Completion.row` repeats. Keyed noise has the key (seed, step, row, position)."""
    seed: int
    step: int
    tokens: tuple[int, ...]
    """The prompt, without padding."""
    version: int
    """Version of the weights to sample with. An engine that updates in flight may use a newer one."""
    sampling: SamplingConfig
    forced: tuple[int, ...] = ()
    """The prescribed response, exactly `sampling.max_new_tokens` tokens long. No token is drawn. The completion
    contains the prescribed tokens, with log-probs computed as for drawn tokens. Empty: all tokens are drawn."""


@dataclass(frozen=True)
class Completion:
    """One finished response."""

    row: int
    tokens: np.ndarray
    """int32 [new]: sampled tokens, the EOS included."""
    logprobs: np.ndarray
    """float32 [new]: log p of each sampled token, given all tokens before it. p is defined at the top of this
    module."""
    versions: np.ndarray
    """int32 [new]: version of the weights that sampled each token."""
    finish_reason: FinishReason


@dataclass(frozen=True)
class EngineStats:
    """Counters and times since the last call of `stats`."""

    tokens: int
    rows: int
    decode_steps: int
    mean_occupancy: float
    """Mean number of rows in flight per decode step, divided by `max_rows`."""
    kv_peak_fraction: float
    preemptions: int
    """Number of times that a row was preempted for lack of cache memory. Such a row is resumed later."""
    refit_s: float
    """Seconds spent on checking and packing new weights."""
    busy_s: float
    prompt_tokens: int = 0
    """Number of prompt tokens that were fed. If a row is fed again, the tokens of its response so far are counted as
    well."""
    shared_tokens: int = 0
    """Number of prompt tokens that were not fed, because their keys and values were in the cache already."""
    drafted_tokens: Mapping[str, int] = field(default_factory=dict)
    """Kind of draft -> number of drafted tokens that were verified."""
    accepted_tokens: Mapping[str, int] = field(default_factory=dict)
    """Kind of draft -> number of drafted tokens that were accepted."""
    draft_lengths: Mapping[int, int] = field(default_factory=dict)
    """Number of tokens that were drafted for a row in a batch -> how often this number occurred."""
    rank_busy_s: tuple[float, ...] = ()
    """Seconds of `busy_s` that each rank of the model has spent computing. An engine that does not measure its ranks
    gives one entry, equal to `busy_s`."""
    rows_given: int = 0
    """Number of rows that migrated to another engine."""
    rows_taken: int = 0
    """Number of rows that migrated here from another engine."""
    accepted_positions: Mapping[int, int] = field(default_factory=dict)
    """Place in a draft, 0 for its first token -> number of tokens that were accepted at this place."""


class GenerationEngine(Protocol):
    version: int
    """Version of the resident weights."""
    capabilities: Capabilities
    numerics: Mapping[str, str]
    """Name of a fact -> its value. The last bits of the engine's results depend on these facts. The fact `kernels` is
    always given. The fact `device` is given if the engine computes in another process."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Sample responses, and yield each row as it finishes. Thread-safe.

        A response ends with EOS or after `max_new_tokens` tokens. If the generator is closed early, even before its
        first row, its unfinished rows are dropped.

        Raises:
            RequestError: raised before any row runs, if the engine cannot serve a request. For example, the request may
                ask for another version of the weights than the resident one (see `check_version`).
            RuntimeError: raised before any row runs, if the engine is asleep or has stopped. The iterator raises
                EngineLost or another RuntimeError if the engine stops later.
            RowsLost: raised by the iterator if rows that migrated come back too late (see `RowsLost`).
            FloatingPointError: raised by the iterator if the logits of a row are not finite.
        """
        ...

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights in place. `tensors` have Hugging Face's names. Tensors that are not given keep their values.

        By default the engine finishes its rows first, and new rows wait. An engine that updates in flight loads between
        two batches. After WeightsError the engine continues with all the old weights. After any other error,
        `Capabilities.failed_refit` tells whether the engine keeps the old weights or must be built anew. Raises
        RuntimeError if the engine is asleep."""
        ...

    def sleep(self) -> None:
        """Free the memory that `Capabilities.sleeps` names, until `wake` is called. If the weights are freed, no
        version is resident (`NO_VERSION`) until `load_weights` is called after `wake`. Raises RuntimeError if rows are
        in flight."""
        ...

    def wake(self) -> None:
        """Allocate the memory of a sleeping engine again."""
        ...

    def stats(self) -> EngineStats:
        """Return the counts since the last call, and reset them. Thread-safe. Rows may be in flight."""
        ...

    def close(self) -> None:
        """Stop the engine and end all its processes. Callers that wait get RuntimeError. A second call does nothing."""
        ...


# ---- requests --------------------------------------------------------------------------------------------


def check_request(request: Request, max_seq: int, vocab: int, eos_ids: Set[int]) -> None:
    """Check everything in a request except its version. Raises RequestError, naming the row, if the request cannot be
    served."""
    sampling = request.sampling
    prompt, new = len(request.tokens), sampling.max_new_tokens
    banned = set(sampling.suppress_token_ids)
    problem = None
    odd = [name for name in ("row", "seed", "step") if not -(2**63) <= getattr(request, name) < 2**63]
    if odd:
        problem = f"has {odd[0]} {getattr(request, odd[0])}, which must be a number of 64 bits, with its sign"
    elif prompt == 0:
        problem = "has an empty prompt"
    elif new <= 0:
        problem = f"has max_new_tokens {new}, which must be positive"
    elif prompt + new > max_seq:
        problem = f"takes {prompt} prompt + {new} new tokens; the engine was built for {max_seq}"
    elif not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        problem = f"has temperature {sampling.temperature}, which must be finite and not negative"
    elif not 0 <= sampling.min_new_tokens <= new:
        problem = f"has min_new_tokens {sampling.min_new_tokens}, which must be 0 to max_new_tokens ({new})"
    elif not all(0 <= token < vocab for token in request.tokens):
        problem = f"has token ids outside the vocabulary of {vocab}"
    elif not all(0 <= token < vocab for token in banned):
        problem = f"suppresses token ids outside the vocabulary of {vocab}"
    elif len(banned | eos_ids if sampling.min_new_tokens else banned) >= vocab:
        problem = "suppresses every token"
    elif request.forced:
        problem = _forced_problem(request, vocab, banned, eos_ids)
    if problem is not None:
        raise RequestError(f"row {request.row} {problem}")


def check_ability(request: Request, can: Capabilities) -> None:
    """Check that an engine with these capabilities can serve a request. Raises RequestError, naming the row, if it
    cannot. `pipeline/config/rules.py` refuses a run before it starts if its requests would fail this check."""
    sampling, problem = request.sampling, None
    if request.forced and not can.scores:
        problem = "is given its tokens, which this engine cannot score"
    elif can.distributions == "plain":
        if sampling.temperature not in (0, 1):
            problem = f"is drawn at temperature {sampling.temperature}; this engine has log-probs only for 0 and 1"
        elif sampling.suppress_token_ids or sampling.min_new_tokens:
            problem = "excludes tokens, which this engine's log-probs ignore"
    if problem is not None:
        raise RequestError(f"row {request.row} {problem}")


def check_version(request: Request, resident: int, *, in_flight: bool) -> None:
    """Check that the resident version of the weights can serve a request. Raises RequestError if the request asks for a
    newer version. Also raises RequestError if the request asks for an older version, unless the engine updates in
    flight (`in_flight`)."""
    if request.version > resident or (request.version < resident and not in_flight):
        raise RequestError(
            f"row {request.row} asks for version {request.version} of the weights; version {resident} is resident"
        )


def start_generator(results: Iterator[Completion | None]) -> Iterator[Completion]:
    """Start a generator by taking its first item, which is None, and return the generator. Without this start, closing
    the generator would not run its `finally`, and the engine would keep the rows of the call."""
    next(results)
    return cast(Iterator[Completion], results)


def _forced_problem(request: Request, vocab: int, banned: Set[int], eos_ids: Set[int]) -> str | None:
    """Return a description of what is wrong with a request's `forced` tokens, or None."""
    forced, sampling = request.forced, request.sampling
    if len(forced) != sampling.max_new_tokens:
        return f"is given {len(forced)} tokens of its response, and max_new_tokens {sampling.max_new_tokens}"
    if not all(0 <= token < vocab for token in forced):
        return f"is given tokens of its response outside the vocabulary of {vocab}"
    if not banned.isdisjoint(forced) or not eos_ids.isdisjoint(forced[: sampling.min_new_tokens]):
        return "is given tokens of its response that cannot be sampled there"
    return None


# ---- weights ---------------------------------------------------------------------------------------------


def check_tensors(spec: ModelSpec, tensors: Mapping[str, torch.Tensor], *, complete: bool) -> None:
    """Check the names and shapes of tensors. Raises WeightsError, naming the tensor, if a tensor is unknown, has
    another shape or is not of floating point. If `complete`, also raises WeightsError if a tensor is missing.

    Does not look for NaN and infinity: packing finds them, so that the numbers are read only once. If the model has
    tied embeddings, `lm_head.weight` may be given, but only together with an equal embedding."""
    expected = tensor_shapes(spec)
    for name, tensor in tensors.items():
        if name == LM_HEAD and spec.tied_embeddings:
            if EMBEDDING not in tensors or not torch.equal(tensor, tensors[EMBEDDING]):
                raise WeightsError(f"{LM_HEAD} is tied to {EMBEDDING} in this model: give both, with equal numbers")
        elif name not in expected:
            raise WeightsError(f"{name} is no tensor of this model ({spec.num_layers} blocks)")
        elif tuple(tensor.shape) != expected[name]:
            raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, this model's is {expected[name]}")
        elif not tensor.is_floating_point():
            raise WeightsError(f"{name} is {tensor.dtype}, not a floating-point tensor")
    missing = [name for name in expected if name not in tensors]
    if complete and missing:
        raise WeightsError(f"{missing[0]} is missing (and {len(missing) - 1} more)")


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that all numbers are finite. Raises WeightsError, naming the first tensor that has NaN or infinity."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise WeightsError(f"{name} has numbers that are not finite")
