"""Settings of prompts, of human judgements and of storage, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Literal

from storage.problems import Problem, above, at_least, between, bucket_url, setting, unread_problems


@dataclass
class PromptsConfig:
    """The source of the prompts. A seeded permutation of the whole source decides which rows are held out for
    evaluation. Held-out rows are never trained on."""

    url: str = "???"
    """fsspec URL or path of a .jsonl, .csv, .parquet, .tsv or .txt file; or `reasoning-gym:TASK?size=..&seed=..`."""
    format: Literal["plain", "chat"] = "plain"
    """plain: the field holds a text. chat: it holds a list of {role, content} messages, to which the chat template is
    applied."""
    field: str = "prompt"
    """Field (JSONL, CSV, Parquet) or 0-based column number (TSV) that holds the prompt. With the default value, each
    line of a .txt file is a prompt."""
    opening_tokens: int | None = setting(None, at_least(1))
    """Number of tokens that are taken from the start of each text as the prompt; shorter texts are skipped. null: the
    whole text is the prompt."""
    max_tokens: int = setting(64, at_least(1))
    """Maximum number of tokens of a prompt. A longer prompt is refused (`too_long: error`) or left out (`skip`)."""
    too_long: Literal["error", "skip"] = "error"
    """Treatment of a prompt that is longer than `max_tokens`."""
    held_out: int | None = setting(None, at_least(0))
    """Number of prompts set aside for evaluation; null: the smaller of 64 and a tenth of all prompts, rounded down to a
    multiple of `evaluate.shards`, but at least 2 and at least `evaluate.shards`. No prompt is set aside if evaluations
    have a source of their own (`evaluate.prompts.url`)."""


def prompts_problems(config: PromptsConfig) -> Iterator[Problem]:
    """Yield the problems of section `prompts` that do not depend on other sections."""
    if config.opening_tokens is not None and config.opening_tokens > config.max_tokens:
        need = f"must be at most prompts.max_tokens = {config.max_tokens}"
        yield Problem("prompts.opening_tokens", config.opening_tokens, need)


@dataclass
class EvaluationPromptsConfig:
    """A source of prompts for evaluations alone. All of its prompts (up to `max`) are evaluated, and all prompts of
    `prompts.url` are trained on. `prompts.opening_tokens`, `prompts.max_tokens` and `prompts.too_long` apply to this
    source, too."""

    url: str | None = None
    """Source, as `prompts.url`; null: the evaluated prompts are held out of `prompts.url`."""
    format: Literal["plain", "chat"] | None = None
    """Format, as `prompts.format`; null: the value of `prompts.format`."""
    field: str | None = None
    """Field or column that holds the prompt, written like `prompts.field`. null: the value of `prompts.field`; but in a
    .txt file, each line is a prompt."""
    max: int | None = setting(None, at_least(2, ": an evaluation reports a spread"))
    """Maximum number of prompts, from the start of the source; null: all."""

    def source(self, training: PromptsConfig) -> PromptsConfig | None:
        """Return the settings by which this source is read, or None if `url` is null. `training`: the section
        `prompts`, whose values replace nulls."""
        if self.url is None:
            return None
        return replace(
            training,
            url=self.url,
            format=self.format or training.format,
            field=self.field or ("prompt" if PurePosixPath(self.url).suffix == ".txt" else training.field),
            held_out=0,
        )


def evaluation_prompts_problems(config: EvaluationPromptsConfig) -> Iterator[Problem]:
    """Yield the problems of section `evaluate.prompts` that do not depend on other sections."""
    if config.url is None:
        why = "nothing is read without evaluate.prompts.url: give it"
        yield from unread_problems("evaluate.prompts", config, why)


BUCKETS = ("s3", "gs", "s3a", "gcs")
"""Protocols of the object stores that can do in one step: check that an object does not exist, and create it."""

RETRY_S = 60.0
"""Seconds for which a store retries transient errors of the filesystem (a stale handle, a time-out), or waits for a
commit that must exist. A full disk or a missing permission is an error at once."""


@dataclass(frozen=True)
class Durability:
    """How a store writes and reads: whether it syncs, how long it retries, and how long it waits for commits."""

    fsync: bool = True
    retry_s: float = RETRY_S
    """Seconds for which transient errors are retried."""
    unseen_s: float = 0.0
    """Seconds to wait for commits that exist, but that this host may not see yet."""


@dataclass
class KeepConfig:
    """Output that a run keeps although no later node needs it. In each setting, null keeps everything. Commit records,
    evaluations, attempts and archived files always stay."""

    rollouts: int | None = setting(None, at_least(1))
    """Number of last steps whose arrays stay. Arrays of earlier steps stay, too, while a recovery may need them."""
    exports: int | None = setting(None, at_least(1))
    """Number of newest exported versions (in Hugging Face layout) that stay."""


@dataclass
class StorageConfig:
    """Settings for writing and reading commits, rollouts and checkpoints."""

    url: str | None = setting(None, bucket_url(*BUCKETS))
    """Object store of this run's commits, arrays, checkpoints and exports: a URL with a prefix of its own, such as
    `s3://bucket/runs/${name}`. null: all of these are in the run's directory."""
    fsync: bool = True
    """Sync files to the disk before they are committed. Without syncs a killed process still loses nothing, but a power
    cut may leave files that differ from what was committed (detected when they are read)."""
    keep: KeepConfig = field(default_factory=KeepConfig)

    def durability(self, *, unseen: bool = False) -> Durability:
        """Return the settings by which a store writes and reads. `unseen`: True for a process that is told which
        outputs are committed, such as a worker. A network filesystem may show such a commit to this host late, so the
        store waits for it, up to `RETRY_S` seconds."""
        return Durability(self.fsync, unseen_s=RETRY_S if unseen else 0.0)


# ---- preferences config ----------------------------------------------------------------------------------


@dataclass
class PreferencesConfig:
    """The source of the judgements, and how they are split into parts. Each prompt (for ratings: each text) is in one
    part only."""

    kind: Literal["pairs", "ratings"] = "pairs"
    """pairs: each row has a prompt, a chosen and a rejected response; ratings: each row has a text and its rating, and
    texts with sufficiently different ratings make pairs."""
    url: str = "???"
    """fsspec URL or path of a .jsonl, .csv, .parquet or .tsv/.txt file."""
    held_out_url: str | None = None
    """A separate file with the held-out rows; null: a share (`held_out`) of the prompts or texts of `url` is held
    out."""
    format: Literal["plain", "chat"] = "plain"
    """For pairs. plain: prompt and responses are texts. chat: the prompt is a list of {role, content} messages, and
    each response is a text or a list with one message of the assistant."""
    prompt: str = "prompt"
    """For pairs: field of the prompt, a name (JSONL, CSV, Parquet) or a 0-based column number (TSV)."""
    chosen: str = "chosen"
    """For pairs: field of the chosen response."""
    rejected: str = "rejected"
    """For pairs: field of the rejected response."""
    text: str = "text"
    """For ratings: field of the text."""
    rating: str = "rating"
    """For ratings: field of the rating."""
    spread: str | None = None
    """For ratings: the field with the standard deviation among the raters of a text; null: not known."""
    raters: str | None = None
    """For ratings: the field with the number of raters."""
    min_gap: float = setting(1.0, above(0, ": of equal ratings none is the better"))
    """For ratings: smallest difference between the two ratings of a pair. It is above 0, because a pair needs a better
    and a worse text."""
    group_texts: int = setting(16, at_least(2, ": a text is compared with others"))
    """For ratings: number of texts in a group. Groups are drawn anew for every epoch, and the texts of a group are
    compared with one another."""
    validation: float = setting(0.1, between(0, 1, " (0.1 is usual)", ends=False))
    """Share of the prompts (for ratings: of the texts) in the validation set. Training keeps the state of the model
    that is the best on this set."""
    held_out: float = 0.2
    """Share of the prompts (for ratings: texts) that are held out. Only the final figures are computed from them."""
    held_out_pairs: int = setting(20000, at_least(1))
    """For ratings: maximum number of pairs that are drawn from the held-out texts. The same maximum applies to the
    validation texts."""
    max_tokens: int = setting(512, at_least(3, ": a prompt, a response and its end"))
    """Maximum number of tokens of a row: prompt, response and end."""
    too_long: Literal["error", "skip"] = "error"
    """Treatment of a row that is longer than `max_tokens`. error: the row is refused. skip: its pair is left out."""


_OF_PAIRS = ("prompt", "chosen", "rejected")
_OF_RATINGS = ("text", "rating", "spread", "raters", "min_gap", "group_texts", "held_out_pairs")


def preferences_problems(config: PreferencesConfig) -> Iterator[Problem]:
    """Yield the problems of section `data` that do not depend on other sections."""
    other, names = ("ratings", _OF_RATINGS) if config.kind == "pairs" else ("pairs", _OF_PAIRS)
    yield from unread_problems("data", config, f"only data.kind={other} reads it (given {config.kind})", names)
    if config.held_out_url is not None:
        why = "data.held_out_url has the held-out rows: leave that out"
        yield from unread_problems("data", config, why, ("held_out",))
    if config.held_out_url is None:
        yield from between(0, 1, " (0.2 is usual)", ends=False).problems({"data.held_out": config.held_out})
        if config.validation < 1 and config.held_out < 1 <= config.validation + config.held_out:
            need = f"with data.validation = {config.validation} nothing is left"
            yield Problem("data.held_out", config.held_out, need)
    if config.kind == "ratings" and config.format == "chat":
        yield Problem("data.format", config.format, "ratings belong to plain texts: plain")
    if (config.spread is None) != (config.raters is None):
        missing = "data.raters" if config.raters is None else "data.spread"
        yield Problem(missing, None, "the noise of a rating needs data.spread and data.raters: give both, or neither")


@dataclass(frozen=True)
class Layout:
    """Shape of the arrays of a Zarr group: num_shards × rows_per_shard rows of seq tokens. A record has the rows of one
    shard or of all shards."""

    num_shards: int
    rows_per_shard: int
    seq: int

    @property
    def num_rows(self) -> int:
        return self.num_shards * self.rows_per_shard


@dataclass(frozen=True)
class Layouts:
    """The layouts of the Zarr groups: `step` for the groups of steps, and `evaluate` for the groups of evaluations.
    `evaluate` is None if the run has no evaluations."""

    step: Layout
    evaluate: Layout | None = None
