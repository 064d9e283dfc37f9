"""Which commits stand if a run goes back to a version of its weights, and whether it can.

    update_policy[v], update_critic[v] and later ──► whatever hangs on them, however far ──► made anew
    all else stands: also rows that older versions have generated ahead

Under `latest` the graph does not say which version a shard was sampled with: its commit does.

Going back to v needs the weights of v (a checkpoint, or the start), and those of each older version that somebody has
still to read: from a checkpoint too, since no update before v is run again.

May import this folder and storage.address.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from pipeline.graph.graph import UPDATE_STAGE, GraphSpec, resumed_weight_readers, run_nodes
from storage.address import Address

SHARDED = ("generate", "score", "reference", "logprob", "value")
ADVANTAGE = "advantage"
_NONE: Mapping[Address, int | None] = MappingProxyType({})


def made_anew(
    spec: GraphSpec,
    committed: Collection[Address],
    version: int,
    dropped_before: int = 0,
    sampled: Mapping[Address, int | None] = _NONE,
) -> list[Address]:
    """The commits that do not stand, children before parents. `dropped_before`: arrays of the steps before this one
    were let go; those that would be trained on again do not stand either. `sampled`: under `latest`, the newest version
    that each shard was sampled with; None where nobody knows any more, and it will become another shard."""
    nodes = list(run_nodes(spec))
    children: dict[Address, list[Address]] = {}
    for node in nodes:
        for parent in node.parents:
            children.setdefault(parent, []).append(node.address)
    found = {Address(stage, step) for stage in UPDATE_STAGE.values() for step in range(version, spec.steps)}
    for step in range(version, min(dropped_before, spec.steps)):
        found |= {Address(stage, step, s) for stage in SHARDED for s in range(spec.shards)} | {Address(ADVANTAGE, step)}
    found |= {address for address, newest in sampled.items() if newest is None or newest > version}
    stack = list(found)
    while stack:
        fresh = [child for child in children.get(stack.pop(), ()) if child not in found]
        found.update(fresh)
        stack += fresh
    order = [node.address for node in nodes]
    # Of an earlier, shorter config: the evaluation of what was the last version then, say.
    strange = sorted(set(committed).difference(order))
    order += [address for address in strange if address.step > version]
    found.update(strange)
    return [address for address in reversed(order) if address in found and address in committed]


def can_go_back(
    spec: GraphSpec,
    committed: Collection[Address],
    version: int,
    saved: Collection[int],
    dropped_before: int = 0,
    sampled: Mapping[Address, int | None] = _NONE,
) -> bool:
    """Whether no version before this one is needed that is neither the start's nor among the `saved`; and whether no
    update before it was trained on a shard that will become another one."""
    if any(newest is None and address.step < version for address, newest in sampled.items()):
        return False
    standing = set(committed).difference(made_anew(spec, committed, version, dropped_before, sampled))
    needed = (v for v in range(1, version) if not standing.issuperset(resumed_weight_readers(spec, v, version)))
    return all(v in saved for v in needed)
