"""The fingerprint of a process: the items on which the last bits of its results depend. Two workers with the same
items, weights and inputs compute the same bits. If an item differs, their results may differ.

    software       versions of Python and of the packages in `software.SOFTWARE`
    processor      vector and matrix instructions, and whether Linux lets this process use matrix registers (AMX)
    libraries      torch's build and the instruction set that it uses; the C compiler's version and flags
    environment    variables that change how MKL, oneDNN, torch, cuBLAS and NCCL compute
    device         a GPU's name and capability, versions of CUDA and cuDNN

The number of threads and the layout are not part of the fingerprint, because they are in the config. The processor's
name and cache sizes are left out too, because in clouds the machines of one type have processors of different names. A
library may choose the block sizes of matrix products by the name or the cache sizes. If results differ for this reason,
the digest comparison of replayed updates shows the difference.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
from functools import cache
from pathlib import Path

import torch

from stages.native.compile import compiler_flags, compiler_version

_ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALGO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
_VECTOR_FLAG = re.compile(r"(avx|amx|sse4|fma|f16c|bmi|asimd|sve|bf16|i8mm|fphp)\w*|sme(2\w*)?")
"""Pattern of the processor flags for instructions that a compiler or a library may use in computations."""
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux's numbers, on x86-64, for the request to use the matrix registers: system call, operation, and registers."""


def machine_numerics() -> dict[str, str]:
    """Return the fingerprint of this process without the software versions: name of an item -> its value. The items
    describe the processor, the libraries, the environment variables and the GPU."""
    flags = _processor_flags()
    items = {
        "machine": platform.machine(),
        "instructions": " ".join(sorted(flag for flag in flags if _VECTOR_FLAG.fullmatch(flag))),
        "amx": _matrix_registers(flags),
        "torch.cpu": torch.backends.cpu.get_cpu_capability(),
        "torch.build": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:12],
        "compiler": compiler_version() or "none",
        "compiler.flags": " ".join(compiler_flags()),
        "environment": " ".join(f"{name}={os.environ[name]}" for name in _ENVIRONMENT if name in os.environ),
    }
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        items["device"] = f"{torch.cuda.get_device_name()} (capability {major}.{minor})"
        items["cuda"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return items


@cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Return True if oneDNN can multiply matrices of this dtype on this processor. Always True for float32."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _processor_flags() -> frozenset[str]:
    """Return the processor's flags as Linux lists them. Empty on other systems."""
    listing = Path("/proc/cpuinfo")
    if not listing.is_file():
        return frozenset()
    for line in listing.read_text("utf8", "replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _matrix_registers(flags: frozenset[str]) -> str:
    """Return "granted", "refused" or "none". The C kernels make the same request: a sandbox or an older Linux may
    refuse registers that the processor has."""
    if "amx_bf16" not in flags or platform.machine() != "x86_64":
        return "none"
    granted = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
    return "granted" if granted else "refused"
