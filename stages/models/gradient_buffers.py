"""Put a trained model's gradients into Megatron's buffers, and overlap their exchange with the passes of an update.

The data-parallel ranks add up their gradients. Under the distributed optimizer each rank also sends the others the
weights that it has updated. On GPUs both exchanges happen in buckets, during the
forward and backward passes:

    last backward pass   │ block 9, 8, 7 │ block 6, 5, 4 │ block 3, 2, 1 │
    gradients                            └─ bucket 0 ─►  └─ bucket 1 ─►  └─ bucket 2 ─► wait, step

    weights              bucket 2 ─► bucket 1 ─► bucket 0 ─►        (distributed optimizer only)
    next forward pass              │ block 1, 2, 3 │ block 4, 5, 6 │ block 7, 8, 9 │

- A bucket of gradients is sent as soon as its last gradient is complete. This happens only during the last
  micro-batch's backward pass. The optimizer step waits for all buckets.
- The buckets of weights are sent in the reverse order, since the forward pass needs the lowest blocks first. A block
  waits only for its own bucket.

The later stages of a pipeline have one bucket each, since they wait for the first stage anyway. In the first minibatch
of a process Megatron only counts how often each gradient becomes ready. It sends all buckets at the end of that
minibatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn import Parameter

from stages.models.build import Blueprint
from stages.models.forward import MicroBatch
from stages.models.protocol import Role
from stages.ppo.losses import LossStats

Loss = Callable[[MicroBatch, Tensor], tuple[Tensor, LossStats]]
"""A function that returns (a micro-batch's share of the minibatch's loss, its stats), given the micro-batch and its
hidden states [N, H]."""


def in_buffers(model: GPTModel, blueprint: Blueprint, *, in_fp32: bool) -> DistributedDataParallel:
    """Return the model with its gradients (and under the distributed optimizer its weights) in Megatron's buffers.
    `in_fp32`: True for gradients in float32, False for gradients in the weights' dtype."""
    sharded, overlapping = blueprint.layout.distributed_optimizer, overlaps(blueprint)
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded,
        grad_reduce_in_fp32=in_fp32,
        overlap_grad_reduce=overlapping,
        overlap_param_gather=overlapping and sharded,
    )
    ddp = _Buffers(model.config, options, model)
    if overlapping:
        model.config.no_sync_func = ddp.no_sync
    settle(ddp)
    return ddp


def overlaps(blueprint: Blueprint) -> bool:
    """Return True if gradients and weights are exchanged during the forward and backward passes. This needs several
    data-parallel ranks and portable kernels, as on CUDA. The kernels for CPUs do not tell Megatron when a gradient is
    ready. Besides, no core would be free to send the gradient."""
    return blueprint.kernels.portable and blueprint.parallel_rank.data_size > 1


class _Buffers(DistributedDataParallel):
    def _make_backward_post_hook(self, param: Parameter) -> Callable[..., None]:
        """Return Megatron's hook, which reports that a gradient is ready, for parameters whose gradient autograd has.
        Other gradients are written into `main_grad` and reported by `registering`. On CUDA another thread calls the
        hook."""
        ready: Callable[..., None] = super()._make_backward_post_hook(param)

        def hook(*unused: Any) -> None:
            if param.grad is not None:
                ready(*unused)

        return hook


def registering(ddp: DistributedDataParallel, role: Role, loss: Loss) -> Loss:
    """Return a loss whose backward pass also reports to Megatron's buffers when the gradient of the policy's output
    layer is complete. The function `token_logprobs` writes this gradient into `main_grad`. Autograd does not see it
    there, so Megatron's own hook does not report it. The gradient is complete together with the gradient of the hidden
    states, since one function computes both.

    Return `loss` itself in these cases:

    - Gradients are not sent during the backward pass (see `overlaps`).
    - The role is not the policy, or this rank has no trained output layer.
    - The output layer is tied to the embedding of the same stage. Its gradient is complete only after the embedding's
      backward pass, and Megatron's own hook reports that.
    """
    weight = ddp.module.output_layer.weight if ddp.module.post_process and role is Role.POLICY else None
    bucket_group = ddp.param_to_bucket_group.get(weight)
    if bucket_group is None or not ddp.ddp_config.overlap_grad_reduce:
        return loss

    def registered(batch: MicroBatch, hidden_NH: Tensor) -> tuple[Tensor, LossStats]:
        hidden_NH.register_hook(lambda _: bucket_group.register_grad_ready(weight))
        return loss(batch, hidden_NH)

    return registered


def complete_weights(ddp: DistributedDataParallel) -> None:
    """Send the weights of the last optimizer step to all data-parallel ranks now, and wait until they have arrived.
    Without this call the next forward pass would send them. If the forward passes never send weights
    (`overlap_param_gather` is False), nothing is done. A collective call."""
    if ddp.ddp_config.overlap_param_gather:
        ddp.start_param_sync(force_sync=True)


def settle(ddp: DistributedDataParallel) -> None:
    """Reset this rank's buffers after an update that may have ended early. First wait for the exchanges of gradients
    and weights that the update started. Then mark the weights as complete, so that the next forward pass does not ask
    other ranks for them. They are not needed: every caller loads all weights itself, before or after this call. Not a
    collective call."""
    for group in ddp.bucket_groups:
        for handle in (group.grad_reduce_handle, group.param_gather_handle):
            if handle is not None:
                handle.wait()
        group.grad_reduce_handle = group.param_gather_handle = None
        group.per_param_grad_ready_counts = {}
        group.param_gather_dispatched = True


def unbind(ddp: DistributedDataParallel) -> None:
    """Drop the cyclic references between Megatron's objects. These references run through torch's own memory, which
    Python's collector does not see. They would keep the gang's connections open."""
    ddp.grad_accs.clear()
    ddp.module.config.grad_scale_func = ddp.module.config.no_sync_func = None
    if ddp.use_forward_hook:
        ddp.disable_forward_pre_hook(param_sync=False)
