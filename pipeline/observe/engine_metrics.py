"""What a generation engine counted, as metrics: counts that add up over shards and replicas, and what a step's say.

Shards share engines, and an engine counts for whoever runs in it: what it counted since it was last asked goes to the
shard that asks. So a single shard's numbers mean little, and only counts are committed; ratios are made of their sums.
An evaluation that runs beside a step takes its share of the counts with it.

May import the standard library, and for types stages.engines.protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the protocol imports torch, which the driver does not load
    from stages.engines.protocol import EngineStats

_COUNT = "engine/"
_DRAFTED, _ACCEPTED, _LENGTH = "engine/drafted/", "engine/accepted/", "engine/draft_length/"
_FETCH_S, _FETCHED_BYTES = "engine/fetch_s", "engine/fetched_bytes"
_KV_PEAK, _PEAK_BYTES = "engine/kv_peak_fraction", "engine/peak_bytes"


def counts(stats: EngineStats, fetch_s: float = 0.0, fetched_bytes: int = 0, peak_bytes: int = 0) -> dict[str, float]:
    """Metrics to commit with a shard. `fetch_s`, `fetched_bytes`: of weights that came from another host;
    `peak_bytes`: the most memory that the replica's process has taken so far."""
    return {
        "engine/tokens": float(stats.tokens),
        "engine/busy_s": stats.busy_s,
        "engine/refit_s": stats.refit_s,
        _FETCH_S: fetch_s,
        _FETCHED_BYTES: float(fetched_bytes),
        "engine/decode_steps": float(stats.decode_steps),
        "engine/full_decode_steps": stats.mean_occupancy * stats.decode_steps,
        "engine/prompt_tokens": float(stats.prompt_tokens),
        "engine/shared_tokens": float(stats.shared_tokens),
        "engine/preemptions": float(stats.preemptions),
        _KV_PEAK: stats.kv_peak_fraction,
        _PEAK_BYTES: float(peak_bytes),
        **{f"{_DRAFTED}{kind}": float(n) for kind, n in stats.drafted_tokens.items()},
        **{f"{_ACCEPTED}{kind}": float(n) for kind, n in stats.accepted_tokens.items()},
        **{f"{_LENGTH}{length}": float(n) for length, n in stats.draft_lengths.items()},
    }


def is_count(name: str) -> bool:
    """Whether a committed metric is one of `counts`."""
    return name.startswith(_COUNT)


def step_metrics(shards: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """What the counts of a step's shards come to; empty where there are none.

    tokens_per_busy_s: of one replica while it has rows. occupancy: rows in flight / slots, of the mean decode step.
    shared_fraction: of prompt tokens, those that another row's keys served. acceptance: accepted / drafted tokens.
    draft_length: how often a decoding row had so many drafted tokens in a pass, as a fraction. fetch_s: seconds
    in which weights came from another host, ahead of time or not."""
    total: dict[str, float] = {}
    for shard in shards:
        for name, value in shard.items():
            known = total.get(name, 0.0)
            total[name] = max(known, value) if name in (_KV_PEAK, _PEAK_BYTES) else known + value
    if not total:
        return {}
    prompts = total["engine/prompt_tokens"] + total["engine/shared_tokens"]
    decided = sum(value for name, value in total.items() if name.startswith(_LENGTH))
    metrics = {
        "generate/busy_s": total["engine/busy_s"],
        "generate/refit_s": total["engine/refit_s"],
        "generate/fetch_s": total.get(_FETCH_S, 0.0),  # not in runs of before
        "generate/fetched_bytes": total.get(_FETCHED_BYTES, 0.0),
        "generate/tokens_per_busy_s": _ratio(total["engine/tokens"], total["engine/busy_s"]),
        "generate/occupancy": _ratio(total["engine/full_decode_steps"], total["engine/decode_steps"]),
        "generate/kv_peak_fraction": total[_KV_PEAK],
        "generate/peak_memory_bytes": total.get(_PEAK_BYTES, 0.0),  # not in runs of before
        "generate/preemptions": total["engine/preemptions"],
        "generate/prompt_tokens": total["engine/prompt_tokens"],
        "generate/shared_fraction": _ratio(total["engine/shared_tokens"], prompts),
    }
    for name, value in total.items():
        kind = name.removeprefix(_DRAFTED)
        if kind != name:
            metrics[f"generate/drafted/{kind}"] = value
            metrics[f"generate/acceptance/{kind}"] = _ratio(total.get(f"{_ACCEPTED}{kind}", 0.0), value)
        length = name.removeprefix(_LENGTH)
        if length != name:
            metrics[f"generate/draft_length/{length}"] = _ratio(value, decided)
    return metrics


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
