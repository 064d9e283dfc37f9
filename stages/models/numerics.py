"""Choose how a process multiplies matrices, and compute the products.

**float32 on a CPU.** The library is torch's BLAS (MKL) or oneDNN. On AMD processors MKL takes its AVX2 path, and oneDNN
is 2-4x as fast in the forward and both backward products. On Intel processors MKL is at least as fast. So the
processor's vendor decides.

A measurement does not decide, because it would depend on the machine's load. The results of the two libraries differ by
rounding, and a replayed update is compared by digest. So all ranks of a gang must use the same library, also after a
restart on another machine with the same processor. The times of both are measured once, and only recorded.

**bfloat16 and float16 on a CPU.** bfloat16 products use oneDNN. Some CPUs have no instructions for 16-bit products
(AVX2 and older). There the 16-bit numbers are multiplied in float32, and the result is rounded to 16 bits. torch's own
16-bit product would take 7 to 30 times as long on these CPUs.

**On CUDA** products always use cuBLAS. `set_numerics` sets TF32 and determinism for the whole process, including an
engine in the process. A CPU has no TF32, and the same calls on the same threads
give the same bits.

Shape suffixes: N rows, K inputs, M outputs.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from stages.models.config import ModelConfig
from stages.native.fingerprint import cpu_multiplies

LOG = logging.getLogger("stageline.products")

MEASURED_SHAPE = (256, 512, 512)
"""Number of rows, inputs and outputs of the measured products. Each product takes about a millisecond."""


class Products(StrEnum):
    """The library for float32 matrix products on a CPU."""

    TORCH = "torch"
    ONEDNN = "onednn"


@dataclass(frozen=True)
class ProductChoice:
    """A gang's library for matrix products, the reason, and the times measured when it was chosen."""

    products: Products
    reason: str
    milliseconds: Mapping[str, float]
    """Library and product -> best time of several runs on rank 0. The keys are "torch forward", "onednn
    weight_gradient" and so on. Empty if only one library could be used."""


def choose_products(
    asked: Literal["auto", "torch", "onednn"], dtype: torch.dtype, device: torch.device
) -> ProductChoice:
    """Return the gang's library for matrix products. Rank 0 chooses it and broadcasts the choice. Block until every
    rank takes part. Raises ValueError, naming the key, if `asked` is `onednn` and oneDNN cannot be used."""
    has_choice = dtype == torch.float32 and device.type == "cpu" and torch.backends.mkldnn.is_available()
    if asked == "onednn" and not has_choice:
        raise ValueError(
            f"model.products = onednn needs float32 on a CPU and a torch with oneDNN; here {dtype}, {device}"
        )
    choice = None
    if dist.get_rank() == 0:
        products, reason = choose_by_vendor(_cpu_vendor()) if has_choice else (Products.TORCH, "no other")
        if asked != "auto":
            products, reason = Products(asked), "model.products"
        choice = ProductChoice(products, reason, measure() if has_choice else {})
        LOG.info("float32 products by %s (%s); milliseconds: %s", products, reason, choice.milliseconds)
    answer = [choice]
    dist.broadcast_object_list(answer)
    assert answer[0] is not None
    return answer[0]


def choose_by_vendor(vendor: str) -> tuple[Products, str]:
    """Return the library for float32 matrix products on a processor, and the reason as text for the log. `vendor`: the
    processor's `vendor_id`, or "" if it is unknown."""
    return Products.ONEDNN if vendor == "AuthenticAMD" else Products.TORCH, f"processor {vendor or 'unknown'}"


def rows_multiple(dtype: torch.dtype, device: torch.device) -> int:
    """Return the number m such that the number of tokens in a product is rounded up to a multiple of m. It is 1 if
    nothing is rounded. On a CPU torch caches its code for every shape of a 16-bit product, some 0.5 MiB each, without
    limit. Without the rounding a trainer grew by 600 MiB in 150 updates, since its rows had many lengths."""
    return 64 if device.type == "cpu" and dtype.itemsize < 4 else 1


def multiply(x_NK: Tensor, weight_MK: Tensor, products: Products) -> Tensor:
    """Return x @ weight.T, where x may have more axes before its last."""
    if x_NK.is_cpu and not cpu_multiplies(x_NK.dtype):
        in_float32, _ = choose_by_vendor(_cpu_vendor())
        return multiply(x_NK.float(), weight_MK.float(), in_float32).to(x_NK.dtype)
    if products is Products.TORCH:
        # as one matrix: with more axes matmul checks gradients and strides to choose between two products
        product = torch.mm(x_NK.flatten(0, -2), weight_MK.T)
        # not `view`: autograd lets nobody add to a view that was made in a Function
        return torch.ops.aten._unsafe_view(product, (*x_NK.shape[:-1], len(weight_MK)))
    return torch.ops.mkldnn._linear_pointwise(x_NK, weight_MK, None, "none", [], "")


def add_product(total_NM: Tensor, x_NK: Tensor, weight_MK: Tensor, products: Products) -> None:
    """Add x @ weight.T to `total`, in one pass over `total` if the library can do so. `total` and x may have more axes
    before their last."""
    if products is Products.TORCH and (not x_NK.is_cpu or cpu_multiplies(x_NK.dtype)):
        total_NM.view(-1, len(weight_MK)).addmm_(x_NK.flatten(0, -2), weight_MK.T)
    else:
        total_NM += multiply(x_NK, weight_MK, products)


def multiply_bfloat16(x_NK: Tensor, weight_MK: Tensor) -> Tensor:
    """Return x @ weight.T in float32. Both tensors are float32, but all their values are bfloat16 numbers. The sums are
    float32 and are not rounded to bfloat16.

    oneDNN multiplies the values as bfloat16. This is several times as fast on a processor with bfloat16 products.
    (torch's product of bfloat16 tensors would round its result.) The call changes a setting of the whole process until
    it returns. Meanwhile the float32 products of other threads would be rounded, but no other thread of a rank's
    process computes products.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        return torch.matmul(x_NK, weight_MK.T)
    finally:
        matmul.fp32_precision = before


def input_gradient(grad_NM: Tensor, weight_MK: Tensor, products: Products) -> Tensor:
    """Return grad @ weight, where grad may have more axes before its last."""
    return multiply(grad_NM, weight_MK.T, products)


def weight_gradient(grad_NM: Tensor, x_NK: Tensor, products: Products) -> Tensor:
    """Return grad.T @ x, with all rows of grad and x flattened to one axis."""
    grad_MN, x_KN = grad_NM.flatten(0, -2).T, x_NK.flatten(0, -2).T
    if not grad_MN.numel():
        return grad_MN.new_zeros(grad_MN.shape[0], x_KN.shape[0])  # oneDNN refuses empty products
    return multiply(grad_MN, x_KN, products)


def measure() -> dict[str, float]:
    """Return library and product ("torch forward" and so on) -> milliseconds in this process. Each time is the best of
    several runs; the libraries take turns."""
    rows, inputs, outputs = MEASURED_SHAPE
    # not random numbers, since the run uses the process's generator
    x_NK, weight_MK, grad_NM = torch.ones(rows, inputs), torch.ones(outputs, inputs), torch.ones(rows, outputs)
    candidates: dict[str, Callable[[], Tensor]] = {}
    for products in Products:
        candidates[f"{products} forward"] = partial(multiply, x_NK, weight_MK, products)
        candidates[f"{products} input_gradient"] = partial(input_gradient, grad_NM, weight_MK, products)
        candidates[f"{products} weight_gradient"] = partial(weight_gradient, grad_NM, x_NK, products)
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(5):
        for name, product in candidates.items():
            start = time.perf_counter()
            product()
            best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return {name: round(ms, 3) for name, ms in best.items()}


@cache
def _cpu_vendor() -> str:
    """Return `vendor_id` of the first processor, "" if the system does not report it."""
    listing = Path("/proc/cpuinfo")
    if not listing.is_file():
        return ""
    names = (line.partition(":") for line in listing.read_text("utf8").splitlines())
    return next((value.strip() for name, _, value in names if name.strip() == "vendor_id"), "")


# ---- CUDA ------------------------------------------------------------------------------------------------

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""Environment variables that make libraries repeat their bits. They must be set before a library's first call. Values
that the user has set are kept. cuBLAS needs a fixed workspace, and NCCL one algorithm (NVLS sums in the switch, in the
order of arrival)."""


def set_numerics(model: ModelConfig) -> None:
    """Set TF32 and determinism on CUDA for the whole process, as the config says. Call this function before the first
    matrix product and before NCCL's groups are created. In a process without CUDA nothing is set. Such a process gets
    ValueError, naming the key, if the config asks for TF32."""
    if not torch.cuda.is_available():
        if model.tf32:
            raise ValueError("model.tf32 = True: float32 products of NVIDIA GPUs; this process has none")
        return
    # `allow_tf32` is the older setting, and setting it also sets the newer `fp32_precision`. If only the newer one were
    # set, code that reads the older one (Inductor, vLLM, Transformer Engine, `torch.get_float32_matmul_precision`)
    # would raise "mix of the legacy and new APIs".
    torch.backends.cuda.matmul.allow_tf32 = model.tf32
    torch.use_deterministic_algorithms(model.deterministic)
    if model.deterministic:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # no code here reads uninitialised memory, so torch need not fill it
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False


def repeats_bits(model: ModelConfig) -> bool:
    """Return True if an update that is computed twice gives the same bits: always on a CPU, and on CUDA under
    `model.deterministic`."""
    return model.deterministic or not torch.cuda.is_available()


def peak_bytes() -> int:
    """Return this process's peak memory: on CUDA torch's allocations on the device; otherwise the resident set, which
    includes libraries and mapped pages of files."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # getrusage also counts the process that started this one, until its `exec`
        return 1024 * int(re.findall(r"^VmHWM:\s+(\d+) kB", status.read_text("utf8"), re.MULTILINE)[0])
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest
