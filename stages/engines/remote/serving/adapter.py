"""The interface between the server's loop and an engine of another project. Each engine implements it in one file. The
functions at the end collect the facts about an environment that last bits depend on, and map weights of another
process.

Runs in the engine's own Python environment.
"""

from __future__ import annotations

import hashlib
import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True)
class Settings:
    """Settings that the engine is started with. `extra`: settings for this kind of engine only."""

    model: str
    """A Hugging Face directory."""
    dtype: str
    max_seq: int
    """Longest prompt plus response, in tokens."""
    max_rows: int
    kv_budget_mb: int
    tensor_parallel: int
    pipeline_parallel: int
    threads: int
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class ServedRow:
    """One response to generate. The token at a position is drawn from p, the softmax of the logits without the
    banned tokens, divided by the temperature (0: the arg max, with its log-prob at temperature 1). The draw is the
    arg max of log p + noise keyed by (seed, step, row, position), unless the engine's `Capabilities.draws` say
    otherwise. Rows that the engine's capabilities exclude (`distributions`, `scores`) are not sent."""

    id: int
    row: int
    seed: int
    step: int
    tokens: tuple[int, ...]
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    suppress: tuple[int, ...]
    stop: tuple[int, ...]
    """Tokens that end the response; banned before `min_new_tokens`."""
    forced: tuple[int, ...]
    """Tokens that are given instead of drawn; empty: none are."""


@dataclass(frozen=True)
class Finished:
    """A response; `logprobs` as in `ServedRow`."""

    id: int
    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class Ready:
    """The engine's description of itself once it is up."""

    engine: str
    version: str
    facts: Mapping[str, str]
    """Facts that the last bits of the engine's results depend on, besides `machine_facts`."""
    device: str
    """Device that it computes on: cpu or cuda."""


class EngineAdapter(Protocol):
    """Owns an engine. One thread calls it. If a method raises, the server ends."""

    ready: Ready

    def add(self, row: ServedRow) -> None:
        """Queue a row; it runs in the next `step`s."""
        ...

    def abort(self, ids: Sequence[int]) -> None:
        """Forget rows, finished or not."""
        ...

    def step(self) -> list[Finished]:
        """Generate a token of each running row. Return the rows that have finished. (An engine that steps by itself
        only waits for a moment.)"""
        ...

    def load(self, places: Sequence[Mapping[str, Any]]) -> None:
        """Load the weights of the whole model from these places, which `map_tensors` maps. The files may be gone after
        the call. Everything cached under the old weights is dropped. Rows in flight, which exist only if
        `Capabilities.updates` has `inflight`, continue from their tokens."""
        ...

    def made(self) -> Mapping[int, int]:
        """Return the number of generated tokens of each row in flight, by id. Called for engines that update in
        flight."""
        ...

    def sleep(self) -> None:
        """Free the memory that `Capabilities.sleeps` names, until `wake`. No row is in flight. If the weights are
        freed too, `load` follows before the next row."""
        ...

    def wake(self) -> None: ...

    def load_now(self) -> tuple[float, int]:
        """Return the share of the cache's memory that is in use, and the number of rows that were preempted for lack of
        it since the last call."""
        ...

    def close(self) -> None: ...


# ---- facts -----------------------------------------------------------------------------------------------

_ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "NCCL_ALGO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "VLLM_ATTENTION_BACKEND",
)


def machine_facts() -> dict[str, str]:
    """Return facts by name: the builds of Python and torch, the processor as torch uses it, the GPU, and environment
    variables that change sums."""
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch.build": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:12],
        "torch.cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "environment": " ".join(f"{name}={os.environ[name]}" for name in _ENVIRONMENT if name in os.environ) or "none",
    }
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        facts["gpu"] = f"{torch.cuda.get_device_name()} (capability {major}.{minor})"
        facts["cuda"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return facts


# ---- tensors ---------------------------------------------------------------------------------------------


def map_tensors(tensors: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return tensors by name, read only and without a copy.

    `tensors`: for each its name, file, offset in bytes, shape and dtype (numpy's name, or "bfloat16"). Raises
    ValueError, naming the tensor, if its file does not hold it."""
    files: dict[str, np.ndarray] = {}
    found = {}
    for info in tensors:
        name, path = str(info["name"]), str(info["file"])
        if path not in files:
            files[path] = np.memmap(path, np.uint8, "r")
        is_bfloat16 = info["dtype"] == "bfloat16"
        dtype = np.dtype(np.uint16 if is_bfloat16 else info["dtype"])
        start = int(info["offset"])
        end = start + dtype.itemsize * int(np.prod(info["shape"], dtype=np.int64))
        if end > files[path].size:
            raise ValueError(f"{name} ends at byte {end} of {path}, which has {files[path].size}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of torch, for memory that cannot be written
            tensor = torch.from_numpy(files[path][start:end].view(dtype).reshape(tuple(info["shape"])))
        found[name] = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
    return found
