"""The input of a report: an open run, with the facts that only the config contains."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.observe.history import History
from pipeline.observe.journal import Event
from pipeline.observe.summary import Summary
from storage.rollouts import Decode


@dataclass(frozen=True)
class Sameness:
    """Facts that decide which numbers of two runs can be compared. Numbers that depend on a fact can be compared if its
    text is the same in both runs."""

    model: str
    """Files of the initial policy."""
    tokenizer: str
    reference: str
    """Files of the reference model for the KL."""
    reward: str
    """Source of the training scores."""
    held_out_reward: str
    """Source of the held-out scores."""
    held_out_sampling: str
    """Sampling of the held-out responses: temperature, lengths, seed."""


@dataclass(frozen=True)
class RunSource:
    """A run that has started. It may be running, or have died at any moment."""

    name: str
    directory: str
    settings: Mapping[str, Any]
    """Key path -> value, of its config."""
    history: History
    summary: Summary
    events: Sequence[Event]
    decode: Decode
    """Function from token ids to text, special tokens included, so that a response ends with its EOS."""
    sameness: Sameness
    software: Mapping[str, str] = field(default_factory=dict)
    """Name -> version of the software that computed the run."""
    together: Collection[str] = ()
    """Gangs whose workers are lost and built together."""
    asked: Sequence[str] | None = None
    """The last user message of each prompt; None if the prompts are plain text."""
    remarks: tuple[str, ...] = ()
    """Remarks for the reader about parts of the run that could not be read."""
