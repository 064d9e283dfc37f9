"""A run as its report reads it: already open, and told what only the config knows. May import the journal, history
and summary beside this folder, and storage.vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.observe.history import History
from pipeline.observe.journal import Event
from pipeline.observe.summary import Summary
from storage.vocabulary import Decode


@dataclass(frozen=True)
class Sameness:
    """What tells whether two runs can be compared: equal texts mean the same thing."""

    model: str
    """Files of the policy that a run began with."""
    tokenizer: str
    reference: str
    """Files of the model that the KL is taken to."""
    reward: str
    """What training scores are made by."""
    held_out_reward: str
    """What held-out scores are made by."""
    held_out_sampling: str
    """How held-out responses are sampled: temperature, lengths, seed."""


@dataclass(frozen=True)
class RunSource:
    """A run that has begun; it may go on, or have died at any moment."""

    name: str
    directory: str
    settings: Mapping[str, Any]
    """Key path -> value, of its config."""
    history: History
    summary: Summary
    events: Sequence[Event]
    decode: Decode
    """Special tokens included, so that a response ends with its EOS."""
    sameness: Sameness
    software: Mapping[str, str] = field(default_factory=dict)
    """Name -> version, of what computed the run."""
    remarks: tuple[str, ...] = ()
    """What of the run could not be read, for who reads the report."""
