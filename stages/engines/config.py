"""Settings of generation, and what of them cannot work: what every engine has a word for, and a section per kind.

May import the standard library and storage.problems.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from storage.problems import Problem, above, at_least

OTHER_ENVIRONMENTS = {"vllm": "make engine-vllm", "tensorrt_llm": "make engine-trtllm"}
"""Kinds of engines that live in a Python environment of their own, and what makes one."""
_FEWEST_BEATS = 5
"""Of the one a second of an engine's process, that must be missing before it is lost: less is a busy machine's."""


@dataclass
class SpeculationConfig:
    """Drafting tokens ahead and verifying several in one pass: the same tokens, sooner."""

    drafter: Literal["none", "ngram", "learned", "both"] = "none"
    """`ngram`: what followed the same two or three tokens before, in the row or in earlier rows of its prompt.
    `learned`: a small head on the model's hidden state, trained on the finished rows while the engine is idle. `both`:
    lookup, and the head for the rows for which that promises less."""
    max_tokens: int = 6
    """Longest draft of a row in a pass: positions ahead."""
    branches: int = 4
    """Guesses for each position that the learned head makes, of which the promising ones are verified side by side; 1:
    a single chain. Not with Triton's kernels, which follow one chain."""
    lengths: Literal["measured", "longest"] = "measured"
    """`measured`: what maximises expected tokens per second, 0 included. `longest`: as long as there are drafts."""
    head_vocab: int = 4096
    """Tokens that the learned head can draft: those most frequent in the responses."""
    head_memory_mb: int = 64
    """Of the hidden states that the head learns from: three quarters for those of the last rows, 2 bytes a number, a
    quarter for those of rows in flight."""
    train_share: float = 0.5
    """Of the engine's idle time, at most so much is spent on training the head."""


@dataclass
class EmbeddedConfig:
    """What only the embedded engine has."""

    kernels: Literal["auto", "native", "torch", "triton"] = "auto"
    """What runs between the matrix products: C compiled on this machine (`native`, on a CPU), Triton's (on CUDA), or
    plain torch. `auto` takes one of the former where a C compiler or Triton is found. Engines whose log-probs must
    agree to the last bit need the same."""
    cuda_graphs: bool = True
    """Decode passes are captured once per size and replayed. On CUDA with Triton's kernels; elsewhere no effect."""
    pipeline_groups: int | None = None
    """Passes that go round the stages at once, each with its share of the rows in flight; null: one for each stage."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)


@dataclass
class VllmConfig:
    """What only vLLM has."""

    compile: bool = False
    """vLLM compiles the model (minutes at every start, where its cache is cold) instead of running it as it is."""
    prefix_caching: bool = True
    """Rows of one prompt share its keys and values."""
    sleep_level: int = 0
    """What vLLM gives back while others have its device. 0: nothing. 1: the cache, and weights go to the host's memory.
    2: weights too, which are loaded again. Only where vLLM can sleep: not on a CPU."""


@dataclass
class TensorrtLlmConfig:
    """What only TensorRT-LLM has."""

    unload_engine_train: bool = False
    """The engine can give its memory back while the trainer has the device: weights too, which are loaded again."""
    bucket_mb: int = 1024
    """New weights come in so many MB at a time, copied to every rank's device: what a refit takes of each."""
    cache: str | None = None
    """Folder in which what is compiled at the start is kept, for the next start with the same model, layout and
    versions; null: ~/.cache/stageline/tensorrt_llm."""


@dataclass
class EngineConfig:
    """What every engine has a word for; then a section for each kind, of which only the one that `kind` names may have
    other values than the defaults."""

    kind: Literal["embedded", "vllm", "tensorrt_llm"] = "embedded"
    """`vllm`, `tensorrt_llm`: in a Python environment of its own (`engine.python`)."""
    python: str | None = None
    """Interpreter of the environment that the engine is installed in; for engines of other projects. Where a config is
    read a relative path becomes an absolute one, and a name without a folder what is found for it."""
    start_s: float | None = None
    """For such an engine to come up with its model; null: 4/5 of `cluster.start_timeout_s`, which ends the whole
    worker's start, and cannot say why."""
    silence_s: float = 60.0
    """Longest time without a word from such an engine's process, which says something every second; then it is taken
    for lost, and its replica is built anew. While it starts, 30 s if that is more. An engine that hangs in a process
    that still speaks is found by `cluster.deadline_s`."""
    slots: int = 16
    """Rows decoded together at most."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_budget_mb: int = 512
    """Memory of all keys and values. Where rows outgrow it, the youngest wait and are resumed."""
    update: Literal["drain", "inflight"] = "drain"
    """How new weights come in: after the rows in flight have finished, or between two tokens, which the rows go on
    from (they are fed again: no token is made from keys of older weights). With `inflight` a token's version
    depends on when weights arrive: a run keeps its staleness bound, and is no longer repeatable bit for bit. It needs
    `rollout.versions: latest`."""
    tensor_parallel: int = 1
    """Ranks that hold each block of a replica's model together, with some of its heads and of its MLP each."""
    pipeline_parallel: int = 1
    """Stages of a replica's model, each with some of the blocks. A replica has tensor_parallel x pipeline_parallel
    ranks, each a process with a device (or the threads) of its own; its own process is the first."""
    embedded: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    tensorrt_llm: TensorrtLlmConfig = field(default_factory=TensorrtLlmConfig)


def engine_problems(config: EngineConfig) -> Iterator[Problem]:
    """What of the section `engine` cannot work by itself."""
    counts = {
        "engine.slots": config.slots,
        "engine.kv_budget_mb": config.kv_budget_mb,
        "engine.tensor_parallel": config.tensor_parallel,
        "engine.pipeline_parallel": config.pipeline_parallel,
        "engine.tensorrt_llm.bucket_mb": config.tensorrt_llm.bucket_mb,
    }
    yield from at_least(1, counts)
    yield from above(0, {"engine.start_s": config.start_s}, " seconds, or null")
    yield from at_least(_FEWEST_BEATS, {"engine.silence_s": config.silence_s}, " seconds: it says something in each")
    if config.vllm.sleep_level not in (0, 1, 2):
        yield Problem("engine.vllm.sleep_level", config.vllm.sleep_level, "vLLM has levels 1 and 2: must be 0, 1 or 2")
    yield from _environment_problems(config)
    yield from _other_kinds_problems(config)
    yield from speculation_problems(config.embedded.speculation)
    groups = config.embedded.pipeline_groups
    most = config.slots if config.pipeline_parallel > 1 else 1
    if groups is not None and not 1 <= groups <= most:
        need = f"must be from 1 to {most} (engine.slots, or 1 without engine.pipeline_parallel), or null"
        yield Problem("engine.embedded.pipeline_groups", groups, need)


def _environment_problems(config: EngineConfig) -> Iterator[Problem]:
    """Of engines that live in a Python environment of their own, and of the one that does not."""
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
    """Of settings that the engine does not have, and would leave out without a word."""
    defaults = EngineConfig()
    for kind in ("embedded", "vllm", "tensorrt_llm"):
        if kind != config.kind:
            given, without = (_leaves(f"engine.{kind}", asdict(getattr(one, kind))) for one in (config, defaults))
            for key, value in given.items():
                if value != without[key]:
                    need = f"only engine.kind={kind} has it: leave it at {without[key]} with engine.kind={config.kind}"
                    yield Problem(key, value, need)


def _leaves(key: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their whole keys."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= _leaves(f"{key}.{name}", value) if isinstance(value, Mapping) else {f"{key}.{name}": value}
    return found


def interpreter(python: str) -> str:
    """`engine.python` as it works in any working directory; what is not found stays as it is. Links are not followed:
    an interpreter knows its environment by the path that it is called by."""
    if os.path.dirname(python):
        return str(Path(python).absolute())
    found = shutil.which(python)
    return python if found is None else str(Path(found).absolute())


def speculation_problems(config: SpeculationConfig) -> Iterator[Problem]:
    """The settings of drafts that cannot work."""
    needs = {
        "max_tokens": (config.max_tokens >= 1, "a draft has at least 1 token: must be 1 or more"),
        "branches": (config.branches >= 1, "a position has at least 1 guess: must be 1 or more"),
        "head_vocab": (config.head_vocab >= 2, "must be 2 or more: a guess is among at least 2 tokens"),
        "head_memory_mb": (config.head_memory_mb >= 1, "must be 1 or more: learning takes at least 1"),
        "train_share": (
            0 < config.train_share <= 1,
            "must be a share of idle time: above 0 and at most 1 (drafter: ngram learns nothing)",
        ),
    }
    for key, (ok, need) in needs.items():
        if not ok:
            yield Problem(f"engine.embedded.speculation.{key}", getattr(config, key), need)
