"""State what each engine can do. A run asks only this before it relies on an engine; no other code branches on
`engine.kind`.

    config, device ──► Capabilities ──┬─► checks: refuse what a run asks for beyond them, before anything starts
                                      ├─► pipeline/config/preflight.py: say what the run cannot prove
                                      └─► workers, replay: how weights are read, and what a repetition must reproduce

The capabilities of an engine are a function of its settings and of its device. A built engine states the same
(`GenerationEngine.capabilities`). If something was never measured, the weaker possibility is stated.
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
    """Memory of an engine that does not follow from its settings alone, for the prediction of a run's memory."""

    reserves_cache: bool = False
    """True if the engine allocates all of `engine.kv_budget_mb` at the start, whatever its rows need."""
    refit_bytes: int | None = None
    """Bytes of new weights beside the old ones on each rank, or of the largest tensor if it is larger; None: all
    weights."""
    process_bytes: int = 0
    """Bytes of each process in the engine's own environment, without weights and cache; 0: the engine has no processes
    of its own."""


@dataclass(frozen=True)
class Capabilities:
    """The abilities of an engine. A run that asks for more is refused before it starts."""

    draws: Literal["keyed", "seeded", "free"]
    """Repeatability of sampled tokens. `keyed`: law 4. `seeded`: the same request in the same engine gives the same
    tokens; no other guarantee. `free`: tokens do not repeat."""
    invariance: Literal["bits", "tokens", "none"]
    """Results of a row that do not depend on the other rows in its batch. bits: its log-probs, to the last bit; tokens:
    its tokens, except for ties within rounding; none: no results."""
    distributions: Literal["any", "plain"]
    """The distributions that rows can be drawn from. any: any temperature, suppressed tokens, and no EOS before
    `min_new_tokens`. plain: the softmax of the logits (temperature 1) or their arg max (0), with no token excluded."""
    scores: bool
    """True if the engine returns the log-probs of given tokens (`Request.forced`). Canaries need it."""
    updates: frozenset[Literal["drain", "inflight"]]
    """The ways to load new weights (`inflight`: `rollout.versions`)."""
    sources: frozenset[Literal["tensors", "mapped"]]
    """The forms of weights that `load_weights` takes. tensors: tensors of this process; one pass packs them and finds
    numbers that are not finite. mapped: the places of their bytes (`MappedTensors.places`), which the engine passes on
    and does not read itself."""
    failed_refit: Literal["kept", "rebuild"]
    """State after a refit that failed half-way. `kept`: the engine continues with the old weights. `rebuild`: it must
    be built anew. (Every engine refuses weights that do not fit before it changes anything.)"""
    migration: bool
    """True if rows can continue in another engine (`MigratingEngine`)."""
    sleeps: Literal["nothing", "cache", "weights"]
    """The memory that `sleep` frees: none, that of keys and values, or that of the weights too. After `weights` they
    must be loaded again after `wake`."""
    speculation: bool
    """True if log-probs are correct with speculative decoding."""
    devices: frozenset[Device]
    """Devices that the engine runs on."""
    memory: EngineMemory = EngineMemory()
    measured: bool = True
    """False: these capabilities were never observed on this device; the engine was only built for them."""

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
"""Size of the pieces in which new weights are copied to every rank's device: the largest tensor of a 70B model in
bfloat16 (its embedding, 128256 x 8192) takes two, and a smaller piece would only mean more calls."""


def vllm_capabilities(config: EngineConfig, device: Device) -> Capabilities:
    """Return the capabilities of vLLM. The draws are ours (`serving/vllm_adapter.py`), but sums depend on the other
    rows. vLLM refuses drafts together with a logits processor. With pipeline stages, batches are in flight between its
    steps, and weights cannot change then."""
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
    """Return the capabilities of TensorRT-LLM by its recorded interface (`serving/trtllm_adapter.py`), which was never
    run: a seed per request, and log-probs of the raw logits, whatever temperature or bans did to the draw."""
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
    """Return the values of `engine.kind` whose capabilities satisfy `can`, with the config's other settings. Error
    messages suggest them."""
    return [kind for kind, stated in STATED.items() if can(stated(config, device))]
