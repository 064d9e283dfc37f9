"""What makes the export of a policy whole: its model card (what it is, by which run, as the Hugging Face hub shows it),
and the sums of its files.

May import pipeline.config, stages.models.hf_config and storage.exports.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.config.run import RunConfig
from stages.models.hf_config import RANDOM_TINY
from storage.exports import write_sums

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [stageline, rlhf, ppo]
{base}---

# {name}, version {version}

Made by {version} PPO updates of the Stageline run `{name}` from `{model}`.

| | |
|---|---|
| run | `{name}`, seed {seed}, config {config_hash} |
| version | {version} of {steps} |
| reward | {reward} |
| advantage | `{advantage}` |
| KL to the reference | {kl} |
| prompts | `{prompts}` |
| responses | up to {max_new_tokens} tokens, temperature {temperature:g} |
| weights | {dtype} |

It loads with `AutoModelForCausalLM.from_pretrained`. What the reward measures is all that it was trained for; licence
and limits are those of the model that it started from.
"""


def describe_export(directory: Path, config: RunConfig, version: int, config_hash: str) -> None:
    """Writes README.md into an export whose files are there, and then the sums of them all: what makes it whole."""
    kl, base = config.ppo.kl, config.model.path
    parts = [f"{part.weight:g} · `{name}` (`{part.kind}`)" for name, (_, part) in config.reward.named("reward").items()]
    text = _CARD.format(
        base="" if base == RANDOM_TINY else f"base_model: {json.dumps(base)}\n",
        name=config.name,
        version=version,
        model=base,
        seed=config.seed,
        config_hash=config_hash,
        steps=config.steps,
        reward=" + ".join(parts),
        advantage=config.ppo.advantage,
        kl=f"coefficient {kl.coef:g} in the {kl.where}" + (f", steered to {kl.target:g} nats" if kl.target else ""),
        prompts=config.prompts.url,
        max_new_tokens=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature,
        dtype=config.model.dtype,
    )
    (directory / "README.md").write_text(text, "utf8")
    write_sums(directory)
