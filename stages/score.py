"""The `score` stage: responses to one number each, by whatever reward there is.

May import numpy, storage, stages.models.hf_files (the tokenizer's protocol), stages.rewards.protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stages.models.hf_files import Tokenizer
from stages.rewards.protocol import Reward, Sample
from storage.records import FinishReason, Rollout, Scores


def score(reward: Reward, tokenizer: Tokenizer, rollout: Rollout, extras: Sequence[Mapping[str, Any]]) -> Scores:
    """Scores every row. `extras`: the prompt's own fields in its source, per row (empty mappings where it has none).

    Raises ValueError where the number of extras or scores is not that of rows, or a score is not a finite float32
    (naming the row)."""
    if len(extras) != rollout.num_rows:
        raise ValueError(f"{len(extras)} extras were given for {rollout.num_rows} rows")
    samples = []
    for i, extra in enumerate(extras):
        start = int(rollout.prompt_lengths[i])
        end = start + int(rollout.response_lengths[i])
        samples.append(
            Sample(
                prompt=tokenizer.decode(rollout.tokens[i, :start].tolist()),
                response=tokenizer.decode(rollout.tokens[i, start:end].tolist()),
                finished=int(rollout.finish_reason[i]) == FinishReason.STOP,
                extra=dict(extra),
            )
        )
    scores = np.asarray(reward(samples), np.float32)
    if scores.shape != (rollout.num_rows,):
        raise ValueError(f"the reward returned {scores.shape} scores for {rollout.num_rows} rows")
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size:
        first = int(bad[0])
        raise ValueError(f"the reward of row {int(rollout.row[first])} is {scores[first]}, not a finite number")
    return Scores(scores=scores)
