"""The protocol that every generation engine implements, and the records that it uses.

How a run uses an engine: several shards call `generate` at the same time, from several threads. The engine batches the
rows of all calls and yields each row as it finishes. Every request names the version of the weights that it must be
sampled with (`Request.version`). A caller that sees another version resident calls `load_weights`, which waits until
the rows of the older version have finished (drain). An engine that updates in flight does not wait: its accepted rows
go on under the new weights. It also accepts rows that ask for an older version than the resident one.
`Completion.versions` says which version sampled each token.

p is the softmax of logits / temperature, without the suppressed tokens, and without EOS before `min_new_tokens`. At
temperature 0 the arg max is taken, and p is that of temperature 1. Law 4: the token at a position, counted from the
prompt's first token, is argmax(log p + Gumbel noise keyed by (seed, step, row, position)). The noise is that of
stages/engines/embedded/sampling.py. So a row's tokens depend neither on the other rows of its batch nor on the engine.
An engine for which this does not hold says so in its `Capabilities` (capabilities.py). A run asks nothing else about an
engine. `build_engine` (build.py) builds an engine from a config.

The functions at the end check requests and new weights, as every engine does before it accepts them.
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
    """A request cannot be served (empty, too long, token ids outside the vocabulary, another version resident). The
    message names the row."""


class WeightsError(ValueError):
    """Weights cannot be loaded (missing, extra, misshapen, NaN). The message names the tensor, or the rank that has no
    memory for them. The old weights stay."""


class EngineLost(RuntimeError):
    """The engine has stopped and lost its rows. It must be built anew."""


class RowsLost(RuntimeError):
    """Rows of a call came back unfinished from another engine, and the weights that they need are no longer resident.
    Load these weights and make the call again. Raised only by engines whose rows can migrate."""


@dataclass(frozen=True)
class TensorPlace:
    """Place of a tensor's bytes on this host, in C order."""

    name: str
    file: str
    offset: int
    """Offset in the file, in bytes."""
    shape: tuple[int, ...]
    dtype: str
    """numpy's name of the dtype, or "bfloat16"."""


class MappedTensors(dict[str, torch.Tensor]):
    """Tensors by name, as views of mapped files, for `GenerationEngine.load_weights`. `places` holds the file and
    offset of each, for an engine in another process that maps the files itself."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], places: Mapping[str, TensorPlace], *, finite: bool = False
    ) -> None:
        """`finite`: True if the caller has checked that all numbers are finite."""
        super().__init__(tensors)
        self.places, self.finite = dict(places), finite


@dataclass(frozen=True)
class Request:
    """One response to sample."""

    row: int
    """Row number, which the result repeats. Together with `seed` and `step` it keys the noise."""
    seed: int
    step: int
    tokens: tuple[int, ...]
    """The prompt, without padding."""
    version: int
    """Version of the weights to sample with. If the engine updates in flight, a newer one may be used."""
    sampling: SamplingConfig
    forced: tuple[int, ...] = ()
    """Tokens of the response that are given instead of drawn, `sampling.max_new_tokens` of them. Each is returned with
    its log-prob under these weights, computed as for a drawn token. Empty: all tokens are drawn."""


@dataclass(frozen=True)
class Completion:
    """One finished response."""

    row: int
    tokens: np.ndarray
    """int32 [new]: sampled tokens, the EOS included."""
    logprobs: np.ndarray
    """float32 [new]: log of p (see the module) of each sampled token, given all tokens before it."""
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
    """Number of times that a row was preempted for lack of cache memory, to be resumed later."""
    refit_s: float
    """Seconds in which new weights were checked and packed."""
    busy_s: float
    prompt_tokens: int = 0
    """Tokens fed before rows decode: their prompts and, if rows are fed again, also their responses so far."""
    shared_tokens: int = 0
    """Prompt tokens not fed, because their keys and values were in the cache already."""
    drafted_tokens: Mapping[str, int] = field(default_factory=dict)
    """Drafted tokens that were verified, by kind of draft."""
    accepted_tokens: Mapping[str, int] = field(default_factory=dict)
    """Accepted draft tokens, by kind of draft."""
    draft_lengths: Mapping[int, int] = field(default_factory=dict)
    """Number of draft tokens of a decoding row in a batch -> how many times that occurred."""
    rank_busy_s: tuple[float, ...] = ()
    """Seconds that each rank of the model computed, within `busy_s`."""
    rows_given: int = 0
    """Rows that migrated to another engine."""
    rows_taken: int = 0
    """Rows that migrated here from another engine."""
    accepted_positions: Mapping[int, int] = field(default_factory=dict)
    """Number of accepted draft tokens, by the number of tokens before them in the draft."""


class GenerationEngine(Protocol):
    version: int
    """Version of the resident weights."""
    capabilities: Capabilities
    numerics: Mapping[str, str]
    """Facts that the last bits of the engine's results depend on, by name: `kernels`, and `device` if the engine
    computes in another process."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield rows as they finish. Thread-safe. A response ends with EOS or after `max_new_tokens` tokens. If the
        generator is closed early, even before its first row, its unfinished rows are dropped.

        Before any row runs, raises RequestError (also if the resident weights are not of the requested version), and
        RuntimeError if the engine is asleep or has stopped. The iterator raises EngineLost or another RuntimeError if
        the engine stops. It raises RowsLost, and FloatingPointError for a row whose logits are not finite."""
        ...

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights in place. `tensors` have Hugging Face's names; tensors that are not given keep their values.
        The engine finishes its rows first while new rows wait, or loads between two batches. After WeightsError it
        continues with all the old weights. After any other error its state is that of `Capabilities.failed_refit`.
        Raises RuntimeError if the engine is asleep."""
        ...

    def sleep(self) -> None:
        """Free the memory that `Capabilities.sleeps` names, until `wake`. Raises RuntimeError if rows are in flight. If
        the weights are freed too, no version is resident (`NO_VERSION`) until `load_weights` is called after `wake`."""
        ...

    def wake(self) -> None:
        """Allocate the memory of a sleeping engine again."""
        ...

    def stats(self) -> EngineStats:
        """Return the counts since the last call, and reset them. Thread-safe, even while rows are in flight."""
        ...

    def close(self) -> None:
        """End the engine with all its processes. Callers that wait get RuntimeError. A second call does nothing."""
        ...


# ---- requests --------------------------------------------------------------------------------------------


def check_request(request: Request, max_seq: int, vocab: int, eos_ids: Set[int]) -> None:
    """Check a request. Raises RequestError, naming the row, if no version of the weights could serve it."""
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
    """Check a request against an engine's capabilities. Raises RequestError, naming the row, if the engine cannot serve
    it. A run that would make such requests is refused before it starts (`pipeline/config/rules.py`)."""
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


def begun(results: Iterator[Completion | None]) -> Iterator[Completion]:
    """Return the generator, started: its first item, None, has been taken. A generator that is closed before its start
    would skip its `finally`, and the engine would keep its rows."""
    next(results)
    return cast(Iterator[Completion], results)


def _forced_problem(request: Request, vocab: int, banned: Set[int], eos_ids: Set[int]) -> str | None:
    """Return the problem of a request's `forced` tokens, or None."""
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
    """Check names and shapes of tensors. Raises WeightsError, naming the first tensor that is unknown, has another
    shape, is not of floating point or, if `complete`, is missing. Whether the numbers are finite is checked when they
    are packed, so that they are read only once. A tied `lm_head.weight` may be given if it equals the embedding given
    with it."""
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
    """Check every number. Raises WeightsError, naming the first tensor with a number that is not finite."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise WeightsError(f"{name} has numbers that are not finite")
