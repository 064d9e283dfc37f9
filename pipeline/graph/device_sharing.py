"""Decide which gang holds devices that several gangs share (`placement.device_sharing`). No clock, no I/O, no Dask.

    generate holds them ──it has no node left to run, train has a ready one──► handover: generate's workers free them
           ▲                                                                       │ all workers have freed them
           └── handover ◄──train has no node left to run, generate has a ready one── train holds them

A gang keeps the devices as long as it can do anything, because a handover costs seconds. So the generating gang
samples as far ahead as the staleness bound allows, and then the training gang trains on all those rows. Under
`rollout.versions: exact` the graph alone says which weights sample which rows, so the run computes the same numbers as
on separate devices.

There is no deadlock: the holder hands the devices over as soon as it has no ready node and another gang has one. So it
never keeps the devices while it waits for a node that another gang must run on them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pipeline.graph.graph import Node


@dataclass(frozen=True)
class Handover:
    """An instruction: the workers of `giver` free the devices, then `taker` holds them."""

    giver: str
    taker: str


@dataclass(eq=False)
class _Group:
    gangs: tuple[str, ...]
    holder: str | None = None
    """Gang that holds the devices. None until a gang of the group has a ready node."""
    handover: Handover | None = None


class DeviceSharing:
    """Owns the state of each group of gangs that share devices."""

    def __init__(self, groups: Collection[Collection[str]]) -> None:
        self._groups = [_Group(tuple(gangs)) for gangs in groups]
        self._group_of = {gang: group for group in self._groups for gang in group.gangs}

    def may_use_devices(self, gang: str) -> bool:
        """Return True if the gang shares its devices with no other gang, or holds the shared devices and is not about
        to hand them over."""
        group = self._group_of.get(gang)
        return group is None or (group.holder == gang and group.handover is None)

    def shares_devices(self, gang: str) -> bool:
        """Return True if the gang shares its devices with others."""
        return gang in self._group_of

    def holder(self, gang: str) -> str | None:
        """Return the gang that holds the shared devices for which `gang` must wait. It is `gang` itself while it hands
        them over. Return None if `gang` may use its devices now, or if no gang holds them yet."""
        return None if self.may_use_devices(gang) else self._group_of[gang].holder

    def assign_free_devices(self, first_ready: Callable[[str], Node | None]) -> None:
        """Assign the shared devices that no gang holds yet. If such devices belong to a group of gangs, they go to the
        gang of this group that has the most urgent ready node. They stay free if no node of the group is ready."""
        for group in self._groups:
            if group.holder is None:
                group.holder = _most_urgent(group.gangs, first_ready)

    def next_handovers(
        self, is_busy: Callable[[str], bool], first_ready: Callable[[str], Node | None]
    ) -> list[Handover]:
        """Return the handovers that begin now. A handover begins if nothing is handed out to the holder of the devices,
        the holder has no ready node, and another gang of its group has a ready node.

        Args:
            is_busy: returns True if anything is handed out to a gang.
            first_ready: returns a gang's most urgent node that waits only for a worker.
        """
        handovers = []
        for group in self._groups:
            holder = group.holder
            if holder is None or group.handover is not None or is_busy(holder) or first_ready(holder) is not None:
                continue
            taker = _most_urgent([gang for gang in group.gangs if gang != holder], first_ready)
            if taker is not None:
                group.handover = Handover(holder, taker)
                handovers.append(group.handover)
        return handovers

    def on_handed_over(self, giver: str) -> None:
        """Record that all workers of the gang `giver` have freed the devices. From now on the taker holds them."""
        group = self._group_of[giver]
        assert group.handover is not None, f"{giver} was not to leave its devices"
        assert group.handover.giver == giver, f"{group.handover.giver} was to leave its devices, not {giver}"
        group.holder, group.handover = group.handover.taker, None


def _most_urgent(gangs: Collection[str], first_ready: Callable[[str], Node | None]) -> str | None:
    ready = [(node, gang) for gang in gangs if (node := first_ready(gang)) is not None]
    return min(ready)[1] if ready else None
