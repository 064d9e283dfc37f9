"""`stageline replay RUN --updates A:B key=value... name=...`: a variant, trained on the rollouts that RUN recorded.

    parent   version A of the trained models ──► where the variant starts
    stored   generate, score, reference of A to B - 1 ──► logprob, value, advantage, updates with the variant's models
    then     version B of the parent's policy, and the variant's: held-out prompts, same noise, paired

Where the variant trains without a critic (`ppo.advantage`) value and the critic's updates are left out.

It runs in this process. The run that it is trained on is read only; the variant has a directory and an MLflow run of
its own, which name their parent. It has no rollouts of its own and cannot be resumed: of one that was interrupted the
directory is removed, and it is begun anew.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cli.answers import output, print_line
from pipeline.cli.exit_codes import DONE
from pipeline.cli.one_process import alone, runtime_for
from pipeline.config.errors import ConfigError
from pipeline.config.loading import config_hash, to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.config.variants import variant_of
from pipeline.driver.results import open_history, open_tracker
from pipeline.driver.session import writable
from pipeline.graph.graph import update_stages
from pipeline.observe.revision import software_versions
from pipeline.observe.spool import delivered_run_id
from pipeline.observe.tracking import RunStatus, Tracker
from pipeline.observe.variants import Comparison, VariantSummary, compare, comparison_table
from pipeline.workers.bindings.scoring import scores_of
from pipeline.workers.messages import Call
from pipeline.workers.model_card import describe_export
from pipeline.workers.parts import required
from pipeline.workers.recorded import RecordedStep, train_recorded
from stages.models.protocol import ModelHost, Role
from stages.publish import publish
from storage.address import Address
from storage.records import Rollout
from storage.weights import WeightBoard

_SHOWN = ("reward/mean", "kl/ref", "policy/approx_kl", "critic/explained_variance")


@dataclass(frozen=True)
class _Plan:
    """A variant that can begin. `scratch` has what is passed from one runtime to the next."""

    parent: RunConfig
    variant: RunConfig
    steps: range
    scratch: Path
    changed: Sequence[str]

    @property
    def trained(self) -> tuple[Role, ...]:
        """Roles that the variant trains."""
        return tuple(update_stages(self.variant.graph()))

    @property
    def compared(self) -> bool:
        """Whether there are prompts to compare the policies on."""
        return self.parent.held_out >= 2

    def board_of(self, whose: str) -> RunConfig:
        """The parent's or the variant's config for this process alone. It reads the parent's prompts and rollouts, and
        has published weights of its own."""
        config = alone(self.variant if whose == "variant" else self.parent, self.scratch / whose)
        config.runs_dir, config.name = self.parent.runs_dir, self.parent.name
        config.evaluate.shards = 1
        return config

    def checkpoint(self, role: Role) -> Path:
        return self.scratch / f"start-{role}"


def train_variant(parent: RunConfig, steps: range, overrides: Sequence[str]) -> int:
    """Trains, exports and compares a variant; returns the exit code.

    Raises:
        ConfigError: it would differ in what its rollouts depend on, its directory exists, or it would need a critic of
            a version that the parent, which has none, cannot give it.
        MissingOutput, StoreError: something recorded is not there, or not what it was.
        ReplayMismatch: this machine does not give the parent's weights, which the variant starts from, or is compared
            with.
    """
    variant, changes = variant_of(parent, overrides)
    if steps.start and variant.has_critic and not parent.has_critic:
        need = f"the run trained no critic that ppo.advantage={variant.ppo.advantage} could start from: begin at 0"
        raise ConfigError("--updates", f"given '{steps.start}:{steps.stop}'; {need}")
    paths = RunPaths(variant.run_dir)
    if paths.root.exists():
        raise ConfigError("name", f"given {variant.name!r}; {paths.root} exists already: choose another name=...")
    changed = [str(change) for change in changes]
    with writable(variant):
        paths.root.mkdir(parents=True)
        born = {"parent": str(parent.run_dir.resolve()), "updates": [steps.start, steps.stop], "changed": changed}
        paths.variant.write_text(json.dumps(born, indent=2) + "\n", "utf8")
        paths.config.write_text(to_yaml(variant), "utf8")
    tracker = open_tracker(variant)
    tracker.tags(_tags(parent, variant, steps))
    status: RunStatus = "KILLED"
    try:
        with tempfile.TemporaryDirectory(prefix="stageline-variant-") as scratch:
            comparison = _train(_Plan(parent, variant, steps, Path(scratch), changed), tracker)
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        tracker.close(status)
    if comparison is None:
        print_line("not compared: the run has fewer than two held-out prompts (prompts.held_out)")
    else:
        output().print(comparison_table(comparison, parent.name, variant.name))
    print_line(f"weights {paths.weights(steps.stop)}, summary {paths.summary}")
    return DONE


def _tags(parent: RunConfig, variant: RunConfig, steps: range) -> dict[str, str]:
    """Who its parent is: in MLflow's own word for it, too, where both runs are in the same store."""
    tags = {"stageline.parent": str(parent.run_dir.resolve()), "stageline.updates": f"{steps.start}:{steps.stop}"}
    uri = variant.tracking.uri
    run_id = None if uri is None else delivered_run_id(RunPaths(parent.run_dir).mlflow_spool, uri)
    return tags if run_id is None else {**tags, "mlflow.parentRunId": run_id, "stageline.parent_run_id": run_id}


def _train(plan: _Plan, tracker: Tracker) -> Comparison | None:
    """Everything between the directory and the tables."""
    paths = RunPaths(plan.variant.run_dir)
    _take_parents_weights(plan)
    done = _train_and_export(plan, tracker)
    comparison = None
    if plan.compared:
        comparison = compare(*(_held_out_scores(plan, whose) for whose in ("parent", "variant")))
        named = {"parent": comparison.parent, "variant": comparison.variant, "difference": comparison.difference}
        tracker.metrics(plan.steps.stop, {f"held_out/{name}": number for name, number in named.items()})
    summary = VariantSummary(
        parent=str(plan.parent.run_dir.resolve()),
        updates=(plan.steps.start, plan.steps.stop),
        changed=plan.changed,
        steps=[{"step": s.step, "digests": s.digests, "metrics": s.metrics} for s in done],
        weights=str(paths.weights(plan.steps.stop)),
        comparison=comparison,
        versions=software_versions(),
    )
    paths.summary.write_text(summary.to_json(), "utf8")
    tracker.artifact(paths.summary, "")
    return comparison


def _take_parents_weights(plan: _Plan) -> None:
    """What the variant starts from, if that is not version 0; and what it is compared with."""
    config = plan.board_of("parent")
    for role in plan.trained if plan.steps.start else (Role.POLICY,) if plan.compared else ():
        with runtime_for(config, role) as runtime:
            updates = required(runtime.parts.updates)
            if plan.steps.start:
                plan.checkpoint(role).mkdir()
                updates.at(role, plan.steps.start).save(role, plan.checkpoint(role))()
            if role is Role.POLICY and plan.compared:
                _publish(updates.at(role, plan.steps.stop), config, plan.steps.stop)


def _train_and_export(plan: _Plan, tracker: Tracker) -> list[RecordedStep]:
    config, target = plan.board_of("variant"), RunPaths(plan.variant.run_dir).weights(plan.steps.stop)
    done = []
    with runtime_for(config, plan.trained) as runtime:
        host = required(runtime.parts.updates).host
        for role in plan.trained if plan.steps.start else ():
            host.load(role, plan.checkpoint(role))
        for step in train_recorded(host, runtime.parts.store, config, plan.steps, _state(plan)):
            done.append(step)
            tracker.metrics(step.step, step.metrics)
            numbers = (f"{name} {step.metrics[name]:.4g}" for name in _SHOWN if name in step.metrics)
            print_line(f"update {step.step + 1 - plan.steps.start}/{len(plan.steps)}  {'  '.join(numbers)}")
        target.mkdir(parents=True)
        host.export(target)()
        describe_export(target, plan.variant, plan.steps.stop, config_hash(plan.variant))
        if plan.compared:
            _publish(host, config, plan.steps.stop)
    return done


def _state(plan: _Plan) -> Mapping[str, Any]:
    """What the parent's step before the first handed on. A KL coefficient that the parent's controller had reached is
    let go where the variant has another controller."""
    if not plan.steps.start:
        return {}
    state = dict(open_history(plan.parent).ledger.get(Address("advantage", plan.steps.start - 1)).state)
    if plan.variant.ppo.kl != plan.parent.ppo.kl:
        state.pop("kl_coef", None)
    return state


def _publish(host: ModelHost, config: RunConfig, version: int) -> None:
    publish(host, WeightBoard(RunPaths(config.run_dir).board(config.cluster.weights_dir)), version)


def _held_out_scores(plan: _Plan, whose: str) -> dict[int, float]:
    """By number of the prompt. Noise is keyed by prompt, so that the scores of two policies are paired."""
    config, version = plan.board_of(whose), plan.steps.stop
    gang = config.placement.roles[Role.GENERATE.value]
    with runtime_for(config, (Role.GENERATE, Role.SCORE)) as runtime:
        call = Call(Address("evaluate", version), "variant", version, (), gang, "variant", 0)
        rollout = runtime.compute(call).record
        assert isinstance(rollout, Rollout)
        scores = scores_of(runtime.parts, rollout, held_out=True).scores
    return {int(prompt): float(score) for prompt, score in zip(rollout.prompt_index, scores, strict=True)}
