"""Settings of prompt sources and of what is written down, and what of them cannot work.

May import the standard library and storage.problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from storage.problems import Problem, at_least


@dataclass
class PromptsConfig:
    """Where prompts come from. Rows are held out for evaluation by a seeded permutation of the whole source, so they
    are never trained on."""

    url: str = "???"
    """fsspec URL or path of a .jsonl, .csv, .parquet or .tsv/.txt file; or `reasoning-gym:TASK?size=..&seed=..`."""
    format: Literal["plain", "chat"] = "plain"
    """plain: a text field; chat: a field holding a list of {role, content} messages, put through the chat template."""
    field: str = "prompt"
    """Field (JSONL, CSV, Parquet) or 0-based column number (TSV) that holds the prompt."""
    opening_tokens: int | None = None
    """Use only the first so many tokens of the text as the prompt, and skip shorter texts; null: all of it."""
    max_tokens: int = 64
    """Longest prompt; a longer one is refused (`too_long: error`) or left out (`skip`)."""
    too_long: Literal["error", "skip"] = "error"
    held_out: int | None = None
    """Prompts set aside for evaluation; null: 64, or a tenth of all where these are fewer than 640."""


def prompts_problems(config: PromptsConfig) -> Iterator[Problem]:
    """What of the section `prompts` cannot work by itself."""
    yield from at_least(1, {"prompts.max_tokens": config.max_tokens})
    yield from at_least(0, {"prompts.held_out": config.held_out})
    if config.opening_tokens is not None and not 1 <= config.opening_tokens <= config.max_tokens:
        need = f"must be from 1 to prompts.max_tokens = {config.max_tokens}"
        yield Problem("prompts.opening_tokens", config.opening_tokens, need)


@dataclass(frozen=True)
class Durability:
    """How hard a store tries: what of `StorageConfig` it needs, and how long it waits for what must be there."""

    fsync: bool = True
    patience_s: float = 60.0
    """For errors that may pass."""
    unseen_s: float = 0.0
    """For commits that the caller knows to exist, and this host may not see yet."""


@dataclass
class KeepConfig:
    """What a run keeps of what it has written, once nothing can need it any more; null: everything. Commit records,
    evaluations, attempts and what was archived or set aside always stay."""

    rollouts: int | None = None
    """Arrays of the last so many steps; more where a recovery may need them."""
    exports: int | None = None
    """Versions in Hugging Face layout, the newest."""


@dataclass
class StorageConfig:
    """How commits, rollouts and checkpoints are written and read."""

    fsync: bool = True
    """Whether what is written is on the disk before it counts. Without, a killed process still loses nothing; a power
    cut may leave files that are not what was committed (found when they are read)."""
    patience_s: float = 60.0
    """How long an error of the filesystem that may pass (a stale handle, a time-out) is tried again, and a commit that
    must be there is waited for, before that is an error. No space, no permission: an error at once."""
    keep: KeepConfig = field(default_factory=KeepConfig)

    def durability(self, *, unseen: bool = False) -> Durability:
        """For stores. `unseen`: for a process that is only asked to read what is committed."""
        return Durability(self.fsync, self.patience_s, self.patience_s if unseen else 0.0)


def storage_problems(config: StorageConfig) -> Iterator[Problem]:
    """What of the section `storage` cannot work by itself."""
    yield from at_least(0, {"storage.patience_s": config.patience_s})
    yield from at_least(1, {"storage.keep.rollouts": config.keep.rollouts, "storage.keep.exports": config.keep.exports})
