"""What people may see of a run while it goes on: the record behind the page, and the markers on Dask's dashboard.

    driver's thread, once a second:   look() ──► markers
                                        └── if somebody asked in the last seconds ──► GraphView
    the dashboard's loop:             await fresh() ──► asks, and waits for the next look

Only the driver's thread touches dispatch, flow, ledger and board; what crosses over is a frozen record.

May import pipeline.driver.graph_markers, pipeline.graph, pipeline.observe and storage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from pipeline.driver.graph_markers import GraphMarkers, marker_states
from pipeline.graph.dispatch import Dispatch
from pipeline.graph.flow import Flow
from pipeline.graph.gangs import Gang
from pipeline.graph.graph import GraphSpec
from pipeline.observe.graph_view import Facts, GraphView, VersionView, node_views, shown_steps
from pipeline.observe.log_files import log_names
from pipeline.observe.node_events import NodeEvents
from pipeline.observe.recorded_view import Curves, gang_views, role_gangs
from storage.address import Address
from storage.ledger import Ledger
from storage.weights import WeightBoard

_ASKED_S = 5.0
"""So long after somebody looked a record is made at each look."""
_PATIENCE_S = 3.0
"""Of a page, for the driver's next look."""
_READS = 64
"""Commits that one look reads for the curves, at most: a long run that is resumed has many."""


class RunView:
    """Owns the newest record of a run."""

    def __init__(
        self,
        facts: Facts,
        spec: GraphSpec,
        gangs: Collection[Gang],
        dispatch: Dispatch,
        flow: Flow,
        ledger: Ledger,
        board: WeightBoard | None,
        events: NodeEvents,
        markers: GraphMarkers,
        logs: Path,
    ) -> None:
        self._facts = facts
        self._logs = logs
        self._spec = spec
        self._gangs = gangs
        self._dispatch = dispatch
        self._flow = flow
        self._board = board
        self._events = events
        self._markers = markers
        self._curves = Curves(spec, ledger)
        self._sizes: dict[int, int] = {}
        self._asked = float("-inf")
        self._made = float("-inf")
        self._latest: GraphView | None = None

    def look(self) -> None:
        """Called about once a second in the driver's thread: markers follow, and whoever looks gets a new record."""
        statuses, admitted = self._dispatch.statuses(), self._flow.admitted
        self._markers.show(marker_states(self._spec, statuses, admitted))
        if time.monotonic() - self._asked > _ASKED_S:
            return
        shown = shown_steps(self._spec, statuses, admitted)
        nodes = node_views(shown, role_gangs(self._gangs), self._events, admitted)
        done = self._flow.steps_done
        self._latest = GraphView(
            facts=replace(self._facts, logs=log_names(self._logs)),
            live=True,
            driven=True,
            finished=self._flow.finished,
            at=time.time(),
            steps_done=done,
            nodes=nodes,
            gangs=gang_views(self._gangs, nodes, self._dispatch.waits(), self._dispatch.is_up),
            versions=self._versions(),
            points=self._curves.points(done, _READS),
            held_out=self._curves.held_out(done),
            notes=tuple(self._events.notes),
        )
        self._made = time.monotonic()

    async def fresh(self) -> GraphView | None:
        """The record of the driver's next look; where that does not come soon, the last one (its time says how old it
        is). None where there is none yet: the workers are only being started."""
        self._asked = asked = time.monotonic()
        while self._made < asked - 1.0 and time.monotonic() < asked + _PATIENCE_S:
            await asyncio.sleep(0.05)
        return self._latest

    def _versions(self) -> tuple[VersionView, ...]:
        """None where the weights are on other hosts only."""
        if self._board is None:
            return ()
        readers, there = self._flow.readers, self._board.available()
        self._sizes = {version: self._size(self._board, version) for version in there}
        return tuple(VersionView(version, self._sizes[version], readers.get(version, _NOBODY)) for version in there)

    def _size(self, board: WeightBoard, version: int) -> int:
        if version in self._sizes:
            return self._sizes[version]
        manifest = board.manifest(version)
        return 0 if manifest is None else manifest.num_bytes


_NOBODY: tuple[Address, ...] = ()
