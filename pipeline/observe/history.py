"""What a run has to say for itself, read from its ledger and store: metrics of a step, scores of an evaluation.

The live run, `resume`, `inspect` and the report all read here, so that they cannot disagree.
May import numpy, storage, pipeline.graph and this folder.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from pipeline.graph.graph import GraphSpec, step_nodes, update_stages
from pipeline.observe.engine_metrics import is_count
from pipeline.observe.engine_metrics import step_metrics as engine_metrics
from pipeline.observe.evaluations import Evaluation
from pipeline.observe.paired import paired
from pipeline.observe.summary import StepNumbers
from storage.address import Address, Ref
from storage.errors import DamagedCommit
from storage.ledger import Ledger
from storage.records import Rollout, Scores
from storage.rollouts import RolloutStore, dropped

EVALUATION_METRIC = "eval/reward_mean"
"""Mean score of the held-out prompts, by version of the weights."""
_NONE: Mapping[Address, Ref] = MappingProxyType({})
STEP_METRIC = "reward/mean"
"""Every step has it."""
_FRACTION = "staleness/fraction_"
_NUMBERED = ("generate", "advantage")
"""Stages whose records have what a step is summed up by."""
_TRUNK_ROWS, _TRUNK_COMPUTED = "trunk/rows", "trunk/computed_rows"
_TOTALS = ("generate/tokens", "generate/rows_finished_elsewhere", _TRUNK_ROWS, _TRUNK_COMPUTED)
"""Metrics of shards that are summed; of the others a step has the mean."""


@dataclass(frozen=True)
class History:
    """A run's ledger and store, and the shape of its graph."""

    spec: GraphSpec
    ledger: Ledger
    store: RolloutStore
    rows: int
    """Rows of a step."""

    def addresses(self, step: int) -> list[Address]:
        """Of a step's nodes, evaluations not included, and of its version's canary."""
        nodes = step_nodes(self.spec, step)
        addresses = [n.address for n in nodes if n.stage != "canary" and not n.stage.startswith("evaluate")]
        return addresses + ([Address("canary", step)] if self.spec.canaries else [])

    def commits(self, step: int, known: Mapping[Address, Ref] = _NONE) -> list[Ref]:
        """References to the commits that are there of `addresses`. Those that are `known` are not read."""
        return self._found(self.addresses(step), known)

    def _found(self, addresses: Iterable[Address], known: Mapping[Address, Ref] = _NONE) -> list[Ref]:
        found = (known.get(address) or self._read(address) for address in addresses)
        return [ref for ref in found if ref is not None]

    def _read(self, address: Address) -> Ref | None:
        try:
            commit = self.ledger.find(address)
        except DamagedCommit:
            if not dropped(address, self.store.dropped_before()):
                raise
            return None  # nobody needs it any more; `check` and the next driver name it
        return None if commit is None else commit.ref()

    def versions_made(self) -> int:
        """How many versions of the policy updates have made: the newest is this one. (A record in between may be
        lost.)"""
        return max((address.step + 1 for address in self.ledger.addresses("update_policy")), default=0)

    def step_metrics(
        self, step: int, starts: Iterable[float] = (), known: Mapping[Address, Ref] = _NONE
    ) -> dict[str, float]:
        """Every metric of a step: those its stages measured, `time/<stage>_s` summed over shards, and throughput.
        `starts`: when drivers started; a step during which one did has no step time, since the run stood still.
        `known`: references that need not be read again."""
        commits = self.commits(step, known)
        metrics: dict[str, float] = {}
        seconds: defaultdict[str, float] = defaultdict(float)
        shards: defaultdict[str, list[float]] = defaultdict(list)
        counted = [{n: v for n, v in commit.metrics.items() if is_count(n)} for commit in commits]
        for commit in commits:
            seconds[f"time/{commit.address.stage}_s"] += commit.finished - commit.started
            for name, value in commit.metrics.items():
                if not is_count(name):
                    shards[name].append(value)
        for name, values in shards.items():
            metrics[name] = float(np.sum(values) if name in _TOTALS else np.mean(values))
        metrics |= seconds | engine_metrics(counted)
        if metrics.get(_TRUNK_ROWS):
            metrics["trunk/hit_rate"] = 1 - metrics[_TRUNK_COMPUTED] / metrics[_TRUNK_ROWS]
        published = {c.address.step: c.finished for c in commits if c.address.stage == "publish"}
        before = known.get(Address("publish", step)) or self._read(Address("publish", step))
        after = published.get(step + 1)
        if before is not None and after is not None and not any(before.finished < t < after for t in starts):
            metrics["time/step_s"] = max(after - before.finished, 1e-9)
            metrics["samples_per_s"] = self.rows / metrics["time/step_s"]
            metrics["tokens_per_s"] = metrics.get("generate/tokens", 0.0) / metrics["time/step_s"]
        return metrics

    def step_numbers(self, step: int) -> StepNumbers | None:
        """The step in the terms of `summary.json`; None where the records that have its numbers are lost. Of a step's
        records only those are read: a run may have ten thousand steps."""
        commits = self._found(address for address in self.addresses(step) if address.stage in _NUMBERED)
        metrics = {name: value for commit in commits for name, value in commit.metrics.items()}
        if not metrics.keys() >= {STEP_METRIC, "kl/ref", "generate/tokens"}:
            return None
        fractions = {int(k.removeprefix(_FRACTION)): v for k, v in metrics.items() if k.startswith(_FRACTION)}
        staleness = Counter({age: round(fraction * self.rows) for age, fraction in fractions.items()})
        return StepNumbers(
            step=step,
            reward=metrics[STEP_METRIC],
            kl=metrics["kl/ref"],
            num_samples=self.rows,
            num_tokens=int(sum(commit.metrics.get("generate/tokens", 0.0) for commit in commits)),
            staleness=staleness,
        )

    def step_over(self, step: int, known: Mapping[Address, Ref] = _NONE) -> bool:
        """Whether all trained models are updated and the policy's next version is published."""
        updates = (Address(stage, step) for stage in update_stages(self.spec).values())
        ends = (*updates, Address("publish", step + 1))
        return all(address in known or self.ledger.find(address) is not None for address in ends)

    def steps_done(self) -> list[int]:
        """Steps whose updates are committed, and what a step's numbers are taken from (of a run that is resumed
        some of it may be gone, and about to be made again)."""
        updates = dict.fromkeys(update_stages(self.spec).values(), 1)
        needed = {**updates, "advantage": 1, "generate": self.spec.shards}
        # Of these steps every record is there, or was there once.
        over = max(self.ledger.closed_until(), self.store.dropped_before())
        there = Counter((address.step, address.stage) for address in self.ledger.addresses(from_step=over))
        steps = {step for step, _ in there}
        done = sorted(s for s in steps if all(there[s, stage] == number for stage, number in needed.items()))
        return [*range(over), *done]

    def evaluation(self, version: int) -> Evaluation | None:
        """Scores by prompt of a version, or None while some are missing; without a KL while the reference's log-probs
        are."""
        if not (self._has_all("evaluate", version) and self._has_all("evaluate_score", version)):
            return None
        rollouts, scores = self.evaluated(version)
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

    def _has_all(self, stage: str, version: int) -> bool:
        """Whether every shard of a stage of an evaluation has its commit."""
        return all(self.ledger.find(Address(stage, version, s)) is not None for s in range(self.spec.eval_shards))

    def evaluated_kl(self, version: int, rollouts: Rollout) -> list[float] | None:
        """Of what an evaluation sampled, to the reference, nats by response: the sum over sampled tokens of log mu -
        log pi_ref, float64. All tokens are of the version, so that no weights are needed. None where the reference has
        not looked at all of it."""
        if not self._has_all("evaluate_reference", version):
            return None
        reference = self.store.read_step("evaluate_reference", version, self.spec.eval_shards)
        difference = rollouts.sampler_logprobs.astype(np.float64) - reference.ref_logprobs
        of_rows: list[float] = np.where(rollouts.response_mask, difference, 0.0).sum(axis=1).tolist()
        return of_rows

    def evaluated(self, version: int) -> tuple[Rollout, Scores]:
        """Rows and scores of an evaluation."""
        num = self.spec.eval_shards
        return self.store.read_step("evaluate", version, num), self.store.read_step("evaluate_score", version, num)

    def evaluations(self) -> list[Evaluation]:
        """All complete evaluations by version."""
        return [e for e in map(self.evaluation, self.evaluated_versions()) if e is not None]

    def evaluated_versions(self) -> list[int]:
        """Versions of which some held-out rows have scores."""
        return sorted({address.step for address in self.ledger.addresses("evaluate_score")})


def evaluation_metrics(evaluation: Evaluation, first: Evaluation | None = None) -> dict[str, float]:
    """What is tracked of an evaluation: score, KL, length, the mean of each part where there is more than one; and
    against the `first` one, on the prompts of both: the gain, and its t paired by prompt."""
    found = {EVALUATION_METRIC: evaluation.mean, "eval/kl": evaluation.kl, "eval/length_mean": evaluation.length}
    parts = evaluation.parts if len(evaluation.parts) > 1 else {}
    gain = None if first is None else paired(first.scores, evaluation.scores)
    if gain is not None:
        found |= {"eval/gain": gain.gain, "eval/paired_t": gain.t}
    return {n: v for n, v in found.items() if v is not None} | {f"eval/{n}/mean": v for n, v in parts.items()}


def alarm_text(version: int, metrics: Mapping[str, float]) -> str | None:
    """What a person is told of a canary's metrics; None where all is well."""
    if not metrics.get("mismatch/alarm"):
        return None
    return (
        f"engine and trainer differ by {metrics['mismatch/canary_mean_abs']:.3g} nats a token at version {version} of "
        f"the weights, above {metrics['mismatch/alarm_nats']:g} (mismatch.alarm_nats): has the engine taken them?"
    )


def distinct_bigrams(rollout: Rollout) -> float | None:
    """Distinct / all bigrams of tokens over the responses of a record; None where no response has two tokens."""
    bigrams: list[tuple[int, int]] = []
    for row in range(rollout.num_rows):
        start = int(rollout.prompt_lengths[row])
        response = rollout.tokens[row, start : start + int(rollout.response_lengths[row])].tolist()
        bigrams += itertools.pairwise(response)
    return len(set(bigrams)) / len(bigrams) if bigrams else None
