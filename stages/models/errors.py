"""What can be wrong with resident models, and with the ranks that hold them. Standard library only."""

from __future__ import annotations


class StateError(RuntimeError):
    """The resident model is not the one the call needs: another version, dirty, closed, not placed here, or saved in
    another layout. Nothing was changed; the message names the role and both versions."""


class NonFiniteGradientsError(RuntimeError):
    """Too many optimizer steps in a row had a gradient that is not finite. The message names the step, the minibatch,
    its rows, and what was not finite."""


class RanksMissing(RuntimeError):
    """Ranks of a gang have not come to a collective in time, or are gone: nothing is wrong with what was computed, but
    the gang must be built anew."""

    def __init__(self, where: str, ranks: tuple[int, ...], detail: str) -> None:
        super().__init__(where, ranks, detail)
        self.where = where
        """What the collective belonged to."""
        self.ranks = ranks
        """Who did not come, ascending."""
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.where}: {self.detail}"
