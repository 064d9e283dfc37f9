"""Lets megatron-core 0.16 run on a torch without CUDA; does nothing where CUDA exists, so both take one code path.

megatron-core asks for CUDA devices, generators and type names by name. On a machine without CUDA `install` answers
with the CPU's. It changes torch for the whole process: call it in worker processes only, before models are built.

May import torch and megatron.core.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "empty_like", "arange")
"""torch functions that megatron-core calls with device="cuda" spelled out."""


def install() -> None:
    """Patches torch and megatron-core, once; a second call and a call on a machine with CUDA do nothing."""
    if torch.cuda.is_available() or hasattr(torch.Tensor.type, "__wrapped__"):
        return
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    # the CPU's generator stands in for the device's
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()  # type: ignore[assignment, misc]
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    torch.Tensor.type = _cuda_type_name(torch.Tensor.type)  # type: ignore[method-assign]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory with device="cuda" read as the CPU."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _cuda_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.type that names CPU tensors "torch.cuda.FloatTensor": megatron-core's optimizers compare this name."""

    @functools.wraps(original)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) and self.is_cpu else name

    return type_name
