"""Settings of generation and their checks. Some settings apply to all engines; others are in a section for one kind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from storage.problems import Problem, at_least, setting, unread_problems

OTHER_ENVIRONMENTS = {"vllm": "make engine-vllm", "tensorrt_llm": "make engine-trtllm"}
"""Kind of engine that needs a Python environment of its own -> the command that makes this environment."""
_NO_DRAFTS = {
    "vllm": "vLLM refuses speculative decoding beside the logits processor that draws its tokens",
    "tensorrt_llm": "TensorRT-LLM refuses log-probs beside drafts, or reports wrong ones",
}
HIDDEN_STATES_BYTES = 64 << 20
"""Memory of the hidden states that a learned draft head is trained on. Finished rows take three quarters of it (2 bytes
per number), and rows in flight one quarter (4 bytes per number)."""
ENGINE_WORK_BYTES = 3 << 30
"""GPU memory that vLLM or TensorRT-LLM needs in addition to weights and cache, for activations, CUDA graphs and
buffers. vLLM's log says: "CUDA graphs can take additional 1~3 GiB memory per GPU"."""


@dataclass
class SpeculationConfig:
    """Speculative decoding: the next tokens of a row are drafted, and several are verified in one pass. The tokens are
    the same as without drafts."""

    drafter: Literal["none", "ngram", "learned", "both"] = "none"
    """Source of drafts. ngram: the tokens that followed the same two or three tokens earlier in the row or in rows of
    the same prompt. learned: a small head on the model's hidden state, trained on finished rows while the engine is
    idle. both: n-grams, and the head for rows where it is expected to gain more."""
    max_tokens: int = setting(6, at_least(1, ": a draft has at least 1 token"))
    """Maximum length of a draft: how many positions after a row's last token are drafted in one pass."""


@dataclass
class EmbeddedConfig:
    """Settings of the embedded engine."""

    kernels: Literal["auto", "native", "torch", "triton"] = "auto"
    """Implementation of the model's operations. native: C for a CPU, compiled on this machine. triton: Triton for CUDA;
    torch computes the matrix products. torch: plain torch. auto: native on a CPU if there is a compiler, triton on CUDA
    if Triton is installed, otherwise torch. Engines whose log-probs must agree to the last bit need the same
    kernels."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)


@dataclass
class VllmConfig:
    """Settings of vLLM."""

    compile: bool = False
    """Let vLLM compile the model. That takes minutes at each start with a cold cache."""


@dataclass
class EngineConfig:
    """Settings that all engines share, and sections for single kinds. Only the section of the chosen kind may differ
    from its defaults."""

    kind: Literal["embedded", "vllm", "tensorrt_llm"] = "embedded"
    """Kind of engine. vllm and tensorrt_llm run in Python environments of their own (`engine.python`)."""
    python: str | None = None
    """Python interpreter of the environment of vLLM or TensorRT-LLM. null: the interpreter that `make engine-vllm` or
    `make engine-trtllm` installed below the working directory. The saved config has its absolute path."""
    max_rows: int = setting(16, at_least(1))
    """Maximum number of rows that are decoded together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the engine's weights and activations."""
    kv_budget_mb: int = setting(512, at_least(1))
    """Memory for all keys and values of a replica, in MiB. If the rows need more, the youngest rows wait and are
    resumed later. vLLM and TensorRT-LLM reserve all of this memory at their start."""
    cuda_graphs: bool = True
    """Capture decode passes as CUDA graphs, once per size, and replay them. This has an effect only on CUDA, and in the
    embedded engine only with Triton's kernels. TensorRT-LLM ignores it and decides itself."""
    tensor_parallel: int = setting(1, at_least(1))
    """Number of ranks that share each block of a replica. Each of these ranks holds some heads and a part of the
    MLP."""
    pipeline_parallel: int = setting(1, at_least(1))
    """Number of pipeline stages of a replica. Each stage holds some of the blocks. A replica has tensor_parallel x
    pipeline_parallel ranks. Each rank is a process with a device (or threads) of its own."""
    embedded: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)


def engine_problems(config: EngineConfig) -> Iterator[Problem]:
    """Yield the problems of section `engine` that do not depend on other sections."""
    yield from _environment_problems(config)
    yield from _other_kinds_problems(config)
    yield from _embedded_problems(config.embedded)
    yield from _graphs_problems(config)


def _environment_problems(config: EngineConfig) -> Iterator[Problem]:
    """Yield a problem if `engine.python` does not suit the kind of engine."""
    if config.kind not in OTHER_ENVIRONMENTS:
        if config.python is not None:
            need = f"engine.kind={config.kind} runs in this environment: null, or engine.kind=vllm or tensorrt_llm"
            yield Problem("engine.python", config.python, need)
        return
    if not config.python:
        made = OTHER_ENVIRONMENTS[config.kind]
        need = f"must name the Python of an environment that has {config.kind} (`{made}` makes one)"
        yield Problem("engine.python", config.python, need)


def _other_kinds_problems(config: EngineConfig) -> Iterator[Problem]:
    """Yield a problem for each changed setting of another kind of engine, since this engine would ignore it."""
    why = "only engine.kind={} reads it (given engine.kind=" + config.kind + ")"
    if config.kind != "embedded":
        embedded, why_embedded = config.embedded, why.format("embedded")
        yield from unread_problems("engine.embedded", embedded, why_embedded, ("kernels",))
        why_no_drafts = ", and ".join(filter(None, (why_embedded, _NO_DRAFTS.get(config.kind))))
        yield from unread_problems("engine.embedded.speculation", embedded.speculation, why_no_drafts)
    if config.kind != "vllm":
        yield from unread_problems("engine.vllm", config.vllm, why.format("vllm"))


def _embedded_problems(config: EmbeddedConfig) -> Iterator[Problem]:
    """Yield a problem for each changed setting of the embedded engine that other settings make useless."""
    key, drafts = "engine.embedded", config.speculation
    if drafts.drafter == "none":
        why = "there are no drafts under engine.embedded.speculation.drafter=none: choose a drafter"
        yield from unread_problems(f"{key}.speculation", drafts, why, ("max_tokens",))


def _graphs_problems(config: EngineConfig) -> Iterator[Problem]:
    """Yield a problem if `engine.cuda_graphs` is switched off although this engine does not read it."""
    without: str | None = None
    if config.kind == "embedded" and config.embedded.kernels in ("native", "torch"):
        without = (
            f"passes are captured with Triton's kernels alone (given engine.embedded.kernels={config.embedded.kernels})"
        )
    elif config.kind == "tensorrt_llm":
        without = "TensorRT-LLM decides by itself what it captures"
    if without is not None:
        yield from unread_problems("engine", config, without, ("cuda_graphs",))


def find_interpreter(kind: str) -> str | None:
    """Return the path of the Python interpreter that `make engine-...` has installed for this kind of engine, or None
    if there is none."""
    python = Path(".engines", kind, "bin", "python")
    return str(python) if kind in OTHER_ENVIRONMENTS and python.exists() else None


def interpreter(python: str) -> str:
    """Return `engine.python` as an absolute path, which works in any working directory. A name without a folder is
    looked up in PATH and returned unchanged if it is not found. Links are not followed, because an interpreter finds
    its environment by the path that it is started with."""
    if os.path.dirname(python):
        return str(Path(python).absolute())
    path = shutil.which(python)
    return python if path is None else str(Path(path).absolute())
