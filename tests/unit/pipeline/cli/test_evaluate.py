"""`stageline evaluate MODEL`: transformers' logits, the engines' draw, the stage's scores."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.cli.evaluate import evaluate_model, evaluation_config
from pipeline.cli.main import main
from pipeline.config.preflight import preflight
from stages.engines.build import build_engine
from stages.generate import generate
from stages.models.hf_weights import read_weights
from stages.models.spec import RANDOM_TINY, read_config
from stages.prompts import EVALUATION_STEP, held_out_prompts
from tests.support.configs import arguments, write_config
from tests.support.reward_models import change_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The random tiny model as transformers writes it, without a tokenizer."""
    path = tmp_path_factory.mktemp("hf") / "tiny"
    llama = LlamaForCausalLM(LlamaConfig(**read_config(RANDOM_TINY)))
    llama.load_state_dict(read_weights(RANDOM_TINY), strict=False)  # the output layer is tied
    llama.save_pretrained(path)
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path)
    return tmp_path


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_the_responses_are_those_of_the_engine(folder: Path, model: str, temperature: float) -> None:
    """Prompts of several lengths in batches of 2; tokens that are never sampled, and no EOS at first."""
    texts = ("a", "word one", "what", "three", "w 5")
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    changes = (
        f"evaluate.temperature={temperature}", "sampling.min_new_tokens=3", "sampling.suppress_token_ids=[32,101]",
        "prompts.held_out=4", "engine.max_rows=2", "engine.embedded.kernels=torch", "seed=3",
    )  # fmt: skip
    config = evaluation_config(model, None, None, [*arguments(folder), *changes])
    found = evaluate_model(model, config)
    table = preflight(config).prompts
    engine = build_engine(RANDOM_TINY, config.engine, max_seq=config.seq, threads=1)
    try:
        theirs = generate(
            engine, held_out_prompts(table, shard=0, shards=1), seed=3, step=EVALUATION_STEP, version=0,
            sampling=config.evaluation_sampling, seq=config.seq, pad_id=table.pad_id,
        )  # fmt: skip
    finally:
        engine.close()
    for name, ours in found.rollout.arrays().items():
        np.testing.assert_allclose(ours, theirs.arrays()[name], atol=1e-4 if name == "sampler_logprobs" else 0)
    vowels = [sum(chr(token) in "aeiou" for token in row[mask]) for row, mask in
              zip(theirs.tokens, theirs.response_mask, strict=True)]  # fmt: skip
    assert np.count_nonzero(found.scores.scores) == np.count_nonzero(vowels)


def test_a_file_and_a_reward_are_enough(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--prompts", f"{folder}/prompts.jsonl", "--reward", "characters", "evaluate.reward.args.characters=aeiou"]
    assert main(["evaluate", model, *given, "model.path=random:tiny", "sampling.max_new_tokens=4"]) == 0
    assert "6 prompts" in capsys.readouterr().out
    members = "evaluate.reward.args.members={a: {kind: vader}, b: {kind: missing_eos}}"
    given = ["--prompts", f"{folder}/prompts.jsonl", "--reward", "ensemble", members]
    assert main(["evaluate", model, *given, "model.path=random:tiny", "sampling.max_new_tokens=4"]) == 0


def test_a_runs_config_may_be_evaluated_on_other_prompts(folder: Path, model: str) -> None:
    (folder / "mine.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "3"}\n')
    config = evaluation_config(model, f"{folder}/mine.jsonl", None, arguments(folder))
    assert len(evaluate_model(model, config).scores.scores) == 3


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["MODEL", "--reward", "vader"], "--prompts"),
        (["MODEL", "--prompts", "PROMPTS"], "--reward"),
        (["MODEL", "--prompts", "gone.jsonl", "--reward", "vader", "model.path=random:tiny"], "evaluate.prompts.url"),
        (["MODEL", "--prompts", "PROMPTS", "--reward", "nope", "model.path=random:tiny"], "evaluate.reward.kind"),
        (["random:tiny", "--prompts", "PROMPTS", "--reward", "vader"], "MODEL"),
        (["MODEL", "--prompts", "PROMPTS", "--reward", "vader"], "model.path"),
        (["MODEL", "--prompts", "PROMPTS", "--reward", "vader", "model.path=random:tiny",
          "sampling.suppress_token_ids=[256]"], "MODEL"),
        (["gone", "--prompts", "PROMPTS", "--reward", "vader", "model.path=random:tiny"], "MODEL"),
        (["MODEL", "--prompts", "PROMPTS", "--reward", "vader", "model.path=random:tiny",
          "sampling.max_new_tokens=999"], "prompts.max_tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_refused_by_its_key(
    folder: Path, model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], key: str
) -> None:
    put = {"MODEL": model, "PROMPTS": f"{folder}/prompts.jsonl"}
    assert main(["evaluate", *(put.get(word, word) for word in arguments)]) == 2
    said = capsys.readouterr().err
    assert f"refused {key}: " in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "t5"}, "no causal language model of its kind (model_type = 't5')"),
        ({"model_type": "mamba"}, "MambaForCausalLM has no cache of keys and values"),
        ({"hidden_size": "64"}, "transformers cannot load it: Validation error for field 'hidden_size'"),
        ({"vocab_size": 64}, "its vocab_size is 64, so it has no token 119"),
        ({"hidden_size": 32}, "tensors are missing or have other shapes (model."),
        ({"num_hidden_layers": 5}, "tensors are missing or have other shapes (model.layers.4."),
        ({}, "transformers cannot load it: Error while deserializing header"),
    ],
)
def test_a_model_that_cannot_continue_the_prompts_is_refused(
    folder: Path, model: str, capsys: pytest.CaptureFixture[str], changes: dict[str, object], said: str
) -> None:
    """Without changes to config.json, the file of weights is cut short."""
    changed = shutil.copytree(model, folder / "changed")
    change_config(changed, **changes)
    if not changes:
        os.truncate(changed / "model.safetensors", 1000)
    given = ["--prompts", f"{folder}/prompts.jsonl", "--reward", "vader", "model.path=random:tiny"]
    assert main(["evaluate", str(changed), *given]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("refused MODEL: given ")
    assert said in last


def test_all_problems_of_a_command_are_reported_at_once(
    folder: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "gone", "--prompts", "gone.jsonl", "--reward", "nope"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("refused ").partition(": ")[0] for line in lines] == [
        "MODEL", "evaluate.prompts.url", "evaluate.reward.kind",
    ]  # fmt: skip
    assert main(["evaluate", "gone"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("refused ").partition(": ")[0] for line in lines] == ["--prompts", "--reward", "MODEL"]


def test_the_directory_of_a_run_is_refused_with_its_versions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "c.yaml").rename(folder / "config.yaml")
    version = folder / "weights" / "v000002"
    version.mkdir(parents=True)
    assert main(["evaluate", str(folder), f"{folder}/config.yaml", f"prompts.url={folder}/prompts.jsonl"]) == 2
    assert f"it is a run's directory: give a version, {version}" in capsys.readouterr().err


def test_only_the_model_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate"])
    assert capsys.readouterr().err.rstrip().endswith("the following arguments are required: MODEL")
