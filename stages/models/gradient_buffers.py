"""Put a trained model's gradients into Megatron's buffers, and overlap their exchange with the passes of an update.

The data-parallel ranks add up their gradients. Under the distributed optimizer each rank also sends the others the
weights that it has updated. On GPUs both exchanges happen in buckets, during the passes:

    last backward pass   block 9, 8, 7 │ 6, 5, 4 │ 3, 2, 1              a bucket is sent as soon as its last gradient
    gradients                   └─ bucket 0 ─► └─ bucket 1 ─► └─ ... ─► wait ─► optimizer step      is complete
    next forward pass                                             block 1, 2, 3 │ 4, 5, 6 │ ...     a block waits for
    weights (distributed optimizer)                    last bucket ─► bucket 1 ─► bucket 0 ─►       its own bucket

Gradients are sent only during the last micro-batch's backward pass. The later stages of a pipeline have one bucket
each, since they wait for the first stage anyway. In the first minibatch of a process Megatron only counts how often
each gradient becomes ready, and sends all buckets at the end of the minibatch.
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
    """Return True if the exchange overlaps with the passes: if there are several data-parallel ranks, and the kernels
    are portable, as on CUDA. The kernels for CPUs do not tell Megatron when a gradient is ready, and no core would be
    free to send the gradient."""
    return blueprint.kernels.portable and blueprint.parallel_rank.data_size > 1


class _Buffers(DistributedDataParallel):
    def _make_backward_post_hook(self, param: Parameter) -> Callable[..., None]:
        """Return Megatron's hook, changed to do nothing if autograd has no gradient for the parameter. Then other code
        has written the gradient into `main_grad`, and `registering` reports when this gradient is complete. On CUDA
        autograd calls this hook in another thread."""
        ready: Callable[..., None] = super()._make_backward_post_hook(param)

        def hook(*unused: Any) -> None:
            if param.grad is not None:
                ready(*unused)

        return hook


def registering(ddp: DistributedDataParallel, role: Role, loss: Loss) -> Loss:
    """Return a loss whose backward pass also tells the buffers when the gradient of a policy's own output layer is
    complete. `token_logprobs` writes this gradient into `main_grad`, where autograd does not see it. Return `loss`
    itself if this rank has no such layer, or if the exchange does not overlap.

    The gradient is complete together with the gradient of the hidden states, since one function computes both. If the
    output layer is tied to the embedding of the same stage, its gradient is complete only after the embedding's part,
    which autograd does see."""
    weight = ddp.module.output_layer.weight if ddp.module.post_process and role is Role.POLICY else None
    bucket_group = ddp.param_to_bucket_group.get(weight)
    if bucket_group is None or not ddp.ddp_config.overlap_grad_reduce:
        return loss

    def registered(batch: MicroBatch, hidden_NH: Tensor) -> tuple[Tensor, LossStats]:
        hidden_NH.register_hook(lambda _: bucket_group.register_grad_ready(weight))
        return loss(batch, hidden_NH)

    return registered


def complete_weights(ddp: DistributedDataParallel) -> None:
    """Send the weights of the last optimizer step to all data-parallel ranks now, and wait until they have arrived. Do
    nothing if this exchange is not left to the forward passes (`overlap_param_gather`). A collective call."""
    if ddp.ddp_config.overlap_param_gather:
        ddp.start_param_sync(force_sync=True)


def settle(ddp: DistributedDataParallel) -> None:
    """Reset the buffers after an update that may have ended early. Wait for the exchanges that the update started. Then
    mark the weights as complete on every rank: every caller has loaded the weights from files, or does so next. Not a
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
