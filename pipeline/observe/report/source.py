"""The input of a report. A `RunSource` is an opened run with the facts that are only in its config. A `VariantSource`
is a variant of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.observe.evaluations import VariantSummary
from pipeline.observe.history import History
from pipeline.observe.journal import Event
from pipeline.observe.summary import Summary
from storage.rollouts import Decode


@dataclass(frozen=True)
class Sameness:
    """Facts about a run that decide which of its numbers can be compared with the numbers of another run.

    Each fact is a text. For example, the training scores of two runs can be compared if `reward` is the same text in
    both runs."""

    model: str
    """Names and digests of the initial policy's files, or the model's path if the digests are not known."""
    tokenizer: str
    reference: str
    """Names and digests of the reference model's files, or the model's path. The KL is measured against this model."""
    reward: str
    """Settings of the reward that gives the training scores, and digests of the models and rubric files of all
    rewards."""
    held_out_reward: str
    """Settings of the reward that gives the held-out scores, and digests of the models and rubric files of all
    rewards."""
    held_out_sampling: str
    """Sampling settings of the held-out responses: temperature, lengths, seed."""


@dataclass(frozen=True)
class RunSource:
    """A run to report on. It may still be running, or it may have been killed at any time."""

    name: str
    directory: str
    settings: Mapping[str, Any]
    """Key path -> setting of the run's config."""
    history: History
    summary: Summary
    events: Sequence[Event]
    decode: Decode
    """Function from token ids to text. Special tokens are part of the text, so that the end of a response (EOS) is
    visible."""
    sameness: Sameness
    software: Mapping[str, str] = field(default_factory=dict)
    """Software package -> version with which the run was computed."""
    rebuilt_together: Collection[str] = ()
    """Names of the gangs whose workers are lost and rebuilt together."""
    user_messages: Sequence[str] | None = None
    """The last user message of each prompt. None if all prompts are plain text."""
    remarks: tuple[str, ...] = ()
    """Remarks for the reader about parts of the run that could not be read."""


@dataclass(frozen=True)
class VariantSource:
    """A finished variant of a run. It was trained on the rollouts of the parent run, so it has no rows, ledger or
    journal of its own. All numbers of the variant are in its summary."""

    name: str
    directory: str
    settings: Mapping[str, Any]
    """Key path -> setting in the config of the variant: the parent run's config with some changes."""
    summary: VariantSummary
    sameness: Sameness
    """Facts that decide with which runs the numbers of this variant can be compared: models, rewards and sampling
    settings. They are copied from the parent run."""


Source = RunSource | VariantSource
