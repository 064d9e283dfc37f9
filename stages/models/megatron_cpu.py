"""Make megatron-core 0.16 run on a torch without CUDA. With CUDA it changes nothing, so both use the same code.

megatron-core asks for CUDA devices, generators and tensor type names by name. On a machine without CUDA `install` gives
its modules a copy of the torch module in which these are the CPU's. All other code in the process keeps the real torch,
except for two methods of Tensor: `cuda` returns the tensor, and `type` without arguments returns
"torch.cuda.FloatTensor". Call `install` in worker processes only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "empty_like", "zeros_like", "arange")
"""torch functions that megatron-core calls with device="cuda"."""


def install() -> None:
    """Patch megatron-core's modules imported so far. A second call, or a call with CUDA, does nothing."""
    if torch.cuda.is_available() or hasattr(torch.Tensor.type, "__wrapped__"):
        return
    cpu = torch.device("cpu")
    cuda = _view(
        torch.cuda,
        current_device=lambda: cpu,
        synchronize=lambda device=None: None,
        # the CPU's generator replaces the device's
        get_rng_state=lambda device="cuda": torch.get_rng_state(),
        set_rng_state=lambda state, device="cuda": torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
    )
    view = _view(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES})
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = view
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.type = _cuda_type_name(torch.Tensor.type)  # type: ignore[method-assign]


def _view(module: ModuleType, **changes: Any) -> ModuleType:
    """Return a copy of a module with some of its contents replaced."""
    view = ModuleType(module.__name__, module.__doc__)
    view.__dict__.update(module.__dict__)
    view.__dict__.update(changes)
    return view


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the factory with device="cuda" replaced by the CPU."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _cuda_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Tensor.type that calls CPU tensors "torch.cuda.FloatTensor": megatron-core's optimizers compare this
    name."""

    @functools.wraps(original)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) and self.is_cpu else name

    return type_name
