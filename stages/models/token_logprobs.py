"""Compute log-probs of sampled tokens and entropies of their distributions from hidden states: the output layer and its
softmax, one block of the vocabulary at a time.

    block b of the vocabulary:   logits = hidden @ weight_b.T  ─► max, sum exp, ... per token   (forward)
                                 logits ─► their gradient G    ─► hidden' += G @ weight_b, weight_b' = G.T @ hidden

So the matrix [tokens, vocabulary] never exists as a whole. (hidden' and weight_b' are gradients.) Logits that fit into
`KEPT_BYTES` are kept from the forward to the backward pass. The backward pass computes the logits of the other blocks
again, a fourth product beside the three that each block needs.

The distribution is the sampler's (temperature, suppressed tokens, no EOS before `min_new_tokens`). Under bfloat16 the
operands of every product are bfloat16 and logits are float32, as in the engine. Logits rounded to bfloat16 would be
another distribution: logits near 20 would be multiples of 1/8.

Shape suffixes: N sampled tokens of the micro-batch, H hidden size, V this tensor-parallel rank's part of the
vocabulary, W tokens of a block, K blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from stages.models.kernels.blocks import BlockKernels
from stages.models.layers import add_weight_gradient
from stages.models.memory import LOGITS_BLOCK_BYTES as BLOCK_BYTES
from stages.models.memory import LOGITS_KEPT_BYTES as KEPT_BYTES
from stages.models.memory import LOGITS_MIN_BLOCK as MIN_BLOCK
from stages.models.numerics import Products, input_gradient, multiply, multiply_bfloat16

EXCLUDED = -1e30
"""Logit of a token that cannot be sampled. Its probability is exactly 0, and 0 times this logit is 0. (0 times -inf
would be NaN.)"""

Entropy = Literal["none", "value", "gradient"]
"""Entropies to compute. none: they are 0. value: without a gradient. gradient: with a gradient."""


@dataclass(frozen=True)
class Distribution:
    """The settings that turn logits into the distribution that tokens are sampled from."""

    temperature: float
    suppressed: tuple[int, ...]
    eos: tuple[int, ...]
    min_new_tokens: int


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    tokens_N: Tensor,
    index_N: Tensor,
    distribution: Distribution,
    products: Products,
    kernels: BlockKernels,
    *,
    entropy: Entropy,
) -> tuple[Tensor, Tensor]:
    """Return two float32 tensors [N]: each token's log-prob, and the entropy in nats of the distribution that the token
    was sampled from. `hidden_NH`: the hidden states that predict the tokens.

    `index_N`: index of each token in its response. The computation is vocabulary-parallel: each tensor-parallel rank
    multiplies with its part of the output layer, and all ranks get the same result.
    """
    first_token = parallel_state.get_tensor_model_parallel_rank() * weight_VH.shape[0]
    logprobs_N, entropy_N = _TokenLogprobs.apply(
        hidden_NH,
        weight_VH,
        tokens_N - first_token,
        index_N < distribution.min_new_tokens,
        _shifted(distribution, first_token),
        products,
        kernels,
        entropy,
    )
    return logprobs_N, entropy_N


class _TokenLogprobs(torch.autograd.Function):
    """The function (log softmax(z)[target], entropy H) of the logits z = hidden @ weight.T, with its gradient. Each
    tensor-parallel rank has a part of the vocabulary. All ranks get the same outputs and the same gradient of hidden.
    With p = softmax(z):

        dlogp/dz_j = 1[j = target] - p_j            dH/dz_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        early_N: Tensor,
        distribution: Distribution,
        products: Products,
        kernels: BlockKernels,
        entropy: Entropy,
    ) -> tuple[Tensor, Tensor]:
        """Return two float32 tensors [N]: the log-prob of each target token, and the entropy of the distribution that
        the token was sampled from (0 if `entropy` is "none"). Token ids in `target_N` and in `distribution` are
        relative to this rank's part of the vocabulary: 0 is the first of its V tokens. A target in the part of another
        rank is outside 0..V-1. `early_N`: True where the response must not end yet."""
        blocks = _blocks(len(target_N), weight_VH.shape[0], hidden_NH.device)
        operand_NH = _operand(hidden_NH, weight_VH)
        kept_bytes = KEPT_BYTES if any(ctx.needs_input_grad) else 0
        kept: list[Tensor] = []
        # per block of logits z: the largest z, and sums of exp(z - largest) and of exp(z - largest) (z - largest)
        largest_KN = torch.empty(len(blocks), len(target_N), device=hidden_NH.device)
        sums_KN, weighted_KN = torch.empty_like(largest_KN), torch.zeros_like(largest_KN)
        target_logit_N = torch.zeros_like(largest_KN[0])
        for k, block in enumerate(blocks):
            z_NW = _logits(operand_NH, weight_VH[block], early_N, _cut(distribution, block), products)
            inside_N, column_N = _columns_in_block(target_N, block)
            target_logit_N += torch.where(inside_N, z_NW.gather(1, column_N[:, None])[:, 0], 0)
            torch.amax(z_NW, 1, out=largest_KN[k])
            kept_bytes -= z_NW.nbytes
            if kept_bytes >= 0:  # only the first blocks: `kept` has no gaps, even if a smaller last block fits
                kept.append(z_NW)
            below_NW = z_NW - largest_KN[k, :, None]
            weight_NW = below_NW.exp() if entropy != "none" else below_NW.exp_()
            torch.sum(weight_NW, 1, out=sums_KN[k])
            if entropy != "none":
                torch.linalg.vecdot(weight_NW, below_NW, out=weighted_KN[k])
        largest_N = _over_ranks(largest_KN.amax(0), dist.ReduceOp.MAX)
        below_KN = largest_KN - largest_N
        parts_3N = torch.stack(
            [
                (below_KN.exp() * sums_KN).sum(0),
                (below_KN.exp() * (weighted_KN + below_KN * sums_KN)).sum(0),
                target_logit_N,
            ]
        )
        total_N, weighted_N, target_logit_N = _over_ranks(parts_3N, dist.ReduceOp.SUM)
        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N if entropy != "none" else torch.zeros_like(total_N)
        if entropy != "gradient":
            ctx.mark_non_differentiable(entropy_N)
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, early_N, largest_N + log_total_N, entropy_N)
        ctx.distribution, ctx.products, ctx.kernels, ctx.kept = distribution, products, kernels, kept
        ctx.main_grad = getattr(weight_VH, "main_grad", None)
        ctx.entropy_gradient = entropy == "gradient"
        return (target_logit_N - largest_N) - log_total_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprob_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, target_N, early_N, log_total_N, entropy_N = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, []  # their memory is overwritten; a second backward computes them again
        operand_NH = _operand(hidden_NH, weight_VH)
        factor_NH = hidden_NH.to(weight_VH.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if needs_hidden else None
        # Megatron's gradient buffer, or a new tensor to return
        total_VH = ctx.main_grad
        if needs_weight and total_VH is None:
            total_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        by_logprob_N, by_entropy_N = (g / ctx.distribution.temperature for g in (grad_logprob_N, grad_entropy_N))
        for k, block in enumerate(_blocks(len(target_N), weight_VH.shape[0], hidden_NH.device)):
            if k < len(kept):
                z_NW, kept[k] = kept[k], kept[k].new_empty(0)
            else:
                z_NW = _logits(operand_NH, weight_VH[block], early_N, _cut(ctx.distribution, block), ctx.products)
            logp_NW = z_NW.sub_(log_total_N[:, None])
            if ctx.entropy_gradient:
                grad_NW = logp_NW.exp()
                logp_NW += entropy_N[:, None]
                logp_NW *= by_entropy_N[:, None]
                logp_NW += by_logprob_N[:, None]
                grad_NW *= logp_NW.neg_()
            else:
                grad_NW = logp_NW.exp_().mul_(-by_logprob_N[:, None])
            inside_N, column_N = _columns_in_block(target_N, block)
            grad_NW.scatter_add_(1, column_N[:, None], torch.where(inside_N, by_logprob_N, 0)[:, None])
            grad_NW = grad_NW.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                _add_product(grad_hidden_NH, grad_NW, weight_VH[block], ctx.products)
            if needs_weight:
                add_weight_gradient(total_VH[block], grad_NW, factor_NH, ctx.products, ctx.kernels)
        if grad_hidden_NH is not None:
            grad_hidden_NH = _over_ranks(grad_hidden_NH, dist.ReduceOp.SUM).to(hidden_NH.dtype)
        grad_weight_VH = total_VH.to(weight_VH.dtype) if needs_weight and ctx.main_grad is None else None
        return grad_hidden_NH, grad_weight_VH, None, None, None, None, None, None


def _blocks(num_tokens: int, width: int, device: torch.device) -> list[slice]:
    """Return the blocks of this rank's vocabulary, the same for forward and backward pass."""
    size = max(MIN_BLOCK, BLOCK_BYTES["cpu" if device.type == "cpu" else "cuda"] // (4 * max(1, num_tokens)))
    return [slice(start, min(start + size, width)) for start in range(0, width, size)]


def _operand(hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """Return the hidden states in the weight's dtype, on a CPU held in float32."""
    rounded_NH = hidden_NH.to(weight_VH.dtype)
    return rounded_NH.float() if rounded_NH.is_cpu else rounded_NH


def _logits(
    operand_NH: Tensor, weight_WH: Tensor, early_N: Tensor, distribution: Distribution, products: Products
) -> Tensor:
    """Return the float32 logits [N, W] of one block of the vocabulary, after temperature and exclusions. Token ids in
    the distribution are relative to the block's first token."""
    if weight_WH.dtype == torch.bfloat16 and weight_WH.is_cpu:
        z_NW = multiply_bfloat16(operand_NH, weight_WH.float())
    elif operand_NH.dtype == torch.float32:
        z_NW = multiply(operand_NH, weight_WH.float(), products)
    else:
        z_NW = torch.mm(operand_NH, weight_WH.T, out_dtype=torch.float32)
    if distribution.temperature != 1:
        z_NW /= distribution.temperature
    if distribution.suppressed:
        z_NW[:, list(distribution.suppressed)] = EXCLUDED
    for token in distribution.eos if distribution.min_new_tokens else ():
        z_NW[:, token].masked_fill_(early_N, EXCLUDED)
    return z_NW


def _add_product(sum_NH: Tensor, grad_NW: Tensor, weight_WH: Tensor, products: Products) -> None:
    """Add grad @ weight to `sum_NH` in float32."""
    if grad_NW.dtype == torch.float32 and products is Products.TORCH:
        sum_NH.addmm_(grad_NW, weight_WH)
    else:
        sum_NH += input_gradient(grad_NW, weight_WH, products)


def _columns_in_block(target_N: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Return for each target whether it is in the block, and its column there (0 if outside)."""
    inside_N = (target_N >= block.start) & (target_N < block.stop)
    return inside_N, torch.where(inside_N, target_N - block.start, 0)


def _cut(distribution: Distribution, block: slice) -> Distribution:
    """Return the distribution with the token ids of one block, relative to its first token."""

    def local(tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(t - block.start for t in tokens if block.start <= t < block.stop)

    return replace(distribution, suppressed=local(distribution.suppressed), eos=local(distribution.eos))


def _shifted(distribution: Distribution, first_token: int) -> Distribution:
    """Return the distribution with token ids relative to this rank's first token."""
    suppressed, eos = ([t - first_token for t in tokens] for tokens in (distribution.suppressed, distribution.eos))
    return replace(distribution, suppressed=tuple(suppressed), eos=tuple(eos))


def _over_ranks(partial: Tensor, operation: Any) -> Tensor:
    """Reduce the tensor-parallel ranks' parts to one tensor, the same on each rank."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1:
        dist.all_reduce(partial, op=operation, group=group)
    return partial
