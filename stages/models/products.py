"""float32 matrix products on a CPU by torch's BLAS (MKL) or by oneDNN, and the choice between them.

On AMD processors MKL takes its AVX2 path, which oneDNN's kernels outrun 2-4x (forward, gradient of the input and of the
weight alike); on Intel's MKL is as fast or faster. The two differ in the last bits, so that the choice must be the same
on every rank of a gang and the same whenever the run is started again on such a machine: a replayed update is compared
by digest. Therefore it is made by a rule, the processor's vendor, and not by a stopwatch, which would answer otherwise
on a busy day; what the stopwatch says is measured once and recorded beside it.

bfloat16 products go through oneDNN and CUDA's through cuBLAS whatever is chosen here. Suffixes: N rows, K inputs, M
outputs.

May import torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

LOG = logging.getLogger("stageline.products")

MEASURED_SHAPE = (256, 512, 512)
"""Rows, inputs and outputs of the products that are measured: a millisecond each."""


class Products(StrEnum):
    """Who multiplies float32 matrices on a CPU."""

    TORCH = "torch"
    ONEDNN = "onednn"


@dataclass(frozen=True)
class ProductChoice:
    """What a gang multiplies with, why, and what was measured when it was chosen."""

    products: Products
    reason: str
    milliseconds: Mapping[str, float]
    """Best of several, by "torch forward", "onednn weight_gradient" and so on; of rank 0. Empty without a choice."""


def choose_products(
    asked: Literal["auto", "torch", "onednn"], dtype: torch.dtype, device: torch.device
) -> ProductChoice:
    """The choice of the whole gang, made by rank 0 and handed to the others; blocks until every rank has come. Raises
    ValueError, naming the key, for `onednn` where there is none."""
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
    """The rule, and its reason."""
    return Products.ONEDNN if vendor == "AuthenticAMD" else Products.TORCH, f"processor {vendor or 'unknown'}"


def rows_multiple(dtype: torch.dtype, device: torch.device) -> int:
    """What the number of tokens in a product is rounded up to. On a CPU torch keeps what it compiled for every shape of
    a 16-bit product, some 0.5 MiB, without end: with rows of all lengths a trainer grew by 600 MiB in 150 updates."""
    return 64 if device.type == "cpu" and dtype.itemsize < 4 else 1


def multiply(x_NK: Tensor, weight_MK: Tensor, products: Products) -> Tensor:
    """x @ weight.T, where x may have more axes before its last."""
    if products is Products.TORCH:
        # as one matrix: of more axes matmul asks for gradients and strides before it chooses between two products
        return torch.mm(x_NK.flatten(0, -2), weight_MK.T).view(*x_NK.shape[:-1], len(weight_MK))
    return torch.ops.mkldnn._linear_pointwise(x_NK, weight_MK, None, "none", [], "")


def multiply_bfloat16(x_NK: Tensor, weight_MK: Tensor) -> Tensor:
    """x @ weight.T of float32 tensors whose numbers are bfloat16's, summed up in float32 and not rounded: oneDNN
    multiplies them as bfloat16, several times as fast where the processor can. (torch's product of bfloat16 tensors
    rounds its answer.) The setting is the process's: float32 products of other threads would be rounded meanwhile, of
    which a rank's process has none."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        return torch.matmul(x_NK, weight_MK.T)
    finally:
        matmul.fp32_precision = before


def input_gradient(grad_NM: Tensor, weight_MK: Tensor, products: Products) -> Tensor:
    """grad @ weight, where grad may have more axes before its last."""
    return multiply(grad_NM, weight_MK.T, products)


def weight_gradient(grad_NM: Tensor, x_NK: Tensor, products: Products) -> Tensor:
    """grad.T @ x, all rows of either flattened to one axis."""
    grad_MN, x_KN = grad_NM.flatten(0, -2).T, x_NK.flatten(0, -2).T
    if not grad_MN.numel():
        return grad_MN.new_zeros(grad_MN.shape[0], x_KN.shape[0])  # oneDNN has no sum of nothing
    return multiply(grad_MN, x_KN, products)


def measure() -> dict[str, float]:
    """Milliseconds of each product by each of `Products` in this process, the best of several, taken in turns."""
    rows, inputs, outputs = MEASURED_SHAPE
    # not drawn: the process's random numbers are a run's
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


def _cpu_vendor() -> str:
    """`vendor_id` of the first processor, "" where the system does not say."""
    listing = Path("/proc/cpuinfo")
    if not listing.is_file():
        return ""
    names = (line.partition(":") for line in listing.read_text("utf8").splitlines())
    return next((value.strip() for name, _, value in names if name.strip() == "vendor_id"), "")
