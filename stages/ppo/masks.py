"""Masks, loss weights, and the shift from positions to the tokens that they predict.

The rest of this folder rests on two rules:

* **One alignment.** Index t of a per-token array belongs to tokens[:, t]. A causal model predicts token t at position
  t - 1. Only `predictions_of_tokens` moves predictions from positions to tokens.
* **Loss weights.** Every loss is a plain sum, sum_t weight_t * term_t. Its weights are computed once, over the rows of
  the whole minibatch. Micro-batches, gradient accumulation, packing and data-parallel ranks only change the order of
  the sum.

Masks are applied by selection (`torch.where`), never by multiplication: 0 * NaN is NaN.
"""

from __future__ import annotations

from typing import Literal

import torch
from beartype import beartype
from jaxtyping import Bool, Float, Int, Shaped, jaxtyped
from torch import Tensor

WHITENING_EPS = 1e-8
"""Term added to the variance before the square root, as in Ziegler et al. 2019."""


@jaxtyped(typechecker=beartype)
def predictions_of_tokens(per_position: Shaped[Tensor, "rows seq *rest"]) -> Shaped[Tensor, "rows seq *rest"]:
    """Return a tensor that has, at index t, a causal model's prediction of token t. This is the model's output at
    position t - 1.

        out[:, t] = per_position[:, t - 1],   out[:, 0] = 0   (nothing predicts the first token)

    For a critic, the value after token t - 1 becomes `values[:, t]`, the value of the state before token t.
    Differentiable.
    """
    return torch.cat([torch.zeros_like(per_position[:, :1]), per_position[:, :-1]], dim=1)


@jaxtyped(typechecker=beartype)
def last_token_mask(mask: Bool[Tensor, "rows seq"]) -> Bool[Tensor, "rows seq"]:
    """Return a mask that is True only at the last True of each row. The Trues of a row must be contiguous. A row may
    have none."""
    next_is_sampled = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    return mask & ~next_is_sampled


@jaxtyped(typechecker=beartype)
def last_token_index(mask: Bool[Tensor, "rows seq"]) -> Int[Tensor, " rows"]:
    """Return the index of the last True of each row. It is 0 for a row without a True."""
    index = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, index, 0).amax(dim=1)


@jaxtyped(typechecker=beartype)
def state_values(
    value_head: Float[Tensor, "rows seq"], mask: Bool[Tensor, "rows seq"]
) -> tuple[Float[Tensor, "rows seq"], Float[Tensor, " rows"]]:
    """Return (values, bootstrap_values) of `storage.records.Values`, from a critic's output at each position
    (`value_head`). `mask`: True at the sampled tokens.

        values[:, t]     = value_head[:, t - 1]     if token t was sampled, else 0
        bootstrap_values = value_head[:, last]      value of the state after the last sampled token, which has index
                                                    `last`; 0 in a row without sampled tokens

    Differentiable.
    """
    values = torch.where(mask, predictions_of_tokens(value_head), 0)
    bootstrap = value_head.gather(1, last_token_index(mask)[:, None])[:, 0]
    return values, torch.where(mask.any(dim=1), bootstrap, 0)


@jaxtyped(typechecker=beartype)
def masked_mean(x: Float[Tensor, "rows seq"], mask: Bool[Tensor, "rows seq"]) -> Float[Tensor, ""]:
    """Return the mean of x over the mask; 0 if the mask is empty."""
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


@jaxtyped(typechecker=beartype)
def masked_var(x: Float[Tensor, "rows seq"], mask: Bool[Tensor, "rows seq"]) -> Float[Tensor, ""]:
    """Return the population variance of x over the mask (divided by n, not n - 1); 0 if the mask is empty."""
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask)


@jaxtyped(typechecker=beartype)
def masked_whiten(
    x: Float[Tensor, "rows seq"], mask: Bool[Tensor, "rows seq"], *, keep_mean: bool = False
) -> Float[Tensor, "rows seq"]:
    """Return (x - mean) / sqrt(var + eps) with the mean and variance of the entries inside the mask; 0 outside. If
    `keep_mean` is true, add the mean to the result.

    Pass all rows of the step. With the rows of one shard, each shard would be scaled differently.
    """
    mean = masked_mean(x, mask)
    whitened = (x - mean) * torch.rsqrt(masked_var(x, mask) + WHITENING_EPS)
    return torch.where(mask, whitened + mean if keep_mean else whitened, 0)


@jaxtyped(typechecker=beartype)
def token_weights(
    mask: Bool[Tensor, "rows seq"], aggregation: Literal["token", "sequence"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "rows seq"]:
    """Return the share of each token in a loss over exactly these rows. The shares sum to 1, or to 0 for an empty mask.

        token:     1 / (number of tokens inside the mask)
        sequence:  1 / (number of the row's tokens inside the mask * number of rows with tokens inside the mask)

    Call this function once with the mask of the WHOLE minibatch, then slice the result along rows.
    """
    tokens_per_row = mask.sum(dim=1, keepdim=True)
    match aggregation:
        case "token":
            num_equal_shares = tokens_per_row.sum()
        case "sequence":
            num_equal_shares = tokens_per_row * (tokens_per_row > 0).sum()
    return mask.to(dtype) / num_equal_shares.clamp(min=1).to(dtype)
