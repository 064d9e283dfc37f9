"""`stageline replay RUN --step N --stage STAGE [--shard S]`: one node again, and the difference. (With
`--updates A:B` a range of updates: `replay_updates`; with changes of the config, too, a variant: `replay_variant`.)

It runs in this process, from its stored inputs.

Nothing is written to the run. Weights that a node needs are rebuilt from checkpoints and stored rollouts (law 3), so a
replay works also long after the run. A gang of several ranks is replayed on one: its sums may then differ in the last
bits, which the answer says; its checkpoints load in one rank as well.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cli.answers import output
from pipeline.cli.exit_codes import DONE, STAGE_FAILED
from pipeline.cli.one_process import alone, runtime_for
from pipeline.cli.replay_updates import replay_updates, update_range
from pipeline.cli.replay_variant import train_variant
from pipeline.cli.sources import saved_config
from pipeline.config.errors import ConfigError
from pipeline.config.guarantees import devices_of, replay_problem
from pipeline.config.identity import fingerprint, read_identity
from pipeline.config.paths import RunPaths
from pipeline.config.placement import gang_of
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.graph.graph import STAGE_ROLES, UPDATE_STAGE, Node, canary_node, evaluate_nodes, evaluated, step_nodes
from pipeline.observe.journal import read_events
from pipeline.workers.messages import Call
from pipeline.workers.parts import required
from stages.models.numerics import repeats_bits
from stages.models.protocol import MODEL_ROLES, Role
from stages.publish import publish
from storage.address import Address
from storage.commits import Commit
from storage.errors import MissingOutput
from storage.records import Record
from storage.weights import WeightBoard

SAMPLING = ("generate", "evaluate", "canary")
"""Stages of the engine: of most, log-probs may differ in the last bits, by which rows shared a batch."""
DRAWING = ("generate", "evaluate")
"""Of these, those whose tokens an engine draws."""
SCORING = ("score", "evaluate_score")
CLOSE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""By the models' dtype: the largest difference of a log-prob, value or score where last bits may differ."""


@dataclass(frozen=True)
class ArrayDifference:
    name: str
    elements: int
    differing: int
    largest: float
    is_float: bool


@dataclass(frozen=True)
class Replayed:
    """A node's stored output against the one made now."""

    address: Address
    differences: list[ArrayDifference]
    tolerance: float
    """The largest difference that a float may show; whole numbers (tokens, versions) must be equal always."""
    digests: tuple[str, str] | None = None
    """Of an update: the committed weights, and these."""
    committed: bool = True
    """False: it had failed, and has run to its end now."""
    unproven: tuple[str, ...] = ()
    """What this may not prove, since the engine cannot do it."""

    @property
    def identical(self) -> bool:
        """Bit for bit."""
        if self.digests is not None:
            return self.digests[0] == self.digests[1]
        return all(d.differing == 0 for d in self.differences)

    @property
    def as_expected(self) -> bool:
        if self.digests is not None:
            return self.digests[0] == self.digests[1] or self.tolerance > 0
        return all(d.differing == 0 or (d.is_float and d.largest <= self.tolerance) for d in self.differences)

    def render(self) -> RenderableType:
        if not self.committed:
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
                table.add_row(d.name, str(d.elements), str(d.differing), f"{d.largest:g}")
        expected = "difference must be 0"
        if self.tolerance:
            expected = f"another batch, layout or reward: floats may differ by {self.tolerance:g}, integers may not"
        verdict = "identical" if self.identical else "as expected" if self.as_expected else "NOT as expected"
        return Group(table, Text("\n".join([f"{verdict}: {expected}", *(f"not proven: {u}" for u in self.unproven)])))


def command(options: argparse.Namespace) -> int:
    config = saved_config(options.run_dir)
    if options.updates is not None and options.stage is None and options.step is None:
        steps = update_range(config, options.updates)
        return train_variant(config, steps, options.changes) if options.changes else replay_updates(config, steps)
    if options.updates is not None or options.changes or None in (options.stage, options.step):
        raise ConfigError("replay", "give --step and --stage for one node, or --updates A:B [key=value...] for updates")
    result = replay_node(config, options.stage, options.step, options.shard)
    output().print(result.render())
    return DONE if result.as_expected else STAGE_FAILED


def replay_node(config: RunConfig, stage: str, step: int, shard: int) -> Replayed:
    """Runs a committed node again; or one that failed, which raises what it raised then.

    Raises:
        ConfigError: no such stage, step or shard.
        MissingOutput: an input has no commit; or the run has no such evaluation.
    """
    node = _find_node(config, stage, step, shard)
    history = open_history(config)
    commit = history.ledger.find(node.address)
    if commit is None and stage.startswith("evaluate") and not evaluated(config.graph(), step):
        every = f"evaluate.every = {'null' if config.evaluate.every is None else config.evaluate.every}"
        raise MissingOutput(f"{node.address} has no commit, and the run does not evaluate version {step} ({every})")
    unproven_here = _check_draws(config, stage, commit)
    version = _version_of(config, node, commit)
    holder = gang_of(config.placement, Role.POLICY if stage in SAMPLING else node.role)
    one_rank = config.placement.gangs[holder].workers == 1 or node.role not in {*MODEL_ROLES, Role.GENERATE}
    one_rank = one_rank and repeats_bits(config.model)
    close = CLOSE[config.model.dtype]
    with tempfile.TemporaryDirectory(prefix="stageline-replay-") as name:
        scratch = Path(name)
        single = alone(config, scratch)
        if stage in UPDATE_STAGE.values():
            with runtime_for(single, node.role) as runtime:
                updates = required(runtime.parts.updates)
                if commit is None:
                    updates.train_alone(node.role, step)
                    return Replayed(node.address, [], 0.0, committed=False)
                digests = updates.replay(node.role, step)
            return Replayed(node.address, [], 0.0 if one_rank else close, digests)
        if stage in SAMPLING:
            with runtime_for(single, Role.POLICY) as runtime:
                board = WeightBoard(RunPaths(single.run_dir).board(single.cluster.weights_dir))
                publish(required(runtime.parts.updates).at(Role.POLICY, version), board, version)
        gang = gang_of(config.placement, node.role)
        with runtime_for(single, node.role) as runtime:
            record = runtime.compute(Call(node.address, "replay", version, node.inputs, gang, "replay", 0)).record
            same_machine = commit is not None and commit.provenance.numerics == fingerprint(runtime.parts.numerics)
            repeats = stage not in SCORING or required(runtime.parts.scorer).deterministic
    assert record is not None
    if commit is None:
        return Replayed(node.address, [], 0.0, committed=False)
    bits = stage not in SAMPLING or (same_machine and _invariance(config) == {"bits"})
    exact = one_rank and repeats and bits
    differences = compare(history.store.read(node.address), record)
    return Replayed(node.address, differences, 0.0 if exact else close, unproven=unproven_here)


def _check_draws(config: RunConfig, stage: str, commit: Commit | None) -> tuple[str, ...]:
    """What the replay of a stage may not prove with the run's engine. Raises ConfigError where it would prove
    nothing. A shard that failed is no matter: it has nothing to be compared with."""
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
    """What of a row was the same in any company, where the run's engines ran."""
    return {config.capabilities(d).invariance for d in devices_of(config, read_identity(config.run_dir))}


def _find_node(config: RunConfig, stage: str, step: int, shard: int) -> Node:
    """The node of the run's graph. Raises ConfigError."""
    if stage not in STAGE_ROLES or stage == "publish":
        known = ", ".join(s for s in STAGE_ROLES if s != "publish")
        raise ConfigError("--stage", f"given {stage!r}; must be one of {known}")
    spec = config.graph()
    of_version = stage.startswith("evaluate")
    last = spec.steps if of_version else spec.steps - 1
    if not 0 <= step <= last:
        raise ConfigError("--step", f"given {step}; the run has {'versions' if of_version else 'steps'} 0 to {last}")
    nodes = evaluate_nodes(spec, step) if of_version else step_nodes(spec, step)
    if stage == "canary" and spec.canaries:  # it is among the nodes of the step that it waits for
        nodes = [canary_node(spec, step)]
    node = next((n for n in nodes if n.address == Address(stage, step, shard)), None)
    if node is None:
        shards = [n.address.shard for n in nodes if n.stage == stage]
        known = f"{stage} has shards {shards[0]} to {shards[-1]}" if shards else f"this run has no {stage} nodes"
        raise ConfigError("--shard" if shards else "--stage", f"given {shard if shards else stage!r}; {known}")
    return node


def _version_of(config: RunConfig, node: Node, commit: Commit | None) -> int:
    """The version of the weights that a node had: of a shard that was sampled, what its commit names; of one that
    failed under `latest`, what it was handed out with last. Raises ConfigError where there were several."""
    if commit is not None and node.stage in SAMPLING:
        return _sampled_version(commit, node.address.shard)
    if commit is not None or node.newest is None:
        return node.version
    where = (node.address.stage, node.address.step, node.address.shard)
    events = read_events(RunPaths(config.run_dir).events)
    given = [event.version for event in events if (event.stage, event.step, event.shard) == where]
    return next((version for version in reversed(given) if version is not None), node.version)


def _sampled_version(commit: Commit, shard: int) -> int:
    """The one version that sampled a shard. Raises ConfigError where there were several."""
    versions = commit.provenance.weight_versions
    if len(versions) > 1:
        named = ", ".join(f"v{v}" for v in versions)
        raise ConfigError(
            "--shard",
            f"given {shard}; its rows were sampled by {named} as they came in (engine.update: inflight), "
            "which cannot be repeated; a shard of one version can",
        )
    return versions[0]


def compare(stored: Record, made: Record) -> list[ArrayDifference]:
    """Array by array: how many elements differ, and by how much at most."""
    differences = []
    for name, array in stored.arrays().items():
        other = made.arrays()[name]
        delta = np.abs(array.astype(np.float64) - other.astype(np.float64))
        differing, largest = int((array != other).sum()), float(delta.max(initial=0.0))
        differences.append(ArrayDifference(name, array.size, differing, largest, array.dtype.kind == "f"))
    return differences
