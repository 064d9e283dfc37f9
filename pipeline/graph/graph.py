"""The graph of a run as plain data: the nodes of each step and their edges. No Dask, no clock, no I/O.

The executor runs these nodes, `replay` runs one of them again, and `check` compares a run's directory with them.

    step i:   weights v(i-eta) --> generate[i,s] --+--> score[i,s] ------+
                                   (shard s)       +--> reference[i,s] --+
              update_policy[i-1] ------------------+--> logprob[i,s] ----+--> advantage[i] --+--> update_policy[i] --+
              update_critic[i-1] -------------------+--> value[i,s] ------+                   +--> update_critic[i]    |
                                                                                                 publish v(i+1) <----+

A run without a critic (`ppo.advantage`) has no `value` and no `update_critic` nodes. A run without
`ppo.proximal: recompute` has no `logprob` nodes.

**The staleness bound is an edge**: `generate[i]` depends on `publish[max(0, i - eta)]` and on nothing newer. With
eta = 0 this is synchronous PPO. Version v of the weights is the result of v updates. Under `rollout.versions: exact`, a
shard of `generate[i]` is sampled with the version that the edge names. Under `latest` the edge is the same, and
the shard is sampled with the newest version that is published when `Dispatch` hands it out, at most version i. Here and
below, `latest` stands for `inflight` too, where a running shard also changes to versions that are published later.

Over some edges no stored output is read. `update_policy[i] <- publish[i]` only orders nodes: the trainer publishes
version i before it trains it into i + 1. `advantage[i] <- advantage[i-1]` carries the state of the KL controller.

**Canaries** compare engine and trainer. In `canary[v]` an engine that holds version v scores a few rows of
`generate[v, 0]`, whichever version sampled them. The result is compared with the trainer's log-probs at version v:
`logprob[v, 0]`, or `canary_logprob[v]` in a run without logprob nodes (a forward pass over these few rows before step v
trains). So the trainer never waits for an engine. `canary[v]` runs after the last generation that uses an older
version, so no engine changes its weights early because of it. All later canaries also read `canary[0]`, which says how
far engine and trainer may differ.

The last part of this file decides which commits stay valid if a run goes back to an older version of its weights:

    update_policy[v], update_critic[v] and later ──► everything that depends on them ──► computed again
    all other commits stay valid, also commits of rows that were generated ahead with older versions

Going back to version v needs the weights of v (a checkpoint, or the start weights). It also needs a checkpoint, or the
start weights, for every older version that a node has yet to read, because no update before v runs again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from stages.models.protocol import MODEL_ROLES, Role
from storage.address import Address

STAGE_ROLES: dict[str, Role] = {
    "generate": Role.GENERATE,
    "score": Role.SCORE,
    "reference": Role.REFERENCE,
    "logprob": Role.POLICY,
    "value": Role.CRITIC,
    "advantage": Role.ADVANTAGE,
    "update_policy": Role.POLICY,
    "update_critic": Role.CRITIC,
    "publish": Role.POLICY,
    "canary_logprob": Role.POLICY,
    "canary": Role.GENERATE,
    "evaluate": Role.GENERATE,
    "evaluate_score": Role.SCORE,
    "evaluate_reference": Role.REFERENCE,
}
"""Stage -> the role whose gang runs the stage. `advantage` needs no model, and runs in the scoring gang unless it is
placed in a gang of its own. A gang of its own helps if scoring is slow, since in the scoring gang `advantage` would
wait while later steps are scored."""


UPDATE_STAGE = {Role.POLICY: "update_policy", Role.CRITIC: "update_critic"}
"""Role -> the stage that trains its model."""


@dataclass(frozen=True, order=True)
class Node:
    """A piece of the run's work: one (stage, step, shard). Nodes sort by priority: the oldest step first."""

    priority: tuple[int, int]
    """(step whose progress the node serves, order within that step): lower runs first."""
    address: Address
    parents: tuple[Address, ...]
    inputs: tuple[Address, ...]
    """The parents whose stored output the node reads. The other parents only order it."""
    version: int
    """Version of the weights that the node needs: the critic's in `value` and `update_critic` nodes, else the policy's.
    In a `publish` node: the version that it publishes. In a node that `Dispatch` has handed out: the version to use."""
    newest_version: int | None = None
    """Newest version that a `generate` node may use under `latest`; `version` is the oldest."""

    @property
    def stage(self) -> str:
        return self.address.stage

    @property
    def role(self) -> Role:
        return STAGE_ROLES[self.address.stage]

    @property
    def chosen_version(self) -> int | None:
        """Version that a node was handed out with, if several were allowed; else None."""
        return None if self.newest_version is None else self.version

    @property
    def scheduled_step(self) -> int:
        """Step whose progress the node serves. For an evaluation or a canary it may be later than the step of its
        address, and for a publication it is one step earlier."""
        return self.priority[0]


@dataclass(frozen=True)
class GraphSpec:
    """The settings that determine the shape of the graph."""

    steps: int
    shards: int
    staleness: int
    """The staleness bound eta, in versions."""
    recompute_logprobs: bool = True
    """True under `ppo.proximal: recompute`; else there are no logprob nodes."""
    eval_every: int = 0
    """Number k of versions between evaluations: versions 0, k, 2k, ... and the last are evaluated. 0: none."""
    eval_shards: int = 1
    has_canaries: bool = False
    """True if engine and trainer are compared at every version that is trained."""
    has_critic: bool = True
    """True under `ppo.advantage: gae`; else there are no critic nodes."""
    uses_latest: bool = False
    """True unless `rollout.versions` is `exact`. A shard then uses the newest version within the staleness bound that
    is published when the shard is handed out."""


def update_stages(spec: GraphSpec) -> dict[Role, str]:
    """Return role -> the stage that trains its model, for the roles that the run trains."""
    return {role: stage for role, stage in UPDATE_STAGE.items() if spec.has_critic or role is not Role.CRITIC}


def generation_version(spec: GraphSpec, step: int) -> int:
    """Return the oldest version that may generate step i: max(0, i - eta)."""
    return max(0, step - spec.staleness)


def generation_versions(spec: GraphSpec, step: int) -> range:
    """Return the versions that may generate step i: max(0, i - eta), and under `latest` all newer versions up to i."""
    oldest = generation_version(spec, step)
    return range(oldest, (step if spec.uses_latest else oldest) + 1)


def resumed_generation_version(spec: GraphSpec, step: int, newest: int) -> int:
    """Return the version that the generation of step i waits for in a resumed run. `newest` is the newest version that
    was published before the run resumed. Under `latest` the result is the version nearest to `newest` that may generate
    step i, so that no older version has to be published again."""
    allowed = generation_versions(spec, step)
    return max(allowed[0], min(allowed[-1], newest))


def is_evaluated(spec: GraphSpec, version: int) -> bool:
    """Return True if version v is evaluated. Every `eval_every`-th version is evaluated, and the last one; none if
    `eval_every` is 0."""
    return spec.eval_every > 0 and (version % spec.eval_every == 0 or version == spec.steps)


def publish_node(version: int) -> Node:
    """Return `publish[v]`, which makes version v readable (v = 0: the start weights). It runs right after the policy's
    update and before the critic's, because the next generation waits for it."""
    parents = (Address("update_policy", version - 1),) if version else ()
    return Node((version - 1, 7), Address("publish", version), parents, (), version)


def evaluate_nodes(spec: GraphSpec, version: int) -> list[Node]:
    """Return the nodes that evaluate version v on the held-out prompts: generation, scores, and the reference's
    log-probs for the KL. The nodes run after the training generation that uses v. Under `latest` they run after the
    generation of step v, before the engines load the next version."""
    nodes = []
    scheduled_step = version if spec.uses_latest else version + spec.staleness
    for shard in range(spec.eval_shards):
        rollout = Address("evaluate", version, shard)
        publish = Address("publish", version)
        nodes.append(Node((scheduled_step, 10), rollout, (publish,), (), version))
        for stage in ("evaluate_score", "evaluate_reference"):
            nodes.append(Node((scheduled_step, 11), Address(stage, version, shard), (rollout,), (rollout,), version))
    return nodes


def canary_node(spec: GraphSpec, version: int) -> Node:
    """Return `canary[v]`, which compares an engine with the trainer at version v."""
    rollout = Address("generate", version)
    trainers = Address("logprob" if spec.recompute_logprobs else "canary_logprob", version)
    first = (Address("canary", 0),) if version else ()
    inputs, step = (rollout, trainers, *first), _canary_step(spec, version)
    parents = {*inputs, Address("publish", version)}
    if generation_version(spec, step) < version and not spec.uses_latest:
        parents |= {Address("generate", step, s) for s in range(spec.shards)}
    return Node((step, 9), Address("canary", version), tuple(sorted(parents)), inputs, version)


def _canary_step(spec: GraphSpec, version: int) -> int:
    """Return the step whose `step_nodes` include `canary[v]`: the last step that is generated with a version older than
    v. Return v if there is no such step or that step is earlier than v. Under `latest` always return v, because engines
    load a new version as soon as they can."""
    if spec.uses_latest:
        return version
    return min(version + max(spec.staleness - 1, 0), spec.steps - 1) if version else 0


def _canaries_of(spec: GraphSpec, step: int) -> list[Node]:
    """Return the canaries among the nodes of a step. The last step of a run may have several."""
    versions = range(max(0, step - spec.staleness), step + 1) if spec.has_canaries else ()
    return [canary_node(spec, version) for version in versions if _canary_step(spec, version) == step]


def step_of_node(node: Node) -> int:
    """Return the step whose `step_nodes` contain the node."""
    return max(0, node.version - 1 if node.stage.startswith("evaluate") else node.scheduled_step)


def step_nodes(spec: GraphSpec, step: int) -> list[Node]:
    """Return all nodes of PPO step i, parents before children. They include the publication of version i + 1 and, if
    that version is evaluated, its evaluation. Step 0 also has the publication and the evaluation of version 0."""
    i = step
    nodes: list[Node] = []
    if i == 0:
        nodes.append(publish_node(0))
        if is_evaluated(spec, 0):
            nodes += evaluate_nodes(spec, 0)
    before_policy = (Address("update_policy", i - 1),) if i else ()
    before_critic = (Address("update_critic", i - 1),) if i else ()
    sources: list[Address] = []
    for s in range(spec.shards):
        rollout = Address("generate", i, s)
        used = generation_version(spec, i)
        nodes.append(Node((i, 0), rollout, (Address("publish", used),), (), used, i if spec.uses_latest else None))

        def reader(stage: str, order: int, *extra: Address, rollout: Address = rollout, s: int = s) -> Node:
            return Node((i, order), Address(stage, i, s), (rollout, *extra), (rollout,), i)

        shard_nodes = [reader("score", 1), reader("reference", 2)]
        if spec.recompute_logprobs:
            shard_nodes.append(reader("logprob", 3, *before_policy))
        if spec.has_critic:
            shard_nodes.append(reader("value", 4, *before_critic))
        nodes += shard_nodes
        sources += [rollout, *(node.address for node in shard_nodes)]
    carried = (Address("advantage", i - 1),) if i else ()
    advantage = Address("advantage", i)
    nodes.append(Node((i, 5), advantage, (*sources, *carried), tuple(sources), i))
    batch = (advantage, *sources)
    ready = (advantage, *before_policy, Address("publish", i))
    if spec.has_canaries and not spec.recompute_logprobs:
        rows, canary = Address("generate", i), Address("canary_logprob", i)
        nodes.append(Node((i, 3), canary, (rows, *before_policy), (rows,), i))
        ready = (*ready, canary)
    nodes.append(Node((i, 6), Address("update_policy", i), ready, batch, i))
    if spec.has_critic:
        nodes.append(Node((i, 8), Address("update_critic", i), (advantage, *before_critic), batch, i))
    nodes += _canaries_of(spec, i)
    nodes.append(publish_node(i + 1))
    if is_evaluated(spec, i + 1):
        nodes += evaluate_nodes(spec, i + 1)
    return nodes


def lineage_of(address: Address, inputs: Iterable[Address], weight_versions: Iterable[int]) -> tuple[Address, ...]:
    """Return the addresses that the output at `address` was computed from. These are the stored `inputs` of its node
    and the origin of each of `weight_versions`, the versions of the weights that the node used. The list of an
    `advantage` also has the advantage of the step before, whose state it continues.

    A version that an engine used comes from a publication, and a version that a trainer used comes from an update.
    Version 0 of a trainer is the config's model and has no address."""
    parents = list(inputs)
    if address.stage == "advantage" and address.step:
        parents.append(Address("advantage", address.step - 1))
    role = STAGE_ROLES[address.stage]
    if role is Role.GENERATE:
        parents += [Address("publish", version) for version in weight_versions]
    elif role in (Role.POLICY, Role.CRITIC):
        stage = "update_policy" if role is Role.POLICY else "update_critic"
        parents += [Address(stage, version - 1) for version in weight_versions if version]
    return tuple(parents)


_TRAINED_FROM = {
    Role.POLICY: ("generate", "reference", "logprob", "advantage", "update_policy"),
    Role.CRITIC: ("generate", "value", "advantage", "update_critic"),
}
"""Role -> the stages whose commits must exist before an update of its model can run again."""


def find_lost_inputs(nodes: Iterable[Node], committed: Set[Address]) -> set[Address]:
    """Return the addresses of one step's nodes that have no commit although an update has been trained from their
    outputs. An update counts as trained if the update itself, or the update of the same stage in the next step, is in
    `committed`."""
    nodes = list(nodes)
    return {
        node.address
        for role, needs in _TRAINED_FROM.items()
        if any(node.stage == UPDATE_STAGE[role] and _is_update_committed(node, committed) for node in nodes)
        for node in nodes
        if node.stage in needs and node.address not in committed
    }


def _is_update_committed(update: Node, committed: Set[Address]) -> bool:
    """Return True if this update, or the update of the same stage in the next step, is committed."""
    after = Address(update.stage, update.address.step + 1)
    return update.address in committed or after in committed


def with_missing_parents(node: Node, missing: Iterable[Address]) -> Node:
    """Return the node with extra parents: all `missing` outputs from which its model may have to be trained again. The
    updates that read these outputs are committed, so no other edge would make the node wait for the outputs."""
    if node.role not in _TRAINED_FROM:
        return node
    needs = _TRAINED_FROM[node.role]
    waits = [a for a in missing if a.stage in needs and a.step < node.version and a not in node.parents]
    return replace(node, parents=(*node.parents, *sorted(waits))) if waits else node


def finished_steps(spec: GraphSpec, first_open_step: int, later_commits: Iterable[Address]) -> list[int]:
    """Return the steps before `first_open_step`, and all later steps whose updates, advantages and generated shards are
    committed.

    Args:
        first_open_step: every earlier step is done.
        later_commits: the committed addresses of step `first_open_step` and later.
    """
    needed = {**dict.fromkeys(update_stages(spec).values(), 1), "advantage": 1, "generate": spec.shards}
    commits_of = Counter((address.step, address.stage) for address in later_commits)
    steps = sorted({step for step, _ in commits_of})
    return [
        *range(first_open_step),
        *(s for s in steps if all(commits_of[s, stage] == count for stage, count in needed.items())),
    ]


def run_nodes(spec: GraphSpec) -> Iterator[Node]:
    """Yield every node of the run, step by step."""
    for step in range(spec.steps):
        yield from step_nodes(spec, step)


def window_size(spec: GraphSpec) -> int:
    """Return the number of steps that the driver keeps in flight: eta + 2. Step i + eta + 1 cannot generate before
    version i + 1, the result of step i, is published. A wider window would therefore only hold nodes that cannot
    run."""
    return spec.staleness + 2


def weight_readers(spec: GraphSpec, version: int) -> list[Address]:
    """Return the nodes that may read the published version v. When all of them have their commits, v can be released.
    Under `latest` a node counts as a reader until its commit, although it may read another version."""
    # without `latest`, version v generates only step v + eta; version 0 also generates all earlier steps
    newest = version + spec.staleness
    steps = range(version if spec.uses_latest or not version else newest, min(newest + 1, spec.steps))
    return [
        *(Address("generate", i, s) for i in steps for s in range(spec.shards)),
        *_readers_of_exactly(spec, version),
    ]


def resumed_weight_readers(spec: GraphSpec, version: int, newest: int) -> list[Address]:
    """Return the nodes that need exactly version v in a resumed run. `newest` is the newest version that was published
    before the run resumed. If one of these nodes has no commit and v is no longer readable, v must be published
    again."""
    steps = range(version, min(version + spec.staleness + 1, spec.steps))
    needing = [i for i in steps if resumed_generation_version(spec, i, newest) == version]
    return [
        *(Address("generate", i, s) for i in needing for s in range(spec.shards)),
        *_readers_of_exactly(spec, version),
    ]


def _readers_of_exactly(spec: GraphSpec, version: int) -> list[Address]:
    """Return the evaluation and canary nodes of version v, which cannot use another version."""
    readers = [Address("evaluate", version, s) for s in range(spec.eval_shards)] if is_evaluated(spec, version) else []
    if spec.has_canaries and version < spec.steps:
        readers.append(Address("canary", version))
    return readers


# ---- Gangs: groups of worker processes, as the graph sees them -------------------------------------------------


class Mode(StrEnum):
    """Ways in which a gang takes the nodes of a stage; `pipeline/graph/dispatch.py` explains each."""

    ORDERED = "ordered"
    SLOT = "slot"
    FREE = "free"


@dataclass(frozen=True)
class Gang:
    """A group of worker processes and the roles it serves."""

    name: str
    roles: frozenset[Role]
    workers: int
    """Number of ranks of an ordered gang, or number of replicas of a pool."""
    concurrent_shards: int = 1
    """Number of shards that a replica of a pool works on at once."""
    divides_scorers: bool = False
    """True if the gang's layout divides the models of its rewards over its workers."""
    gpus: int = 0
    """Number of GPUs of each worker, on hosts that have GPUs."""

    @property
    def is_ordered(self) -> bool:
        """True if the gang holds a trained or a reference model, or divides the models of its rewards, so that its
        ranks act together."""
        return bool(self.roles & MODEL_ROLES) or self.divides_scorers

    def ranks_of(self, role: Role) -> int:
        """Return the number of ranks that run a node of this role together. Rank 0 alone runs a node without models."""
        together = role in MODEL_ROLES or (self.divides_scorers and role is Role.SCORE)
        return self.workers if self.is_ordered and together else 1

    @property
    def max_running_nodes(self) -> int:
        """Number of nodes that one worker runs at once. In an ordered gang it is one. In a pool it is
        `concurrent_shards`, plus one if the gang generates and has another role too."""
        if self.is_ordered:
            return 1
        return self.concurrent_shards + (1 if Role.GENERATE in self.roles and self.roles != {Role.GENERATE} else 0)

    def mode(self, role: Role) -> Mode:
        if self.is_ordered:
            return Mode.ORDERED
        return Mode.SLOT if role is Role.GENERATE else Mode.FREE


def gangs_of(
    roles: Mapping[Role, str],
    workers: Mapping[str, int],
    concurrent_shards: Mapping[str, int],
    dividing: Collection[str] = (),
) -> list[Gang]:
    """Return the gangs of a placement. `roles` maps each role to a gang's name. `dividing`: names of gangs whose layout
    divides models. Such a gang divides the models of its rewards if it has the scoring role, no engine, and no trained
    or reference model."""
    gangs = []
    for name in sorted(set(roles.values())):
        own = frozenset(role for role, gang in roles.items() if gang == name)
        scores = Role.SCORE in own and own.isdisjoint({Role.GENERATE, *MODEL_ROLES})
        gangs.append(Gang(name, own, workers[name], concurrent_shards[name], scores and name in dividing))
    return gangs


# ---- Going back to an older version ----------------------------------------------------------------------------

SHARDED = ("generate", "score", "reference", "logprob", "value")
ADVANTAGE = "advantage"
_NONE: Mapping[Address, int | None] = MappingProxyType({})


def commits_to_recompute(
    spec: GraphSpec,
    committed: Collection[Address],
    version: int,
    dropped_before: int = 0,
    sampled: Mapping[Address, int | None] = _NONE,
) -> list[Address]:
    """Return the commits that are no longer valid after going back to `version`, children before parents.

    Args:
        dropped_before: the arrays of all steps before this step were deleted. The shards of such a step are computed
            again if an update will be trained on them again.
        sampled: under `latest`, shard's address -> newest version that sampled it, according to its commit, or None if
            that is unknown. A shard is computed again if this version is newer than `version`, or is None.
    """
    nodes = list(run_nodes(spec))
    children: dict[Address, list[Address]] = {}
    for node in nodes:
        for parent in node.parents:
            children.setdefault(parent, []).append(node.address)
    addresses = {Address(stage, step) for stage in UPDATE_STAGE.values() for step in range(version, spec.steps)}
    for step in range(version, min(dropped_before, spec.steps)):
        addresses |= {Address(stage, step, s) for stage in SHARDED for s in range(spec.shards)} | {
            Address(ADVANTAGE, step)
        }
    addresses |= {address for address, newest in sampled.items() if newest is None or newest > version}
    stack = list(addresses)
    while stack:
        fresh = [child for child in children.get(stack.pop(), ()) if child not in addresses]
        addresses.update(fresh)
        stack += fresh
    order = [node.address for node in nodes]
    # Commits of an earlier, shorter config. For example, its last version was evaluated, and now it need not be.
    strange = sorted(set(committed).difference(order))
    order += [address for address in strange if address.step > version]
    addresses.update(strange)
    return [address for address in reversed(order) if address in addresses and address in committed]


def can_rewind(
    spec: GraphSpec,
    committed: Collection[Address],
    version: int,
    saved: Collection[int],
    dropped_before: int = 0,
    sampled: Mapping[Address, int | None] = _NONE,
) -> bool:
    """Return True if the run can go back to `version`. Every older version that is still needed must have a checkpoint
    (be in `saved`) or be version 0. No update before `version` may have been trained on a shard whose version is None
    in `sampled`, because the shard would come out differently if it were computed again."""
    if any(newest is None and address.step < version for address, newest in sampled.items()):
        return False
    standing = set(committed).difference(commits_to_recompute(spec, committed, version, dropped_before, sampled))
    needed = (v for v in range(1, version) if not standing.issuperset(resumed_weight_readers(spec, v, version)))
    return all(v in saved for v in needed)
