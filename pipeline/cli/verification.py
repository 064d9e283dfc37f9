"""`stageline check RUN`: what is proven of a finished or dead run from what it wrote down, with counts.

Each proof is a function of the run that looks at everything of one kind and names every problem. A run that died is
held to the same, as far as it came. May import everything below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cli.proofs import (
    Evidence,
    RowsFound,
    checkpoints_proof,
    commits_proof,
    earlier_graphs,
    exports_proof,
    identity_proof,
    lineage_proof,
    plain_readers_proof,
    rows_found,
    rows_proof,
    staleness_proof,
    updates_proof,
    weights_proof,
)
from pipeline.config.guarantees import devices_of, engine_line, unproven
from pipeline.config.identity import read_identity
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.outlived import outlived
from pipeline.driver.results import open_history
from pipeline.graph.graph import run_nodes
from pipeline.observe.history import History
from stages.prompts import PromptTable
from storage import files
from storage.address import Address
from storage.commits import Commit
from storage.errors import StoreError
from storage.records import Rollout
from storage.retention import KEY
from storage.rollouts import dropped


@dataclass(frozen=True)
class Proof:
    """What was looked at, how much of it there was, and what is wrong with it."""

    claim: str
    counted: str
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Verification:
    """All proofs of a run, and what is no fault but should be known."""

    commits: Counter[str]
    """By stage."""
    proofs: tuple[Proof, ...]
    notes: tuple[str, ...]
    nodes: int
    """Of the whole run."""
    outlived: int = 0
    """Nodes whose records are lost, and which nobody needs any more."""

    @property
    def faults(self) -> list[str]:
        return [fault for proof in self.proofs for fault in proof.faults]

    @property
    def sound(self) -> bool:
        return not self.faults

    def render(self) -> RenderableType:
        stages = Table(title="commits by stage", title_justify="left")
        stages.add_column("stage")
        stages.add_column("commits", justify="right")
        for stage, number in self.commits.items():
            stages.add_row(stage, str(number))
        proofs = Table(title="proven", title_justify="left")
        proofs.add_column("")
        proofs.add_column("claim")
        proofs.add_column("of")
        for proof in self.proofs:
            proofs.add_row("NO" if proof.faults else "yes", proof.claim, proof.counted)
        done = sum(self.commits.values())
        came = "all of them" if done >= self.nodes else "the run has not come to its end"
        if self.outlived and done + self.outlived >= self.nodes:
            came = f"all but {self.outlived} that nobody needs any more"
        lines = [f"{done} of {self.nodes} nodes have their commit: {came}", *self.notes]
        lines += [f"PROBLEM {fault}" for fault in self.faults]
        lines.append("sound" if self.sound else f"NOT sound: {len(self.faults)} problems")
        return Group(stages, proofs, Text("\n".join(lines), no_wrap=True, overflow="ignore"))


def verify_run(config: RunConfig) -> Verification:
    """Reads everything a run has committed, twice (as Stageline does and as any Zarr reader does), and its
    checkpoints."""
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
    before, lost, dropped_faults = _let_go(history, paths, {commit.address for commit in commits})
    present = [commit for commit in commits if not dropped(commit.address, before)]
    arrays_faults, rows = _read_arrays(config, history, present)
    nodes = {node.address: node for node in run_nodes(config.graph())}
    once = {node.address: node for graph in earlier_graphs(config) for node in run_nodes(graph)}
    evidence = Evidence(config, paths, history, once | nodes, {c.address: c for c in commits}, rows, before, lost)
    num_arrays = sum(len(commit.arrays) for commit in present)
    num_files = len(commits) + len(damaged)
    proofs = [
        Proof(
            "every commit record is what was written, by its checksum",
            f"{num_files} records"
            + (f", less {len(lost & damaged.keys())} that nobody needs" if lost & damaged.keys() else ""),
            tuple(what for address, what in damaged.items() if address not in lost),
        ),
        Proof(
            "every array is what was committed, by its CRC-32",
            f"{num_arrays} arrays",
            (*dropped_faults, *arrays_faults),
        ),
    ]
    for claim, proof in PROOFS.items():
        counted, faults = proof(evidence)
        proofs.append(Proof(claim, counted, tuple(faults)))
    notes = tuple(_notes(evidence, damaged))
    return Verification(Counter(sorted(c.address.stage for c in commits)), tuple(proofs), notes, len(nodes), len(lost))


PROOFS: dict[str, Callable[[Evidence], tuple[str, list[str]]]] = {
    "plain Zarr sees every committed array": plain_readers_proof,
    "every commit is of the run's graph, and none is there twice": commits_proof,
    "every commit was made by the run that was stated: its config, on its machines": identity_proof,
    "every update is committed once, none is left out": updates_proof,
    "every row of every step is the prompt that the schedule says, once": rows_proof,
    "every sampled token is within the staleness bound": staleness_proof,
    "every output was made from the committed inputs that the graph says": lineage_proof,
    "every version of the weights goes back to version 0, update by update": weights_proof,
    "every checkpoint is what was saved, of the version that was committed": checkpoints_proof,
    "every export is what was written, by its CRC-32": exports_proof,
}
"""Claim -> what looks at it: (what was counted, every problem by name)."""


def _let_go(
    history: History, paths: RunPaths, committed: set[Address]
) -> tuple[int, frozenset[Address], tuple[str, ...]]:
    """The first step whose arrays were not let go; the nodes whose records are lost, or damaged, and which nobody needs
    for that reason; and what is wrong with the record of it."""
    try:
        return history.store.dropped_before(), outlived(history, paths.checkpoints, committed), ()
    except StoreError as error:
        return 0, frozenset(), (str(error),)


def _read_arrays(
    config: RunConfig, history: History, commits: list[Commit]
) -> tuple[list[str], dict[Address, RowsFound]]:
    """Everything that has arrays, read as stages read it: what is wrong, and what the rollouts' rows are like."""
    faults: list[str] = []
    rows: dict[Address, RowsFound] = {}
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
            rows[commit.address] = rows_found(config, table, commit, record)
    return faults, rows


def _unproven(evidence: Evidence) -> Iterator[str]:
    """What these proofs say nothing about, by what the run's engines can do where they ran."""
    try:
        identity = read_identity(evidence.paths.root)
    except StoreError:
        return  # a fault of its own
    for device in devices_of(evidence.config, identity):
        yield engine_line(evidence.config, device)
        yield from (f"not proven: {missing}" for missing in unproven(evidence.config, device))


def _notes(evidence: Evidence, damaged: Mapping[Address, str]) -> Iterator[str]:
    """What a person may want to know, and is no fault. `damaged`: records, and what is wrong with them."""
    yield from _unproven(evidence)
    for address in sorted(evidence.outlived):
        what = damaged.get(address, f"{address} has no commit record")
        yield f"{what}; nobody needs it any more, since {KEY} has let go what it was made from"
    left = evidence.history.store.attempts()
    if left:
        names = ", ".join(f"{address} ({attempt})" for address, attempt in left[:3])
        yield f"{len(left)} attempts have files in attempts/, under way or of processes that died: {names}"
    before = evidence.dropped_before
    gone = [c for c in evidence.commits.values() if c.arrays and dropped(c.address, before)]
    if gone:
        arrays = sum(len(commit.arrays) for commit in gone)
        yield f"{arrays} arrays of the steps before {before} were dropped by {KEY}: their commits alone are looked at"
    aside = list(files.keys(files.open_root(str(evidence.paths.damaged))))
    if aside:
        yield f"{len(aside)} damaged commit records were set aside in {evidence.paths.damaged}"
