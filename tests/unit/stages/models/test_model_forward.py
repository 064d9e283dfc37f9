"""Outputs of the Megatron models, against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from stages.models.config import ModelConfig, SamplingConfig
from stages.models.forward import MicroBatch, Trunk, cut_micro_batches, hidden_states
from stages.models.hf_weights import read_weights
from stages.models.protocol import Role
from stages.models.spec import read_config
from tests.support.models import opened, random_rollout
from tests.support.paths import SMOLLM2
from tests.support.sampled_rows import rollout_of

SEQ = 12
CPU = torch.device("cpu")


def tiny_transformer(num_blocks: int = 4) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**read_config("random:tiny") | {"num_hidden_layers": num_blocks})).eval()
    weights = read_weights("random:tiny")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


@pytest.mark.parametrize("frozen_blocks", [0, 2])
def test_logits_equal_transformers(tmp_path: Path, frozen_blocks: int) -> None:
    rollout = random_rollout(np.random.default_rng(0), 6, SEQ)
    with opened(tmp_path, ModelConfig(path="random:tiny", frozen_blocks=frozen_blocks)) as host, torch.no_grad():
        policy = host._trainers[Role.POLICY].model
        (batch,) = cut_micro_batches(rollout.tokens, rollout.response_mask, np.arange(6), CPU, max_tokens=6 * SEQ)
        (hidden,) = hidden_states(policy, host._trunk, batch)
        logits = hidden @ read_weights("random:tiny")["model.embed_tokens.weight"].T
        expected = [tiny_transformer()(row[None]).logits[0] for row in batch.tokens.split(batch.lengths.tolist())]
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("frozen_blocks", [0, 3])
def test_logprobs_and_entropy_are_those_of_the_sampler(tmp_path: Path, frozen_blocks: int) -> None:
    """Temperature divides, suppressed tokens are out, and so is EOS among the first `min_new_tokens`."""
    rollout = random_rollout(np.random.default_rng(0), 6, SEQ)
    sampling = SamplingConfig(temperature=0.7, suppress_token_ids=[5, 6, 250], min_new_tokens=3)
    model = ModelConfig(path="random:tiny", frozen_blocks=frozen_blocks)
    model.policy.micro_batch_rows = 4
    with opened(tmp_path, model, sampling=sampling) as host:
        found, reference = host.policy_logprobs(rollout), host.ref_logprobs(rollout)

    logprobs, entropy = np.zeros((2, 6, SEQ))
    for b in range(6):
        start, length = int(rollout.prompt_lengths[b]), int(rollout.response_lengths[b])
        tokens = torch.from_numpy(rollout.tokens[b, : start + length]).long()
        with torch.no_grad():
            logits = tiny_transformer()(tokens[None]).logits[0].double() / 0.7
        for t in range(start, start + length):
            row = logits[t - 1].clone()
            row[[5, 6, 250]] = -torch.inf
            if t - start < 3:
                row[2] = -torch.inf
            p = row.softmax(0)
            logprobs[b, t] = row.log_softmax(0)[tokens[t]]
            entropy[b, t] = -(p[p > 0] * p[p > 0].log()).sum()
    sampled = rollout.response_mask & ~np.isin(rollout.tokens, [5, 6, 250])
    np.testing.assert_allclose(found.policy_logprobs[sampled], logprobs[sampled], atol=2e-5)
    np.testing.assert_allclose(found.entropy, entropy, atol=2e-5)
    np.testing.assert_array_equal(reference.ref_logprobs, found.policy_logprobs)
    assert not found.policy_logprobs[~rollout.response_mask].any()


@pytest.mark.parametrize(("frozen_blocks", "critic_blocks", "total"), [(0, None, 4), (0, 2, 2), (1, 2, 3)])
def test_values_are_the_head_on_the_state_before_each_token(
    tmp_path: Path, frozen_blocks: int, critic_blocks: int | None, total: int
) -> None:
    rollout = random_rollout(np.random.default_rng(3), 6, SEQ)
    model = ModelConfig(path="random:tiny", frozen_blocks=frozen_blocks, critic_blocks=critic_blocks)
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(1, 64, generator=generator)
    with opened(tmp_path, model) as host:
        zero = host.values(rollout)
        assert not zero.values.any()
        critic = host._trainers[Role.CRITIC].model
        with torch.no_grad():
            critic.output_layer.weight.copy_(head)
            critic.output_layer.bias.fill_(0.25)
        found = host.values(rollout)
    with torch.no_grad():
        state = tiny_transformer(total).model(torch.from_numpy(rollout.tokens).long()).last_hidden_state
    at = (state @ head[0] + 0.25).numpy()
    for b in range(6):
        start, end = rollout.prompt_lengths[b], rollout.prompt_lengths[b] + rollout.response_lengths[b]
        np.testing.assert_allclose(found.values[b, start:end], at[b, start - 1 : end - 1], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(found.bootstrap_values[b], at[b, end - 1], atol=1e-5, rtol=1e-5)
        assert not found.values[b, end:].any()


def test_the_trunk_computes_each_row_once_and_forgets_the_oldest(tmp_path: Path) -> None:
    rollout = random_rollout(np.random.default_rng(0), 6, SEQ)
    with opened(tmp_path, ModelConfig(path="random:tiny", frozen_blocks=2)) as host:
        trunk = host._trunk
        host.ref_logprobs(rollout)
        host.policy_logprobs(rollout)
        host.values(rollout)
        assert (trunk.num_rows, trunk.num_computed) == (18, 6)
        assert host.trunk_counts() == {"trunk/rows": 18, "trunk/computed_rows": 6}
        host.values(rollout)
        assert host.trunk_counts() == {"trunk/rows": 6, "trunk/computed_rows": 0}

        def batch_of(rows: np.ndarray) -> MicroBatch:
            (batch,) = cut_micro_batches(rollout.tokens, rollout.response_mask, rows, CPU, max_tokens=6 * SEQ)
            return batch

        batch = batch_of(np.arange(6))
        whole = trunk.hidden(batch)

        # 64 float32 a token: room for the last rows only, so that the first ones are computed again
        small = Trunk(trunk.model, cache_bytes=int(batch.lengths[-3:].sum()) * 256)
        torch.testing.assert_close(small.hidden(batch), whole, rtol=0, atol=0)
        small.hidden(batch_of(batch.rows[-3:]))
        assert small.num_computed == 6
        first = batch_of(batch.rows[:2])
        again = small.hidden(first)
        assert small.num_computed == 8
        # bit for bit, though other rows ran beside them: a replay must not depend on what the cache held
        torch.testing.assert_close(again, whole[: first.lengths.sum()], rtol=0, atol=0)


@pytest.mark.smollm2
def test_smollm2_on_real_text_equals_transformers(tmp_path: Path) -> None:
    text = "The gorgeously elaborate continuation of the trilogy is so huge that a column of words cannot describe it."
    tokens = AutoTokenizer.from_pretrained(SMOLLM2)(text).input_ids
    assert len(tokens) > 15
    mask = np.arange(len(tokens))[None] >= 4
    rollout = rollout_of([tokens], mask)
    with opened(tmp_path, ModelConfig(path=str(SMOLLM2), frozen_blocks=24)) as host:
        found = host.policy_logprobs(rollout)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
    expected = logits[3:-1].log_softmax(-1).gather(1, torch.tensor(tokens[4:])[:, None])[:, 0]
    np.testing.assert_allclose(found.policy_logprobs[0, 4:], expected.numpy(), atol=1e-3)
