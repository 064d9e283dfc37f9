"""A small config and its prompts, for tests that look at both without running anything."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

CONFIG = """
name: small
model: {path: "random:tiny"}
prompts: {max_tokens: 8, held_out: 2}
rollout: {rows: 8, shards: 2}
sampling: {max_new_tokens: 8}
reward: {kind: characters, args: {characters: aeiou}}
tracking: {uri: null}
placement:
  gangs: {all: {}}
  roles: {generate: all, score: all, reference: all, policy: all, critic: all}
"""


SCORES_APART = (
    "placement.gangs.score={}",
    "placement.roles={generate: all, score: score, reference: all, policy: all, critic: all}",
)
"""A gang of its own for what scores: models in it are counted there."""


def arguments(folder: Path) -> list[str]:
    """Return the arguments of `stageline run`, with the files that `write_config` writes."""
    return [str(folder / "c.yaml"), f"runs_dir={folder}/runs", f"prompts.url={folder}/prompts.jsonl"]


def write_config(folder: Path) -> None:
    """Into c.yaml, beside prompts.jsonl with six prompts of 6 tokens."""
    (folder / "c.yaml").write_text(CONFIG)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"word {i}"}) + "\n" for i in range(6)))


def keys(config: Any, prefix: str) -> list[str]:
    """Key paths of a config's leaves."""
    found = []
    for field in fields(config):
        value = getattr(config, field.name)
        found += keys(value, f"{prefix}{field.name}.") if is_dataclass(value) else [f"{prefix}{field.name}"]
    return found
