"""What stands between the server's loop and an engine of another project: one file per engine implements it.

Runs in the engine's own Python environment.

What the last bits of an engine's results depend on, seen in the environment that it runs in.

Weights that another process has published, mapped where they lie.
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
    """What the engine is started with; `extra` is the section of the config that only this engine has."""

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
    """One response to make. The token at a position is drawn from p, the softmax of the logits less the banned tokens,
    over the temperature (0: the arg max, its log-prob at temperature 1): as the arg max of log p + noise keyed by
    (seed, step, row, position), or otherwise, as the engine's `Capabilities.draws` say. Rows that an engine cannot make
    by its capabilities (`distributions`, `scores`) do not come here."""

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
    """What the engine says of itself once it is up."""

    engine: str
    version: str
    facts: Mapping[str, str]
    """What the last bits of its results depend on, beside the machine's own (`facts.py`)."""
    device: str
    """What it computes on: cpu or cuda."""


class EngineAdapter(Protocol):
    """Owns an engine; called by one thread. A method that raises ends the server, unless it says otherwise."""

    ready: Ready

    def add(self, row: ServedRow) -> None:
        """Queues a row; it runs in the next `step`s."""
        ...

    def abort(self, ids: Sequence[int]) -> None:
        """Forgets rows, finished or not."""
        ...

    def step(self) -> list[Finished]:
        """Makes a token of each running row. Returns those that are finished now."""
        ...

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the weights of the whole model in; the tensors are mapped, read only, and gone when it returns.
        Whatever was cached under the old ones is forgotten. Rows in flight, which there are only where
        `Capabilities.updates` has `inflight`, go on from the tokens that they have."""
        ...

    def made(self) -> Mapping[int, int]:
        """How many tokens of its response each row in flight has, by id. Asked of an engine that updates in flight."""
        ...

    def sleep(self) -> None:
        """Gives back the memory that `Capabilities.sleeps` says, without rows in flight; `wake` takes it again. Where
        that is the weights' too, `load` follows before the next row."""
        ...

    def wake(self) -> None: ...

    def load_now(self) -> tuple[float, int]:
        """Share of the memory of keys and values that is taken now, and how many rows were sent back for want of it
        since the last call."""
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
    """By name: Python and torch as they are built, the processor as torch uses it, the GPU, and what is set in the
    environment that changes sums."""
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
    """Tensors by name, without a copy and read only.

    `tensors`: of each its name, the file, the offset in bytes, the shape, and its dtype: numpy's name, or "bfloat16".
    Raises ValueError, naming the tensor, for one that its file does not hold."""
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
