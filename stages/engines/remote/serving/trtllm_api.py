"""What is used of TensorRT-LLM, found in the version that is there: its calls for reinforcement learning are marked as
prototypes and move between versions, so each is looked for, and an error names the version that lacks it.

Checked against recorded signatures (tests/support/trtllm_stand_in); never run.

Runs in the engine's own Python environment. May import the standard library and torch; tensorrt_llm when it is asked
for.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

EXTENSION = "tensorrt_llm.llmapi.rlhf_utils.WorkerExtension"
"""What every worker gets beside its own methods: `update_weights`, once per bucket and once with None."""
_ASYNC_LLM = ("tensorrt_llm._torch.async_llm", "tensorrt_llm.llmapi", "tensorrt_llm")
_MEMORY = ("tensorrt_llm._torch.virtual_memory",)
_COMPILERS_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables that say where torch and Triton keep what they compile."""


class MissingFeatureError(RuntimeError):
    """The version that is there lacks what is needed; names both."""


@dataclass(frozen=True)
class TrtllmApi:
    """Of one version."""

    version: str
    make_llm: Any
    """AsyncLLM: the only one whose weights can be exchanged; it needs Ray."""
    sampling_params: Any
    kv_cache_config: Any
    sleep_options: Mapping[str, Any]
    """Arguments of AsyncLLM with which it can give memory back."""
    sleep_tags: tuple[str, ...]
    """The memory of keys and values, and of weights."""


def find_api(*, sleeps: bool) -> TrtllmApi:
    """`sleeps`: it must be able to give memory back. Raises MissingFeatureError; RuntimeError, naming what it lacks
    itself, for a module that cannot be imported."""
    package = importlib.import_module("tensorrt_llm")
    version = str(package.__version__)
    llmapi = importlib.import_module("tensorrt_llm.llmapi")
    options: dict[str, Any] = {}
    tags: tuple[str, ...] = ()
    if sleeps:
        own_config = getattr(llmapi, "SleepConfig", None)
        options = {"enable_sleep": True} if own_config is None else {"sleep_config": own_config()}
        tags = _sleep_tags(_found(version, _MEMORY, "ExecutorMemoryType"), version)
    return TrtllmApi(
        version=version,
        make_llm=_found(version, _ASYNC_LLM, "AsyncLLM"),
        sampling_params=_attribute(version, package, "SamplingParams"),
        kv_cache_config=_attribute(version, llmapi, "KvCacheConfig"),
        sleep_options=options,
        sleep_tags=tags,
    )


def keep_compiled(folder: str, key: Mapping[str, object]) -> Path:
    """Has what torch and Triton compile at the start kept in a folder for this key (model, layout, versions), so that
    it is compiled once. To be called before tensorrt_llm is imported. Returns the folder."""
    name = hashlib.sha256(json.dumps(dict(key), sort_keys=True, default=str).encode()).hexdigest()[:16]
    place = Path(folder) / name
    for variable, inside in _COMPILERS_FOLDERS.items():
        (place / inside).mkdir(parents=True, exist_ok=True)
        os.environ[variable] = str(place / inside)
    (place / "key.json").write_text(json.dumps(dict(key), sort_keys=True, default=str, indent=1), "utf8")
    return place


def buckets(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, most_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors in groups of at most `most_bytes` in the engine's dtype; those of one block stay together, since engines
    fuse them, so that a group may be as large as a block."""
    groups: dict[str, list[str]] = {}
    for name in tensors:
        parts = name.split(".")
        group = ".".join(parts[:3]) if parts[:2] == ["model", "layers"] else ".".join(parts[:2])
        groups.setdefault(group, []).append(name)
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for names in groups.values():
        more = sum(tensors[name].numel() for name in names) * dtype.itemsize
        if bucket and size + more > most_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket |= {name: tensors[name] for name in names}
        size += more
    if bucket:
        yield bucket


def _sleep_tags(kinds: Any, version: str) -> tuple[str, ...]:
    """Where weights have memory of their own it is theirs alone that goes with the cache's; else all of the model's."""
    named = {kind.name: str(kind.value) for kind in kinds}
    weights = "MODEL_WEIGHTS_MAIN" if "MODEL_WEIGHTS_MAIN" in named else "MODEL_ENGINE_MAIN"
    for name in ("KV_CACHE", weights):
        if name not in named:
            raise MissingFeatureError(f"TensorRT-LLM {version} has no memory called {name}: {', '.join(named)}")
    return named["KV_CACHE"], named[weights]


def _found(version: str, modules: tuple[str, ...], name: str) -> Any:
    """The attribute, from the first module that has it. A module that is there and cannot be imported (it needs
    another package, a library of the system) is no module that this version lacks."""
    for module in modules:
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            if absent is not None and f"{module}.".startswith(f"{absent}."):
                continue
            raise RuntimeError(f"TensorRT-LLM {version}: {module} cannot be imported: {error}") from error
        if hasattr(found, name):
            return getattr(found, name)
    raise MissingFeatureError(f"TensorRT-LLM {version} has no {name} in {', '.join(modules)}")


def _attribute(version: str, module: Any, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise MissingFeatureError(f"TensorRT-LLM {version} has no {module.__name__}.{name}") from error
