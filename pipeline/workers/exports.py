"""Write files in the background while a worker computes, and complete an exported policy.

Checkpoints are written from copies of the models, and exports from published versions, so training can go on meanwhile.
An exported policy gets a model card for the Hugging Face hub, and checksums of all its files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pipeline.config.run import RunConfig
from stages.models.spec import is_random
from storage.exports import write_sums
from storage.redaction import redacted_text


class BackgroundWriter:
    """Owns a thread that does pieces of work one after the other, in the order of submission. All ranks of a gang
    submit the same pieces in the same order, so their collectives match. At most one piece of each name is pending. The
    error of a piece that failed is raised by the next `submit` or `wait_for` of the same name, or by `wait_for_all` or
    `close`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background-writer")
        self._pending: dict[str, Future[None]] = {}

    def submit(self, name: str, work: Callable[[], None]) -> None:
        """Wait for the pending piece of this name, if there is one, then give `work` to the thread. If the pending
        piece failed, raise its error instead, and do not give `work` to the thread."""
        self.wait_for(name)
        self._pending[name] = self._thread.submit(work)

    def wait_for(self, name: str) -> None:
        """Wait until the work that was last submitted under this name is done. Return at once if there is none. Raises
        the error of the work if it failed."""
        pending = self._pending.pop(name, None)
        if pending is not None:
            pending.result()

    def wait_for_all(self) -> None:
        """Wait until all submitted work is done. If some of it failed, raise the error of the work that was submitted
        first."""
        errors = [error for future in self._pending.values() if (error := future.exception()) is not None]
        self._pending.clear()
        if errors:
            raise errors[0]

    def close(self) -> None:
        try:
            self.wait_for_all()
        finally:
            self._thread.shutdown()


# ---- model card ------------------------------------------------------------------------------------------

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

Load it with `AutoModelForCausalLM.from_pretrained`. It was trained only for what the reward measures. Licence and
limits are those of the model that it started from.
"""


def describe_export(directory: Path, config: RunConfig, version: int, config_hash: str) -> None:
    """Write README.md into a finished export, and then the checksums of all its files. An export with checksums counts
    as complete."""
    kl, base = config.ppo.kl, config.model.path
    parts = [
        f"{part.weight:g} · `{name}` (`{part.kind}`)"
        for name, (_, part) in config.reward.parts_by_name("reward").items()
    ]
    text = _CARD.format(
        base="" if is_random(base) else f"base_model: {json.dumps(base)}\n",
        name=config.name,
        version=version,
        model=base,
        seed=config.seed,
        config_hash=config_hash,
        steps=config.steps,
        reward=" + ".join(parts),
        advantage=config.ppo.advantage,
        kl=f"coefficient {kl.coef:g} in the {kl.where}" + (f", steered to {kl.target:g} nats" if kl.target else ""),
        prompts=redacted_text(config.prompts.url),
        max_new_tokens=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature,
        dtype=config.model.dtype,
    )
    (directory / "README.md").write_text(text, "utf8")
    write_sums(directory)
