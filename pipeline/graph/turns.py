"""Whose turn it is on devices that several gangs have in turn (`placement.turns`): no clock, no I/O, no Dask.

    generate has them ──it has nothing out or ready, train has──► pass: its workers leave the devices
           ▲                                                                  │ all of them have
           └── pass ◄──it has nothing out or ready, generate has── train has them

A gang keeps its turn for as long as it can do anything, since passing costs seconds: with a staleness bound it
generates as far ahead as the bound allows, and then all of it is trained on. Which weights sample what is said by the
graph alone, so a run in turns is the run that it would be on devices of its own.

A gang waits for its turn, and the one that has it for nothing that only the waiting one could do: it passes as soon as
it has nothing ready. So some gang always goes on, or nothing in the group is ready.

May import pipeline.graph.graph and the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pipeline.graph.graph import Node


@dataclass(frozen=True)
class Pass:
    """An instruction: the workers of one gang leave the devices; then it is the other's turn."""

    giver: str
    taker: str


@dataclass(eq=False)
class _Group:
    gangs: tuple[str, ...]
    holder: str | None = None
    """None until a gang has something to do."""
    passing: Pass | None = None


class Turns:
    """Owns who has the devices of each group of gangs."""

    def __init__(self, groups: Collection[Collection[str]]) -> None:
        self._groups = [_Group(tuple(gangs)) for gangs in groups]
        self._group_of = {gang: group for group in self._groups for gang in group.gangs}

    def has(self, gang: str) -> bool:
        """Whether a gang may work: it has the devices, and is not about to pass them on; or they are its own."""
        group = self._group_of.get(gang)
        return group is None or (group.holder == gang and group.passing is None)

    def shares(self, gang: str) -> bool:
        """Whether a gang has its devices in turn with others."""
        return gang in self._group_of

    def holder(self, gang: str) -> str | None:
        """Who has the devices that this gang waits for; None where it has them itself."""
        return None if self.has(gang) else self._group_of[gang].holder

    def take_free(self, first_ready: Callable[[str], Node | None]) -> None:
        """Devices that nobody has had yet go to the gang with the most urgent node that could run."""
        for group in self._groups:
            if group.holder is None:
                group.holder = _most_urgent(group.gangs, first_ready)

    def next_passes(self, at_work: Callable[[str], bool], first_ready: Callable[[str], Node | None]) -> list[Pass]:
        """Turns that end now. `at_work`: whether anything is handed out to a gang; `first_ready`: its most urgent node
        that waits for nothing but a worker."""
        found = []
        for group in self._groups:
            holder = group.holder
            if holder is None or group.passing is not None or at_work(holder) or first_ready(holder) is not None:
                continue
            taker = _most_urgent([gang for gang in group.gangs if gang != holder], first_ready)
            if taker is not None:
                group.passing = Pass(holder, taker)
                found.append(group.passing)
        return found

    def passed(self, giver: str) -> None:
        """All workers of this gang have left the devices."""
        group = self._group_of[giver]
        assert group.passing is not None, f"{giver} was not to leave its devices"
        assert group.passing.giver == giver, f"{group.passing.giver} was to leave its devices, not {giver}"
        group.holder, group.passing = group.passing.taker, None


def _most_urgent(gangs: Collection[str], first_ready: Callable[[str], Node | None]) -> str | None:
    ready = [(node, gang) for gang in gangs if (node := first_ready(gang)) is not None]
    return min(ready)[1] if ready else None
