"""Metrics of the generation engines: the counts that are committed with each shard, and the metrics of a step.

Several shards share an engine, and the engine does not count per shard. A shard gets everything that the engine counted
since the last reading, so the numbers of a single shard mean little. Only counts and two peaks are committed. For a
step, the counts are summed over its shards, and ratios are computed from the sums. Each peak of a step is the maximum
over its shards. If an evaluation runs at the same time as a step, part of the counts goes to the evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this import would load torch, which the driver does not load
    from stages.engines.protocol import EngineStats

_COUNT = "engine/"
DRAFTED, _ACCEPTED, _LENGTH = "engine/drafted/", "engine/accepted/", "engine/draft_length/"
_FETCH_S, _FETCHED_BYTES = "engine/fetch_s", "engine/fetched_bytes"
_KV_PEAK, _PEAK_BYTES = "engine/kv_peak_fraction", "engine/peak_bytes"


def shard_metrics(
    stats: EngineStats, fetch_s: float = 0.0, fetched_bytes: int = 0, peak_bytes: int = 0
) -> dict[str, float]:
    """Return the metrics to commit with a shard.

    Args:
        stats: the engine's counts since the last reading.
        fetch_s: seconds spent on fetching weights from another host.
        fetched_bytes: number of bytes of these weights.
        peak_bytes: peak memory of the replica's process so far, in bytes."""
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
        **{f"{DRAFTED}{kind}": float(n) for kind, n in stats.drafted_tokens.items()},
        **{f"{_ACCEPTED}{kind}": float(n) for kind, n in stats.accepted_tokens.items()},
        **{f"{_LENGTH}{length}": float(n) for length, n in stats.draft_lengths.items()},
    }


def is_shard_metric(name: str) -> bool:
    """Return True if the metric `name` is a count or a peak of the generation engine. The function `shard_metrics`
    makes these metrics, and they are committed with each generated shard."""
    return name.startswith(_COUNT)


def step_metrics(shards: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the generation metrics of a step, computed from the counts of its shards. Empty if there are no shards.
    These names do not explain themselves:

    tokens_per_busy_s  tokens per second of one replica while it generates
    occupancy          rows in flight / max_rows, averaged over the decode steps
    shared_fraction    fraction of the prompt tokens whose keys and values were shared with another row
    acceptance         accepted / drafted tokens
    draft_length/N     fraction of the decoding passes in which N tokens were drafted for a row
    fetch_s            seconds spent on fetching weights from another host, prefetching included"""
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
        "generate/fetch_s": total.get(_FETCH_S, 0.0),  # older runs lack this metric
        "generate/fetched_bytes": total.get(_FETCHED_BYTES, 0.0),
        "generate/tokens_per_busy_s": _ratio(total["engine/tokens"], total["engine/busy_s"]),
        "generate/occupancy": _ratio(total["engine/full_decode_steps"], total["engine/decode_steps"]),
        "generate/kv_peak_fraction": total[_KV_PEAK],
        "generate/peak_memory_bytes": total.get(_PEAK_BYTES, 0.0),  # older runs lack this metric
        "generate/preemptions": total["engine/preemptions"],
        "generate/prompt_tokens": total["engine/prompt_tokens"],
        "generate/shared_fraction": _ratio(total["engine/shared_tokens"], prompts),
    }
    for name, value in total.items():
        kind = name.removeprefix(DRAFTED)
        if kind != name:
            metrics[f"generate/drafted/{kind}"] = value
            metrics[f"generate/acceptance/{kind}"] = _ratio(total.get(f"{_ACCEPTED}{kind}", 0.0), value)
        length = name.removeprefix(_LENGTH)
        if length != name:
            metrics[f"generate/draft_length/{length}"] = _ratio(value, decided)
    return metrics


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
