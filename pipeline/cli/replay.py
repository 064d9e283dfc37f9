"""`stageline replay RUN --step N --stage STAGE [--shard S]`: run one node again from its stored inputs, and compare its
output with the stored output.

Nothing is written to the run. Weights that a node needs are rebuilt from checkpoints and stored rollouts (law 3 of
docs/architecture.md), so a replay works long after the run. A node of a gang with several ranks is replayed on one
rank. Its sums may therefore differ in the last bits, and the printed result says so.

`stageline replay RUN --updates A:B`: run updates A to B - 1 of all trained models again, from the stored rollouts.

    start weights, or the newest checkpoint of version A or older ──► version A ──► update A ──► ... ──► update B - 1
                                                                                    └ digest beside committed digest

First all updates of one model are run, then all updates of the other model. This is possible because every input of an
update (rollouts, advantages, values, log-probs) is stored. Last bits may differ for a gang of several ranks, and on
devices whose results do not repeat bit for bit. The printed result says so.

`stageline replay RUN --updates A:B key=value... name=...`: train a variant on the rollouts that RUN recorded.

    parent   version A of the trained models ──► where the variant starts
    stored   generate, score, reference of A to B - 1 ──► logprob, value, advantage, updates with the variant's models
    then     compare version B of both policies on the held-out prompts, with the same noise for each prompt

If the variant trains without a critic (`ppo.advantage`), value and the critic's updates are left out. The parent is
only read. The variant has its own directory and MLflow run, which name the parent. It has no rollouts of its own and
cannot be resumed. If it is interrupted, remove its directory and start it again.

All computation runs in this process.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cli.answers import STAGE_FAILED, SUCCESS, output_console, print_line, read_trusted_config
from pipeline.config.identity import fingerprint, read_identity
from pipeline.config.loading import config_hash, variant_config, write_config
from pipeline.config.paths import RunPaths
from pipeline.config.placement import gang_of_role
from pipeline.config.preflight import recorded_devices, replay_problem
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history, open_tracker
from pipeline.driver.session import refuse_unwritable_directory
from pipeline.errors import ConfigError
from pipeline.graph.graph import (
    STAGE_ROLES,
    UPDATE_STAGE,
    GraphSpec,
    Node,
    canary_node,
    evaluate_nodes,
    is_evaluated,
    step_nodes,
    update_stages,
)
from pipeline.observe.evaluations import Comparison, VariantSummary, compare, comparison_table
from pipeline.observe.journal import read_events
from pipeline.observe.provenance import software_versions
from pipeline.observe.tracking import RunStatus, Tracker, delivered_run_id
from pipeline.workers.exports import describe_export
from pipeline.workers.messages import Call
from pipeline.workers.parts import require_part
from pipeline.workers.recorded import RecordedStep, train_recorded
from pipeline.workers.runtime import local_config, runtime_for, was_held_in_one_process
from pipeline.workers.stages import score_rollout
from stages.models.numerics import repeats_bits
from stages.models.protocol import MODEL_ROLES, ModelHost, Role
from stages.publish import publish
from storage.address import Address
from storage.commits import Commit
from storage.errors import MissingOutput
from storage.records import Record, Rollout
from storage.rollouts import KEEP
from storage.weights import WeightBoard

SAMPLING = ("generate", "evaluate", "canary")
"""Stages whose results come from the generation engine. In most engines the rounding of a row's log-probs depends on
the other rows of its batch, so a replay of these stages accepts small differences (`TOLERANCES`). It demands equal bits
only from an engine without this dependence, on a machine like that of the run."""
DRAWING = ("generate", "evaluate")
"""Stages in which the engine draws tokens."""
SCORING = ("score", "evaluate_score")
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""Dtype of the models -> largest accepted difference between a replayed and a stored log-prob, value or score. It
applies only if the replay may round differently from the run: for results of several ranks, for a reward that is not
deterministic, and in some cases for the stages of `SAMPLING`. In all other replays, and for whole numbers, no
difference is accepted."""


@dataclass(frozen=True)
class ArrayDifference:
    name: str
    num_elements: int
    num_different: int
    max_difference: float
    is_float: bool


@dataclass(frozen=True)
class ReplayResult:
    """The comparison of a node's stored output with its replayed output."""

    address: Address
    differences: list[ArrayDifference]
    tolerance: float
    """Largest allowed difference of a float. Whole numbers (tokens, versions) must always be equal."""
    digests: tuple[str, str] | None = None
    """Digests of the committed weights and of the replayed weights. None if the node is not an update."""
    was_committed: bool = True
    """False if the node has no commit, for example because it failed in the run. There is then nothing to compare."""
    unproven: tuple[str, ...] = ()
    """Properties that the replay cannot prove because of the engine."""

    @property
    def is_identical(self) -> bool:
        """Return True if both outputs are the same bit for bit."""
        if self.digests is not None:
            return self.digests[0] == self.digests[1]
        return all(d.num_different == 0 for d in self.differences)

    @property
    def is_as_expected(self) -> bool:
        if self.digests is not None:
            return self.digests[0] == self.digests[1] or self.tolerance > 0
        return all(
            d.num_different == 0 or (d.is_float and d.max_difference <= self.tolerance) for d in self.differences
        )

    def render(self) -> RenderableType:
        if not self.was_committed:
            return Text(f"{self.address} ran to its end here. It has no commit: there is nothing to compare with")
        table = Table(title=f"replay of {self.address}", title_justify="left")
        if self.digests is not None:
            table.add_column("weights")
            table.add_column("digest")
            table.add_row("committed", self.digests[0])
            table.add_row("replayed", self.digests[1])
        else:
            for heading in ("array", "elements", "differing", "largest difference"):
                table.add_column(heading, justify="left" if heading == "array" else "right")
            for d in self.differences:
                table.add_row(d.name, str(d.num_elements), str(d.num_different), f"{d.max_difference:g}")
        expected = "difference must be 0"
        if self.tolerance:
            expected = f"another batch, layout or reward: floats may differ by {self.tolerance:g}, integers may not"
        conclusion = "identical" if self.is_identical else "as expected" if self.is_as_expected else "NOT as expected"
        return Group(
            table, Text("\n".join([f"{conclusion}: {expected}", *(f"not proven: {u}" for u in self.unproven)]))
        )


def command(options: argparse.Namespace) -> int:
    config = read_trusted_config(options.run_dir)
    if options.updates is not None and options.stage is None and options.step is None:
        steps = update_range(config, options.updates)
        return train_variant(config, steps, options.changes) if options.changes else replay_updates(config, steps)
    if options.updates is not None or options.changes or None in (options.stage, options.step):
        raise ConfigError("replay", "give --step and --stage for one node, or --updates A:B [changes] for updates")
    result = replay_node(config, options.stage, options.step, options.shard)
    output_console().print(result.render())
    return SUCCESS if result.is_as_expected else STAGE_FAILED


def replay_node(config: RunConfig, stage: str, step: int, shard: int) -> ReplayResult:
    """Run a node again, and compare its output with the committed output.

    A node without a commit is run too, for example to see the error with which it failed. Its output is not compared.

    Raises:
        ConfigError: the run has no such stage, step or shard, or the node's draws cannot be repeated.
        MissingOutput: an input has no commit, or the run has no such evaluation.
    """
    node = _find_node(config, stage, step, shard)
    history = open_history(config)
    commit = history.ledger.find(node.address)
    if commit is None and stage.startswith("evaluate") and not is_evaluated(config.graph(), step):
        every = f"evaluate.every = {'null' if config.evaluate.every is None else config.evaluate.every}"
        raise MissingOutput(f"{node.address} has no commit, and the run does not evaluate version {step} ({every})")
    unproven_here = _check_draws(config, stage, commit)
    version = _used_version(config, node, commit)
    holder = gang_of_role(config.placement, Role.POLICY if stage in SAMPLING else node.role)
    scored_apart = stage not in SCORING or next(g for g in config.gangs() if g.name == holder).ranks_of(node.role) == 1
    in_replicas = node.role not in {*MODEL_ROLES, Role.GENERATE} and scored_apart
    one_rank = config.placement.gangs[holder].workers == 1 or in_replicas
    one_rank = one_rank and repeats_bits(config.model)
    close = TOLERANCES[config.model.dtype]
    with tempfile.TemporaryDirectory(prefix="stageline-replay-") as name:
        scratch = Path(name)
        single = local_config(config, scratch)
        if stage in UPDATE_STAGE.values():
            with runtime_for(single, node.role) as runtime:
                updates = require_part(runtime.parts.updates)
                if commit is None:
                    updates.train_without_commit(node.role, step)
                    return ReplayResult(node.address, [], 0.0, was_committed=False)
                digests = updates.replay(node.role, step)
            return ReplayResult(node.address, [], 0.0 if one_rank else close, digests)
        if stage in SAMPLING:
            with runtime_for(single, Role.POLICY) as runtime:
                _publish(require_part(runtime.parts.updates).model_at(Role.POLICY, version), single, version)
        gang = gang_of_role(config.placement, node.role)
        with runtime_for(single, node.role) as runtime:
            record = runtime.compute(Call(node.address, "replay", version, node.inputs, gang, "replay", 0)).record
            same_machine = commit is not None and commit.provenance.numerics == fingerprint(runtime.parts.numerics)
            repeats = stage not in SCORING or require_part(runtime.parts.scorer).is_deterministic
    assert record is not None
    if commit is None:
        return ReplayResult(node.address, [], 0.0, was_committed=False)
    bits = stage not in SAMPLING or (same_machine and _invariance(config) == {"bits"})
    exact = one_rank and repeats and bits
    differences = compare_outputs(history.store.read(node.address), record)
    return ReplayResult(node.address, differences, 0.0 if exact else close, unproven=unproven_here)


def _check_draws(config: RunConfig, stage: str, commit: Commit | None) -> tuple[str, ...]:
    """Return a sentence for the user if rounding alone may explain a different token in the replay of a stage. Raises
    ConfigError if the engine cannot repeat its draws at all."""
    if stage not in DRAWING or commit is None:
        return ()
    problem = replay_problem(config.capabilities())
    if problem is not None:
        others = ", ".join(s for s in STAGE_ROLES if s not in (*SAMPLING, "publish"))
        need = f"engine.kind={config.engine.kind} cannot repeat it: {problem}. What can be replayed: {others}"
        raise ConfigError("--stage", f"given {stage!r}; {need}")
    if _invariance(config) == {"bits"}:
        return ()
    return ("tokens that differ may be an error, or from a tie of rounding on: this engine's sums depend on the batch",)


def _invariance(config: RunConfig) -> set[str]:
    """Return the engine's `Capabilities.invariance`: several values if it ran on several kinds of devices."""
    return {config.capabilities(d).invariance for d in recorded_devices(config, read_identity(config.run_dir))}


def _find_node(config: RunConfig, stage: str, step: int, shard: int) -> Node:
    """Return the node of this stage, step and shard in the run's graph. Raises ConfigError if there is none, or the
    stage cannot be replayed."""
    if stage not in STAGE_ROLES or stage == "publish":
        known = ", ".join(s for s in STAGE_ROLES if s != "publish")
        raise ConfigError("--stage", f"given {stage!r}; must be one of {known}")
    spec = config.graph()
    of_version = stage.startswith("evaluate")
    last = spec.steps if of_version else spec.steps - 1
    if not 0 <= step <= last:
        raise ConfigError("--step", f"given {step}; the run has {'versions' if of_version else 'steps'} 0 to {last}")
    nodes = evaluate_nodes(spec, step) if of_version else step_nodes(spec, step)
    if stage == "canary" and spec.has_canaries:  # `step_nodes` may have it under a later step
        nodes = [canary_node(spec, step)]
    node = next((n for n in nodes if n.address == Address(stage, step, shard)), None)
    if node is None:
        shards = [n.address.shard for n in nodes if n.stage == stage]
        known = f"{stage} has shards {shards[0]} to {shards[-1]}" if shards else f"this run has no {stage} nodes"
        raise ConfigError("--shard" if shards else "--stage", f"given {shard if shards else stage!r}; {known}")
    return node


def _used_version(config: RunConfig, node: Node, commit: Commit | None) -> int:
    """Return the version of the weights that a node used. Without a commit, a version that depends on timing is in the
    journal. Raises ConfigError if several versions sampled the shard."""
    if commit is not None and node.stage in SAMPLING:
        return _sampled_version(commit, node.address.shard)
    if commit is not None or node.newest_version is None:
        return node.version
    address = (node.address.stage, node.address.step, node.address.shard)
    events = read_events(RunPaths(config.run_dir).events)
    versions = [event.version for event in events if (event.stage, event.step, event.shard) == address]
    return next((version for version in reversed(versions) if version is not None), node.version)


def _sampled_version(commit: Commit, shard: int) -> int:
    """Return the version that sampled a shard. Raises ConfigError if several versions did."""
    versions = commit.provenance.weight_versions
    if len(versions) > 1:
        named = ", ".join(f"v{v}" for v in versions)
        raise ConfigError(
            "--shard",
            f"given {shard}; its rows were sampled by {named} as they came in (rollout.versions: inflight), "
            "which cannot be repeated; a shard of one version can",
        )
    return versions[0]


def compare_outputs(stored: Record, replayed: Record) -> list[ArrayDifference]:
    """Return, for each array of `stored`, the number of elements that differ and the largest difference."""
    differences = []
    for name, array in stored.arrays().items():
        other = replayed.arrays()[name]
        delta = np.abs(array.astype(np.float64) - other.astype(np.float64))
        differing, largest = int((array != other).sum()), float(delta.max(initial=0.0))
        differences.append(ArrayDifference(name, array.size, differing, largest, array.dtype.kind == "f"))
    return differences


# ---- replay updates --------------------------------------------------------------------------------------

_TRAINING = ("generate", "score", "reference", "logprob", "value", "advantage", "update_policy", "update_critic")
"""Stages whose nodes must be committed in a step before its updates can be replayed. The update stages are listed too,
because a replay compares its results with the recorded updates."""
_RANGE = re.compile(r"(\d+):(\d+)")


def update_range(config: RunConfig, text: str) -> range:
    """Return the steps A to B - 1 for a text "A:B".

    Raises:
        ConfigError: the text has another form, the run has fewer than B steps, or an output of these steps is missing.
            Or the weights at step A cannot be rebuilt, because rollouts were deleted."""
    match = _RANGE.fullmatch(text)
    steps = range(int(match[1]), int(match[2])) if match else range(0)
    if not steps:
        raise ConfigError("--updates", f"given {text!r}; write A:B for updates A to B - 1, for example 0:40")
    history = open_history(config)
    committed = set(history.ledger.addresses())
    spec = config.graph()
    whole = next((step for step in range(spec.steps) if _missing_inputs(spec, step, committed)), spec.steps)
    if steps.stop > spec.steps:
        raise ConfigError("--updates", f"given {text!r}; the run has updates 0:{whole}")
    for step in steps:
        missing = _missing_inputs(spec, step, committed)
        if missing:
            raise ConfigError("--updates", f"given {text!r}; {missing[0]} is not there (from 0 on it has 0:{whole})")
    first = min(_newest_checkpoint(config, role, steps.start) for role in update_stages(spec))
    before = history.store.dropped_before()
    if first < before:
        need = (
            f"they would be trained from version {first}, and the rollouts before step {before} were dropped by {KEEP}"
        )
        raise ConfigError("--updates", f"given {text!r}; {need}. Updates from a later checkpoint on can be")
    return steps


def _newest_checkpoint(config: RunConfig, role: Role, version: int) -> int:
    """Return the version of the newest checkpoint that is not newer than `version`. Return 0 if there is none."""
    saved = config.stored.checkpoints()
    return next(iter(saved.newest_first(str(role), version)), 0)


def _missing_inputs(spec: GraphSpec, step: int, committed: set[Address]) -> list[Address]:
    nodes = (node for node in step_nodes(spec, step) if node.stage in _TRAINING)
    return [node.address for node in nodes if node.address not in committed]


def replay_updates(config: RunConfig, steps: range) -> int:
    """Run the updates of these steps again, and return the exit code.

    Print each update's digest beside the committed digest. At the end print "identical" or the first difference. If the
    run held the model in one process, the model's replay ends after its first difference.

    A difference is a failure only if the run held each trained model in one process, and the computations of its
    devices repeat bit for bit. Otherwise digests may differ, and the exit code is 0.

    Raises:
        MissingOutput: an input of an update between the checkpoint and `steps` is missing.
        ReplayMismatch: an update between the checkpoint and `steps` gave weights other than the committed weights.
    """
    differing: list[Address] = []
    trained = update_stages(config.graph())
    for role, stage in trained.items():
        for step, committed, made in _replay_role(config, role, steps):
            same = "same" if committed == made else "DIFFERS"
            print_line(f"{Address(stage, step)}  committed {committed}  replayed {made}  {same}")
            if committed != made:
                differing.append(Address(stage, step))
    if not differing:
        print_line(f"identical: updates {steps.start}:{steps.stop} of {' and '.join(trained)}, in this process")
        return SUCCESS
    first = min(differing, key=lambda address: address.step)
    if was_held_in_one_process(config, [*trained]) and repeats_bits(config.model):
        print_line(f"first difference: {first}")
        return STAGE_FAILED
    print_line(
        f"first difference: {first}; another layout, or a device that does not repeat its bits: digests may differ"
    )
    return SUCCESS


def _replay_role(config: RunConfig, role: Role, steps: range) -> Iterator[tuple[int, str, str]]:
    """Replay the updates of a role by `ExactlyOnceUpdates.replay_all`. Yield (step, committed digest, digest now)."""
    start = _newest_checkpoint(config, role, steps.start)
    print_line(f"{role}: from {f'the checkpoint of version {start}' if start else 'the start weights'}")
    with tempfile.TemporaryDirectory(prefix="stageline-replay-") as name:
        scratch = Path(name)
        with runtime_for(local_config(config, scratch), role) as runtime:
            yield from require_part(runtime.parts.updates).replay_all(role, steps)


# ---- replay variant --------------------------------------------------------------------------------------

_SHOWN = ("reward/mean", "kl/ref", "policy/approx_kl", "critic/explained_variance")


@dataclass(frozen=True)
class _VariantPlan:
    """The checked inputs of a variant's training. `scratch` is a temporary directory. One runtime (the models of some
    roles, built in this process) writes files there, and a later runtime reads them."""

    parent: RunConfig
    variant: RunConfig
    steps: range
    scratch: Path
    changed: Sequence[str]

    @property
    def trained_roles(self) -> tuple[Role, ...]:
        """Return the roles that the variant trains."""
        return tuple(update_stages(self.variant.graph()))

    @property
    def is_compared(self) -> bool:
        """Return True if the parent has at least two held-out prompts. Parent and variant are then compared on them."""
        return self.parent.held_out >= 2

    def config_with_own_board(self, whose: str) -> RunConfig:
        """Return a config for computing in this process alone. `whose`: "parent" or "variant".

        The config has the settings of the parent or of the variant. Prompts and rollouts are read from the parent's
        directory. Published weights are in a directory of their own below `scratch`, so that parent and variant do not
        mix."""
        config = local_config(self.variant if whose == "variant" else self.parent, self.scratch / whose)
        config.runs_dir, config.name = self.parent.runs_dir, self.parent.name
        config.evaluate.shards = 1
        return config

    def checkpoint(self, role: Role) -> Path:
        return self.scratch / f"start-{role}"


def train_variant(parent: RunConfig, steps: range, overrides: Sequence[str]) -> int:
    """Train, export and compare a variant. Return the exit code.

    Raises:
        ConfigError: the variant changes a setting that it must share with the parent, or the variant's directory
            exists. Or the variant starts after step 0 with a critic, and the parent trained no critic.
        MissingOutput, StoreError: a recorded output is missing or damaged.
        ReplayMismatch: this machine does not reproduce the parent's weights.
    """
    variant, changes = variant_config(parent, overrides)
    if steps.start and variant.has_critic and not parent.has_critic:
        need = f"the run trained no critic that ppo.advantage={variant.ppo.advantage} could start from: begin at 0"
        raise ConfigError("--updates", f"given '{steps.start}:{steps.stop}'; {need}")
    paths = RunPaths(variant.run_dir)
    if paths.root.exists():
        raise ConfigError("name", f"given {variant.name!r}; {paths.root} exists already: choose another name=...")
    changed = [str(change) for change in changes]
    with refuse_unwritable_directory(variant):
        paths.root.mkdir(parents=True)
        born = {"parent": str(parent.run_dir.resolve()), "updates": [steps.start, steps.stop], "changed": changed}
        paths.variant.write_text(json.dumps(born, indent=2) + "\n", "utf8")
        write_config(paths.config, variant)
    tracker = open_tracker(variant)
    tracker.set_tags(_tags(parent, variant, steps))
    status: RunStatus = "KILLED"
    try:
        with tempfile.TemporaryDirectory(prefix="stageline-variant-") as scratch:
            comparison = _train(_VariantPlan(parent, variant, steps, Path(scratch), changed), tracker)
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        tracker.close(status)
    if comparison is None:
        print_line("not compared: the run has fewer than two held-out prompts (prompts.held_out)")
    else:
        output_console().print(comparison_table(comparison, parent.name, variant.name))
    print_line(f"weights {paths.weights(steps.stop)}, summary {paths.summary}")
    return SUCCESS


def _tags(parent: RunConfig, variant: RunConfig, steps: range) -> dict[str, str]:
    """Return the MLflow tags that name the parent and the repeated updates."""
    tags = {"stageline.parent": str(parent.run_dir.resolve()), "stageline.updates": f"{steps.start}:{steps.stop}"}
    uri = variant.tracking.uri
    run_id = None if uri is None else delivered_run_id(RunPaths(parent.run_dir).mlflow_spool, uri)
    return tags if run_id is None else {**tags, "mlflow.parentRunId": run_id, "stageline.parent_run_id": run_id}


def _train(plan: _VariantPlan, tracker: Tracker) -> Comparison | None:
    """Train, export and compare the variant, and write its summary. Return the comparison, or None if there are fewer
    than two held-out prompts."""
    paths = RunPaths(plan.variant.run_dir)
    _publish_parent_weights(plan)
    done = _train_and_export(plan, tracker)
    comparison = None
    if plan.is_compared:
        comparison = compare(*(_held_out_scores(plan, whose) for whose in ("parent", "variant")))
        named = {"parent": comparison.parent, "variant": comparison.variant, "difference": comparison.difference}
        tracker.log_metrics(plan.steps.stop, {f"held_out/{name}": number for name, number in named.items()})
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
    tracker.log_artifact(paths.summary, "")
    return comparison


def _publish_parent_weights(plan: _VariantPlan) -> None:
    """Rebuild the parent's weights: version `steps.start` of each trained role in `scratch` (unless 0), where the
    variant starts, and for the comparison version `steps.stop` of the policy, published."""
    config = plan.config_with_own_board("parent")
    for role in plan.trained_roles if plan.steps.start else (Role.POLICY,) if plan.is_compared else ():
        with runtime_for(config, role) as runtime:
            updates = require_part(runtime.parts.updates)
            if plan.steps.start:
                plan.checkpoint(role).mkdir()
                updates.model_at(role, plan.steps.start).save(role, plan.checkpoint(role))()
            if role is Role.POLICY and plan.is_compared:
                _publish(updates.model_at(role, plan.steps.stop), config, plan.steps.stop)


def _train_and_export(plan: _VariantPlan, tracker: Tracker) -> list[RecordedStep]:
    config, target = plan.config_with_own_board("variant"), RunPaths(plan.variant.run_dir).weights(plan.steps.stop)
    done = []
    with runtime_for(config, plan.trained_roles) as runtime:
        host = require_part(runtime.parts.updates).host
        for role in plan.trained_roles if plan.steps.start else ():
            host.load(role, plan.checkpoint(role))
        for step in train_recorded(host, runtime.parts.store, config, plan.steps, _parent_state(plan)):
            done.append(step)
            tracker.log_metrics(step.step, step.metrics)
            numbers = (f"{name} {step.metrics[name]:.4g}" for name in _SHOWN if name in step.metrics)
            print_line(f"update {step.step + 1 - plan.steps.start}/{len(plan.steps)}  {'  '.join(numbers)}")
        target.mkdir(parents=True)
        host.export(runtime.parts.board, target)()
        describe_export(target, plan.variant, plan.steps.stop, config_hash(plan.variant))
        if plan.is_compared:
            _publish(host, config, plan.steps.stop)
    return done


def _parent_state(plan: _VariantPlan) -> Mapping[str, Any]:
    """Return the parent's state at the variant's first step, without the KL coefficient if the variant changes
    `ppo.kl`."""
    if not plan.steps.start:
        return {}
    state = dict(open_history(plan.parent).ledger.get(Address("advantage", plan.steps.start - 1)).state)
    if plan.variant.ppo.kl != plan.parent.ppo.kl:
        state.pop("kl_coef", None)
    return state


def _publish(host: ModelHost, config: RunConfig, version: int) -> None:
    publish(host, WeightBoard(RunPaths(config.run_dir).board(config.cluster.weights_dir)), version)


def _held_out_scores(plan: _VariantPlan, whose: str) -> dict[int, float]:
    """Return held-out prompt -> score of a sampled response. The noise depends on the prompt and not on the policy, so
    two policies can be compared in pairs."""
    config, version = plan.config_with_own_board(whose), plan.steps.stop
    gang = config.placement.roles[Role.GENERATE.value]
    with runtime_for(config, (Role.GENERATE, Role.SCORE)) as runtime:
        call = Call(Address("evaluate", version), "variant", version, (), gang, "variant", 0)
        rollout = runtime.compute(call).record
        assert isinstance(rollout, Rollout)
        scores = score_rollout(runtime.parts, rollout, held_out=True).scores
    return {int(prompt): float(score) for prompt, score in zip(rollout.prompt_index, scores, strict=True)}
