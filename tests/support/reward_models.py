"""Small reward models in Hugging Face layout, written by the trainer's own exporter."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from stages.models.config import LayoutConfig, ModelConfig
from stages.models.hf_files import ByteTokenizer
from stages.models.protocol import ALONE, Rank
from stages.models.reward_model import RewardModel
from stages.rewards.learned import ModelReward
from stages.rewards.protocol import Sample


def export_reward_model(directory: Path, *, source: str = "random:tiny", seed: int = 5, bias: float = 0.25) -> str:
    """The model of `source` with a head drawn with the seed; returns its path."""
    host = RewardModel(ModelConfig(path=source), LayoutConfig(), Rank(0, 1, ALONE, 1), seed=seed, total_steps=1)
    try:
        host.shift(bias)
        host.export(directory)
    finally:
        host.close()
    return str(directory)


def assert_scores_are_the_trainings(run: Path, pairs: Path) -> None:
    """The exported model, as a reward, gives the held-out rows of its training the scores that this left. `pairs`: the
    file that it was trained on; a token is a byte."""
    of_text = {pair[side]: pair["prompt"] for pair in map(json.loads, pairs.open()) for side in ("chosen", "rejected")}
    rows = [json.loads(line) for line in (run / "held_out.jsonl").read_text().splitlines()]
    encode = ByteTokenizer().encode
    samples = [
        Sample("", "", prompt_ids=tuple(encode(of_text[row["text"]])), response_ids=tuple(encode(row["text"])))
        for row in rows
    ]
    reward = ModelReward(str(run / "model"))
    try:
        np.testing.assert_allclose(reward(samples), [row["score"] for row in rows], atol=1e-5)
    finally:
        reward.close()


def change_config(directory: str | Path, **changes: object) -> None:
    """Change entries of an exported model's config.json; None removes an entry. The export's checksums are removed, on
    purpose."""
    (Path(directory) / "export.json").unlink(missing_ok=True)
    file = Path(directory) / "config.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
