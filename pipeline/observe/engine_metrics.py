"""Metrics of the generation engines: the counts that are committed with each shard, and the metrics of a step.

Several shards share an engine, which does not count per shard: a shard gets everything that the engine counted since
the last reading. So a single shard's numbers mean little. Only counts and two peaks are committed. Counts are added up
over shards and replicas, and ratios are computed from the sums; of a peak the maximum counts. An evaluation that runs
beside a step takes part of the counts.
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
    """Return the metrics to commit with a shard.

    `fetch_s` and `fetched_bytes` are the seconds and bytes of fetching weights from another host. `peak_bytes` is the
    peak memory of the replica's process so far."""
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
    """Return True if a committed metric is one of `counts`."""
    return name.startswith(_COUNT)


def step_metrics(shards: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a step from the counts of its shards; empty if there are none.

    tokens_per_busy_s: tokens per second of one replica while it has rows.
    occupancy: rows in flight / max_rows, averaged over the decode steps.
    shared_fraction: the fraction of prompt tokens whose keys were shared with another row.
    acceptance: accepted / drafted tokens.
    draft_length: the fraction of a decoding row's passes with this number of drafted tokens.
    fetch_s: seconds of fetching weights from another host, prefetching included."""
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
        "generate/fetch_s": total.get(_FETCH_S, 0.0),  # older runs do not have it
        "generate/fetched_bytes": total.get(_FETCHED_BYTES, 0.0),
        "generate/tokens_per_busy_s": _ratio(total["engine/tokens"], total["engine/busy_s"]),
        "generate/occupancy": _ratio(total["engine/full_decode_steps"], total["engine/decode_steps"]),
        "generate/kv_peak_fraction": total[_KV_PEAK],
        "generate/peak_memory_bytes": total.get(_PEAK_BYTES, 0.0),  # older runs do not have it
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
