"""Moves the rolling window along the run: which steps are open, when one is over, which weights nobody needs any more.

May import this folder and storage.address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pipeline.graph.dispatch import Dispatch
from pipeline.graph.graph import GraphSpec, Node, after_reopened, reopened, step_nodes, weight_readers, window
from storage.address import Address


class Flow:
    """Owns the window: eta + 2 steps counted from the oldest whose policy update is not done. A step stays open until
    all its nodes are (an evaluation may lag behind)."""

    def __init__(
        self,
        spec: GraphSpec,
        dispatch: Dispatch,
        *,
        first_step: int = 0,
        committed: Iterable[Address] = (),
        published: Iterable[int] = (),
        on_step: Callable[[int, list[Node]], None],
        on_unread: Callable[[int], None],
    ) -> None:
        """`first_step`: before it every step is over, and every address of a lower step committed. `committed`: outputs
        from there on that an earlier attempt at this run left. `published`: versions whose weights are
        readable now. `on_step(step, nodes)` is called when every node of a step is done, `on_unread(version)` when
        every reader of a version is."""
        self._spec = spec
        self._dispatch = dispatch
        self._committed = set(committed)
        self._published = set(published)
        self._on_step = on_step
        self._on_unread = on_unread
        self._open: dict[int, list[Node]] = {}
        self._left: dict[int, set[Address]] = {}
        self._step_of: dict[Address, int] = {}
        self._first = self._updated = self._next = first_step
        self._reopened: set[Address] = set()
        """Without a commit, though an update that read them has one: a trainer that goes back needs them."""
        self._readers: dict[int, set[Address]] = {}

    def advance(self) -> None:
        """Admits every step that the window reaches."""
        while self._next < min(self._spec.steps, self._updated + window(self._spec)):
            step, nodes = self._next, step_nodes(self._spec, self._next)
            self._reopened |= reopened(nodes, self._committed)
            nodes = [after_reopened(node, self._reopened) for node in nodes]
            self._next += 1
            done = [node for node in nodes if self._is_committed(node)]
            self._dispatch.admit(nodes, [node.address for node in done])
            self._open[step] = nodes
            self._left[step] = {node.address for node in nodes}
            self._step_of.update((node.address, step) for node in nodes)
            for node in nodes:
                if node.stage == "publish":
                    readers = weight_readers(self._spec, node.version)
                    self._readers[node.version] = {reader for reader in readers if not self._has_commit(reader)}
            for node in done:
                self._settle(node)

    def done(self, node: Node) -> None:
        """A node has its commit."""
        self._settle(node)
        self.advance()

    def _settle(self, node: Node) -> None:
        """What a commit completes: a reader of weights, an update, a step. Admits nothing: `advance` does that in a
        loop, for a resumed run may find thousands of steps committed."""
        step = self._step_of.pop(node.address)
        self._reopened.discard(node.address)
        if node.stage == "update_policy":
            self._updated = max(self._updated, node.address.step + 1)
        if node.stage in ("generate", "evaluate", "canary"):
            readers = self._readers.get(node.version, set())
            readers.discard(node.address)
            if not readers:
                self._readers.pop(node.version, None)
                self._on_unread(node.version)
        self._left[step].discard(node.address)
        if not self._left[step]:
            del self._left[step]
            nodes = self._open.pop(step)
            self._dispatch.retire([n.address for n in nodes])
            self._on_step(step, nodes)

    @property
    def finished(self) -> bool:
        return self._next == self._spec.steps and not self._open

    @property
    def readers(self) -> dict[int, tuple[Address, ...]]:
        """By version that somebody still has to read: who."""
        return {version: tuple(sorted(left)) for version, left in sorted(self._readers.items())}

    @property
    def steps_done(self) -> int:
        """Steps whose policy update is done."""
        return self._updated

    def _is_committed(self, node: Node) -> bool:
        if not self._has_commit(node.address):
            return False
        if node.stage != "publish" or node.version in self._published:
            return True
        # Published weights live in memory: if they are lost and somebody still has to read them, publish runs again.
        return all(map(self._has_commit, weight_readers(self._spec, node.version)))

    def _has_commit(self, address: Address) -> bool:
        """Whether an earlier attempt at this run left an output there."""
        return address.step < self._first or address in self._committed
