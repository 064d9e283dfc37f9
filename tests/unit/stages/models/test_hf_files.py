"""Reading a Hugging Face directory, and the random tiny model, against transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from stages.models.hf_files import (
    ChatTemplateError,
    FastTokenizer,
    HubTokenizer,
    PadTokenError,
    file_digests,
    plain_tokenizer,
    read_tokenizer,
    read_vocabulary,
    weight_files,
    weights_fault,
)
from stages.models.hf_weights import read_weights, write_model
from stages.models.spec import RANDOM_8B, RANDOM_TINY, read_config, read_eos_ids, read_spec
from tests.support.paths import SMOLLM2


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


@pytest.mark.parametrize("max_file_bytes", [10**9, 20_000])
def test_a_written_model_has_the_changed_tensors_and_the_others(tmp_path: Path, max_file_bytes: int) -> None:
    """In one file or several, as transformers reads them."""
    changed = {"model.norm.weight": torch.arange(64, dtype=torch.bfloat16)}
    write_model(tmp_path, RANDOM_TINY, changed, "bfloat16", max_file_bytes)
    assert (len(weight_files(str(tmp_path))) > 1) == (max_file_bytes < 10**9)
    found = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    expected = {name: tensor.bfloat16() for name, tensor in read_weights(RANDOM_TINY).items()} | changed
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_config(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        read_weights(str(tmp_path))


def test_weights_that_are_not_those_of_the_config_are_found_by_their_headers(tmp_path: Path) -> None:
    write_model(tmp_path / "m", RANDOM_TINY, {}, "bfloat16", max_file_bytes=100_000)
    spec = read_spec(RANDOM_TINY)
    assert weights_fault(str(tmp_path / "m"), spec) is None
    fault = weights_fault(str(tmp_path / "m"), replace(spec, num_layers=spec.num_layers + 1))
    assert fault is not None
    assert fault.startswith("its weights lack model.layers.4.")
    last = weight_files(str(tmp_path / "m"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    assert str(weights_fault(str(tmp_path / "m"), spec)).startswith(f"{last.name} is cut short")


def test_a_tokenizer_without_a_chat_template_says_so(tmp_path: Path) -> None:
    byte_level(tmp_path)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        read_tokenizer(str(tmp_path)).apply_chat_template([{"role": "user", "content": "a"}])
    refuses = "{{ raise_exception('no system prompts') }}"
    (tmp_path / "chat_template.jinja").write_text(refuses)
    with pytest.raises(ChatTemplateError, match="refuses these messages: no system prompts"):
        read_tokenizer(str(tmp_path)).apply_chat_template([{"role": "system", "content": "a"}])


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


TEXTS = ("", "Hello wörld, don't", "日本 \n\n  x  ", "a <|end|> b <|pad|>", "<|im_start|>user\nhi<|im_end|>")


def assert_equal_to_transformers(path: Path, *texts: str) -> None:
    ours, theirs = read_tokenizer(str(path)), AutoTokenizer.from_pretrained(path)
    assert isinstance(ours, FastTokenizer)
    hub = HubTokenizer(theirs, ours.eos_ids, ours.pad_id)
    assert (ours.pad_id, ours.vocab_size, ours.eos_ids) == (theirs.pad_token_id, len(theirs), (theirs.eos_token_id,))
    assert read_vocabulary(str(path)) == theirs.get_vocab()
    assert ours.token_bytes() == hub.token_bytes()
    for text in texts:
        ids = ours.encode(text)
        assert ids == hub.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == hub.decode(ids, skip)


def byte_level(folder: Path, special: Sequence[str] = ("<|end|>", "<|pad|>"), **config: object) -> Path:
    """A directory whose tokenizer.json alone defines its tokenizer, unless `config` or other files say otherwise."""
    backend = Tokenizer(BPE({char: n for n, char in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))
    pad = {"__type": "AddedToken", "content": "<|pad|>", "special": True}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": pad}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.mark.smollm2
def test_the_demo_s_tokenizer_is_that_of_transformers() -> None:
    assert_equal_to_transformers(SMOLLM2, *TEXTS)
    messages = [{"role": "user", "content": "hi"}]
    theirs = AutoTokenizer.from_pretrained(SMOLLM2)
    asked = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert read_tokenizer(str(SMOLLM2)).apply_chat_template(messages) == asked


def test_a_tokenizer_of_its_file_alone_is_that_of_transformers(tmp_path: Path) -> None:
    assert_equal_to_transformers(byte_level(tmp_path), *TEXTS)


def test_a_model_whose_responses_cannot_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no token that ends a response: set eos_token_id in"):
        read_tokenizer(str(byte_level(tmp_path, eos_token=None)))


@pytest.mark.parametrize(
    ("config", "file", "content"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, None, None),
        ({"add_bos_token": True, "bos_token": "<|end|>"}, None, None),
        ({"unk_token": "<|unk|>"}, None, None),  # transformers adds it
        ({"added_tokens_decoder": {"300": {"content": "<|new|>", "special": False}}}, None, None),
        ({}, "special_tokens_map.json", {"pad_token": "<|end|>"}),
        ({}, "added_tokens.json", {"<|new|>": 258}),
        ({}, "config.json", {"model_type": "qwen2"}),
    ],
)
def test_what_transformers_may_change_is_left_to_it(
    tmp_path: Path, config: dict[str, object], file: str | None, content: object
) -> None:
    folder = byte_level(tmp_path, **config)
    if file is not None:
        (folder / file).write_text(json.dumps(content))
    assert plain_tokenizer(str(folder)) is None


@pytest.mark.parametrize("own", [None, "<|end|>"])  # none (Llama 3), or the EOS (Qwen)
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("special", "chosen"),
    [
        ("<|end|> <|tool|> <|reserved_1|> <|reserved_0|> <|right_pad_id|>", "<|right_pad_id|>"),
        ("<|end|> <|tool|> <|reserved_1|> <|reserved_0|>", "<|reserved_1|>"),  # the lowest id
        ("<|end|> <|begin|> <|user|> <|tool|>", "<|tool|>"),  # the others have a role, or are in the chat template
        ("<|end|> <|begin|> <|user|>", None),
    ],
)
def test_a_missing_pad_token_is_an_unused_special_one(
    tmp_path: Path, own: str | None, plain: bool, special: str, chosen: str | None
) -> None:
    changes = {} if plain else {"add_prefix_space": False}
    begin = "<|begin|>" if "<|begin|>" in special else None
    template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    named = {"pad_token": own, "bos_token": begin, "chat_template": template, **changes}
    path = str(byte_level(tmp_path, special.split(), **named))
    assert (plain_tokenizer(path) is not None) == plain
    if chosen is None:
        with pytest.raises(PadTokenError):
            _ = read_tokenizer(path).pad_id
    else:
        assert read_tokenizer(path).pad_id == 256 + special.split().index(chosen)


def test_a_pad_token_may_be_named(tmp_path: Path) -> None:
    path = str(byte_level(tmp_path))
    encoded = read_tokenizer(path).encode("h")
    assert read_tokenizer(path).pad_id == 257
    assert [read_tokenizer(path, "h").pad_id] == encoded
    for wrong in ("<|end|>", "<|gone|>"):
        with pytest.raises(PadTokenError):
            read_tokenizer(path, wrong)


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
