"""Read and write the weights of a model directory in Hugging Face layout, without building a model. `write_model` and
`write_lowest_blocks` write whole directories, with config and tokenizer. `lease_tensors` reads a published version.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.models.hf_files import COPIED_FILES, MAX_FILE_BYTES, WEIGHTS_INDEX, weight_files
from stages.models.spec import (
    EMBEDDING,
    LM_HEAD,
    RANDOM_TINY,
    REWARD_BIAS,
    SCORE_BIAS,
    SCORE_WEIGHT,
    is_random,
    layer_and_part,
    read_config,
    read_spec,
    tensor_shapes,
)
from storage.weights import BFLOAT16, WeightLease

_RANDOM_SEED = 20_24
_TINY_LINEAR_STD = 0.1
_TINY_EMBEDDING_STD = 0.2
"""Standard deviation of the embedding. The logits then have a standard deviation of about 0.2 * sqrt(64) = 1.6, since
the final norm makes the hidden state's RMS 1."""
_LARGE_STD = 0.02
"""Standard deviation in larger random models, as in most models' initialisation."""


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Return Hugging Face name -> tensor for all tensors of a model, in their stored dtype. A tied `lm_head.weight` is
    usually not among them. A reward model also has `SCORE_BIAS`, which is read from its config.json. Raises
    FileNotFoundError, naming the missing files."""
    if is_random(path):
        return _random_weights(path)
    weights: dict[str, torch.Tensor] = {}
    for file in weight_files(path):
        weights |= load_file(file)
    if SCORE_WEIGHT in weights:
        weights[SCORE_BIAS] = torch.tensor([read_config(path).get(REWARD_BIAS, 0.0)])
    return weights


def read_some_weights(path: str, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the model's tensors with these names, in the order of the names. Names that the model lacks are left out,
    and other tensors are not read. Raises what `read_weights` raises."""
    if is_random(path):
        weights = _random_weights(path)
        return {name: weights[name] for name in names if name in weights}
    read: dict[str, torch.Tensor] = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            read |= {name: tensors.get_tensor(name) for name in set(names) & set(tensors.keys())}
    return {name: read[name] for name in names if name in read}


def first_difference(path: str, other: str, names: Collection[str], dtype: str) -> str | None:
    """Return the first of `names` whose tensor is missing or different in the model `other`, or None. Tensors are
    compared in `dtype`, since an export in bfloat16 is the rounded model. Names that the model `path` lacks are
    skipped."""
    ours, theirs = read_some_weights(path, names), read_some_weights(other, names)
    wanted = getattr(torch, dtype)
    for name, tensor in ours.items():
        their_tensor = theirs.get(name)
        if their_tensor is None or not torch.equal(tensor.to(wanted), their_tensor.to(wanted)):
            return name
    return None


def lease_tensors(lease: WeightLease) -> dict[str, Tensor]:
    """Return the tensors of a published version, without a copy. They are read-only."""
    patterns = {info.name for info in lease.manifest.tensors if info.dtype == BFLOAT16}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns that they are read-only
        tensors = {name: torch.from_numpy(array) for name, array in lease.tensors.items()}
    return {name: t.view(torch.bfloat16) if name in patterns else t for name, t in tensors.items()}


def write_model(
    directory: Path,
    source: str,
    changed: Mapping[str, torch.Tensor],
    dtype: str,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write config, weights and tokenizer of the model `source` to `directory`, which is created. `changed`: name ->
    tensor that replaces a tensor of `source`.

    All tensors are converted to `dtype`, the tensors of one file at a time. Weights of more than `max_file_bytes` are
    divided over several files, with an index. `AutoModelForCausalLM.from_pretrained` loads the directory.
    """
    weights, wanted = read_weights(source) | dict(changed), getattr(torch, dtype)
    if read_spec(source).tied_embeddings:
        weights.pop(LM_HEAD, None)
    files = split_state_dict_into_shards_factory(
        weights,
        get_storage_size=lambda tensor: tensor.numel() * wanted.itemsize,
        get_storage_id=lambda tensor: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    directory.mkdir(parents=True, exist_ok=True)
    for file, names in files.filename_to_tensors.items():
        write_tensors(directory / file, {name: weights[name].to(wanted) for name in names})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        (directory / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n")
    write_config_and_tokenizer(directory, source, read_config(source) | {"dtype": dtype})


def write_config_and_tokenizer(directory: Path, source: str, config: Mapping[str, object]) -> None:
    """Write `config` as config.json, and copy the tokenizer's files of `source`. A random model has no such files."""
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COPIED_FILES if not is_random(source) else ():
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, directory / name)


def _random_weights(path: str) -> dict[str, torch.Tensor]:
    """Return the weights of a random model in its dtype: normal numbers for linears and embeddings, 1 for norms. They
    are the same on every call."""
    generator = torch.Generator().manual_seed(_RANDOM_SEED)
    dtype = getattr(torch, str(read_config(path)["dtype"]))

    def make_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        std = _LARGE_STD if path != RANDOM_TINY else _TINY_EMBEDDING_STD if name == EMBEDDING else _TINY_LINEAR_STD
        return torch.randn(shape, generator=generator, dtype=dtype).mul_(std)

    return {name: make_tensor(name, shape) for name, shape in tensor_shapes(read_spec(path)).items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file that transformers and peft accept (its metadata names torch). The file gets the
    permissions of any new file; safetensors alone would make it readable by its owner only."""
    path.write_bytes(b"")
    mode = path.stat().st_mode
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(mode)


# ---- smaller models --------------------------------------------------------------------------------------

_LAYERS, _OF_LAYERS = "num_hidden_layers", "layer_types"
"""Keys of config.json: the number of blocks, and in some families the kind of each block."""


def write_lowest_blocks(directory: Path, source: str, blocks: int) -> None:
    """Write a model of the lowest `blocks` blocks of `source`, and of the embeddings, final norm and head of `source`.
    Create the directory. Write config, weights in their stored dtype, and tokenizer."""
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
    write_config_and_tokenizer(directory, source, config)
