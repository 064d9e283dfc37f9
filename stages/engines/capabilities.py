"""State the abilities of each kind of engine. A run asks only for these before it relies on an engine.

    config, device ──► Capabilities ──┬─► checks: refuse what a run asks for beyond them, before anything starts
                                      ├─► pipeline/config/preflight.py: say what the run cannot prove
                                      └─► workers, replay: how to read weights, and what a repetition must reproduce

The capabilities of an engine are a function of its settings and of its device. A built engine has them as
`GenerationEngine.capabilities`. If something was never measured, the weaker possibility is stated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from stages.engines.config import EngineConfig

Device = Literal["cpu", "cuda"]
_SERVER_BYTES = 950 << 20
"""Memory of vLLM's CPU build, mostly libraries: 660 MiB measured with a tiny model, 820 to 910 with SmolLM2. Other
builds were never measured."""


@dataclass(frozen=True)
class EngineMemory:
    """Facts about an engine's memory that its settings alone do not tell, for the prediction of a run's memory."""

    reserves_cache: bool = False
    """True if the engine allocates all of `engine.kv_budget_mb` at the start, even if its rows need less."""
    refit_bytes: int | None = None
    """Bytes of new weights that a rank holds beside the old ones during a refit, or the bytes of the largest tensor if
    these are more. None: all of the rank's weights."""
    process_bytes: int = 0
    """Bytes of each process in the engine's own environment, without weights and cache; 0: the engine has no processes
    of its own."""


@dataclass(frozen=True)
class Capabilities:
    """The abilities of an engine. A run that asks for more is refused before it starts."""

    draws: Literal["keyed", "seeded", "free"]
    """Repeatability of sampled tokens. `keyed`: law 4. `seeded`: the same request in the same engine gives the same
    tokens; nothing else is guaranteed. `free`: tokens do not repeat."""
    invariance: Literal["bits", "tokens", "none"]
    """Results of a row that do not depend on the other rows in its batch. bits: its tokens, and its log-probs to the
    last bit. tokens: its tokens, unless two candidates are closer than rounding. none: no results."""
    distributions: Literal["any", "plain"]
    """The distributions that rows can be drawn from. any: any temperature, suppressed tokens, and no EOS before
    `min_new_tokens`. plain: the softmax of the logits (temperature 1) or their arg max (0), with no token excluded."""
    scores: bool
    """True if the engine returns the log-probs of given tokens (`Request.forced`). Canaries need it."""
    updates: frozenset[Literal["drain", "inflight"]]
    """The ways to load new weights (`inflight`: `rollout.versions`)."""
    sources: frozenset[Literal["tensors", "mapped"]]
    """The forms of weights that `load_weights` takes. tensors: tensors of this process, which the engine packs and
    checks for numbers that are not finite in one pass. mapped: the places of their bytes (`MappedTensors.places`),
    which the engine passes on without reading the bytes."""
    failed_refit: Literal["kept", "rebuild"]
    """State after a refit that failed half-way. `kept`: the engine continues with the old weights. `rebuild`: it must
    be built anew. (Every engine refuses weights that are not the model's before it changes anything.)"""
    migration: bool
    """True if rows can continue in another engine (`MigratingEngine`)."""
    sleeps: Literal["nothing", "cache", "weights"]
    """The memory that `sleep` frees. cache: that of keys and values. weights: that of keys, values and weights, so the
    weights must be loaded again after `wake`."""
    speculation: bool
    """True if log-probs are correct with speculative decoding."""
    devices: frozenset[Device]
    """Devices that the engine runs on."""
    memory: EngineMemory = EngineMemory()
    measured: bool = True
    """True if these capabilities were observed on this device. Otherwise the engine was written for them and never run
    there."""

    def __str__(self) -> str:
        said = {
            "draws": self.draws,
            "the same in any company": self.invariance,
            "distributions": self.distributions,
            "updates": "|".join(sorted(self.updates)),
            "after a failed refit": self.failed_refit,
            "sleep": self.sleeps,
        }
        no = [word for word, has in (("scores", self.scores), ("drafts", self.speculation)) if not has]
        no += [] if self.migration else ["migration"]
        text = ", ".join(f"{name} {value}" for name, value in said.items()) + (f"; no {', '.join(no)}" if no else "")
        return text if self.measured else f"{text}; never measured on this device"


def embedded_capabilities(config: EngineConfig, device: Device) -> Capabilities:
    """Return the capabilities of the embedded engine. On a CPU a row's bits do not depend on the other rows (tested).
    On CUDA cuBLAS chooses its algorithm by the number of rows, so tokens differ if two candidates lie within rounding.
    """
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
"""MiB of new weights that are copied to every rank's device at a time, or more if a block or a tensor is larger. The
embedding of a 70B model in bfloat16 (128256 x 8192) is twice as large, and smaller pieces would only take more
calls."""


def vllm_capabilities(config: EngineConfig, device: Device) -> Capabilities:
    """Return the capabilities of vLLM. Our code makes the draws (`serving/vllm_adapter.py`), but a row's sums depend on
    the other rows of its batch. vLLM refuses drafts together with a logits processor. With pipeline stages, batches are
    in flight between vLLM's steps, so weights cannot change there."""
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
    """Return the capabilities of TensorRT-LLM, taken from its recorded interface (`serving/trtllm_adapter.py`); it was
    never run. It has a seed per request. Its log-probs are those of the raw logits, without the temperature and the
    bans of the draw."""
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
"""`engine.kind` -> function that returns the engine's capabilities."""


def capabilities_of(config: EngineConfig, device: Device) -> Capabilities:
    """Return the capabilities of the config's engine on `device`."""
    return STATED[config.kind](config, device)


def able(config: EngineConfig, device: Device, can: Callable[[Capabilities], bool]) -> list[str]:
    """Return the values of `engine.kind` whose capabilities satisfy `can` under the config's other settings. Error
    messages suggest them."""
    return [kind for kind, stated in STATED.items() if can(stated(config, device))]
