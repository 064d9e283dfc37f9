"""The proofs of `stageline check RUN`: each takes what was read of a run, and gives what it counted and every problem.

May import pipeline.config, pipeline.driver.{integrity, retention}, pipeline.graph, pipeline.observe, stages and
storage.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.changes import sections
from pipeline.config.identity import identity_faults, read_identity
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.integrity import lineage_faults
from pipeline.driver.retention import exported
from pipeline.graph.graph import GraphSpec, Node, generation_versions, made_from, update_stages
from pipeline.observe.history import History
from stages.models.protocol import Role
from stages.prompts import PromptTable, held_out_prompts, training_prompts
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.commits import Commit
from storage.errors import StoreError
from storage.exports import export_faults, has_sums
from storage.records import PromptBatch, Rollout
from storage.rollouts import dropped

Answer = tuple[str, list[str]]
"""What was counted, and every problem."""


@dataclass(frozen=True)
class RowsFound:
    """What is kept of a rollout, once it was looked at: a long run's do not fit into memory."""

    numbers: tuple[int, ...]
    tokens: int
    """That were sampled."""
    prompt_faults: tuple[str, ...]
    version_faults: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """What was read of a run."""

    config: RunConfig
    paths: RunPaths
    history: History
    nodes: Mapping[Address, Node]
    """Of the whole run, and of the evaluations that it was once to have."""
    commits: Mapping[Address, Commit]
    """Those that are sound."""
    rows: Mapping[Address, RowsFound]
    """Of `generate` and `evaluate`."""
    dropped_before: int = 0
    """Arrays of the steps before this one were let go, and are not looked at."""
    outlived: frozenset[Address] = frozenset()
    """Their records are lost, and nobody needs them any more: that they are not there is no fault."""

    @property
    def updates(self) -> Mapping[Role, str]:
        """By role that the run trains: the stage that does it."""
        return update_stages(self.config.graph())

    def steps_of(self, stage: str) -> list[int]:
        return sorted({address.step for address in self.commits if address.stage == stage})


def rows_found(config: RunConfig, table: PromptTable | None, commit: Commit, rollout: Rollout) -> RowsFound:
    """Looks at a rollout's rows. `table`: the run's prompts; None where they cannot be read."""
    sampled = rollout.token_versions[rollout.response_mask]
    prompts: tuple[str, ...] = (f"{commit.address}: the run's prompts cannot be read",)
    if table is not None:
        prompts = tuple(_prompt_faults(commit.address, rollout, _prompts_of(config, table, commit.address)))
    versions = tuple(_version_faults(config, commit, sampled))
    return RowsFound(tuple(rollout.row.tolist()), sampled.size, prompts, versions)


def _version_faults(config: RunConfig, commit: Commit, sampled: np.ndarray) -> Iterator[str]:
    """`sampled`: the version of each sampled token."""
    address, named, step = commit.address, commit.provenance.weight_versions, commit.address.step
    evaluation = address.stage == "evaluate"
    allowed = range(step, step + 1) if evaluation else generation_versions(config.graph(), step)
    versions = np.unique(sampled).tolist()
    if versions and not (versions[0] in allowed and versions[-1] in allowed):
        found = f"{versions[0]} to {versions[-1]}"
        yield f"{address}: tokens of versions {found}, allowed are {allowed[0]} to {allowed[-1]}"
    if len(versions) > 1 and config.engine.update == "drain":
        yield f"{address}: tokens of versions {versions}, though engine.update=drain keeps a shard to one"
    if tuple(versions) != named:
        yield f"{address}: its commit names versions {named}, its tokens others"


def plain_readers_proof(run: Evidence) -> Answer:
    """Any Zarr reader sees what was committed: no file stayed behind, no metadata is missing."""
    stored = [c for c in run.commits.values() if c.kind is not None and not dropped(c.address, run.dropped_before)]
    faults = dict.fromkeys(fault for commit in stored for fault in run.history.store.plain_faults(commit))
    return f"{sum(len(commit.arrays) for commit in stored)} arrays", list(faults)


def commits_proof(run: Evidence) -> Answer:
    """One record at each address, and no record that the graph has no node for."""
    strange = sorted(address for address in run.commits if address not in run.nodes)
    faults = [f"{address}: is committed, and no node of this run" for address in strange]
    faults += [f"{run.paths.ledger}/{key}: is no commit record's place" for key in run.history.ledger.strangers()]
    seeds = {commit.provenance.seed for commit in run.commits.values()} - {run.config.seed}
    faults += [f"commits were made with seed {seed}, the run has {run.config.seed}" for seed in sorted(seeds)]
    return f"{len(run.commits)} commits", faults


def identity_proof(evidence: Evidence) -> Answer:
    """Configs and numerics against those that identity.json lists; config and prompts of the directory against it."""
    try:
        identity = read_identity(evidence.paths.root)
    except StoreError as error:
        return "0 statements", [str(error)]
    faults = list(identity_faults(identity, sections(evidence.config), evidence.commits.values()))
    number = 0 if identity is None else len(identity.statements)
    with suppress(StoreError):  # prompts that cannot be read are named where rows are looked at
        if identity is not None and PromptTable.load(evidence.paths.prompts).digest() != identity.prompts:
            faults.append(f"{evidence.paths.prompts} or its .jsonl is not what was written")
    return f"{number} statements", faults


def earlier_graphs(config: RunConfig) -> list[GraphSpec]:
    """Of a run that was resumed with more steps, or with other evaluations: those that it had before. (What was its
    last version then was evaluated as such.)"""
    try:
        identity = read_identity(config.run_dir)
    except StoreError:
        return []  # `identity_proof` names it
    stated = [] if identity is None else [statement.config for statement in identity.statements]
    shapes = {(int(one["steps"]), _every(one)) for one in stated}
    spec = config.graph()
    return [replace(spec, steps=s, eval_every=every) for s, every in sorted(shapes - {(spec.steps, spec.eval_every)})]


def _every(stated: Mapping[str, Any]) -> int:
    """`GraphSpec.eval_every` of a stated config."""
    every = stated["evaluate"]["every"]
    return int(stated["steps"]) if every is None else int(every)


def updates_proof(run: Evidence) -> Answer:
    """The steps of each model's updates are 0, 1, 2, ...; each update has the digest of what it made."""
    counted: list[str] = []
    faults: list[str] = []
    for role, stage in run.updates.items():
        steps = run.steps_of(stage)
        counted.append(f"{len(steps)} of the {role}")
        if steps != list(range(len(steps))):
            missing = [s for s in range(steps[-1]) if s not in steps and Address(stage, s) not in run.outlived]
            faults += [f"{stage}: steps {missing} have no commit, though later ones do"] if missing else []
        for step in steps:
            if not run.commits[Address(stage, step)].digest:
                faults.append(f"{Address(stage, step)}: has no digest of the weights that it made")
    return ", ".join(counted), faults


def rows_proof(run: Evidence) -> Answer:
    """Rows of each step, and of each evaluation: numbered through, none twice and none left out where all shards are
    there, and each the prompt that the schedule gives it."""
    faults: list[str] = []
    seen: dict[tuple[str, int], list[int]] = {}
    for address, found in run.rows.items():
        faults += found.prompt_faults
        seen.setdefault((address.stage, address.step), []).extend(found.numbers)
    whole = {"generate": run.config.rollout.rows, "evaluate": run.config.held_out}
    shards = {"generate": run.config.rollout.shards, "evaluate": run.config.evaluate.shards}
    for (stage, step), rows in sorted(seen.items()):
        twice = sorted(row for row, number in Counter(rows).items() if number > 1)
        if twice:
            faults.append(f"{stage} of step {step}: rows {twice} are there twice")
        complete = all(Address(stage, step, shard) in run.rows for shard in range(shards[stage]))
        skipped = sorted(set(range(whole[stage])) - set(rows)) if complete else []
        if skipped:
            faults.append(f"{stage} of step {step}: rows {skipped} are left out")
    trained = {step for stage in run.updates.values() for step in run.steps_of(stage)}
    for address in (Address("generate", step, s) for step in sorted(trained) for s in range(shards["generate"])):
        if address not in run.rows and not dropped(address, run.dropped_before):
            faults.append(f"{address}: was trained on, and is not there (or not sound)")
    num = sum(len(rows) for rows in seen.values())
    steps, evaluations = len(run.steps_of("generate")), len(run.steps_of("evaluate"))
    return f"{num} rows of {steps} steps and {evaluations} evaluations", faults


def _prompts_of(config: RunConfig, table: PromptTable, address: Address) -> PromptBatch:
    if address.stage == "evaluate":
        return held_out_prompts(table, shard=address.shard, shards=config.evaluate.shards)
    return training_prompts(
        table,
        seed=config.seed,
        step=address.step,
        shard=address.shard,
        rows=config.rollout.rows,
        shards=config.rollout.shards,
        responses_per_prompt=config.rollout.responses_per_prompt,
    )


def _prompt_faults(address: Address, rollout: Rollout, prompts: PromptBatch) -> Iterator[str]:
    for name, found, expected in (
        ("row", rollout.row, prompts.row),
        ("prompt_index", rollout.prompt_index, prompts.prompt_index),
        ("prompt_lengths", rollout.prompt_lengths, prompts.prompt_lengths),
    ):
        if not np.array_equal(found, expected):
            at = int(np.argmax(found != expected))
            yield f"{address}: {name} {found[at]} at row {at}, the schedule says {expected[at]}"
            return
    width = prompts.tokens.shape[1]
    inside = np.arange(width) < prompts.prompt_lengths[:, None]
    other = (rollout.tokens[:, :width] != prompts.tokens) & inside
    if other.any():
        yield f"{address}: the prompt of row {int(np.argmax(other.any(axis=1)))} has other tokens than the schedule's"


def staleness_proof(run: Evidence) -> Answer:
    """Every sampled token of step i is of version max(0, i - eta), or under `latest` of a newer one up to i; an
    evaluation is of its one version."""
    tokens = sum(found.tokens for found in run.rows.values())
    faults = [fault for found in run.rows.values() for fault in found.version_faults]
    mode = run.config.rollout.versions
    return f"{tokens} tokens, {mode} versions, staleness bound {run.config.staleness}", faults


def lineage_proof(run: Evidence) -> Answer:
    """Each commit names the inputs that its node has in the graph, and the content that is committed there now."""
    faults, num = list(lineage_faults(run.commits.values(), run.commits)), 0
    for address, commit in run.commits.items():
        named = {one.address for one in commit.provenance.inputs}
        num += len(named)
        faults += [
            f"{address}: was made from {a}, which has no commit"
            for a in sorted(named - run.commits.keys() - run.outlived)
        ]
        node = run.nodes.get(address)
        if node is None:
            continue
        expected = set(made_from(address, node.inputs, commit.provenance.weight_versions))
        faults += [f"{address}: does not name {a}, which the graph has it read" for a in sorted(expected - named)]
        odd = sorted(named - expected)
        faults += [f"{address}: was made from {a}, which the graph does not have it read" for a in odd]
        if node.role in (Role.POLICY, Role.CRITIC) and commit.provenance.weight_versions != (node.version,):
            versions = commit.provenance.weight_versions
            faults.append(f"{address}: was made with versions {versions} of the weights, the graph says {node.version}")
    return f"{num} inputs of {len(run.commits)} commits", faults


def weights_proof(run: Evidence) -> Answer:
    """From each version back: the publication of v names the update that made v, by its digest, and that one the update
    before, down to the weights that the run began with."""
    faults: list[str] = []
    chains: list[str] = []
    for role, stage in run.updates.items():
        steps = run.steps_of(stage)
        for step in steps[1:]:
            faults += _link_faults(run, Address(stage, step), Address(stage, step - 1))
        chains.append(f"{role} v{steps[-1] + 1 if steps else 0} to v0")
    published = run.steps_of("publish")
    for version in published:
        if version:
            faults += _link_faults(run, Address("publish", version), Address("update_policy", version - 1))
        if not run.commits[Address("publish", version)].digest:
            faults.append(f"{Address('publish', version)}: has no digest of what was published")
    return f"{', '.join(chains)}; {len(published)} publications", faults


def _link_faults(run: Evidence, later: Address, earlier: Address) -> Iterator[str]:
    there = run.commits.get(earlier)
    named = [one.content for one in run.commits[later].provenance.inputs if one.address == earlier]
    if there is None and earlier in run.outlived:
        return
    if there is None:
        yield f"{later}: the version that it was made from has no commit ({earlier})"
    elif named != [there.content]:
        yield f"{later}: does not go back to {earlier} as it is committed (digest {there.digest})"


def checkpoints_proof(run: Evidence) -> Answer:
    """Every byte by its CRC, and the digest that the update of that version committed. A run goes on without one that
    is damaged, from the one before it."""
    checkpoints, faults, counted = Checkpoints(Path(run.paths.checkpoints)), [], 0
    for role, stage in run.updates.items():
        for version in checkpoints.newest_first(role, at_most=sys.maxsize):
            counted += 1
            try:
                meta = checkpoints.verify(role, version)
            except StoreError as error:
                faults.append(f"checkpoint v{version} of the {role}: {error}")
                continue
            made_by = Address(stage, version - 1)
            commit = run.commits.get(made_by)
            if commit is None and made_by in run.outlived:
                continue  # nothing vouches for it any more, and nobody loads it
            if commit is None or commit.digest != meta.get("digest"):
                committed = "nothing" if commit is None else commit.digest
                faults.append(
                    f"checkpoint v{version} of the {role}: has weights of digest {meta.get('digest')}, committed is "
                    f"{committed}"
                )
    return f"{counted} checkpoints", faults


def exports_proof(run: Evidence) -> Answer:
    """Every file by its CRC. Those of earlier versions have no sums, and are counted as such."""
    exports = [run.paths.weights(version) for version in exported(run.paths.weights(0).parent)]
    summed = [directory for directory in exports if has_sums(directory)]
    without = f", {len(exports) - len(summed)} of them without sums" if len(exports) > len(summed) else ""
    return f"{len(exports)} exports{without}", [fault for directory in summed for fault in export_faults(directory)]
