"""The results of a run, read from its ledger and store: metrics of steps and scores of evaluations.

The live run, `resume`, `inspect` and the report all read the results through `History`, so their numbers agree.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from pipeline.graph.graph import GraphSpec, finished_steps, step_nodes, update_stages
from pipeline.observe.engine_metrics import is_shard_metric
from pipeline.observe.engine_metrics import step_metrics as engine_metrics
from pipeline.observe.evaluations import Evaluation, compare_paired
from pipeline.observe.summary import StepNumbers
from storage.address import Address, Ref
from storage.errors import DamagedCommit
from storage.ledger import Ledger
from storage.records import Rollout, Scores
from storage.rollouts import RolloutStore, dropped

EVALUATION_METRIC = "eval/reward_mean"
"""Name of the metric with the mean score of the held-out prompts at a version of the weights."""
_NONE: Mapping[Address, Ref] = MappingProxyType({})
STEP_METRIC = "reward/mean"
"""Name of a metric that is committed in every step."""
_FRACTION = "staleness/fraction_"
_NUMBERED = ("generate", "advantage")
"""Stages whose commits contain the reward, KL, token count and staleness of a step (`StepNumbers`)."""
_TRUNK_ROWS, _TRUNK_COMPUTED = "trunk/rows", "trunk/computed_rows"
_TOTALS = ("generate/tokens", "generate/rows_finished_elsewhere", _TRUNK_ROWS, _TRUNK_COMPUTED)
"""Metrics that are summed over the shards of a step."""
_SO_FAR = "judge/"
"""Prefix of the names of metrics that grow during a run. For these metrics, the value of a step is the maximum over its
shards. Metrics in `_TOTALS` are summed over the shards. All others are averaged."""


@dataclass(frozen=True)
class History:
    """A reader of the results of a run. It needs the run's ledger, its store and the shape of its graph."""

    spec: GraphSpec
    ledger: Ledger
    store: RolloutStore
    rows_per_step: int
    """Number of rows per step."""

    def addresses(self, step: int) -> list[Address]:
        """Return the addresses of a step's nodes, without evaluations.

        A canary is a node that compares engine and trainer at one version of the weights. If the run has canaries, the
        canary of version `step` (the weights at the start of the step) is included."""
        nodes = step_nodes(self.spec, step)
        addresses = [n.address for n in nodes if n.stage != "canary" and not n.stage.startswith("evaluate")]
        return addresses + ([Address("canary", step)] if self.spec.has_canaries else [])

    def commits(self, step: int, known_commits: Mapping[Address, Ref] = _NONE) -> list[Ref]:
        """Return references to the existing commits of a step. Commits in `known_commits` are not read again."""
        return self._existing_refs(self.addresses(step), known_commits)

    def _existing_refs(self, addresses: Iterable[Address], known_commits: Mapping[Address, Ref] = _NONE) -> list[Ref]:
        refs = (known_commits.get(address) or self._read(address) for address in addresses)
        return [ref for ref in refs if ref is not None]

    def _read(self, address: Address) -> Ref | None:
        try:
            commit = self.ledger.find(address)
        except DamagedCommit:
            if not dropped(address, self.store.dropped_before()):
                raise
            return None  # the commit is not needed any more; `check` and the next driver report the damage
        return None if commit is None else commit.ref()

    def newest_version(self) -> int:
        """Return the newest version of the policy, which equals the number of the policy's updates. The version is
        derived from the last committed update. Updates are not counted, because commits of earlier updates may be
        lost."""
        return max((address.step + 1 for address in self.ledger.addresses("update_policy")), default=0)

    def read_step_metrics(
        self, step: int, driver_starts: Iterable[float] = (), known_commits: Mapping[Address, Ref] = _NONE
    ) -> dict[str, float]:
        """Return all metrics of a step: the metrics of its stages, the seconds of each stage summed over its shards
        (`time/<stage>_s`), the step time, and the throughput.

        Args:
            step: number of the step.
            driver_starts: start times of the run's drivers. If a driver started during the step, the step has no step
                time and no throughput, because the run was stopped in between.
            known_commits: commits that the caller has already read. They are not read again."""
        commits = self.commits(step, known_commits)
        metrics: dict[str, float] = {}
        seconds: defaultdict[str, float] = defaultdict(float)
        shards: defaultdict[str, list[float]] = defaultdict(list)
        counted = [{n: v for n, v in commit.metrics.items() if is_shard_metric(n)} for commit in commits]
        for commit in commits:
            seconds[f"time/{commit.address.stage}_s"] += commit.finished - commit.started
            for name, value in commit.metrics.items():
                if not is_shard_metric(name):
                    shards[name].append(value)
        for name, values in shards.items():
            combine = np.sum if name in _TOTALS else np.max if name.startswith(_SO_FAR) else np.mean
            metrics[name] = float(combine(values))
        metrics |= seconds | engine_metrics(counted)
        if metrics.get(_TRUNK_ROWS):
            metrics["trunk/hit_rate"] = 1 - metrics[_TRUNK_COMPUTED] / metrics[_TRUNK_ROWS]
        published = {c.address.step: c.finished for c in commits if c.address.stage == "publish"}
        before = known_commits.get(Address("publish", step)) or self._read(Address("publish", step))
        after = published.get(step + 1)
        if before is not None and after is not None and not any(before.finished < t < after for t in driver_starts):
            metrics["time/step_s"] = max(after - before.finished, 1e-9)
            metrics["samples_per_s"] = self.rows_per_step / metrics["time/step_s"]
            metrics["tokens_per_s"] = metrics.get("generate/tokens", 0.0) / metrics["time/step_s"]
        return metrics

    def read_step_numbers(self, step: int) -> StepNumbers | None:
        """Return the numbers of a step for `summary.json`, or None if the commits that contain them are lost. Only the
        commits of the stages in `_NUMBERED` are read, because a run may have ten thousand steps."""
        commits = self._existing_refs(address for address in self.addresses(step) if address.stage in _NUMBERED)
        metrics = {name: value for commit in commits for name, value in commit.metrics.items()}
        if not metrics.keys() >= {STEP_METRIC, "kl/ref", "generate/tokens"}:
            return None
        fractions = {int(k.removeprefix(_FRACTION)): v for k, v in metrics.items() if k.startswith(_FRACTION)}
        staleness = Counter({age: round(fraction * self.rows_per_step) for age, fraction in fractions.items()})
        return StepNumbers(
            step=step,
            reward=metrics[STEP_METRIC],
            kl=metrics["kl/ref"],
            num_samples=self.rows_per_step,
            num_tokens=int(sum(commit.metrics.get("generate/tokens", 0.0) for commit in commits)),
            staleness=staleness,
        )

    def step_ends(self, step: int) -> list[Address]:
        """Return the addresses of the nodes that finish a step: the update of each trained model, and the publication
        of the next version of the policy."""
        return [*(Address(stage, step) for stage in update_stages(self.spec).values()), Address("publish", step + 1)]

    def finished_steps(self) -> list[int]:
        """Return the numbers of the finished steps. If the ledger segment of a step is closed, or its arrays were
        deleted, this step and all steps before it are finished. A later step is finished if all its updates, advantages
        and generated shards are committed."""
        over = max(self.ledger.closed_until(), self.store.dropped_before())
        return finished_steps(self.spec, over, self.ledger.addresses(from_step=over))

    def read_evaluation(self, version: int) -> Evaluation | None:
        """Return the evaluation of a version, or None if not all of its rows are scored yet. The evaluation's KL is
        None until the reference has scored all rows."""
        if not (self._is_stage_complete("evaluate", version) and self._is_stage_complete("evaluate_score", version)):
            return None
        rollouts, scores = self.read_evaluated_rows(version)
        kl = self.evaluated_kl(version, rollouts)
        by_prompt = {int(p): float(s) for p, s in zip(rollouts.prompt_index, scores.scores, strict=True)}
        return Evaluation(
            version,
            by_prompt,
            distinct_bigrams(rollouts),
            kl=None if kl is None else float(np.mean(kl)),
            length=float(rollouts.response_lengths.mean()),
            parts={name: float(part.mean(dtype=np.float64)) for name, part in scores.parts.items()},
        )

    def _is_stage_complete(self, stage: str, version: int) -> bool:
        """Return True if every shard of one stage of an evaluation has a commit."""
        return all(self.ledger.find(Address(stage, version, s)) is not None for s in range(self.spec.eval_shards))

    def evaluated_kl(self, version: int, rollouts: Rollout) -> list[float] | None:
        """Return the KL to the reference of each response of an evaluation, in nats. Return None until the reference
        has scored all shards.

        The KL is the sum of log mu - log pi_ref over the sampled tokens, in float64. mu is the policy of this version,
        which sampled all tokens. So no importance weights are needed."""
        if not self._is_stage_complete("evaluate_reference", version):
            return None
        reference = self.store.read_step("evaluate_reference", version, self.spec.eval_shards)
        difference = rollouts.sampler_logprobs.astype(np.float64) - reference.ref_logprobs
        of_rows: list[float] = np.where(rollouts.response_mask, difference, 0.0).sum(axis=1).tolist()
        return of_rows

    def read_evaluated_rows(self, version: int) -> tuple[Rollout, Scores]:
        """Return the rows and scores of an evaluation."""
        num = self.spec.eval_shards
        return self.store.read_step("evaluate", version, num), self.store.read_step("evaluate_score", version, num)

    def read_evaluations(self) -> list[Evaluation]:
        """Return all complete evaluations, in order of version."""
        return [e for e in map(self.read_evaluation, self.evaluated_versions()) if e is not None]

    def evaluated_versions(self) -> list[int]:
        """Return the versions that have at least one scored shard of held-out rows, in order."""
        return sorted({address.step for address in self.ledger.addresses("evaluate_score")})


def evaluation_metrics(evaluation: Evaluation, first: Evaluation | None = None) -> dict[str, float]:
    """Return the metrics of an evaluation for experiment tracking: score, KL, length, and the mean of each part of the
    score if there are several parts.

    If `first` is given, the metrics include the gain over `first` and Student's t of the gain. Both are computed on the
    prompts that both evaluations have."""
    metrics = {EVALUATION_METRIC: evaluation.mean, "eval/kl": evaluation.kl, "eval/length_mean": evaluation.length}
    parts = evaluation.parts if len(evaluation.parts) > 1 else {}
    gain = None if first is None else compare_paired(first.scores, evaluation.scores)
    if gain is not None:
        metrics |= {"eval/gain": gain.gain, "eval/paired_t": gain.t_statistic}
    return {n: v for n, v in metrics.items() if v is not None} | {f"eval/{n}/mean": v for n, v in parts.items()}


def canary_alarm_text(version: int, metrics: Mapping[str, float]) -> str | None:
    """Return the text of the alarm that `metrics` raise, or None if they raise none. They come from a canary, which
    compares log-probs of engine and trainer at `version`."""
    if not metrics.get("mismatch/alarm"):
        return None
    difference, limit = metrics["mismatch/canary_mean_abs"], metrics["mismatch/alarm_nats"]
    text = f"engine and trainer differ by {difference:.3g} nats a token at version {version} of the weights"
    if difference <= limit:
        moved = metrics["mismatch/canary_moved"]
        return f"{text}, and the engine has moved by {moved:.3g} since older weights: it seems to have those still"
    return f"{text}, above {limit:.3g} (mismatch.alarm_nats): has the engine taken them?"


def distinct_bigrams(rollout: Rollout) -> float | None:
    """Return the number of distinct token bigrams divided by the number of all token bigrams, over all responses. None
    if no response has two tokens."""
    bigrams: list[tuple[int, int]] = []
    for row in range(rollout.num_rows):
        start = int(rollout.prompt_lengths[row])
        response = rollout.tokens[row, start : start + int(rollout.response_lengths[row])].tolist()
        bigrams += itertools.pairwise(response)
    return len(set(bigrams)) / len(bigrams) if bigrams else None
