"""What each engine can do: the one thing that a run asks before it relies on an engine. Nobody asks for `engine.kind`.

    config, device ──► Capabilities ──┬─► checks: what a run asks for beyond them is refused before anything starts
                                      ├─► pipeline/config/preflight.py: what a run may then not prove, and says so
                                      └─► workers, replay: how weights are read, what a repetition may be held to

They are stated here, engine by engine, as a function of the settings and of the device that the engine computes on; an
engine that is built says the same (`GenerationEngine.capabilities`). What was never measured is stated as the weaker of
what it may be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from stages.engines.config import EngineConfig

Device = Literal["cpu", "cuda"]
_SERVER_BYTES = 950 << 20
"""Of vLLM's CPU build, mostly libraries: 660 MiB measured with a tiny model, 820 to 910 with SmolLM2. Others were never
measured."""


@dataclass(frozen=True)
class EngineMemory:
    """What its memory is, where that does not follow from its settings alone: for what a run is predicted to take."""

    reserves_cache: bool = False
    """All of `engine.kv_budget_mb` is taken at the start, whatever the rows need of it."""
    refit_bytes: int | None = None
    """Of new weights beside the old ones, on each rank, or the largest tensor where that is more; None: all of them."""
    process_bytes: int = 0
    """Of each process of its own environment, without weights and cache; 0: it computes in Stageline's processes."""


@dataclass(frozen=True)
class Capabilities:
    """What a run may rely on; what it asks for beyond that is refused before it starts."""

    draws: Literal["keyed", "seeded", "free"]
    """`keyed`: law 4. `seeded`: tokens repeat for the same request in the same engine alone. `free`: they do not."""
    invariance: Literal["bits", "tokens", "none"]
    """What of a row is the same in any company: its log-probs to the last bit; its tokens, but for ties of rounding;
    nothing."""
    distributions: Literal["any", "plain"]
    """What rows may be drawn from: `any`: at any temperature, without suppressed tokens and without EOS before
    `min_new_tokens`. `plain`: the softmax of the logits (temperature 1) or their arg max (0), nothing taken out."""
    scores: bool
    """Tokens that are given come back with their log-probs (`Request.forced`): without it there are no canaries."""
    updates: frozenset[Literal["drain", "inflight"]]
    """How new weights can come in (`engine.update`)."""
    sources: frozenset[Literal["tensors", "mapped"]]
    """What `load_weights` takes: tensors of this process, and is done with them in one pass that also finds what is not
    finite; `mapped`: it hands on where their bytes lie (`MappedTensors.places`), and reads none itself."""
    failed_refit: Literal["kept", "rebuild"]
    """After a refit that failed half-way the old weights go on, or the engine must be built anew. (Weights that do not
    fit are refused before: they change nothing in any engine.)"""
    migration: bool
    """Rows can go on in another engine (`MigratableRows`)."""
    sleeps: Literal["nothing", "cache", "weights"]
    """What `sleep` gives back: no memory, that of keys and values, or that of the weights too, which must then be
    loaded again after `wake`."""
    speculation: bool
    """Drafts go together with right log-probs."""
    devices: frozenset[Device]
    """What it runs on."""
    memory: EngineMemory = EngineMemory()
    measured: bool = True
    """Whether what is said here was ever seen on this device; otherwise it is what the engine is built for."""

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
        no += [] if self.migration else ["rows that move"]
        text = ", ".join(f"{name} {value}" for name, value in said.items()) + (f"; no {', '.join(no)}" if no else "")
        return text if self.measured else f"{text}; never measured on this device"


def embedded_capabilities(config: EngineConfig, device: Device) -> Capabilities:
    """On a CPU a row's bits do not depend on its company (tested). On CUDA cuBLAS picks its algorithm by the number of
    rows: tokens then differ where two candidates lie within rounding."""
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


_VLLM_SLEEPS: Mapping[int, Literal["cache", "weights"]] = {1: "cache", 2: "weights"}
"""By `engine.vllm.sleep_level`, where the platform can (the server refuses it elsewhere)."""


def vllm_capabilities(config: EngineConfig, device: Device) -> Capabilities:
    """Draws are ours (`serving/vllm_adapter.py`); sums depend on a row's company. vLLM refuses drafts beside a logits
    processor. With pipeline stages batches are under way between its steps, where weights cannot change."""
    return Capabilities(
        draws="keyed",
        invariance="tokens",
        distributions="any",
        scores=True,
        updates=frozenset({"drain"} if config.pipeline_parallel > 1 else {"drain", "inflight"}),
        sources=frozenset({"mapped"}),
        failed_refit="rebuild",
        migration=False,
        sleeps=_VLLM_SLEEPS.get(config.vllm.sleep_level, "nothing"),
        speculation=False,
        devices=frozenset({"cpu", "cuda"}),
        memory=EngineMemory(reserves_cache=True, refit_bytes=0, process_bytes=_SERVER_BYTES),
        measured=device == "cpu" and config.tensor_parallel * config.pipeline_parallel == 1,
    )


def tensorrt_llm_capabilities(config: EngineConfig, device: Device) -> Capabilities:
    """By its recorded interface (`serving/trtllm_adapter.py`), which was never run: a seed for each request, log-probs
    of the logits as they are, whatever temperature or bans did to the draw."""
    return Capabilities(
        draws="seeded",
        invariance="none",
        distributions="plain",
        scores=False,
        updates=frozenset({"drain"}),
        sources=frozenset({"mapped"}),
        failed_refit="rebuild",
        migration=False,
        sleeps="weights" if config.tensorrt_llm.unload_engine_train else "nothing",
        speculation=False,
        devices=frozenset({"cuda"}),
        memory=EngineMemory(
            reserves_cache=True, refit_bytes=config.tensorrt_llm.bucket_mb << 20, process_bytes=_SERVER_BYTES
        ),
        measured=False,
    )


STATED: Mapping[str, Callable[[EngineConfig, Device], Capabilities]] = {
    "embedded": embedded_capabilities,
    "vllm": vllm_capabilities,
    "tensorrt_llm": tensorrt_llm_capabilities,
}
"""`engine.kind` -> what such an engine can do."""


def capabilities_of(config: EngineConfig, device: Device) -> Capabilities:
    """Of the engine that a config asks for, computing on `device`."""
    return STATED[config.kind](config, device)


def able(config: EngineConfig, device: Device, can: Callable[[Capabilities], bool]) -> list[str]:
    """The kinds of engines that can do something, with this config's other settings: what to set `engine.kind` to."""
    return [kind for kind, stated in STATED.items() if can(stated(config, device))]
