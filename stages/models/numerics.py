"""How a process multiplies on CUDA: float32 products as TF32 or not, and the same bits in every run or not.

On a CPU neither is a question: there is no TF32, and the same calls on the same threads give the same bits. What is set
here is the process's, an engine's in it too. Written for CUDA, and never run on a device.

May import torch and stages.models.config.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from stages.models.config import ModelConfig

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""What libraries read before their first call, unless it is set already: cuBLAS repeats its bits only with a fixed
workspace, NCCL only with one algorithm (NVLS sums in the switch, in the order of arrival)."""


def set_numerics(model: ModelConfig) -> None:
    """Makes the process multiply as the config asks. Before the first product and before NCCL's groups are made. Raises
    ValueError, naming the key, for TF32 without CUDA."""
    if not torch.cuda.is_available():
        if model.tf32:
            raise ValueError("model.tf32 = True: float32 products of NVIDIA GPUs; this process has none")
        return
    torch.backends.cuda.matmul.fp32_precision = "tf32" if model.tf32 else "ieee"
    torch.use_deterministic_algorithms(model.deterministic)
    if model.deterministic:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # nothing here reads memory that it has not written, and filling all of it costs a pass
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False


def repeats_bits(model: ModelConfig) -> bool:
    """Whether an update that runs again here has the same digest."""
    return model.deterministic or not torch.cuda.is_available()
