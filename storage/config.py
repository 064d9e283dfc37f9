"""Settings of prompt sources, and what of them cannot work. May import the standard library and storage.problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from storage.problems import Problem, at_least


@dataclass
class PromptsConfig:
    """Where prompts come from. Rows are held out for evaluation by a seeded permutation of the whole source, so they
    are never trained on."""

    url: str = "???"
    """fsspec URL or path of a .jsonl, .parquet or .tsv/.txt file."""
    format: Literal["plain", "chat"] = "plain"
    """plain: a text field; chat: a field holding a list of {role, content} messages, put through the chat template."""
    field: str = "prompt"
    """Field (JSONL, Parquet) or 0-based column number (TSV) that holds the prompt."""
    opening_tokens: int | None = None
    """Use only the first so many tokens of the text as the prompt, and skip shorter texts; null: all of it."""
    max_tokens: int = 64
    """Longest prompt; a longer one is refused (`too_long: error`) or left out (`skip`)."""
    too_long: Literal["error", "skip"] = "error"
    held_out: int = 64
    """Prompts set aside for evaluation."""


def prompts_problems(config: PromptsConfig) -> Iterator[Problem]:
    """What of the section `prompts` cannot work by itself."""
    yield from at_least(1, {"prompts.max_tokens": config.max_tokens})
    yield from at_least(0, {"prompts.held_out": config.held_out})
    if config.opening_tokens is not None and not 1 <= config.opening_tokens <= config.max_tokens:
        need = f"must be from 1 to prompts.max_tokens = {config.max_tokens}"
        yield Problem("prompts.opening_tokens", config.opening_tokens, need)
