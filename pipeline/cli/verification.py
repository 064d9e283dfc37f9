"""`stageline check RUN`: verify a finished or dead run from its files.

Each proof is a function that checks all records of one kind. It returns a text about what it counted, and a list of all
problems. A run that died must pass the same proofs, for the steps that it reached.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.config.identity import config_sections, identity_faults, read_identity
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import guarantee_lines, recorded_devices
from pipeline.config.run import RunConfig
from pipeline.driver.integrity import lineage_faults, unneeded_outputs
from pipeline.driver.results import open_history
from pipeline.graph.graph import GraphSpec, Node, generation_versions, lineage_of, run_nodes, update_stages
from pipeline.observe.history import History
from stages.models.checkpoint_metadata import pickle_fault
from stages.models.protocol import Role
from stages.prompts import PromptTable, held_out_prompts, training_prompts
from storage import files
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.commits import Commit
from storage.errors import StoreError
from storage.exports import export_faults, has_sums
from storage.records import PromptBatch, Rollout
from storage.rollouts import KEEP, dropped

Answer = tuple[str, list[str]]
"""(text about what was counted, all problems)."""


@dataclass(frozen=True)
class CheckedRows:
    """The results of checking the rows of one rollout: row numbers, number of tokens, and faults. The checks of the
    whole run use these results, because the arrays of all rollouts of a long run do not fit into memory."""

    numbers: tuple[int, ...]
    tokens: int
    """Number of sampled tokens."""
    prompt_faults: tuple[str, ...]
    version_faults: tuple[str, ...]


@dataclass(frozen=True)
class RunContent:
    """The content that was read from a run's directory."""

    config: RunConfig
    paths: RunPaths
    history: History
    nodes: Mapping[Address, Node]
    """Nodes of the run's graph and of its earlier graphs (`earlier_graphs`)."""
    commits: Mapping[Address, Commit]
    """Commits whose records are not damaged."""
    rows: Mapping[Address, CheckedRows]
    """Address of an output of `generate` or `evaluate` -> facts about its rows."""
    dropped_before: int = 0
    """First step whose arrays were not deleted. The deleted arrays of earlier steps are not checked."""
    unneeded: frozenset[Address] = frozenset()
    """Nodes whose records are lost, and whose outputs nothing needs any more. A lost record of such a node is not a
    fault."""

    @property
    def update_stages(self) -> Mapping[Role, str]:
        """Return the update stage of each trained role."""
        return update_stages(self.config.graph())

    def committed_steps(self, stage: str) -> list[int]:
        return sorted({address.step for address in self.commits if address.stage == stage})


def check_rows(config: RunConfig, table: PromptTable | None, commit: Commit, rollout: Rollout) -> CheckedRows:
    """Check a rollout's rows. Return facts about the rows, with the faults that were found. `table`: the run's prompts,
    or None if they cannot be read."""
    sampled = rollout.token_versions[rollout.response_mask]
    prompts: tuple[str, ...] = (f"{commit.address}: the run's prompts cannot be read",)
    if table is not None:
        prompts = tuple(_prompt_faults(commit.address, rollout, _prompts_of(config, table, commit.address)))
    versions = tuple(_version_faults(config, commit, sampled))
    return CheckedRows(tuple(rollout.row.tolist()), sampled.size, prompts, versions)


def _version_faults(config: RunConfig, commit: Commit, sampled: np.ndarray) -> Iterator[str]:
    """Yield faults in the weight versions of a rollout's tokens. `sampled`: version of each sampled token."""
    address, named, step = commit.address, commit.provenance.weight_versions, commit.address.step
    evaluation = address.stage == "evaluate"
    allowed = range(step, step + 1) if evaluation else generation_versions(config.graph(), step)
    versions = np.unique(sampled).tolist()
    if versions and not (versions[0] in allowed and versions[-1] in allowed):
        found = f"{versions[0]} to {versions[-1]}"
        yield f"{address}: tokens of versions {found}, allowed are {allowed[0]} to {allowed[-1]}"
    if len(versions) > 1 and not config.in_flight:
        mode = config.rollout.versions
        yield f"{address}: tokens of versions {versions}, though rollout.versions={mode} keeps a shard to one"
    if tuple(versions) != named:
        yield f"{address}: its commit names versions {named}, its tokens others"


def check_plain_readers(run: RunContent) -> Answer:
    """Check that a plain Zarr reader finds every committed array, and reads the committed values from it."""
    stored = [c for c in run.commits.values() if c.kind is not None and not dropped(c.address, run.dropped_before)]
    faults = dict.fromkeys(fault for commit in stored for fault in run.history.store.plain_faults(commit))
    return f"{sum(len(commit.arrays) for commit in stored)} arrays", list(faults)


def check_commits(run: RunContent) -> Answer:
    """Check that each commit belongs to a node of the graph and has the run's seed. Check that the ledger contains only
    commit records."""
    strange = sorted(address for address in run.commits if address not in run.nodes)
    faults = [f"{address}: is committed, and no node of this run" for address in strange]
    ledger = run.history.ledger
    faults += [f"{ledger.url}/{key}: is no commit record's place" for key in ledger.unknown_files()]
    seeds = {commit.provenance.seed for commit in run.commits.values()} - {run.config.seed}
    faults += [f"commits were made with seed {seed}, the run has {run.config.seed}" for seed in sorted(seeds)]
    return f"{len(run.commits)} commits", faults


def check_identity(evidence: RunContent) -> Answer:
    """Check that configs, prompts and numerics match identity.json."""
    try:
        identity = read_identity(evidence.paths.root)
    except StoreError as error:
        return "0 statements", [str(error)]
    faults = list(identity_faults(identity, config_sections(evidence.config), evidence.commits.values()))
    number = 0 if identity is None else len(identity.statements)
    with suppress(StoreError):  # `_read_arrays` reports prompts that cannot be read
        if identity is not None and PromptTable.load(evidence.paths.prompts).digest() != identity.prompts:
            faults.append(f"{evidence.paths.prompts} or its .jsonl is not what was written")
    return f"{number} statements", faults


def earlier_graphs(config: RunConfig) -> list[GraphSpec]:
    """Return the earlier graphs of a run that was resumed with more steps or other evaluations.

    The current graph may lack evaluations of the earlier graphs. For example, a version may have been evaluated because
    it was the last version, before the number of steps was raised."""
    try:
        identity = read_identity(config.run_dir)
    except StoreError:
        return []  # `check_identity` reports it
    stated = [] if identity is None else [statement.config for statement in identity.statements]
    shapes = {(int(one["steps"]), _eval_every(one)) for one in stated}
    spec = config.graph()
    return [replace(spec, steps=s, eval_every=every) for s, every in sorted(shapes - {(spec.steps, spec.eval_every)})]


def _eval_every(stated: Mapping[str, Any]) -> int:
    """Return the versions between two evaluations under an earlier config. null means only the first and the last
    version."""
    every = stated["evaluate"]["every"]
    return int(stated["steps"]) if every is None else int(every)


def check_updates(run: RunContent) -> Answer:
    """Check that each model has updates of steps 0, 1, 2, ... without gaps, and that the commit of each update has the
    digest of its weights. Lost commits that nothing needs any more do not count as gaps."""
    counted: list[str] = []
    faults: list[str] = []
    for role, stage in run.update_stages.items():
        steps = run.committed_steps(stage)
        counted.append(f"{len(steps)} of the {role}")
        if steps != list(range(len(steps))):
            missing = [s for s in range(steps[-1]) if s not in steps and Address(stage, s) not in run.unneeded]
            faults += [f"{stage}: steps {missing} have no commit, though later ones do"] if missing else []
        for step in steps:
            if not run.commits[Address(stage, step)].digest:
                faults.append(f"{Address(stage, step)}: has no digest of the weights that it made")
    return ", ".join(counted), faults


def check_row_numbers(run: RunContent) -> Answer:
    """Check the rows of all steps and evaluations:

    - The row numbers of a step or an evaluation have no repetitions, and no gaps if all its shards exist.
    - Each row has the prompt that the schedule gives it.
    - The rows of each trained step exist, or were deleted by `storage.keep.rollouts`."""
    faults: list[str] = []
    seen: dict[tuple[str, int], list[int]] = {}
    for address, numbered in run.rows.items():
        faults += numbered.prompt_faults
        seen.setdefault((address.stage, address.step), []).extend(numbered.numbers)
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
    trained = {step for stage in run.update_stages.values() for step in run.committed_steps(stage)}
    for address in (Address("generate", step, s) for step in sorted(trained) for s in range(shards["generate"])):
        if address not in run.rows and not dropped(address, run.dropped_before):
            faults.append(f"{address}: was trained on, and is not there (or not sound)")
    num = sum(len(rows) for rows in seen.values())
    steps, evaluations = len(run.committed_steps("generate")), len(run.committed_steps("evaluate"))
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
    for name, stored, expected in (
        ("row", rollout.row, prompts.row),
        ("prompt_index", rollout.prompt_index, prompts.prompt_index),
        ("prompt_lengths", rollout.prompt_lengths, prompts.prompt_lengths),
    ):
        if not np.array_equal(stored, expected):
            at = int(np.argmax(stored != expected))
            yield f"{address}: {name} {stored[at]} at row {at}, the schedule says {expected[at]}"
            return
    width = prompts.tokens.shape[1]
    inside = np.arange(width) < prompts.prompt_lengths[:, None]
    other = (rollout.tokens[:, :width] != prompts.tokens) & inside
    if other.any():
        yield f"{address}: the prompt of row {int(np.argmax(other.any(axis=1)))} has other tokens than the schedule's"


def check_staleness(run: RunContent) -> Answer:
    """Check the weight version of every sampled token:

    - Tokens of step i are of version max(0, i - eta), where eta is `staleness`. If `rollout.versions` is `latest` or
      `inflight`, these tokens may also be of newer versions, up to i.
    - Tokens of an evaluation are of the evaluated version."""
    tokens = sum(rows.tokens for rows in run.rows.values())
    faults = [fault for rows in run.rows.values() for fault in rows.version_faults]
    mode = run.config.rollout.versions
    return f"{tokens} tokens, {mode} versions, staleness bound {run.config.staleness}", faults


def check_lineage(run: RunContent) -> Answer:
    """Check three claims about each commit:

    - The commit names exactly the inputs that its node has in the graph.
    - The commit names each input with the content that is committed now.
    - If the node belongs to the policy or the critic, the commit names the weight version that the node has in the
      graph."""
    faults, num = list(lineage_faults(run.commits.values(), run.commits)), 0
    for address, commit in run.commits.items():
        named = {one.address for one in commit.provenance.inputs}
        num += len(named)
        faults += [
            f"{address}: was made from {a}, which has no commit"
            for a in sorted(named - run.commits.keys() - run.unneeded)
        ]
        node = run.nodes.get(address)
        if node is None:
            continue
        expected = set(lineage_of(address, node.inputs, commit.provenance.weight_versions))
        faults += [f"{address}: does not name {a}, which the graph has it read" for a in sorted(expected - named)]
        odd = sorted(named - expected)
        faults += [f"{address}: was made from {a}, which the graph does not have it read" for a in odd]
        if node.role in (Role.POLICY, Role.CRITIC) and commit.provenance.weight_versions != (node.version,):
            versions = commit.provenance.weight_versions
            faults.append(f"{address}: was made with versions {versions} of the weights, the graph says {node.version}")
    return f"{num} inputs of {len(run.commits)} commits", faults


def check_weights(run: RunContent) -> Answer:
    """Check the digests of the weights:

    - The commit of each publication has a digest of the published weights.
    - The publication of version v > 0 has among its inputs the update that made v, with this update's committed
      content.
    - Each update except the first has among its inputs the update before it, with that update's committed content.
    """
    faults: list[str] = []
    chains: list[str] = []
    for role, stage in run.update_stages.items():
        steps = run.committed_steps(stage)
        for step in steps[1:]:
            faults += _link_faults(run, Address(stage, step), Address(stage, step - 1))
        chains.append(f"{role} v{steps[-1] + 1 if steps else 0} to v0")
    published = run.committed_steps("publish")
    for version in published:
        if version:
            faults += _link_faults(run, Address("publish", version), Address("update_policy", version - 1))
        if not run.commits[Address("publish", version)].digest:
            faults.append(f"{Address('publish', version)}: has no digest of what was published")
    return f"{', '.join(chains)}; {len(published)} publications", faults


def _link_faults(run: RunContent, later: Address, earlier: Address) -> Iterator[str]:
    commit = run.commits.get(earlier)
    named = [one.content for one in run.commits[later].provenance.inputs if one.address == earlier]
    if commit is None and earlier in run.unneeded:
        return
    if commit is None:
        yield f"{later}: the version that it was made from has no commit ({earlier})"
    elif named != [commit.content]:
        yield f"{later}: does not go back to {earlier} as it is committed (digest {commit.digest})"


def check_checkpoints(run: RunContent) -> Answer:
    """Check each checkpoint:

    - Its files have the recorded CRCs.
    - Its pickles hold only data.
    - The digest of its weights equals the digest in the commit of the update that made the checkpoint's version. This
      is not checked if that commit is gone and no longer needed.

    A run whose newest checkpoint is damaged resumes from the checkpoint before it."""
    faults, counted = [], 0
    with run.config.stored.downloaded() as stored:
        checkpoints = stored.checkpoints()
        for role, stage in run.update_stages.items():
            for version in checkpoints.newest_first(role, at_most=sys.maxsize):
                counted += 1
                fault = _checkpoint_fault(run, checkpoints, role, Address(stage, version - 1))
                if fault is not None:
                    faults.append(stored.replace_places(f"checkpoint v{version} of the {role}: {fault}"))
                checkpoints.forget(role, version)
    return f"{counted} checkpoints", faults


def _checkpoint_fault(run: RunContent, checkpoints: Checkpoints, role: Role, made_by: Address) -> str | None:
    """Return the fault of a checkpoint, or None if there is no fault. `made_by`: the update that made the checkpoint's
    version."""
    version = made_by.step + 1
    try:
        checkpoints.fetch(role, version)
        meta = checkpoints.verify(role, version)
        fault = pickle_fault(checkpoints.place(role, version))
    except StoreError as error:
        fault = str(error)
    commit = run.commits.get(made_by)
    if fault is not None or (commit is None and made_by in run.unneeded):
        return fault  # without a commit there is no digest to compare with, and no run loads this checkpoint
    if commit is None or commit.digest != meta.get("digest"):
        committed = "nothing" if commit is None else commit.digest
        return f"has weights of digest {meta.get('digest')}, committed is {committed}"
    return None


def check_exports(run: RunContent) -> Answer:
    """Check that every file of an export has its recorded CRC. Exports by earlier versions of Stageline have no CRCs,
    and are only counted."""
    faults, without = [], 0
    with run.config.stored.downloaded() as stored:
        exports = stored.exports()
        versions = exports.versions()
        for version in versions:
            try:
                directory = exports.fetch(version)
            except StoreError as error:
                faults.append(str(error))
                continue
            summed = directory is not None and has_sums(directory)
            without += not summed
            faults += map(stored.replace_places, export_faults(exports.place(version)) if summed else ())
            exports.forget(version)
    return f"{len(versions)} exports" + (f", {without} of them without sums" if without else ""), faults


# ---- verification ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckResult:
    """A claim that was checked, a text about what was counted, and the faults."""

    claim: str
    checked_count: str
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Verification:
    """The results of all checks of a run's directory. The remarks in `notes` do not count as faults."""

    num_commits: Counter[str]
    """Number of commits by stage."""
    checks: tuple[CheckResult, ...]
    notes: tuple[str, ...]
    num_nodes: int
    """Number of nodes of the whole run."""
    num_unneeded: int = 0
    """Number of nodes whose commit records are missing or damaged, but whose outputs are no longer needed. These nodes
    do not count as faults."""

    @property
    def faults(self) -> list[str]:
        return [fault for proof in self.checks for fault in proof.faults]

    @property
    def is_sound(self) -> bool:
        return not self.faults

    def render(self) -> RenderableType:
        stages = Table(title="commits by stage", title_justify="left")
        stages.add_column("stage")
        stages.add_column("commits", justify="right")
        for stage, number in self.num_commits.items():
            stages.add_row(stage, str(number))
        proofs = Table(title="claims", title_justify="left")
        proofs.add_column("true")
        proofs.add_column("claim")
        proofs.add_column("checked")
        for proof in self.checks:
            proofs.add_row("NO" if proof.faults else "yes", proof.claim, proof.checked_count)
        done = sum(self.num_commits.values())
        came = "all of them" if done >= self.num_nodes else "the run is not finished"
        if self.num_unneeded and done + self.num_unneeded >= self.num_nodes:
            came = f"all but {self.num_unneeded} that are not needed any more"
        lines = [f"{done} of {self.num_nodes} nodes have their commit: {came}", *self.notes]
        lines += [f"PROBLEM {fault}" for fault in self.faults]
        lines.append("sound" if self.is_sound else f"NOT sound: {len(self.faults)} problems")
        return Group(stages, proofs, Text("\n".join(lines), no_wrap=True, overflow="ignore"))


def verify_run(config: RunConfig) -> Verification:
    """Check all files in a run's directory, and return the results of the checks.

    Committed arrays are read twice: by Stageline's own reader, and by a plain Zarr reader. Checkpoints and exports are
    read too.
    """
    history, paths = open_history(config), RunPaths(config.run_dir)
    damaged: dict[Address, str] = {}
    commits: list[Commit] = []
    for address in sorted(history.ledger.addresses(), key=lambda address: address.step):  # reads each segment once
        try:
            commit = history.ledger.find(address)
        except StoreError as error:
            damaged[address] = str(error)
            continue
        commits += [commit] if commit is not None else []
    committed, saved = {commit.address for commit in commits}, config.stored.checkpoints()
    before, lost, dropped_faults = _dropped_outputs(history, saved, committed)
    present = [commit for commit in commits if not dropped(commit.address, before)]
    arrays_faults, rows = _read_arrays(config, history, present)
    nodes = {node.address: node for node in run_nodes(config.graph())}
    once = {node.address: node for graph in earlier_graphs(config) for node in run_nodes(graph)}
    evidence = RunContent(config, paths, history, once | nodes, {c.address: c for c in commits}, rows, before, lost)
    num_arrays = sum(len(commit.arrays) for commit in present)
    num_files = len(commits) + len(damaged)
    proofs = [
        CheckResult(
            "every commit record is what was written, by its checksum",
            f"{num_files} records"
            + (f", less {len(lost & damaged.keys())} that nobody needs" if lost & damaged.keys() else ""),
            tuple(what for address, what in damaged.items() if address not in lost),
        ),
        CheckResult(
            "every array is what was committed, by its CRC-32",
            f"{num_arrays} arrays",
            (*dropped_faults, *arrays_faults),
        ),
    ]
    for claim, proof in CHECKS.items():
        counted, faults = proof(evidence)
        proofs.append(CheckResult(claim, counted, tuple(faults)))
    notes = tuple(_notes(evidence, damaged))
    return Verification(Counter(sorted(c.address.stage for c in commits)), tuple(proofs), notes, len(nodes), len(lost))


CHECKS: dict[str, Callable[[RunContent], tuple[str, list[str]]]] = {
    "plain Zarr sees every committed array": check_plain_readers,
    "every commit is of the run's graph, and none is there twice": check_commits,
    "every commit was made by the run that was stated: its config, on its machines": check_identity,
    "every update is committed once, none is left out": check_updates,
    "every row of every step is the prompt that the schedule says, once": check_row_numbers,
    "every sampled token is within the staleness bound": check_staleness,
    "every output was made from the committed inputs that the graph says": check_lineage,
    "every version of the weights goes back to version 0, update by update": check_weights,
    "every checkpoint is what was saved, of the version that was committed": check_checkpoints,
    "every export is what was written, by its CRC-32": check_exports,
}
"""Claim about the run, in the words that the user reads -> the function that checks it. The function returns a text
about what it counted, and a list of all problems."""


def _dropped_outputs(
    history: History, checkpoints: Checkpoints, committed: set[Address]
) -> tuple[int, frozenset[Address], tuple[str, ...]]:
    """Return the first step whose arrays were kept, the lost nodes that nothing needs any more, and the faults of the
    record of deleted steps. With a fault no arrays count as deleted."""
    try:
        return history.store.dropped_before(), unneeded_outputs(history, checkpoints, committed), ()
    except StoreError as error:
        return 0, frozenset(), (str(error),)


def _read_arrays(
    config: RunConfig, history: History, commits: list[Commit]
) -> tuple[list[str], dict[Address, CheckedRows]]:
    """Read the arrays of these commits in the way that stages read them. Return the faults, and facts about the rows of
    the rollouts."""
    faults: list[str] = []
    rows: dict[Address, CheckedRows] = {}
    table: PromptTable | None = None
    try:
        table = PromptTable.load(RunPaths(config.run_dir).prompts)
    except (OSError, StoreError) as error:
        faults.append(f"{RunPaths(config.run_dir).prompts}: cannot be read ({type(error).__name__}: {error})")
    for commit in commits:
        if commit.kind is None:
            continue
        try:
            record = history.store.read(commit.address)
        except (StoreError, ValueError) as error:
            faults.append(str(error))
            continue
        if isinstance(record, Rollout):
            rows[commit.address] = check_rows(config, table, commit, record)
    return faults, rows


def _unproven_lines(evidence: RunContent) -> Iterator[str]:
    """Yield lines about the guarantees that the run lacks, or that none is missing, for each kind of device of its
    engine."""
    try:
        identity = read_identity(evidence.paths.root)
    except StoreError:
        return  # `check_identity` reports it
    for device in recorded_devices(evidence.config, identity):
        yield from guarantee_lines(evidence.config, device)


def _notes(evidence: RunContent, damaged: Mapping[Address, str]) -> Iterator[str]:
    """Yield notes for the user that do not count as faults. `damaged`: address of a damaged record -> its fault."""
    yield from _unproven_lines(evidence)
    for address in sorted(evidence.unneeded):
        what = damaged.get(address, f"{address} has no commit record")
        yield f"{what}; nobody needs it any more, since {KEEP} has deleted its inputs"
    left = evidence.history.store.attempts()
    if left:
        names = ", ".join(f"{address} ({attempt})" for address, attempt in left[:3])
        yield f"{len(left)} attempts have files in attempts/, of running or dead processes: {names}"
    before = evidence.dropped_before
    gone = [c for c in evidence.commits.values() if c.arrays and dropped(c.address, before)]
    if gone:
        arrays = sum(len(commit.arrays) for commit in gone)
        yield f"{arrays} arrays of the steps before {before} were dropped by {KEEP}: only their commits were checked"
    aside = list(files.keys(files.open_root(evidence.config.stored.damaged)))
    if aside:
        yield f"{len(aside)} damaged commit records were set aside in {evidence.config.stored.damaged}"
