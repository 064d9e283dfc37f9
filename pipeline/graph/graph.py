"""The graph of a run as plain data: the nodes of each step and their edges. No Dask, no clock, no I/O.

The executor runs these nodes. The command `replay` runs one of them again, and the command `check` compares a run's
directory with them. Step i has these nodes, where eta is the staleness bound:

    step i:   weights v(i-eta) --> generate[i,s] --+--> score[i,s] ------+
                                   (shard s)       +--> reference[i,s] --+
              update_policy[i-1] ------------------+--> logprob[i,s] ----+--> advantage[i] --+--> update_policy[i] --+
              update_critic[i-1] -------------------+--> value[i,s] ------+                   +--> update_critic[i]    |
                                                                                                 publish v(i+1) <----+

A run without a critic (`ppo.advantage`) has no `value` and no `update_critic` nodes. A run without `ppo.proximal:
recompute` has no `logprob` nodes.

**The staleness bound is an edge**: `generate[i]` depends on `publish[max(0, i - eta)]` and on nothing newer. With eta =
0 this is synchronous PPO. Version v of the weights is the result of v updates. The setting `rollout.versions`
determines which version samples a shard of `generate[i]`:
- `exact`: the version that the edge names.
- `latest`: the newest version that is published when `Dispatch` hands the shard out, at most version i. The edge is the
  same.
- `inflight`: like `latest`, but a running shard also changes to versions that are published later. In this module
  `latest` stands for `inflight` too.

Over some edges no stored output is read. The edge `update_policy[i] <- publish[i]` only orders nodes: the trainer
publishes version i before it trains it into version i + 1. The edge `advantage[i] <- advantage[i-1]` carries the state
of the KL controller.

**Canaries** compare engine and trainer. In `canary[v]` an engine that holds version v scores a few rows of `generate[v,
0]`, whichever version sampled them. The result is compared with the trainer's log-probs of these rows at version v.
They come from `logprob[v, 0]`. In a run without logprob nodes they come from `canary_logprob[v]`, a forward pass over
these few rows before step v trains. So the trainer never waits for an engine. The node `canary[v]` runs after the last
generation that uses an older version. So no engine has to load version v early because of it. All later canaries also
read `canary[0]`, which says how far engine and trainer may differ.

The last section of this file decides which commits stay valid if a run goes back to version v:

    update_policy[v], update_critic[v] and later ──► all that depends on them ──► computed again
    all other commits stay valid, also commits of rows that were generated ahead with older versions

For this, the weights of version v must be in a checkpoint. Some nodes may still have to read weights older than v, for
example a shard of step v that was not generated yet. No update before v runs again, so each of these older versions
must be in a checkpoint too. Version 0 needs no checkpoint, because it is the weights with which the run started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

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


class Node(NamedTuple):
    """A piece of the run's work: one (stage, step, shard). Nodes sort by priority: the oldest step first."""

    priority: tuple[int, int]
    """(step whose progress the node serves, order within that step): lower runs first."""
    address: Address
    parents: tuple[Address, ...]
    inputs: tuple[Address, ...]
    """The parents whose stored output the node reads. The node also waits for its other parents, but reads nothing from
    them."""
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
        """PPO step at which the node is due. Usually it is the step of the node's address. For an evaluation or a
        canary it may be a later step. For a publication it is one step earlier: `publish[v]` is due at step v - 1."""
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
    """True unless `rollout.versions` is `exact`. A shard then uses the newest version that is published at the time
    when the shard is handed out. This version must be within the staleness bound."""


def update_stages(spec: GraphSpec) -> dict[Role, str]:
    """Return role -> the stage that trains its model, for the roles that the run trains."""
    return {role: stage for role, stage in UPDATE_STAGE.items() if spec.has_critic or role is not Role.CRITIC}


def generation_version(spec: GraphSpec, step: int) -> int:
    """Return the oldest version of the weights that may generate a step: max(0, step - eta). eta is the staleness bound
    (`spec.staleness`)."""
    return max(0, step - spec.staleness)


def generation_versions(spec: GraphSpec, step: int) -> range:
    """Return the versions of the weights that may generate a step. If `rollout.versions` is `exact`, this is only
    max(0, step - eta), where eta is the staleness bound. Otherwise all newer versions up to `step` are allowed too."""
    oldest = generation_version(spec, step)
    return range(oldest, (step if spec.uses_latest else oldest) + 1)


def resumed_generation_version(spec: GraphSpec, step: int, newest: int) -> int:
    """Return the version of the weights that the generation of a step waits for in a resumed run. If `rollout.versions`
    is `exact`, this is the only version that may generate the step. Otherwise it is the allowed version that is closest
    to `newest`, so that no older version has to be published again.

    `newest`: newest version that was published before the run resumed.
    """
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
    log-probs for the KL. With `rollout.versions: exact` they run after the last training generation that uses v.
    Otherwise they run after the generation of step v, before the engines load the next version."""
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
    """Return the step whose nodes include `canary[v]`: usually v + eta - 1, the last step that is generated with a
    version older than v. So no engine loads v early for the canary. Unless `rollout.versions` is `exact`, engines load
    a version as soon as they can, and the step is v."""
    if spec.uses_latest:
        return version
    return min(version + max(spec.staleness - 1, 0), spec.steps - 1) if version else 0


def _canaries_of(spec: GraphSpec, step: int) -> list[Node]:
    """Return the canaries among the nodes of a step. The last step also has those that would be due after the run's
    end."""
    versions = range(max(0, step - spec.staleness), step + 1) if spec.has_canaries else ()
    return [canary_node(spec, version) for version in versions if _canary_step(spec, version) == step]


def step_of_node(node: Node) -> int:
    """Return the step whose `step_nodes` contain the node."""
    step = node.version - 1 if node.address.stage.startswith("evaluate") else node.priority[0]
    return step if step > 0 else 0  # the first publication and evaluation belong to step 0


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
"""Role -> the stages whose commits a trainer needs to repeat an update of its model. The update's own commit is one of
them: its digest is compared with the result."""


def find_lost_inputs(nodes: Iterable[Node], committed: Set[Address]) -> set[Address]:
    """Return the addresses of the `nodes` of one step whose commits are lost: they have none, but an update that needed
    their outputs has run. A trainer may have to repeat this update.

    An update has run if its own commit is in `committed`. It has also run if the next step's update of the same model
    is in `committed`. In this case its own commit may be lost. Its address is then in the result too.
    """
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
    """Return the node with extra parents, if it is a node of a trained model. A trainer that is restored to an older
    version repeats earlier updates of its model. The node must wait until the inputs of these updates exist again.
    Without extra parents it would not wait: these updates are committed, so they count as done.

    `missing`: addresses of outputs that were lost (`find_lost_inputs`).
    """
    if node.role not in _TRAINED_FROM:
        return node
    needs = _TRAINED_FROM[node.role]
    waits = [a for a in missing if a.stage in needs and a.step < node.version and a not in node.parents]
    return node._replace(parents=(*node.parents, *sorted(waits))) if waits else node


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
    """Return the nodes that need exactly this `version` of the weights in a resumed run. If one of them has no commit,
    the version must be readable. If it is not, it must be published again.

    `newest`: newest version that was published before the run resumed. It determines which version the generation of a
    step waits for (`resumed_generation_version`).
    """
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
        """Return the number of ranks that run a node of this role together. If the ranks of an ordered gang hold or
        divide the role's models, it is the number of all ranks. Otherwise it is 1: rank 0 of an ordered gang, or one
        replica of a pool, runs the node alone."""
        together = role in MODEL_ROLES or (self.divides_scorers and role is Role.SCORE)
        return self.workers if self.is_ordered and together else 1

    @property
    def max_running_nodes(self) -> int:
        """Number of nodes that one worker runs at once. In an ordered gang it is one. In a pool it is
        `concurrent_shards`, plus one if the gang generates and has another role too."""
        if self.is_ordered:
            return 1
        return self.concurrent_shards + (1 if Role.GENERATE in self.roles and self.roles != {Role.GENERATE} else 0)

    @property
    def max_submitted_nodes(self) -> int:
        """Number of nodes that an ordered gang has at once. Several ranks get one node at a time: two could reach the
        ranks in different orders, since each waits for its own inputs, and then their collectives would interleave. A
        single rank gets two. It computes one of them, and meanwhile reads the inputs or stores the output of the
        other."""
        return 1 if self.workers > 1 else 2

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
    """Return the gangs of a placement.

    Args:
        roles: role -> name of its gang.
        workers: name of a gang -> its number of workers.
        concurrent_shards: name of a gang -> number of shards that one of its replicas works on at once.
        dividing: names of the gangs whose layout splits a model over several workers. If such a gang has the role of
            scoring, it also splits the models of its rewards (`Gang.divides_scorers`). It does not split them if it
            also generates, or has the role of a trained or reference model.
    """
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
    """Return the commits that become invalid when the run goes back to `version`, children before parents. These are
    the updates of step `version` and later, and everything that depends on them. Commits of nodes that the graph of the
    present config does not have become invalid too, if their step is later than `version`. The arguments below may add
    more commits.

    Args:
        dropped_before: first step whose arrays were not deleted. The steps from `version` up to `dropped_before` - 1
            will be trained again, so their shards and advantages must be computed again.
        sampled: address of a shard of rollouts -> newest version of the weights that sampled it, or None if it is
            unknown. Empty if `rollout.versions` is `exact`. A shard must be sampled again if its version is newer than
            `version`, or is unknown.
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
    """Return True if the run can go back to `version`. Two conditions must hold:
    - Nodes may still have to read older versions after the run has gone back. Each of these versions, except version 0,
      must have a checkpoint. `saved` has the versions with a checkpoint.
    - For every shard of the steps before `version`, it must be known which version sampled it. In `sampled`, None means
      that it is unknown. Such a shard would have to be sampled again, with other content. But an update before
      `version`, which stays valid, was trained on the old content.

    The other arguments are those of `commits_to_recompute`.
    """
    if any(newest is None and address.step < version for address, newest in sampled.items()):
        return False
    standing = set(committed).difference(commits_to_recompute(spec, committed, version, dropped_before, sampled))
    needed = (v for v in range(1, version) if not standing.issuperset(resumed_weight_readers(spec, v, version)))
    return all(v in saved for v in needed)
