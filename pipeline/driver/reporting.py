"""A run's report: its directory opened for `pipeline/observe/report`, and the file written. Loads no Dask.

    config.yaml, identity.json ──► settings, what tells whether runs can be compared ─┐
    ledger, store, events.jsonl ──────────────────────────────────────────────────────┴──► RunSource ──► report.html

May import pipeline.config, pipeline.observe and below.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.changes import sections, settings
from pipeline.config.identity import Identity, read_identity
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.observe.history import History
from pipeline.observe.journal import journal_exists, read_events
from pipeline.observe.report.page import report
from pipeline.observe.report.source import RunSource, Sameness
from pipeline.observe.summary import Summary
from storage.errors import StoreError
from storage.vocabulary import Decode

_SAMPLING = ("sampling.", "evaluate.temperature", "seed")
_TOKENIZER = ("token", "vocab", "merges")


def write_report(sources: Sequence[RunSource], file: Path) -> Path:
    """One HTML file of one run or of several, in place of what is there; returns it. Raises OSError."""
    staged = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        staged.write_bytes(report(sources))
        staged.replace(file)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    return file


def report_source(config: RunConfig, history: History, summary: Summary) -> RunSource:
    """A run's directory as its report reads it."""
    paths, remarks = RunPaths(config.run_dir), []
    tokenizers = importlib.import_module("stages.models.hf_files")  # torch and transformers take seconds to import
    try:
        decode: Decode = partial(tokenizers.read_tokenizer(config.model.path).decode, skip_special=False)
    except (OSError, ValueError) as error:
        decode = _as_numbers
        reason = str(error).splitlines()[0]
        remarks.append(f"the tokenizer of {config.model.path} cannot be read ({reason}): tokens are shown as numbers")
    try:
        identity = read_identity(paths.root)
    except StoreError as error:
        identity = None
        remarks.append(str(error))
    return RunSource(
        name=config.name,
        directory=str(paths.root.resolve()),
        settings=settings(sections(config)),
        history=history,
        summary=summary,
        events=list(read_events(paths.events)) if journal_exists(paths.events) else [],
        decode=decode,
        sameness=_sameness(config, identity),
        software=identity.latest.software if identity is not None else {},
        remarks=tuple(remarks),
    )


def _sameness(config: RunConfig, identity: Identity | None) -> Sameness:
    """By what was stated when the run began; without that by where the models are."""
    models: Mapping[str, Mapping[str, str]] = identity.models if identity is not None else {}
    flat, whole = settings(sections(config)), sections(config)
    policy = models.get("policy", {"path": config.model.path})
    reference = models.get("reference", {"path": config.model.reference_path or config.model.path})
    tokenizer = {name: digest for name, digest in policy.items() if any(part in name for part in _TOKENIZER)}
    key, _ = config.held_out_reward
    learned = {name: digests for name, digests in models.items() if "." in name}
    sampling = {name: value for name, value in flat.items() if name.startswith(_SAMPLING)}
    return Sameness(
        model=_text(policy),
        tokenizer=_text(tokenizer or policy),
        reference=_text(reference),
        reward=_text([_scored_by(whole["reward"]), learned]),
        held_out_reward=_text(
            [_scored_by(whole["evaluate"]["reward"] if key != "reward" else whole["reward"]), learned]
        ),
        held_out_sampling=_text(sampling),
    )


def _scored_by(section: Mapping[str, Any]) -> dict[str, Any]:
    """Of a reward's settings those that decide scores; not what is made of them before they are learnt from."""
    return {key: section.get(key) for key in ("kind", "args", "parts")}


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _as_numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens)) + " " if tokens else ""
