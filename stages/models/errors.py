"""What can be wrong with resident models. Standard library only."""

from __future__ import annotations


class StateError(RuntimeError):
    """The resident model is not the one the call needs: another version, dirty, closed, not placed here, or saved in
    another layout. Nothing was changed; the message names the role and both versions."""


class NonFiniteGradientsError(RuntimeError):
    """Too many optimizer steps in a row had a gradient that is not finite. The message names the step, the minibatch,
    its rows, and what was not finite."""
