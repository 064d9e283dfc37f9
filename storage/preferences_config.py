"""Settings of human judgements that a reward model learns from, and what of them cannot work.

May import the standard library and storage.problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from storage.problems import Problem, above, at_least


@dataclass
class PreferencesConfig:
    """Where judgements come from, and how they are split. A prompt (of ratings: a text) is in one part alone."""

    kind: Literal["pairs", "ratings"] = "pairs"
    """pairs: a prompt, a chosen and a rejected response in each row; ratings: a text and its rating, of which texts
    whose ratings differ enough make pairs."""
    url: str = "???"
    """fsspec URL or path of a .jsonl, .csv, .parquet or .tsv/.txt file."""
    held_out_url: str | None = None
    """A file of its own whose rows are held out; null: a share of `url`'s."""
    format: Literal["plain", "chat"] = "plain"
    """Of pairs: the prompt is a text, or a list of {role, content} messages; responses are texts, or, in a chat, lists
    of one message of the assistant."""
    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    """Fields of pairs: names (JSONL, CSV, Parquet) or 0-based column numbers (TSV)."""
    text: str = "text"
    rating: str = "rating"
    """Fields of ratings."""
    spread: str | None = None
    """Of ratings: the field with the standard deviation of the people who rated a text; null: not known."""
    raters: str | None = None
    """Of ratings: the field with their number."""
    min_gap: float = 1.0
    """Of ratings: a pair's ratings differ by this much or more."""
    group_texts: int = 16
    """Of ratings: so many texts, drawn anew for every epoch, are compared with one another."""
    validation: float = 0.1
    """Share of the prompts (texts) that the best state is chosen by."""
    held_out: float = 0.2
    """Share that nothing is chosen by and only the final figures are measured on."""
    held_out_pairs: int = 20000
    """Of ratings: pairs that are drawn, at most, of all that the held-out texts (or those for validation) make."""
    max_tokens: int = 512
    """Longest row, prompt, response and end; a longer one is refused (`too_long: error`) or its pair left out."""
    too_long: Literal["error", "skip"] = "error"


def preferences_problems(config: PreferencesConfig) -> Iterator[Problem]:
    """What of the section `data` cannot work by itself."""
    counts = {"data.held_out_pairs": config.held_out_pairs}
    yield from at_least(1, counts)
    yield from at_least(2, {"data.group_texts": config.group_texts}, ": a text is compared with others")
    yield from at_least(3, {"data.max_tokens": config.max_tokens}, ": a prompt, a response and its end")
    yield from above(0, {"data.min_gap": config.min_gap}, ": of equal ratings none is the better")
    shares = {"data.validation": config.validation}
    if config.held_out_url is None:
        shares["data.held_out"] = config.held_out
    for key, share in shares.items():
        if not 0 < share < 1:
            yield Problem(key, share, "must be a share, above 0 and below 1 (0.1 is usual)")
    if all(0 < share < 1 for share in shares.values()) and sum(shares.values()) >= 1:
        yield Problem("data.held_out", config.held_out, f"with data.validation = {config.validation} nothing is left")
    if config.kind == "ratings" and config.format == "chat":
        yield Problem("data.format", config.format, "ratings are of texts: plain")
    if (config.spread is None) != (config.raters is None):
        missing = "data.raters" if config.raters is None else "data.spread"
        yield Problem(missing, None, "the noise of a rating takes both spread and raters, or name neither")
