"""A smaller model in Hugging Face layout: the lowest blocks of another, with its embeddings, final norm and head.

May import safetensors and this folder.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from stages.models.hf_config import RANDOM_TINY, read_config
from stages.models.hf_files import COPIED_FILES, read_weights
from stages.models.spec import SCORE_BIAS, layer_and_part

_LAYERS, _OF_LAYERS = "num_hidden_layers", "layer_types"
"""Settings of config.json: how many blocks there are, and of some families the kind of each."""


def write_lowest_blocks(directory: Path, source: str, blocks: int) -> None:
    """Writes the model of `source` with its lowest `blocks` alone: config, weights as they are stored, tokenizer. Makes
    the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = {}
    for name, tensor in read_weights(source).items():
        layer = layer_and_part(name)
        if name != SCORE_BIAS and (layer is None or layer[0] < blocks):  # the bias is in config.json
            kept[name] = tensor.contiguous()
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    config = read_config(source) | {_LAYERS: blocks}
    if isinstance(config.get(_OF_LAYERS), list):
        config[_OF_LAYERS] = config[_OF_LAYERS][:blocks]
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COPIED_FILES if source != RANDOM_TINY else ():
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, directory / name)
