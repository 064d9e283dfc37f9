"""The catalogue of all metrics, and the places where metrics are shown. To add a metric, see docs/extending.md.

    METRICS    unit, x-axis and healthy range of every metric; docs/metrics.md explains the same metrics (tested)
    TERMINAL   metrics on the line of a step and in the live panel
    PANELS     learning curves in the report and in plots/curves.png; `/stageline` shows the first two panels
    OVERVIEW   metrics that MLflow's page shows first; `select_tracked` says which other metrics MLflow gets

In the name of a metric, a part in angle brackets stands for any word: `time/<stage>_s`. `find_unhealthy_numbers`
returns the unhealthy numbers that the display shows in red. Problems that need attention at once are alarms
(`alarms.*`) instead. Pure functions; standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

STEP, VERSION, SECONDS = "step", "version", "seconds"
"""The x-axes of metrics: PPO steps, versions of the weights, or seconds since the first start of the run. Step i trains
version i of the weights into version i + 1."""


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    axis: str
    healthy: str
    """Range of the metric in a healthy run, or "-" if there is no such range."""


# ---- where metrics are shown -----------------------------------------------------------------------------

TERMINAL = (
    ("reward/mean", "reward", ""),
    ("kl/ref", "KL", ""),
    ("staleness/max", "staleness", ""),
    ("samples_per_s", "", " responses/s"),
    ("tokens_per_s", "", " tokens/s"),
)
"""The metrics of a step that are shown on the terminal, as (name, label, unit)."""
GROUPED_TERMINAL = (("group/equal_fraction", "equal groups", ""), ("response/truncated_fraction", "cut", ""))
"""Further metrics that are shown on the terminal, as (name, label, unit). They are shown only if the advantages compare
the responses to one prompt with each other."""


@dataclass(frozen=True)
class Panel:
    """One of the plots that together show the learning curves."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    """Pairs (name of a metric, label). A name may contain `*`, which matches any text. If such a name matches at least
    two metrics, each of these metrics is drawn, and the text that `*` matched is put before the label. If it matches
    fewer, nothing is drawn for this pair."""
    healthy: float | None = None
    """Ideal value, drawn as a dashed line."""


PANELS = (
    Panel("Reward", "mean score", (("reward/mean", "training"), ("eval/reward_mean", "held-out"))),
    Panel("KL to the reference", "nats per response", (("kl/ref", "training"), ("eval/kl", "held-out"))),
    Panel("Parts of the reward", "before weights", (("reward/*/mean", "training"), ("eval/*/mean", "held-out"))),
    Panel("Entropy of the policy", "nats per token", (("policy/entropy_start", "at the step's start"),)),
    Panel("Response length", "tokens", (("response/length_mean", "training"), ("eval/length_mean", "held-out"))),
    Panel("Explained variance of the critic", "fraction", (("critic/explained_variance", "critic"),), 1.0),
    Panel("Clipped", "fraction of tokens", (("policy/clipfrac", "policy"), ("critic/clipfrac", "critic"))),
    Panel("Policy's change in an update", "nats per token", (("policy/approx_kl", "approx. KL"),)),
    Panel("Gradient norm", "before clipping", (("policy/grad_norm", "policy"), ("critic/grad_norm", "critic"))),
    Panel(
        "Trainer against sampler",
        "|log-prob difference|, nats",
        (("mismatch/mean_abs_all", "all tokens"), ("mismatch/canary_mean_abs", "at one version")),
        0.0,
    ),
    Panel("Staleness", "versions", (("staleness/mean", "mean"), ("staleness/max", "max"))),
    Panel("Effective sample size", "fraction", (("ess/fraction", "of the tokens"),), 1.0),
    Panel("Prompts whose responses score alike", "fraction", (("group/equal_fraction", "of the prompts"),)),
    Panel("Speed", "samples/s", (("samples_per_s", "samples/s"),)),
    Panel(
        "Seconds of a step",
        "s",
        (
            ("time/step_s", "step"),
            ("time/generate_s", "generate"),
            ("time/update_policy_s", "update policy"),
            ("time/update_critic_s", "update critic"),
        ),
    ),
)
"""The panels of the learning curves. In the report, readers can choose any other metric."""
OVERVIEW = {
    "reward/mean": "Overview/reward",
    "eval/reward_mean": "Overview/held_out_reward",
    "eval/gain": "Overview/held_out_gain",
    "kl/ref": "Overview/kl_to_reference",
    "policy/entropy": "Overview/entropy",
    "policy/approx_kl": "Overview/approx_kl",
    "critic/explained_variance": "Overview/explained_variance",
    "time/step_s": "Overview/step_seconds",
    "samples_per_s": "Overview/samples_per_s",
}
"""Metric -> second name of the metric, under the heading `Overview`. The metric is logged under both names. MLflow's
page lists headings that begin with a capital letter first, and opens only the first few headings."""
UNTRACKED = frozenset(
    (
        "score/mean",  # the same as reward/mean
        "policy/proximal_recomputed", "mismatch/alarm_nats", "publish/bytes",  # in the config
        "update_policy/peak_tflops", "update_critic/peak_tflops",
    )
)  # fmt: skip
"""Metrics that are committed with a node but not tracked, because they are duplicates or constants."""
TRACKED_IF_NONZERO = frozenset(
    (
        "generate/fetch_s", "generate/fetched_bytes", "generate/preemptions", "generate/rows_finished_elsewhere",
        "generate/shared_fraction", "group/skipped_rows", "kl/ref_capped_share", "mismatch/alarm",
        *(f"policy/{what}_steps" for what in ("skipped", "empty", "stopped", "overflow")),
        *(f"critic/{what}_steps" for what in ("skipped", "empty", "stopped", "overflow")),
    )
)  # fmt: skip
"""Metrics of rare events. Tracking of such a metric begins with its first value other than 0."""

_TABLE = """
Overview/reward | score | step | rises
Overview/held_out_reward | score | version | rises
Overview/held_out_gain | score | version | above 0
Overview/kl_to_reference | nats/response | step | rises slowly
Overview/entropy | nats/token | step | above 0.1
Overview/approx_kl | nats/token | step | below 0.1
Overview/explained_variance | fraction | step | 0.2 to 1
Overview/step_seconds | s | step | steady
Overview/samples_per_s | responses/s | step | steady
samples_per_s | responses/s | step | steady
tokens_per_s | tokens/s | step | steady
overlap | fraction | step | above 0.3 for staleness >= 1
advantage/mean | score | step | near 0
advantage/std | score | step | above 0
critic/clipfrac | fraction | step | below 0.3
critic/empty_steps | count | step | 0
critic/explained_variance | fraction | step | 0.2 to 1
critic/grad_norm | - | step | steady
critic/grad_norm_max | - | step | below 10 x the mean
critic/loss | score² | step | falls, then steady
critic/loss_scale | - | step | above its minimum
critic/lr | - | step | as configured
critic/mean | score | step | near `critic/return_mean`
critic/optimizer_steps | count | step | epochs x minibatches
critic/overflow_steps | count | step | rare
critic/peak_memory_bytes | bytes | step | below the device's
critic/replayed_updates | count | step | below `checkpoint.every`
critic/return_mean | score | step | -
critic/skipped_steps | count | step | 0
critic/start_mean | score | step | near `critic/return_mean`
critic/stopped_steps | count | step | 0
ess/fraction | fraction | step | above 0.5
eval/reward_mean | score | version | rises
eval/gain | score | version | above 0
eval/paired_t | - | version | above 2
eval/kl | nats/response | version | below the budget
eval/length_mean | tokens | version | steady
eval/<part>/mean | score | version | -
generate/acceptance/<kind> | fraction | step | above 0.3
generate/busy_s | s | step | -
generate/draft_length/<length> | fraction | step | -
generate/drafted/<kind> | tokens | step | -
generate/fetch_s | s | step | below 0.1 x `time/step_s`
generate/fetched_bytes | bytes | step | -
generate/kv_peak_fraction | fraction | step | below 1
generate/occupancy | fraction | step | above 0.5
generate/peak_memory_bytes | bytes | step | below the device's
generate/preemptions | count | step | 0
generate/prompt_tokens | tokens | step | -
generate/refit_s | s | step | below 0.1 x `time/step_s`
generate/rows_finished_elsewhere | rows | step | -
generate/shared_fraction | fraction | step | -
generate/tokens | tokens | step | -
generate/tokens_per_busy_s | tokens/s | step | steady
group/equal_fraction | fraction | step | below 0.5
group/score_std | score | step | above 0
group/skipped_rows | rows | step | -
kl/coef | - | step | steady
kl/prox_sampler | nats/token | step | below 0.1
kl/ref | nats/response | step | rises slowly
kl/ref_capped_share | fraction | step | below 0.05
kl/ref_k3 | nats/response | step | near `kl/ref`
kl/ref_per_token | nats/token | step | below 1
kl/ref_sampler | nats/response | step | near `kl/ref`
mismatch/alarm | 0 or 1 | version | 0
mismatch/canary_k3 | nats/token | version | below 0.001
mismatch/canary_max_abs | nats | version | below 0.5
mismatch/canary_mean_abs | nats/token | version | below `mismatch.alarm_nats`
mismatch/canary_moved | nats/token | version | above 0
mismatch/exp_abs | - | step | below 1.05
mismatch/exp_abs_all | - | step | below 1.5
mismatch/fresh_fraction | fraction | step | -
mismatch/mean_abs | nats/token | step | below 0.05
mismatch/mean_abs_all | nats/token | step | below 0.3
policy/approx_kl | nats/token | step | below 0.1
policy/clipfrac | fraction | step | 0.02 to 0.3
policy/dual_clipfrac | fraction | step | below 0.05
policy/empty_steps | count | step | 0
policy/entropy | nats/token | step | above 0.1
policy/entropy_start | nats/token | step | above 0.1
policy/grad_norm | - | step | steady
policy/grad_norm_max | - | step | below 10 x the mean
policy/kl_ref | nats/token | step | -
policy/loss | - | step | -
policy/loss_scale | - | step | above its minimum
policy/lr | - | step | as configured
policy/optimizer_steps | count | step | epochs x minibatches
policy/overflow_steps | count | step | rare
policy/peak_memory_bytes | bytes | step | below the device's
policy/ratio_deviation_first | - | step | below 0.01
policy/ratio_max | - | step | below 100
policy/ratio_mean | - | step | 0.9 to 1.1
policy/replayed_updates | count | step | below `checkpoint.every`
policy/skipped_steps | count | step | 0
policy/stopped_steps | count | step | 0
policy/surrogate | - | step | -
policy/weight_max | - | step | below 100
policy/weight_mean | - | step | 0.9 to 1.1
policy/weight_outside | fraction | step | below 0.05
response/eos_fraction | fraction | step | near 1
response/length_max | tokens | step | below `sampling.max_new_tokens`
response/length_mean | tokens | step | steady
response/truncated_fraction | fraction | step | below 0.2
reward/adjusted_mean | score | step | rises
reward/mean | score | step | rises
reward/std | score | step | above 0
reward/<part>.stopped/mean | fraction | step | near 0
reward/<part>/mean | score | step | -
reward/<part>/std | score | step | -
reward/<part>/disagreement | score | step | steady
score/early_fraction | fraction | step | near 1
judge/<part>/requests | count | step | below `max_requests`
judge/<part>/cost | as `max_cost` | step | below `max_cost`
staleness/fraction_<age> | fraction | step | -
staleness/max | versions | step | at most `staleness`
staleness/mean | versions | step | at most `staleness`
system/<gang>/cpu_percent | percent | seconds | up to 100 x threads x workers
system/<gang>/memory_bytes | bytes | seconds | below the host's
system/<gang>/gpu_percent | percent | seconds | up to 100
system/<gang>/gpu_memory_bytes | bytes | seconds | below the GPU's
system/driver/cpu_percent | percent | seconds | below 50
system/driver/memory_bytes | bytes | seconds | steady
time/<stage>_s | s | step | -
time/step_s | s | step | steady
trainer/lost_s | s | step | 0
trunk/computed_rows | rows | step | -
trunk/hit_rate | fraction | step | above 0.5
trunk/rows | rows | step | -
update_critic/mfu | fraction | step | -
update_critic/tflops_per_s | TFLOP/s | step | -
update_critic/tokens_per_s | tokens/s | step | steady
update_policy/mfu | fraction | step | -
update_policy/tflops_per_s | TFLOP/s | step | -
update_policy/tokens_per_s | tokens/s | step | steady
"""


def _parse(table: str) -> tuple[Metric, ...]:
    rows = (line.split(" | ") for line in table.strip().splitlines())
    return tuple(Metric(*(cell.strip() for cell in row)) for row in rows)


METRICS = _parse(_TABLE)
"""All metrics, in the same order as in docs/metrics.md: group by group, beginning with the overview."""
_PATTERNS = tuple(
    (re.compile(re.sub(r"<\w+>", "[^/]+", re.escape(metric.name).replace(r"\<", "<").replace(r"\>", ">"))), metric)
    for metric in sorted(METRICS, key=lambda metric: "<" in metric.name)
)


@cache
def find_metric(name: str) -> Metric | None:
    """Return the catalogue's entry of a metric, or None if there is no entry."""
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def upper_limit(name: str) -> float:
    """Return the upper end of a metric's healthy range. Raises ValueError unless the range is given as `below X`."""
    metric = find_metric(name)
    if metric is None or not metric.healthy.startswith("below "):
        raise ValueError(f"the catalogue has no healthy range `below X` of {name}")
    return float(metric.healthy.removeprefix("below "))


def terminal_numbers(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the numbers of a step to show on the terminal, as (label, number with unit)."""
    names = TERMINAL + (GROUPED_TERMINAL if GROUPED_TERMINAL[0][0] in metrics else ())
    return [(label, f"{metrics[name]:.4g}{unit}") for name, label, unit in names if name in metrics]


def select_tracked(
    values: Mapping[str, float], meaningless: Collection[str], tracked_before: Collection[str]
) -> dict[str, float]:
    """Return the metrics of a step or version to log in experiment tracking: name -> value. Each metric in `OVERVIEW`
    is returned twice: first under its name that begins with `Overview/`, then under its own name. A metric of a rare
    event (`TRACKED_IF_NONZERO`) is left out until its value is not 0 for the first time.

    Args:
        values: all metrics.
        meaningless: names of metrics that have no meaning under the run's config. They are left out.
        tracked_before: names of the metrics of this run that were tracked before.
    """
    kept = {
        name: value
        for name, value in values.items()
        if name not in UNTRACKED
        and name not in meaningless
        and (value != 0 or name not in TRACKED_IF_NONZERO or name in tracked_before)
    }
    return {overview: kept[name] for name, overview in OVERVIEW.items() if name in kept} | kept


# ---- unhealthy numbers -----------------------------------------------------------------------------------

MAX_APPROX_KL = 0.1
"""Largest healthy `approx_kl`: the change of the policy by one update, in nats per token."""
MAX_RATIO = 100.0
MIN_ENTROPY = 0.1
"""Lowest healthy entropy, in nats per token."""
MIN_ENTROPY_FRACTION = 0.2
"""Lowest healthy entropy, as a fraction of the first step's entropy."""
MIN_EXPLAINED_VARIANCE, MAX_NEGATIVE_STEPS = -0.05, 5
"""The critic's explained variance is unhealthy if it was lower than this number in this many steps in a row. A critic
that predicts a constant has 0, up to the noise of a step. Steps without the metric do not count."""
RECENT_STEPS = 50
"""Number of recent steps that callers keep for `find_unhealthy_numbers`."""


def find_unhealthy_numbers(recent: Sequence[Mapping[str, float]], first_entropy: float | None = None) -> list[str]:
    """Return the unhealthy numbers of the last step, each as a short text with its limit. NaN is unhealthy.

    Args:
        recent: metrics of the latest steps, in order.
        first_entropy: entropy of the first step of the run, if known."""
    if not recent:
        return []
    last, unhealthy = recent[-1], []
    limits = (("policy/approx_kl", "approx_kl", MAX_APPROX_KL), ("policy/ratio_max", "ratio_max", MAX_RATIO))
    for name, label, limit in limits:
        if name in last and not last[name] <= limit:
            unhealthy.append(f"{label} {last[name]:.4g} > {limit:g}")
    for name, label, _ in GROUPED_TERMINAL if GROUPED_TERMINAL[0][0] in last else ():
        if name in last and not last[name] < upper_limit(name):
            unhealthy.append(f"{label} {last[name]:.3g} >= {upper_limit(name):g}")
    entropy = last.get("policy/entropy")
    if entropy is not None:
        floor = max(MIN_ENTROPY, MIN_ENTROPY_FRACTION * first_entropy) if first_entropy is not None else MIN_ENTROPY
        if not entropy >= floor:
            unhealthy.append(f"entropy {entropy:.3g} < {floor:.3g}: collapsing")
    explained = [m["critic/explained_variance"] for m in recent if "critic/explained_variance" in m][
        -MAX_NEGATIVE_STEPS:
    ]
    if len(explained) == MAX_NEGATIVE_STEPS and not any(value >= MIN_EXPLAINED_VARIANCE for value in explained):
        unhealthy.append(
            f"explained variance {explained[-1]:.2f} < {MIN_EXPLAINED_VARIANCE:g} for {MAX_NEGATIVE_STEPS} steps"
        )
    return unhealthy
