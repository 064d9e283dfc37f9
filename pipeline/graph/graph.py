"""The graph of a run as plain data: which nodes a step has, what each depends on. No Dask, no clock, no I/O.

Three interpreters read the same nodes: the executor runs them, `replay` runs one of them, `docs/` draws them.

    step i:   weights v(i-eta) --> generate[i,s] --+--> score[i,s] ------+
                                   (shard s)       +--> reference[i,s] --+
              update_policy[i-1] ------------------+--> logprob[i,s] ----+--> advantage[i] --+--> update_policy[i] --+
              update_critic[i-1] -------------------+--> value[i,s] ------+                   +--> update_critic[i]    |
                                                                                                 publish v(i+1) <----+

Without a critic (`ppo.advantage`) there are no `value` and no `update_critic` nodes; without `ppo.proximal: recompute`
no `logprob` nodes.

**The staleness bound is an edge**: `generate[i]` depends on `publish[max(0, i - eta)]`, and on nothing newer. With
eta = 0 that is synchronous PPO. Version v of the weights is what v updates have made. A shard of `generate[i]` is
sampled with the version that the edge names; under `latest`, where the edge is the same, with the newest that is
published when it is handed out, i at most (`Dispatch` says which).

Edges that are not data: `update_policy[i] <- publish[i]` (the trainer must have given version i away before it trains
it into i + 1), `advantage[i] <- advantage[i-1]` (the KL controller's state), `evaluate` nodes beside the generation
that uses the same version.

**Canaries** hang beside all this. `canary[v]` has an engine that holds version v score a few rows of `generate[v, 0]`,
whatever version sampled them, and compares with what the trainer said of them at version v: `logprob[v, 0]`, or, where
there are no logprob nodes, `canary_logprob[v]`, a forward of those few rows that the trainer makes before it trains v.
So the trainer never waits for an engine; and `canary[v]` comes after the last generation that uses an older version, so
that no engine is made to change weights for it before its time.

May import the standard library, `stages.models.protocol.Role` and `storage.address`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace

from stages.models.protocol import Role
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
"""Every stage, and the role whose gang runs it. `advantage` needs no model, and runs where scoring does unless it has a
gang of its own: behind a slow scorer it would wait for scores of later steps."""


UPDATE_STAGE = {Role.POLICY: "update_policy", Role.CRITIC: "update_critic"}
"""By role that is trained: the stage that does it."""


@dataclass(frozen=True, order=True)
class Node:
    """One (stage, step, shard). Nodes sort by priority: the oldest step first."""

    priority: tuple[int, int]
    """(step whose progress it serves, order within it): lower runs first."""
    address: Address
    parents: tuple[Address, ...]
    inputs: tuple[Address, ...]
    """The parents whose stored output the node reads; the rest only order it."""
    version: int
    """Version of the weights it needs: the policy's, or the critic's for value nodes. As a node is handed out: the one
    it is to use."""
    newest: int | None = None
    """Of `generate` under `latest`: the newest version that will do as well, `version` being the oldest."""

    @property
    def stage(self) -> str:
        return self.address.stage

    @property
    def role(self) -> Role:
        return STAGE_ROLES[self.address.stage]

    @property
    def chosen_version(self) -> int | None:
        """Of a node that is handed out: the version that it was given, where several would do."""
        return None if self.newest is None else self.version

    @property
    def turn(self) -> int:
        """The step whose progress it serves."""
        return self.priority[0]


@dataclass(frozen=True)
class GraphSpec:
    """What the shape of the graph depends on."""

    steps: int
    shards: int
    staleness: int
    """The bound eta, in versions."""
    recompute_logprobs: bool = True
    """`ppo.proximal: recompute`; otherwise there are no logprob nodes."""
    eval_every: int = 0
    """Evaluate versions 0, k, 2k, ... and the last; 0: none."""
    eval_shards: int = 1
    canaries: bool = False
    """Compare engine and trainer at every version that is trained."""
    critic: bool = True
    """`ppo.advantage: gae`; otherwise there are no nodes of a critic."""
    latest: bool = False
    """Shards are sampled with the newest version that there is when they start, within the bound."""


def update_stages(spec: GraphSpec) -> dict[Role, str]:
    """`UPDATE_STAGE` of the roles that the run trains."""
    return {role: stage for role, stage in UPDATE_STAGE.items() if spec.critic or role is not Role.CRITIC}


def generation_version(spec: GraphSpec, step: int) -> int:
    """Version that generates step i, or the oldest that may: max(0, i - eta)."""
    return max(0, step - spec.staleness)


def generation_versions(spec: GraphSpec, step: int) -> range:
    """Versions that may generate step i: max(0, i - eta), and under `latest` all that are newer, up to i."""
    oldest = generation_version(spec, step)
    return range(oldest, (step if spec.latest else oldest) + 1)


def resumed_generation_version(spec: GraphSpec, step: int, newest: int) -> int:
    """Version that the generation of step i waits for in a run that goes on when `newest` had been published: under
    `latest` that one, so that none that is older need be published again for it."""
    allowed = generation_versions(spec, step)
    return max(allowed[0], min(allowed[-1], newest))


def evaluated(spec: GraphSpec, version: int) -> bool:
    """Whether version v is evaluated."""
    return spec.eval_every > 0 and (version % spec.eval_every == 0 or version == spec.steps)


def publish_node(version: int) -> Node:
    """`publish[v]`: makes version v readable; v = 0 are the start weights. Ordered right after the policy's update,
    before the critic's: the next generation waits for it."""
    parents = (Address("update_policy", version - 1),) if version else ()
    return Node((version - 1, 7), Address("publish", version), parents, (), version)


def evaluate_nodes(spec: GraphSpec, version: int) -> list[Node]:
    """Generation of responses to the held-out prompts by version v, after the training generation that uses v (under
    `latest` after that of step v: before engines go on to the next version); their scores, and the reference's
    log-probs, which their KL is taken from."""
    nodes = []
    turn = version if spec.latest else version + spec.staleness
    for shard in range(spec.eval_shards):
        rollout = Address("evaluate", version, shard)
        publish = Address("publish", version)
        nodes.append(Node((turn, 10), rollout, (publish,), (), version))
        for stage in ("evaluate_score", "evaluate_reference"):
            nodes.append(Node((turn, 11), Address(stage, version, shard), (rollout,), (rollout,), version))
    return nodes


def canary_node(spec: GraphSpec, version: int) -> Node:
    """The comparison of an engine with the trainer at a version that is trained."""
    rollout = Address("generate", version)
    trainers = Address("logprob" if spec.recompute_logprobs else "canary_logprob", version)
    inputs, step = (rollout, trainers), _canary_step(spec, version)
    parents = {*inputs, Address("publish", version)}
    if generation_version(spec, step) < version and not spec.latest:
        parents |= {Address("generate", step, s) for s in range(spec.shards)}
    return Node((step, 9), Address("canary", version), tuple(sorted(parents)), inputs, version)


def _canary_step(spec: GraphSpec, version: int) -> int:
    """The step among whose nodes a canary is: the last that an older version generates, or its own (always under
    `latest`, where engines go on as soon as they can)."""
    if spec.latest:
        return version
    return min(version + max(spec.staleness - 1, 0), spec.steps - 1) if version else 0


def _canaries_of(spec: GraphSpec, step: int) -> list[Node]:
    """The canaries among a step's nodes; in the run's last step there may be several."""
    versions = range(max(0, step - spec.staleness), step + 1) if spec.canaries else ()
    return [canary_node(spec, version) for version in versions if _canary_step(spec, version) == step]


def step_of(node: Node) -> int:
    """The step among whose `step_nodes` it is. (An evaluation's turn is a later one.)"""
    return max(0, node.version - 1 if node.stage.startswith("evaluate") else node.turn)


def step_nodes(spec: GraphSpec, step: int) -> list[Node]:
    """All nodes of PPO step i, parents before children, with the publication of version i + 1 and its evaluation (and,
    for step 0, those of version 0)."""
    i = step
    nodes: list[Node] = []
    if i == 0:
        nodes.append(publish_node(0))
        if evaluated(spec, 0):
            nodes += evaluate_nodes(spec, 0)
    before_policy = (Address("update_policy", i - 1),) if i else ()
    before_critic = (Address("update_critic", i - 1),) if i else ()
    sources: list[Address] = []
    for s in range(spec.shards):
        rollout = Address("generate", i, s)
        used = generation_version(spec, i)
        nodes.append(Node((i, 0), rollout, (Address("publish", used),), (), used, i if spec.latest else None))

        def reader(stage: str, order: int, *extra: Address, rollout: Address = rollout, s: int = s) -> Node:
            return Node((i, order), Address(stage, i, s), (rollout, *extra), (rollout,), i)

        shard_nodes = [reader("score", 1), reader("reference", 2)]
        if spec.recompute_logprobs:
            shard_nodes.append(reader("logprob", 3, *before_policy))
        if spec.critic:
            shard_nodes.append(reader("value", 4, *before_critic))
        nodes += shard_nodes
        sources += [rollout, *(node.address for node in shard_nodes)]
    carried = (Address("advantage", i - 1),) if i else ()
    advantage = Address("advantage", i)
    nodes.append(Node((i, 5), advantage, (*sources, *carried), tuple(sources), i))
    batch = (advantage, *sources)
    ready = (advantage, *before_policy, Address("publish", i))
    if spec.canaries and not spec.recompute_logprobs:
        rows, canary = Address("generate", i), Address("canary_logprob", i)
        nodes.append(Node((i, 3), canary, (rows, *before_policy), (rows,), i))
        ready = (*ready, canary)
    nodes.append(Node((i, 6), Address("update_policy", i), ready, batch, i))
    if spec.critic:
        nodes.append(Node((i, 8), Address("update_critic", i), (advantage, *before_critic), batch, i))
    nodes += _canaries_of(spec, i)
    nodes.append(publish_node(i + 1))
    if evaluated(spec, i + 1):
        nodes += evaluate_nodes(spec, i + 1)
    return nodes


def made_from(address: Address, inputs: Iterable[Address], weight_versions: Iterable[int]) -> tuple[Address, ...]:
    """Everything that an output was made from: the stored `inputs` of its node, the state that was handed on, and, for
    each version of the weights that took part, what made that version: a publication where an engine read it, an update
    where a trainer held it. Version 0 of a trainer is the config's model."""
    found = list(inputs)
    if address.stage == "advantage" and address.step:
        found.append(Address("advantage", address.step - 1))
    role = STAGE_ROLES[address.stage]
    if role is Role.GENERATE:
        found += [Address("publish", version) for version in weight_versions]
    elif role in (Role.POLICY, Role.CRITIC):
        stage = "update_policy" if role is Role.POLICY else "update_critic"
        found += [Address(stage, version - 1) for version in weight_versions if version]
    return tuple(found)


_TRAINED_FROM = {
    Role.POLICY: ("generate", "reference", "logprob", "advantage", "update_policy"),
    Role.CRITIC: ("generate", "value", "advantage", "update_critic"),
}
"""By role: the stages that must have their commits before its update can run again."""


def reopened(nodes: Iterable[Node], committed: Set[Address]) -> set[Address]:
    """Of the nodes of one step: those that lost their commits after an update had read them."""
    nodes = list(nodes)
    return {
        node.address
        for role, needs in _TRAINED_FROM.items()
        if any(node.stage == UPDATE_STAGE[role] and _updated(node, committed) for node in nodes)
        for node in nodes
        if node.stage in needs and node.address not in committed
    }


def _updated(update: Node, committed: Set[Address]) -> bool:
    """Whether an update, or the one after it, is committed."""
    after = Address(update.stage, update.address.step + 1)
    return update.address in committed or after in committed


def after_reopened(node: Node, missing: Iterable[Address]) -> Node:
    """The node, behind those of the `missing` outputs that its model may have to be trained from again: updates in
    between are committed, so nothing else would hold it back."""
    if node.role not in _TRAINED_FROM:
        return node
    needs = _TRAINED_FROM[node.role]
    waits = [a for a in missing if a.stage in needs and a.step < node.version and a not in node.parents]
    return replace(node, parents=(*node.parents, *sorted(waits))) if waits else node


def run_nodes(spec: GraphSpec) -> Iterator[Node]:
    """Every node of the run, step by step."""
    for step in range(spec.steps):
        yield from step_nodes(spec, step)


def window(spec: GraphSpec) -> int:
    """How many steps the driver keeps in flight: eta + 2. Step i + eta + 1 can start generating only when step i is
    published, so a wider window would hold nodes that cannot run."""
    return spec.staleness + 2


def weight_readers(spec: GraphSpec, version: int) -> list[Address]:
    """The nodes that may read the published version v: when all have committed, v can be released. Under `latest` a
    node may turn out to have read another, so that v is kept for as long as it is without."""
    newest = version + spec.staleness  # the step that no older one may generate; of version 0 also all before that
    steps = range(version if spec.latest or not version else newest, min(newest + 1, spec.steps))
    return [*(Address("generate", i, s) for i in steps for s in range(spec.shards)), *_own_readers(spec, version)]


def resumed_weight_readers(spec: GraphSpec, version: int, newest: int) -> list[Address]:
    """Of `weight_readers`, those that need v itself in a run that goes on when `newest` had been published: if any has
    no commit, and v is not there, it must be published again."""
    steps = range(version, min(version + spec.staleness + 1, spec.steps))
    needing = [i for i in steps if resumed_generation_version(spec, i, newest) == version]
    return [*(Address("generate", i, s) for i in needing for s in range(spec.shards)), *_own_readers(spec, version)]


def _own_readers(spec: GraphSpec, version: int) -> list[Address]:
    """Those that any other version would be of no use to."""
    readers = [Address("evaluate", version, s) for s in range(spec.eval_shards)] if evaluated(spec, version) else []
    if spec.canaries and version < spec.steps:
        readers.append(Address("canary", version))
    return readers
