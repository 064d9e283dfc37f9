"""`stageline check RUN`: is a run's directory what its ledger says? Every array's CRC, every commit's lineage, the
staleness of every row, every byte of the checkpoints."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.workers.updates import committed_meta
from stages.models.protocol import Role
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.errors import StoreError
from storage.ledger import Commit, Ledger
from storage.records import Rollout


@dataclass(frozen=True)
class Verification:
    """What was looked at, and what is wrong with it."""

    commits: Counter[str]
    """By stage."""
    faults: list[str]

    @property
    def sound(self) -> bool:
        return not self.faults

    def render(self) -> RenderableType:
        table = Table(title="commits by stage", title_justify="left")
        table.add_column("stage")
        table.add_column("commits", justify="right")
        for stage, number in self.commits.items():
            table.add_row(stage, str(number))
        verdict = "sound: every array and checkpoint has its CRC, every input its commit, every row its bound"
        return Group(table, Text(verdict) if self.sound else Text("\n".join(self.faults)))


def verify_run(config: RunConfig) -> Verification:
    """Reads everything a run has committed, and its checkpoints."""
    history = open_history(config)
    commits = history.ledger.list()
    attempts = {commit.address: commit.attempt for commit in commits}
    faults: list[str] = []
    for commit in commits:
        faults += _lineage_faults(commit, attempts)
        if commit.kind is None:
            continue
        try:
            record = history.store.read(commit.address)
        except StoreError as error:
            faults.append(str(error))
            continue
        if commit.address.stage == "generate" and isinstance(record, Rollout):
            faults += _staleness_faults(config, commit.address, record)
    faults += _checkpoint_faults(Checkpoints(RunPaths(config.run_dir).checkpoints), history.ledger)
    for stage in ("update_policy", "update_critic"):
        steps = sorted(c.address.step for c in commits if c.address.stage == stage)
        if steps != list(range(len(steps))):
            faults.append(f"{stage}: committed steps {steps} have a gap")
    return Verification(Counter(c.address.stage for c in commits), faults)


def _checkpoint_faults(checkpoints: Checkpoints, ledger: Ledger) -> list[str]:
    """A run goes on without one that is damaged or another run's, from the one before it."""
    faults = []
    for role in (Role.POLICY, Role.CRITIC):
        for version in checkpoints.newest_first(role, at_most=sys.maxsize):
            try:
                checkpoints.verify(role, version, expected=committed_meta(ledger, role, version))
            except StoreError as error:
                faults.append(f"checkpoint v{version} of the {role}: {error}")
    return faults


def _lineage_faults(commit: Commit, attempts: dict[Address, str]) -> list[str]:
    return [
        f"{commit.address}: made from {i.address} ({i.attempt}), committed is {attempts.get(i.address, 'nothing')}"
        for i in commit.provenance.inputs
        if attempts.get(i.address) != i.attempt
    ]


def _staleness_faults(config: RunConfig, address: Address, rollout: Rollout) -> list[str]:
    sampled = rollout.token_versions[rollout.response_mask]
    oldest, newest = int(sampled.min()), int(sampled.max())
    if address.step - config.staleness <= oldest and newest <= address.step:
        return []
    return [f"{address}: versions {oldest} to {newest} break the bound {config.staleness} of step {address.step}"]
