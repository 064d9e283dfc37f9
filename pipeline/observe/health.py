"""What of a step's numbers a person should see in red: pure. Alarms (`alarms.*`) are for what should wake somebody up;
this is for whoever looks anyway.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

APPROX_KL = 0.1
"""Nats a token that one update may move the policy."""
RATIO = 100.0
ENTROPY = 0.1
"""Nats a token."""
COLLAPSE = 0.2
"""Share of the first entropy seen."""
CRITIC_STEPS = 5
"""In a row."""
REMEMBERED = 50
"""Steps that `findings` looks at, at most."""


def findings(recent: Sequence[Mapping[str, float]], first_entropy: float | None = None) -> list[str]:
    """Of the last of these steps' metrics, each in a few words with its limit; a number that is none (NaN) is one, too.
    `first_entropy`: of the run's first step seen."""
    if not recent:
        return []
    last, found = recent[-1], []
    limits = (("policy/approx_kl", "approx_kl", APPROX_KL), ("policy/ratio_max", "ratio_max", RATIO))
    for name, label, limit in limits:
        if name in last and not last[name] <= limit:
            found.append(f"{label} {last[name]:.4g} > {limit:g}")
    entropy = last.get("policy/entropy")
    if entropy is not None:
        floor = max(ENTROPY, COLLAPSE * first_entropy) if first_entropy is not None else ENTROPY
        if not entropy >= floor:
            found.append(f"entropy {entropy:.3g} < {floor:.3g}: collapsing")
    explained = [m["critic/explained_variance"] for m in recent if "critic/explained_variance" in m][-CRITIC_STEPS:]
    if len(explained) == CRITIC_STEPS and not any(value >= 0 for value in explained):
        found.append(f"explained variance {explained[-1]:.2f} < 0 for {CRITIC_STEPS} steps")
    return found


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last values as small columns; a flat line where they are equal, a blank for what is no number."""
    shown = list(values)[-width:]
    finite = [value for value in shown if value - value == 0]
    if not finite:
        return " " * len(shown)
    low, span = min(finite), max(finite) - min(finite)
    ticks = "▁▂▃▄▅▆▇█"

    def tick(value: float) -> str:
        if value - value != 0:
            return " "
        return ticks[3] if span == 0 else ticks[min(7, int(8 * (value - low) / span))]

    return "".join(map(tick, shown))
