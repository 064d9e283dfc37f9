"""Reading a Hugging Face directory, and the random tiny model, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.models.hf_files import file_digests, read_tokenizer
from stages.models.hf_weights import read_weights
from stages.models.spec import RANDOM_8B, RANDOM_TINY, read_config, read_eos_ids


def test_random_tiny_is_a_llama_and_always_the_same() -> None:
    model = LlamaForCausalLM(LlamaConfig(**read_config(RANDOM_TINY)))
    loaded = model.load_state_dict(read_weights(RANDOM_TINY), strict=False)
    assert loaded.missing_keys == ["lm_head.weight"]  # tied
    assert loaded.unexpected_keys == []
    again = read_weights(RANDOM_TINY)
    assert all(torch.equal(tensor, again[name]) for name, tensor in read_weights(RANDOM_TINY).items())
    assert read_eos_ids(RANDOM_TINY) == (2,)


def test_random_tiny_is_neither_flat_nor_certain() -> None:
    """Entropy well below log 256 = 5.55 nats and well above 0, so that there is something to learn."""
    model = LlamaForCausalLM(LlamaConfig(**read_config(RANDOM_TINY)))
    model.load_state_dict(read_weights(RANDOM_TINY), strict=False)
    model.tie_weights()
    tokens = torch.randint(3, 256, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs = model(tokens).logits.log_softmax(-1)
    assert 3.5 < -(logprobs.exp() * logprobs).sum(-1).mean().item() < 5.0


@pytest.mark.parametrize("shard_size", ["50GB", "20KB"])
def test_weights_of_one_file_and_of_several(tmp_path: Path, shard_size: str) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shard_size == "20KB"
    weights, expected = read_weights(str(tmp_path)), model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert read_config(str(tmp_path))["hidden_size"] == 16


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_config(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        read_weights(str(tmp_path))


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_eos_ids(str(tmp_path)) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert read_eos_ids(str(tmp_path)) == (8, 9)


def test_byte_tokenizer() -> None:
    tokenizer = read_tokenizer(RANDOM_TINY)
    ids = tokenizer.encode("né")
    assert ids == [110, 195, 169]
    assert tokenizer.decode([*ids, 2, 0]) == "né"
    assert tokenizer.decode([*ids, 2, 0], skip_special=False) == "né\x02\x00"
    assert tokenizer.decode([195]) == "\ufffd"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(chat) == "user: hi\nassistant: "
    assert tokenizer.pad_id not in tokenizer.eos_ids


def test_tokens_beyond_bytes_are_shown_and_are_no_text() -> None:
    """A random model with a larger vocabulary samples them."""
    tokenizer = read_tokenizer(RANDOM_8B)
    assert tokenizer.vocab_size == 128256
    assert tokenizer.decode([104, 105, 256, 128255]) == "hi\ufffd\ufffd"
    tokens = tokenizer.token_bytes()
    assert (len(tokens), tokens[104], tokens[300]) == (128256, b"h", b"\xff")


def test_digests_are_of_all_that_a_model_is_read_from_and_nothing_else(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        (tmp_path / name).write_text("one")
    before = file_digests(str(tmp_path))
    assert list(before) == ["config.json", "model.safetensors", "tokenizer.json"]
    (tmp_path / "README.md").write_text("two")
    assert file_digests(str(tmp_path)) == before
    (tmp_path / "model.safetensors").write_text("two")  # as long as before
    after = file_digests(str(tmp_path))
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}
    assert file_digests(RANDOM_TINY) == {RANDOM_TINY: "built in"}


def test_digests_of_a_model_without_weights(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        file_digests(str(tmp_path))
