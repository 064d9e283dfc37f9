"""What every engine refuses of new weights before it takes any of them in.

May import torch, stages.engines.protocol and stages.models.spec.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stages.engines.protocol import WeightsError
from stages.models.spec import EMBEDDING, LM_HEAD, ModelSpec, tensor_shapes


def check_tensors(spec: ModelSpec, tensors: Mapping[str, torch.Tensor], *, complete: bool) -> None:
    """Raises WeightsError naming the first tensor that is unknown or misshapen, or (`complete`) missing. That all
    numbers are finite is seen when they are packed, so that they are read once. A tied `lm_head.weight` may come along
    if it is the embedding that also comes."""
    expected = tensor_shapes(spec)
    for name, tensor in tensors.items():
        if name == LM_HEAD and spec.tied_embeddings:
            if EMBEDDING not in tensors or not torch.equal(tensor, tensors[EMBEDDING]):
                raise WeightsError(f"{LM_HEAD} is tied to {EMBEDDING} in this model and must come with it, equal to it")
        elif name not in expected:
            raise WeightsError(f"{name} is no tensor of this model ({spec.num_layers} blocks)")
        elif tuple(tensor.shape) != expected[name]:
            raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, this model's is {expected[name]}")
        elif not tensor.is_floating_point():
            raise WeightsError(f"{name} is {tensor.dtype}, not a floating-point tensor")
    missing = [name for name in expected if name not in tensors]
    if complete and missing:
        raise WeightsError(f"{missing[0]} is missing (and {len(missing) - 1} more)")


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Reads every number. Raises WeightsError, naming the first tensor that has one which is not finite."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise WeightsError(f"{name} has numbers that are not finite")
