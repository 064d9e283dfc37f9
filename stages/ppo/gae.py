"""Generalised advantage estimation over the sampled tokens of each row (Schulman et al. 2016, eq. 11-16).

May import torch, jaxtyping, stages.ppo.masks and the standard library.
"""

from __future__ import annotations

from typing import Literal

import torch
from beartype import beartype
from jaxtyping import Bool, Float, jaxtyped
from torch import Tensor

from stages.ppo.masks import last_token_mask


@jaxtyped(typechecker=beartype)
def gae(
    rewards: Float[Tensor, "rows seq"],
    values: Float[Tensor, "rows seq"],
    bootstrap_values: Float[Tensor, " rows"],
    mask: Bool[Tensor, "rows seq"],
    truncated: Bool[Tensor, " rows"],
    gamma: float,
    lam: float,
    on_truncation: Literal["bootstrap", "terminate"],
) -> tuple[Float[Tensor, "rows seq"], Float[Tensor, "rows seq"]]:
    """Advantages A_t and returns G_t, both before any whitening; 0 outside the mask.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        G_t     = A_t + V_t

    V_t is the value of the state BEFORE token t. After the last token of a response

        V_{last+1} = bootstrap_value    if the response was cut and `on_truncation` is "bootstrap"
                   = 0                  otherwise: nothing follows

    and A_{last+1} = 0. Each row's mask is one contiguous run, at its own offset. Nothing here has a gradient.
    """
    r_t = torch.where(mask, rewards, 0).detach()
    v_t = torch.where(mask, values, 0).detach()
    bootstraps = truncated & (on_truncation == "bootstrap")
    v_end = torch.where(bootstraps, bootstrap_values, 0).detach()

    v_tp1 = torch.cat([v_t[:, 1:], torch.zeros_like(v_t[:, :1])], dim=1)
    v_tp1 = torch.where(last_token_mask(mask), v_end[:, None], v_tp1)
    delta_t = torch.where(mask, r_t + gamma * v_tp1 - v_t, 0)

    a_t = torch.zeros_like(delta_t)
    a_tp1 = torch.zeros_like(v_end)
    for t in reversed(range(mask.shape[1])):
        # Where token t was not sampled delta is 0; the selection also keeps A from flowing back into the prompt.
        a_tp1 = torch.where(mask[:, t], delta_t[:, t] + gamma * lam * a_tp1, 0)
        a_t[:, t] = a_tp1
    return a_t, a_t + v_t
