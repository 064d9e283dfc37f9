"""Move a window of open steps along the run: open steps, close finished steps, release weights that nobody needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from pipeline.graph.dispatch import Dispatch
from pipeline.graph.graph import (
    GraphSpec,
    Node,
    find_lost_inputs,
    generation_versions,
    resumed_generation_version,
    resumed_weight_readers,
    step_nodes,
    step_of_node,
    weight_readers,
    window_size,
    with_missing_parents,
)
from storage.address import Address

_NONE: Mapping[Address, int] = MappingProxyType({})


class Flow:
    """Owns the window and the open steps. The window is eta + 2 steps long (eta is the staleness bound) and starts at
    the oldest step whose policy update is not done. A step opens when the window reaches it, and stays open until all
    its nodes are done. An evaluation may keep a step open while later steps end."""

    def __init__(
        self,
        spec: GraphSpec,
        dispatch: Dispatch,
        *,
        first_step: int = 0,
        committed: Iterable[Address] = (),
        published: Iterable[int] = (),
        sampled_versions: Mapping[Address, int] = _NONE,
        on_step: Callable[[int, list[Node]], None],
        on_unread: Callable[[int], None],
    ) -> None:
        """Start without open steps. The method `advance` opens the first steps.

        Args:
            first_step: first step to open. All nodes of earlier steps are done and committed.
            committed: addresses of the outputs, from `first_step` on, that an earlier driver of this run committed.
            published: versions whose weights are readable now.
            sampled_versions: address of a shard of rollouts -> version of the weights that sampled it. These shards
                have lost their commits, and committed outputs were computed from them. Each of these shards must be
                sampled again with the same version.
            on_step: called with a step and its nodes when every node of the step is done.
            on_unread: called with a version when all its readers are done.
        """
        self._spec = spec
        self._dispatch = dispatch
        self._committed = set(committed)
        self._published = set(published)
        self._on_step = on_step
        self._on_unread = on_unread
        self._open: dict[int, list[Node]] = {}
        self._num_unfinished: dict[int, int] = {}
        """Open step -> number of its nodes that are not done."""
        self._first = self._updated = self._next = first_step
        self._is_resumed = bool(first_step or self._committed or sampled_versions)
        self._reopened: set[Address] = set()
        """Addresses of nodes whose commits are lost although an update that read their outputs is committed. These
        nodes must run again, because a trainer that is restored to an older version trains from their outputs."""
        self._readers: dict[int, set[Address]] = {}
        """Version -> its readers that have no commit yet. A version is added when its publication is admitted."""
        self._awaited: set[int] = set()
        """Versions in the window that are not published yet."""
        self._made_with = sampled_versions
        self._newest = max((address.step for address in self._committed if address.stage == "publish"), default=0)
        """Newest version that had been published when this driver started."""

    def advance(self) -> None:
        """Open every step up to the end of the window, and admit its nodes to the dispatch. The window is the eta + 2
        steps (`window_size`) after the last policy update, where eta is the staleness bound."""
        while self._next < min(self._spec.steps, self._updated + window_size(self._spec)):
            step, nodes = self._next, step_nodes(self._spec, self._next)
            done: list[Node] = []
            if self._is_resumed:
                self._reopened |= find_lost_inputs(nodes, self._committed)
                nodes = [self._adapt_to_resume(with_missing_parents(node, self._reopened)) for node in nodes]
                done = [node for node in nodes if self._is_committed(node)]
            self._next += 1
            self._dispatch.admit(nodes, [node.address for node in done])
            self._open[step] = nodes
            self._num_unfinished[step] = len(nodes)
            for node in nodes:
                readers = weight_readers(self._spec, node.version) if node.stage == "publish" else []
                if readers:
                    self._readers[node.version] = {reader for reader in readers if not self._has_commit(reader)}
                    self._awaited.add(node.version)
            for node in done:
                self._update_window(node)

    def on_node_done(self, node: Node) -> None:
        """Record that a node has its commit."""
        stage = node.address.stage
        if stage == "publish":
            self._published.add(node.version)
        self._update_window(node)
        if stage == "update_policy":  # nothing else moves the window
            self.advance()

    def _update_window(self, node: Node) -> None:
        """Record a node's commit in the state of the window. A step whose nodes are all done is closed and reported
        with `on_step`. `advance` opens steps, in a loop, because a resumed run may find thousands of committed ones."""
        step = step_of_node(node)
        if self._reopened:
            self._reopened.discard(node.address)
        stage = node.address.stage
        if stage == "update_policy":
            self._updated = max(self._updated, node.address.step + 1)
        elif stage == "generate":
            for version in generation_versions(self._spec, node.address.step):
                self._remove_reader(version, node.address)
        elif stage in ("evaluate", "canary"):
            self._remove_reader(node.version, node.address)
        elif stage == "publish":
            if node.version in self._published:
                self._dispatch.on_published(node.version)
            self._awaited.discard(node.version)
            self._release_if_unread(node.version)
        self._num_unfinished[step] -= 1
        if not self._num_unfinished[step]:
            del self._num_unfinished[step]
            nodes = self._open.pop(step)
            self._dispatch.retire([n.address for n in nodes])
            self._on_step(step, nodes)

    @property
    def is_finished(self) -> bool:
        return self._next == self._spec.steps and not self._open

    @property
    def num_admitted_steps(self) -> int:
        """Number of steps that have been opened so far, finished steps included."""
        return self._next

    @property
    def readers_by_version(self) -> dict[int, tuple[Address, ...]]:
        """Version -> its readers (`weight_readers`) that have no commit yet, sorted."""
        return {version: tuple(sorted(left)) for version, left in sorted(self._readers.items())}

    @property
    def num_trained_steps(self) -> int:
        """Number of steps whose policy update is done."""
        return self._updated

    def _remove_reader(self, version: int, reader: Address) -> None:
        """Record that a node that may have read this version has committed. Readers of a version whose step was
        finished before this driver started are not counted, so it is released at once."""
        self._readers.get(version, set()).discard(reader)
        if max(version - 1, 0) < self._first:  # the step that published the version is over
            self._on_unread(version)
        else:
            self._release_if_unread(version)

    def _release_if_unread(self, version: int) -> None:
        """Release a version if it is published and its `weight_readers` are done. Unless `rollout.versions` is `exact`,
        these may have used other versions, and be done before it is published."""
        if self._readers.get(version, True) or version in self._awaited:
            return
        del self._readers[version]
        self._published.discard(version)
        self._dispatch.forget_version(version)
        self._on_unread(version)

    def _adapt_to_resume(self, node: Node) -> Node:
        """Return the node as a resumed run needs it. Only a shard of rollouts without a commit, that may use several
        versions, changes: it is sampled with the version in `sampled_versions`, so that its content is the same as
        before, or waits for the `resumed_generation_version`."""
        if node.newest_version is None or self._has_commit(node.address):
            return node
        if node.address in self._made_with:
            version = self._made_with[node.address]
            return node._replace(parents=(Address("publish", version),), version=version, newest_version=version)
        version = resumed_generation_version(self._spec, node.address.step, self._newest)
        parents = (*node.parents, Address("publish", version))
        return node._replace(parents=parents) if version > node.version else node

    def _is_committed(self, node: Node) -> bool:
        if not self._has_commit(node.address):
            return False
        if node.stage != "publish" or node.version in self._published:
            return True
        # Published weights are in memory only. If they are lost and a node still has to read them, publish runs again.
        if any(made == node.version and not self._has_commit(a) for a, made in self._made_with.items()):
            return False
        return all(map(self._has_commit, resumed_weight_readers(self._spec, node.version, self._newest)))

    def _has_commit(self, address: Address) -> bool:
        """Return True if an earlier driver of this run left an output at the address."""
        return address.step < self._first or address in self._committed
