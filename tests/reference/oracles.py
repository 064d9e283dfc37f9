"""Plain-loop oracles of PPO's formulas in Python floats (float64): one line per equation, no vectorisation, and nothing
of this project imported. A row is a list; a mask is a list of bools.
"""

from __future__ import annotations

import math

Matrix = list[list[float]]
Masks = list[list[bool]]


def sampled(mask: Masks) -> list[tuple[int, int]]:
    """(row, t) of every sampled token."""
    return [(i, t) for i, row in enumerate(mask) for t, on in enumerate(row) if on]


def last_index(mask_row: list[bool]) -> int:
    return max(t for t, on in enumerate(mask_row) if on)


def kl_estimate(d: float, estimator: str) -> float:
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def ref_kl(policy: Matrix, sampler: Matrix, ref: Matrix, mask: Masks, cap: float) -> tuple[float, float, float]:
    """(KL(pi_prox || pi_ref), KL(mu || pi_ref), share of capped weights), the KLs in nats per response: tokens per
    response times the weighted mean per token, w = min(pi_prox / mu, cap)."""
    total_w = total_wd = total_sampler = 0.0
    capped = 0
    cells = sampled(mask)
    for i, t in cells:
        w = math.exp(policy[i][t] - sampler[i][t])
        capped += w > cap
        total_w += min(w, cap)
        total_wd += min(w, cap) * (policy[i][t] - ref[i][t])
        total_sampler += sampler[i][t] - ref[i][t]
    tokens_per_response = len(cells) / len(mask)
    return tokens_per_response * total_wd / total_w, total_sampler / len(mask), capped / len(cells)


def token_rewards(
    scores: list[float], policy: Matrix, ref: Matrix, mask: Masks, kl_coef: float, estimator: str, where: str
) -> Matrix:
    out = [[0.0] * len(row) for row in mask]
    for i, t in sampled(mask):
        if where == "reward":
            out[i][t] -= kl_coef * kl_estimate(policy[i][t] - ref[i][t], estimator)
        if t == last_index(mask[i]):
            out[i][t] += scores[i]
    return out


def gae(
    rewards: Matrix,
    values: Matrix,
    bootstrap: list[float],
    mask: Masks,
    truncated: list[bool],
    gamma: float,
    lam: float,
    on_truncation: str,
) -> tuple[Matrix, Matrix]:
    """A_t as the explicit sum over l of (gamma lam)^l delta_{t+l}: not the recursion the code uses."""
    advantages = [[0.0] * len(row) for row in mask]
    returns = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        span = [t for t, on in enumerate(row) if on]
        delta = {}
        for t in span:
            if t != span[-1]:
                v_next = values[i][t + 1]
            else:
                v_next = bootstrap[i] if truncated[i] and on_truncation == "bootstrap" else 0.0
            delta[t] = rewards[i][t] + gamma * v_next - values[i][t]
        for t in span:
            advantages[i][t] = sum((gamma * lam) ** (s - t) * delta[s] for s in span if s >= t)
            returns[i][t] = advantages[i][t] + values[i][t]
    return advantages, returns


def group_advantages(
    rewards: list[float], groups: list[int], counted: list[bool], estimator: str, eps: float
) -> list[float]:
    """std, none: reward less its group's mean, over the group's deviation or not; rloo: less the mean of the others."""
    out = []
    for i, reward in enumerate(rewards):
        members = [j for j in range(len(rewards)) if groups[j] == groups[i] and counted[j]]
        others = [rewards[j] for j in members if j != i]
        if not counted[i] or not others:
            out.append(0.0)
        elif estimator == "rloo":
            out.append(reward - sum(others) / len(others))
        else:
            mean = sum(rewards[j] for j in members) / len(members)
            std = math.sqrt(sum((rewards[j] - mean) ** 2 for j in members) / (len(members) - 1))
            out.append((reward - mean) / (std + eps if estimator == "std" else 1.0))
    return out


def rewards_to_go(rewards: Matrix, mask: Masks, gamma: float) -> Matrix:
    out = [[0.0] * len(row) for row in mask]
    for i, t in sampled(mask):
        out[i][t] = sum(gamma ** (s - t) * rewards[i][s] for j, s in sampled(mask) if j == i and s >= t)
    return out


def whiten(x: Matrix, mask: Masks, keep_mean: bool) -> Matrix:
    cells = sampled(mask)
    mean = sum(x[i][t] for i, t in cells) / len(cells)
    var = sum((x[i][t] - mean) ** 2 for i, t in cells) / len(cells)
    out = [[0.0] * len(row) for row in mask]
    for i, t in cells:
        out[i][t] = (x[i][t] - mean) / math.sqrt(var + 1e-8) + (mean if keep_mean else 0.0)
    return out


def aggregate(terms: Matrix, mask: Masks, aggregation: str) -> float:
    """token: mean over all sampled tokens; sequence: mean over (non-empty) rows of each row's mean."""
    if aggregation == "token":
        cells = sampled(mask)
        return sum(terms[i][t] for i, t in cells) / len(cells)
    means = [
        sum(x for x, on in zip(row, on_row, strict=True) if on) / sum(on_row)
        for row, on_row in zip(terms, mask, strict=True)
        if any(on_row)
    ]
    return sum(means) / len(means)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def corrected(w: float, correction: str, cap: float) -> float:
    if correction == "none":
        return 1.0
    if correction == "truncate":
        return min(w, cap)
    return w if 1 / cap <= w <= cap else 0.0


def policy_loss(
    new: Matrix,
    entropy: Matrix,
    sampler: Matrix,
    policy: Matrix,
    ref: Matrix,
    advantages: Matrix,
    mask: Masks,
    behind: list[list[int]],
    taken: int,
    *,
    clip_eps: float,
    anchor: str,
    correction: str,
    cap: float,
    proximal: str,
    aggregation: str,
    entropy_coef: float,
    kl_where: str,
    kl_estimator: str,
    kl_coef: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> float:
    high = 1 + (clip_eps if clip_high is None else clip_high)
    terms = [[0.0] * len(row) for row in mask]
    for i, t in sampled(mask):
        if proximal == "recompute":
            prox = policy[i][t]
        elif proximal == "sampler":
            prox = sampler[i][t]
        elif taken == 0:
            prox = new[i][t]
        else:
            alpha = behind[i][t] / (behind[i][t] + taken)
            prox = sampler[i][t] + alpha * (new[i][t] - sampler[i][t])
        w = 1.0 if anchor == "sampler" else corrected(math.exp(prox - sampler[i][t]), correction, cap)
        u = math.exp(new[i][t] - (sampler[i][t] if anchor == "sampler" else prox))
        a = advantages[i][t]
        # Written as a maximum of losses, as Schulman et al. 2017 is usually coded; ours is a minimum of gains.
        terms[i][t] = w * max(-a * u, -a * clip(u, 1 - clip_eps, high))
        if dual_clip is not None and a < 0:
            terms[i][t] = min(terms[i][t], w * -a * dual_clip)
        if kl_where == "loss":
            rho = corrected(math.exp(new[i][t] - sampler[i][t]), correction, cap)
            terms[i][t] += kl_coef * rho * kl_estimate(new[i][t] - ref[i][t], kl_estimator)
        terms[i][t] -= entropy_coef * entropy[i][t]
    return aggregate(terms, mask, aggregation)


def value_loss(new: Matrix, old: Matrix, returns: Matrix, mask: Masks, c: float | None, aggregation: str) -> float:
    terms = [[0.0] * len(row) for row in mask]
    for i, t in sampled(mask):
        square = (new[i][t] - returns[i][t]) ** 2
        if c is not None:
            clipped = old[i][t] + clip(new[i][t] - old[i][t], -c, c)
            square = max(square, (clipped - returns[i][t]) ** 2)
        terms[i][t] = square / 2
    return aggregate(terms, mask, aggregation)


def learning_rate(lr: float, least: float, warmup: int, decay: str, step: int, total: int) -> float:
    """By the share of the decay that is behind, 0 right after the warm-up and 1 one step past the last."""
    if step < warmup:
        return lr * (step + 1) / warmup
    behind = 1.0 if step >= total else (step - warmup) / (total - warmup)
    shape = {"constant": 1.0, "linear": 1 - behind, "cosine": 0.5 + 0.5 * math.cos(math.pi * behind)}[decay]
    return least + (lr - least) * shape
