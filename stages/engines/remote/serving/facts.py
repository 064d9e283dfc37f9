"""What the last bits of an engine's results depend on, seen in the environment that it runs in.

May import the standard library and torch.
"""

from __future__ import annotations

import hashlib
import os
import platform

import torch

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
