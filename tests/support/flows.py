"""A run's flow without workers: nodes end when a test says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.graph.dispatch import Dispatch
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Gang, GraphSpec, Node
from stages.models.protocol import Role
from storage.address import Address


class FlowMachine:
    """Owns a flow on a dispatch whose workers are all up, and finishes nodes on demand."""

    def __init__(
        self,
        spec: GraphSpec,
        committed: Iterable[Address] = (),
        published: Iterable[int] = (),
        sampled_versions: Mapping[Address, int] | None = None,
        slots: int = 64,
        first_step: int = 0,
    ) -> None:
        """`slots`: shards that are sampled at once; the fewer, the longer others wait. `first_step`: see `Flow`."""
        self.over: list[int] = []
        self.unread: list[int] = []
        self.ran: list[Address] = []
        self.out: dict[Address, Node] = {}
        gangs = (
            Gang("gen", frozenset({Role.GENERATE}), 1, slots),
            Gang("score", frozenset({Role.SCORE, Role.ADVANTAGE}), 1),
            Gang("train", frozenset({Role.POLICY, Role.CRITIC, Role.REFERENCE}), 1),
        )
        self.dispatch = Dispatch(gangs)
        for gang in gangs:
            self.dispatch.on_worker_up(gang.name, 0)
        self.flow = Flow(
            spec,
            self.dispatch,
            first_step=first_step,
            committed=committed,
            published=published,
            sampled_versions=sampled_versions or {},
            on_step=lambda step, nodes: self.over.append(step),
            on_unread=self.on_unread,
        )
        self.flow.advance()
        self.submit()

    def on_unread(self, version: int) -> None:
        self.unread.append(version)

    def submit(self) -> None:
        self.out |= {submit.node.address: submit.node for submit in self.dispatch.next_submits()}

    def finish(self, address: Address) -> None:
        node = self.out.pop(address)
        self.ran.append(address)
        self.dispatch.mark_done(address)
        self.flow.on_node_done(node)

    def ready(self) -> list[Address]:
        """Return the nodes that can end: they are handed out, and their parents are done."""
        return [a for a in sorted(self.out) if all(map(self.dispatch.is_done, self.out[a].parents))]

    def finish_all(self, *held: tuple[str, int]) -> None:
        """Finish whatever can be, except nodes of the (stage, step) pairs."""
        while ready := [a for a in self.ready() if (a.stage, a.step) not in held]:
            self.finish(ready[0])
            self.submit()

    def steps(self, stage: str) -> list[int]:
        return [address.step for address in self.ran if address.stage == stage]
