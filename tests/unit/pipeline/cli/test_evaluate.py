"""`stageline evaluate MODEL`: transformers' logits, the engines' draw, the stage's scores."""

from __future__ import annotations

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
    assert f"refused {key}: " in capsys.readouterr().err
