"""Small reward models in Hugging Face layout, written by the trainer's own exporter."""

from __future__ import annotations

import json
from pathlib import Path

from stages.models.config import LayoutConfig, ModelConfig
from stages.models.protocol import ALONE, Rank
from stages.models.reward_host import RewardModel


def export_reward_model(directory: Path, *, source: str = "random:tiny", seed: int = 5, bias: float = 0.25) -> str:
    """The model of `source` with a head drawn with the seed; returns its path."""
    host = RewardModel(ModelConfig(path=source), LayoutConfig(), Rank(0, 1, ALONE, 1), seed=seed, total_steps=1)
    try:
        host.shift(bias)
        host.export(directory)
    finally:
        host.close()
    return str(directory)


def change_config(directory: str | Path, **changes: object) -> None:
    """Of what config.json of an exported model says; None takes an entry out. On purpose: the sums of the export go."""
    (Path(directory) / "export.json").unlink(missing_ok=True)
    file = Path(directory) / "config.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
