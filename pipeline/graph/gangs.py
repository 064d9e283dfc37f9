"""Groups of worker processes as the graph's floor sees them: which roles they have, and how they take work.

May import stages.models.protocol and the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from stages.models.protocol import MODEL_ROLES, Role


class Mode(StrEnum):
    ORDERED = "ordered"
    SLOT = "slot"
    FREE = "free"


@dataclass(frozen=True)
class Gang:
    """One gang as dispatch sees it."""

    name: str
    roles: frozenset[Role]
    workers: int
    """Ranks of an ordered gang, replicas of a pool."""
    slots: int = 1
    """Shards a replica of a pool works on at once."""

    @property
    def ordered(self) -> bool:
        """Whether it holds a trained or a reference model: then its ranks act together."""
        return bool(self.roles & MODEL_ROLES)

    @property
    def threads(self) -> int:
        """Nodes that one of its workers runs at once: one in an ordered gang; a replica's slots, and one more where it
        also scores."""
        if self.ordered:
            return 1
        return self.slots + (1 if Role.GENERATE in self.roles and self.roles != {Role.GENERATE} else 0)

    def mode(self, role: Role) -> Mode:
        if self.ordered:
            return Mode.ORDERED
        return Mode.SLOT if role is Role.GENERATE else Mode.FREE


def gangs_of(roles: Mapping[Role, str], workers: Mapping[str, int], slots: Mapping[str, int]) -> list[Gang]:
    """The gangs that a placement describes: `roles` maps each role to a gang's name."""
    names = sorted(set(roles.values()))
    return [
        Gang(name, frozenset(r for r, g in roles.items() if g == name), workers[name], slots[name]) for name in names
    ]
