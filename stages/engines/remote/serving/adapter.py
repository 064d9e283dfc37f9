"""The interface between the server's loop and an engine of another project. Each engine implements it in one file.

`machine_facts` collects facts about the machine that the last bits of results depend on. `map_tensors` maps weights
that another process has written.

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
    """Settings with which the engine is started. `extra` holds settings for this kind of engine only."""

    model: str
    """A Hugging Face directory."""
    dtype: str
    max_seq: int
    """Maximum length of a prompt and its response together, in tokens."""
    max_rows: int
    kv_budget_mb: int
    tensor_parallel: int
    pipeline_parallel: int
    threads: int
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class ServedRow:
    """A request to generate one response.

    The token at a position is drawn from p, the softmax of logits / temperature without the banned tokens. The tokens
    in `suppress` are banned. Before `min_new_tokens`, the tokens in `stop` are banned too. At temperature 0 the token
    is the arg max of the logits, and its log-prob is computed at temperature 1. At other temperatures the token is the
    arg max of log p plus noise whose key is (seed, step, row, position), if `Capabilities.draws` of the engine is
    `keyed`.

    A row that the engine cannot serve (`Capabilities.distributions` and `Capabilities.scores`) is not sent to it."""

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
    """Tokens that end the response. They are banned before `min_new_tokens`."""
    forced: tuple[int, ...]
    """Prescribed tokens, which are not drawn; empty: all tokens are drawn."""


@dataclass(frozen=True)
class Finished:
    """A finished response. `logprobs`: log-prob of each token, under the distribution that the token was drawn from.
    The class `ServedRow` defines this distribution."""

    id: int
    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class Ready:
    """The engine's description of itself, once it has started."""

    engine: str
    version: str
    facts: Mapping[str, str]
    """Name -> value of each fact about the engine that can change the last bits of its results. The facts about the
    machine come from the function `machine_facts`."""
    device: str
    """Device that the engine computes on: cpu or cuda."""


class EngineAdapter(Protocol):
    """Owner of an engine. All calls come from one thread. If a method raises an exception, the server ends."""

    ready: Ready

    def add(self, row: ServedRow) -> None:
        """Queue a row. It runs in the following calls of `step`."""
        ...

    def abort(self, ids: Sequence[int]) -> None:
        """Drop rows, whether or not they are finished."""
        ...

    def step(self) -> list[Finished]:
        """Generate a token of each running row, and return the rows that have finished. If the engine makes its steps
        by itself, only wait for a moment."""
        ...

    def load(self, places: Sequence[Mapping[str, Any]]) -> None:
        """Load the weights of the whole model. `places`: place of each tensor, for `map_tensors`. The files may be
        deleted after the call.

        Everything that was cached under the old weights is dropped. Rows in flight continue from the tokens that they
        have. Rows can be in flight only if `Capabilities.updates` has `inflight`."""
        ...

    def made(self) -> Mapping[int, int]:
        """Return id -> number of generated tokens, for each row in flight. If rows are in flight, the loop calls this
        before `load`, to record which of their tokens the old weights sampled."""
        ...

    def sleep(self) -> None:
        """Free the memory that `Capabilities.sleeps` names, until `wake` is called. No row is in flight. If the weights
        are freed, `load` is called before the next row."""
        ...

    def wake(self) -> None: ...

    def load_now(self) -> tuple[float, int]:
        """Return the share of the cache's memory that is in use now, and the number of preemptions since the last call.
        A row is preempted when cache memory is short."""
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
    """Return name -> value of each fact about the machine that can change the last bits of results. The facts are the
    builds of Python and torch, the processor as torch uses it, the GPU with the versions of CUDA and cuDNN, and the
    environment variables that change the order or the precision of floating-point operations."""
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
    """Return tensors by name, as read-only views of files, without a copy.

    `tensors`: for each tensor its name, file, offset in bytes, shape and dtype (numpy's name, or "bfloat16"). Raises
    ValueError, naming the tensor, if the file is too short for it."""
    files: dict[str, np.ndarray] = {}
    mapped = {}
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
            warnings.simplefilter("ignore", UserWarning)  # torch warns about memory that cannot be written
            tensor = torch.from_numpy(files[path][start:end].view(dtype).reshape(tuple(info["shape"])))
        mapped[name] = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
    return mapped
