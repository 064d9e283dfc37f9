"""The capabilities of each kind of engine. Decisions about what an engine can do are based on its capabilities alone.

    config, device ──► Capabilities ──┬─► checks: refuse a run that needs more, before anything starts
                                      ├─► pipeline/config/preflight.py: list the guarantees that the run does not have
                                      └─► workers, replay: how to read weights, and what a repetition must reproduce

The capabilities of an engine depend only on its settings and its device. An engine that was built has its capabilities
in `GenerationEngine.capabilities`. If an ability was never measured, the weaker alternative is stated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from stages.engines.config import EngineConfig

Device = Literal["cpu", "cuda"]
_SERVER_BYTES = 950 << 20
"""Memory of a process of vLLM or TensorRT-LLM, mostly for libraries. With vLLM's CPU build, 660 MiB were measured with
a tiny model, and 820 to 910 MiB with SmolLM2. Other builds and TensorRT-LLM were never measured."""


@dataclass(frozen=True)
class EngineMemory:
    """Facts about an engine's memory that the engine's settings do not contain. They are inputs of the prediction of a
    run's memory."""

    reserves_cache: bool = False
    """True if the engine allocates all of `engine.kv_budget_mb` at the start, even if its rows need less."""
    refit_bytes: int | None = None
    """Bytes of new weights that a rank holds beside the old ones during a refit (a load of new weights). If the largest
    tensor has more bytes, its size counts instead. None: all weights of the rank."""
    process_bytes: int = 0
    """Bytes of main memory that each process of the engine takes, without weights and cache. Given only for engines
    with a Python environment of their own. 0: the engine has none."""


@dataclass(frozen=True)
class Capabilities:
    """The abilities of an engine. A run that needs further abilities is refused before it starts."""

    draws: Literal["keyed", "seeded", "free"]
    """Repeatability of sampled tokens. keyed: the noise of each token depends only on (seed, step, row, position), as
    in every other engine with keyed draws. seeded: the same request in the same engine gives the same tokens, and
    nothing more is guaranteed. free: tokens do not repeat."""
    invariance: Literal["bits", "tokens", "none"]
    """Properties of a row that stay the same if the other rows of its batch change. bits: its tokens, and its log-probs
    to the last bit. tokens: its log-probs except for rounding, and its tokens unless two candidates are closer than the
    rounding. none: nothing; tokens and log-probs may change."""
    distributions: Literal["any", "plain"]
    """The distributions that rows can be drawn from. any: any temperature, suppressed tokens, and no EOS before
    `min_new_tokens`. plain: the softmax of the logits (temperature 1) or their arg max (0), with no token excluded."""
    scores: bool
    """True if the engine returns the log-probs of given tokens (`Request.forced`). The comparison of engine and trainer
    needs it (config section `mismatch`)."""
    updates: frozenset[Literal["drain", "inflight"]]
    """Ways to load new weights (see `rollout.versions`). drain: after the rows in flight have finished. inflight: while
    rows run; these rows continue under the new weights."""
    sources: frozenset[Literal["tensors", "mapped"]]
    """Forms of weights that `load_weights` can take. tensors: tensors in this process. The engine packs them and checks
    in the same pass that their numbers are finite. mapped: places of tensors in files (`MappedTensors.places`). The
    engine passes the places on without reading the bytes."""
    failed_refit: Literal["kept", "rebuild"]
    """State after a refit that failed half-way. kept: the engine continues with the old weights. rebuild: the engine
    must be built anew. (Every engine refuses weights of another model before it changes anything.)"""
    migration: bool
    """True if rows can continue in another engine (`MigratingEngine`)."""
    sleeps: Literal["nothing", "cache", "weights"]
    """Memory that `sleep` frees. nothing: none. cache: the keys and values. weights: the keys, the values and the
    weights, so that weights must be loaded again after `wake`."""
    speculation: bool
    """True if log-probs are correct under speculative decoding."""
    devices: frozenset[Device]
    """Devices that the engine runs on."""
    memory: EngineMemory = EngineMemory()
    measured: bool = True
    """True if these capabilities were observed on this device and with this number of ranks. False if they are only
    expected."""

    def __str__(self) -> str:
        parts = [
            f"draws are {self.draws}",
            _INVARIANCE_TEXT[self.invariance],
            f"distributions: {self.distributions}",
            f"new weights by {' or '.join(sorted(self.updates))}",
            f"a failed load of weights {_FAILED_REFIT_TEXT[self.failed_refit]}",
            f"sleep frees {_SLEEP_TEXT[self.sleeps]}",
        ]
        missing = [word for word, has in (("scores", self.scores), ("drafts", self.speculation)) if not has]
        missing += [] if self.migration else ["migration"]
        parts += [f"no {', '.join(missing)}"] if missing else []
        parts += [] if self.measured else ["never measured on this device"]
        return "; ".join(parts)


_INVARIANCE_TEXT = {
    "bits": "other rows of a batch change no bit",
    "tokens": "other rows of a batch change log-probs by rounding, and tokens only at ties",
    "none": "other rows of a batch may change tokens",
}
_FAILED_REFIT_TEXT = {"kept": "keeps the old ones", "rebuild": "needs a new engine"}
_SLEEP_TEXT = {"nothing": "nothing", "cache": "the cache", "weights": "the cache and the weights"}


def embedded_capabilities(config: EngineConfig, device: Device) -> Capabilities:
    """Return the capabilities of the embedded engine.

    On a CPU a row's bits do not depend on the other rows of its batch (tested). On CUDA, cuBLAS chooses its algorithm
    by the number of rows. So on CUDA a token may differ if two candidates are closer than the rounding errors."""
    return Capabilities(
        draws="keyed",
        invariance="bits" if device == "cpu" else "tokens",
        distributions="any",
        scores=True,
        updates=frozenset({"drain", "inflight"}),
        sources=frozenset({"tensors"}),
        failed_refit="kept",
        migration=True,
        sleeps="cache",
        speculation=True,
        devices=frozenset({"cpu", "cuda"}),
        measured=device == "cpu",
    )


TENSORRT_LLM_BUCKET_MB = 1024
"""Size of a bucket in MiB: new weights are copied to the device of every rank one bucket at a time. A model block or a
tensor that is larger than this makes a larger bucket.

The embedding of a 70B model in bfloat16 (128256 x 8192) alone makes a bucket of 2004 MiB. So for large models a smaller
value would not save memory, and would only need more calls.
"""


def vllm_capabilities(config: EngineConfig, device: Device) -> Capabilities:
    """Return the capabilities of vLLM.

    - Draws: Stageline's own code makes them, so the noise depends only on seed, step, row and position
      (`remote/serving/vllm_adapter.py`).
    - Invariance: the other rows of a batch may change the rounding of a row's logits.
    - Speculative decoding: none. Tokens are drawn in a logits processor, and vLLM does not allow the two together.
    - New weights: with pipeline stages, batches are in flight between two steps of vLLM. Then weights cannot change
      while rows run.
    """
    return Capabilities(
        draws="keyed",
        invariance="tokens",
        distributions="any",
        scores=True,
        updates=frozenset({"drain"} if config.pipeline_parallel > 1 else {"drain", "inflight"}),
        sources=frozenset({"mapped"}),
        failed_refit="rebuild",
        migration=False,
        sleeps="weights" if device == "cuda" else "nothing",
        speculation=False,
        devices=frozenset({"cpu", "cuda"}),
        memory=EngineMemory(reserves_cache=True, refit_bytes=0, process_bytes=_SERVER_BYTES),
        measured=device == "cpu" and config.tensor_parallel * config.pipeline_parallel == 1,
    )


def tensorrt_llm_capabilities(config: EngineConfig, device: Device) -> Capabilities:
    """Return the capabilities of TensorRT-LLM. Stageline has never run this engine. The capabilities are derived from
    the recorded signatures of its functions (`remote/serving/trtllm_adapter.py`).

    Draws have a seed per request. Log-probs are computed from the raw logits, so they ignore the temperature and the
    banned tokens of the draw.
    """
    return Capabilities(
        draws="seeded",
        invariance="none",
        distributions="plain",
        scores=False,
        updates=frozenset({"drain"}),
        sources=frozenset({"mapped"}),
        failed_refit="rebuild",
        migration=False,
        sleeps="weights",
        speculation=False,
        devices=frozenset({"cuda"}),
        memory=EngineMemory(reserves_cache=True, refit_bytes=TENSORRT_LLM_BUCKET_MB << 20, process_bytes=_SERVER_BYTES),
        measured=False,
    )


STATED: Mapping[str, Callable[[EngineConfig, Device], Capabilities]] = {
    "embedded": embedded_capabilities,
    "vllm": vllm_capabilities,
    "tensorrt_llm": tensorrt_llm_capabilities,
}
"""`engine.kind` -> function that returns the engine's capabilities, given the config and the device."""


def capabilities_of(config: EngineConfig, device: Device) -> Capabilities:
    """Return the capabilities of the config's engine on `device`."""
    return STATED[config.kind](config, device)


def able(config: EngineConfig, device: Device, can: Callable[[Capabilities], bool]) -> list[str]:
    """Return every `engine.kind` whose capabilities would meet the condition `can` on this device, if all other
    settings of `config` stayed the same. Error messages suggest these kinds."""
    return [kind for kind, stated in STATED.items() if can(stated(config, device))]
