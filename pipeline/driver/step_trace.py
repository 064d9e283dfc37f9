"""A step as a trace: its nodes by gang, with their true times, what they read and what they made.

May import pipeline.graph, pipeline.observe.{history, tracking}, pipeline.workers.messages, stages.models.protocol.Role,
storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipeline.graph.graph import Node
from pipeline.observe.history import History
from pipeline.observe.tracking import Span
from pipeline.workers.messages import Outcome
from stages.models.protocol import Role
from storage.address import Address

_OF_VERSION = frozenset({"publish", "canary"})
_SHOWN = frozenset({"generate", "advantage"})
_WHOLE_STEP = frozenset({"advantage", "update_policy", "update_critic"})


def span_name(address: Address) -> str:
    """`generate s0`, `publish v8`, `evaluate v4 s0`, `advantage`: the step is the trace's."""
    if address.stage in _WHOLE_STEP:
        return address.stage
    if address.stage in _OF_VERSION:
        return f"{address.stage} v{address.step}"
    version = f" v{address.step}" if address.stage.startswith("evaluate") else ""
    return f"{address.stage}{version} s{address.shard}"


def step_spans(ran: Iterable[tuple[Node, Outcome]], gang_of: Mapping[Role, str]) -> list[Span]:
    """A span for each node that ran."""
    return [
        Span(
            name=span_name(node.address),
            stage=node.stage,
            start_s=outcome.started,
            end_s=outcome.finished,
            gang=gang_of[node.role],
            worker=outcome.worker,
            attributes={"step": node.address.step, "shard": node.address.shard, "version": node.version},
            inputs=tuple(map(str, node.parents)),
            output=str(node.address),
        )
        for node, outcome in ran
    ]


def previews(run_name: str, step: int, ran: Sequence[tuple[Node, Outcome]], history: History) -> tuple[str, str]:
    """What a list of traces shows of a step: (`demo · step 7 · v6`, `reward 0.198 KL 0.79`); the version is the one
    that its rows were sampled with. Of nodes that an earlier driver ran, the ledger tells it."""
    known = {node.address: outcome.ref for node, outcome in ran if outcome.ref is not None}
    sampled = {node.version for node, _ in ran if node.stage == "generate"}
    for address in history.addresses(step):
        commit = history.ledger.find(address) if address.stage in _SHOWN and address not in known else None
        if commit is not None:
            known[address] = commit.ref()
            sampled |= {*commit.provenance.weight_versions} if address.stage == "generate" else set()
    versions = sorted(sampled)
    asked = " · ".join([run_name, f"step {step}", *([f"v{versions[0]}"] if len(versions) == 1 else [])])
    if len(versions) > 1:
        asked += f" · v{versions[0]}-{versions[-1]}"
    advantage = known.get(Address("advantage", step))
    metrics = {} if advantage is None else advantage.metrics
    numbers = (("reward", metrics.get("reward/mean")), ("KL", metrics.get("kl/ref")))
    return asked, " ".join(f"{label} {value:.3g}" for label, value in numbers if value is not None)
