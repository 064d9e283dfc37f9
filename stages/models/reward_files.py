"""A reward model's directory in Hugging Face layout: it loads with `AutoModelForSequenceClassification`, whose one
logit is the score less `reward_bias` of its config.json (their heads have no bias).

May import numpy, torch, storage.exports and this folder.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stages.models.hf_config import RANDOM_TINY, REWARD_BIAS, read_config
from stages.models.hf_files import COPIED_FILES, read_tokenizer, read_weights, tensor_shape
from stages.models.spec import LM_HEAD, SCORE_BIAS, SCORE_WEIGHT, VALUE_HEAD_BIAS, VALUE_HEAD_WEIGHT, ModelSpec
from stages.models.tensor_files import write_tensors
from storage.exports import write_sums

_HEAD = 2
"""Keeps the numbers of a new head from the others that are drawn with a run's seed."""


def new_head(hidden_size: int, seed: int) -> dict[str, Tensor]:
    """A head that has learnt nothing, by its tensors' names: weight normal with standard deviation 1 / sqrt(d + 1), so
    that scores of normed states begin near 1 in size, and no bias (Stiennon et al. 2020; Huang et al. 2024)."""
    drawn = np.random.default_rng([seed, _HEAD]).standard_normal((1, hidden_size), np.float32)
    return {
        SCORE_WEIGHT: torch.from_numpy(drawn) / math.sqrt(hidden_size + 1),
        SCORE_BIAS: torch.zeros(1),
    }


def is_classifier(path: str) -> bool:
    """Whether a model's directory says that it holds a model with a head in place of the output layer."""
    return any(name.endswith("ForSequenceClassification") for name in read_config(path).get("architectures") or ())


def head_problem(path: str, spec: ModelSpec) -> str | None:
    """Why the head that a model's directory has cannot be a reward's; None where it can, or where there is none."""
    found, wanted = tensor_shape(path, SCORE_WEIGHT) if is_classifier(path) else None, (1, spec.hidden_size)
    if found is None or found == wanted:
        return None
    return f"its {SCORE_WEIGHT} is {found}, and a reward model's head is {wanted}: one score for each row"


def write_reward_model(directory: Path, source: str, trained: Mapping[str, Tensor]) -> None:
    """Writes the model of `source` with its trained tensors (their head under a critic's names) changed: config,
    weights, tokenizer, and their sums. What was not trained keeps its bits and dtype; of what was, nothing is
    rounded. Makes the directory."""
    tensors = dict(trained)
    head = {SCORE_WEIGHT: tensors.pop(VALUE_HEAD_WEIGHT), SCORE_BIAS: tensors.pop(VALUE_HEAD_BIAS)}
    weights = {name: t for name, t in read_weights(source).items() if name not in (LM_HEAD, SCORE_BIAS)}
    weights |= {name: tensor.float() for name, tensor in tensors.items()} | {SCORE_WEIGHT: head[SCORE_WEIGHT]}
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / "model.safetensors", weights)
    (directory / "config.json").write_text(json.dumps(_config(source, float(head[SCORE_BIAS])), indent=2) + "\n")
    for name in COPIED_FILES if source != RANDOM_TINY else ():
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, directory / name)
    write_sums(directory)


def _config(source: str, bias: float) -> dict[str, object]:
    config = read_config(source)
    (architecture,) = config.get("architectures") or [f"{config['model_type'].capitalize()}ForCausalLM"]
    family = architecture.partition("For")[0]
    if config.get("pad_token_id") is None:
        config["pad_token_id"] = read_tokenizer(source).pad_id  # by which transformers finds a row's last token
    return config | {
        "architectures": [f"{family}ForSequenceClassification"],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "dtype": "float32",
        REWARD_BIAS: bias,
    }
