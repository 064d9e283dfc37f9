"""PPO as a person writes it first, for `benchmarks/ablation.py`, in a process of its own.

    python -m benchmarks.naive_ppo JOB.json       prints one JSON line: seconds of each measured step, and of its stages

One stage after the other on all cores: transformers' `generate` on one batch that is padded to its longest response,
scores, log-probs of policy and reference, values, GAE, one update with checkpointed activations on padded
micro-batches, and the weights through a file to the model that generates. With `"engine": true` in the job the embedded
engine generates instead, and takes the weights from the same file. Responses have given lengths, those of the runs that
it is compared with; prompts have equal lengths.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    StoppingCriteria,
    StoppingCriteriaList,
    logging,
)

from benchmarks.slow_reward import score
from stages.engines.config import EngineConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.protocol import Request
from stages.models.config import SamplingConfig

GAMMA, LAMBDA, CLIP, KL = 1.0, 0.95, 0.2, 0.05

Generate = Callable[[int, torch.Tensor, Sequence[int]], torch.Tensor]
"""(step, prompts [B, P], number of new tokens of each row) -> tokens [B, P + longest], padded with 0."""
Load = Callable[[int, Path], None]
"""Take the weights of a version from a directory."""


class Lengths(StoppingCriteria):
    """Ends each row at its length, and the batch with its longest row."""

    def __init__(self, new: Sequence[int], width: int) -> None:
        self._ends = width + torch.tensor(new)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> Any:
        return input_ids.shape[1] >= self._ends


def transformers_generation(job: dict[str, Any]) -> tuple[Generate, Load]:
    """Return generation by transformers, on a model of its own."""
    dtype = getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()

    def generate(step: int, prompts: torch.Tensor, new: Sequence[int]) -> torch.Tensor:
        made: torch.Tensor = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max(new),
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=job["suppressed"],
            stopping_criteria=StoppingCriteriaList([Lengths(new, prompts.shape[1])]),
        )
        return made

    def load(version: int, folder: Path) -> None:
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict())

    return generate, load


@contextmanager
def engine_generation(job: dict[str, Any]) -> Iterator[tuple[Generate, Load]]:
    """Yield generation by the embedded engine."""
    longest = max(max(new) for _, new in job["rows"])
    width = len(job["rows"][0][0][0])
    config = EngineConfig(max_rows=len(job["rows"][0][0]), dtype=job["dtype"], kv_budget_mb=512)
    engine = build_embedded(job["model"], config, max_seq=width + longest, threads=job["threads"])

    def generate(step: int, prompts: torch.Tensor, new: Sequence[int]) -> torch.Tensor:
        settings = [SamplingConfig(n, n, suppress_token_ids=job["suppressed"]) for n in new]
        requests = [
            Request(row, 0, step, tuple(prompt), engine.version, settings[row])
            for row, prompt in enumerate(prompts.tolist())
        ]
        made = torch.zeros(len(prompts), width + max(new), dtype=torch.int64)
        made[:, :width] = prompts
        for done in engine.generate(requests):
            made[done.row, width : width + new[done.row]] = torch.from_numpy(done.tokens).long()
        return made

    def load(version: int, folder: Path) -> None:
        engine.load_weights(version, load_file(folder / "model.safetensors"))

    with closing(engine):
        yield generate, load


def logprobs(model: Any, tokens: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
    """Return the log-probs of all tokens after the prompt."""
    logits = model(input_ids=tokens, attention_mask=mask).logits[:, width - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, width:, None])[..., 0]


def values_of(model: Any, tokens: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
    """Return the values of the states before all tokens after the prompt."""
    values: torch.Tensor = model(input_ids=tokens, attention_mask=mask).logits[:, width - 1 : -1, 0].float()
    return values


def advantages_of(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return generalized advantage estimates, backwards through time."""
    made, last, following = torch.zeros_like(rewards), torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * following - values[:, t]
        last = (delta + GAMMA * LAMBDA * last) * mask[:, t]
        made[:, t], following = last, values[:, t] * mask[:, t]
    return made


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text("utf8"))
    torch.set_num_threads(job["threads"])
    logging.set_verbosity_error()
    dtype, part = getattr(torch, job["dtype"]), job["micro_batch_rows"]
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    policy, reference = (AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype) for _ in range(2))
    critic = AutoModelForTokenClassification.from_pretrained(job["model"], num_labels=1, dtype=dtype)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-7) for model in (policy, critic)]
    for model in (policy, critic):
        model.gradient_checkpointing_enable()
        model.train()
    seconds: defaultdict[str, float] = defaultdict(float)
    ends, warm_s = list[float](), dict[str, float]()

    @contextmanager
    def timed(stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds[stage] += time.perf_counter() - started

    with ExitStack() as stack:
        saved = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        generate, load = stack.enter_context(engine_generation(job)) if job["engine"] else transformers_generation(job)
        for step, (prompt_rows, new) in enumerate(job["rows"]):
            if step == job["warm_up"]:
                warm_s = dict(seconds)
            prompts = torch.tensor(prompt_rows)
            width, total = prompts.shape[1], torch.tensor(new)
            with timed("generate"), torch.no_grad():
                tokens = generate(step, prompts, new)
            positions = torch.arange(tokens.shape[1])
            mask = (positions < (width + total)[:, None]).long()
            sampled = mask[:, width:].float()
            parts = [slice(start, start + part) for start in range(0, len(tokens), part)]
            with timed("score"):
                texts = [tokenizer.decode(row[width : width + n]) for row, n in zip(tokens.tolist(), new, strict=True)]
                scores = torch.tensor(score(texts, job["seconds_per_row"]))
            with timed("forward"), torch.no_grad():
                old = torch.cat([logprobs(policy, tokens[p], mask[p], width) for p in parts])
                ref = torch.cat([logprobs(reference, tokens[p], mask[p], width) for p in parts])
                values = torch.cat([values_of(critic, tokens[p], mask[p], width) for p in parts])
            rewards = -KL * (old - ref) * sampled
            rewards[torch.arange(len(rewards)), total - 1] += scores
            advantages = advantages_of(rewards, values, sampled)
            returns, count = advantages + values, sampled.sum()
            advantages = (advantages - advantages[sampled > 0].mean()) / (advantages[sampled > 0].std() + 1e-8)
            with timed("update"):
                for p in parts:
                    ratio = (logprobs(policy, tokens[p], mask[p], width) - old[p]).exp()
                    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                    loss = -torch.minimum(ratio * advantages[p], clipped * advantages[p])
                    ((loss * sampled[p]).sum() / count).backward()
                    error = F.mse_loss(values_of(critic, tokens[p], mask[p], width), returns[p], reduction="none")
                    (0.5 * (error * sampled[p]).sum() / count).backward()
                for model, optimizer in zip((policy, critic), optimizers, strict=True):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            with timed("weights"):
                policy.save_pretrained(saved)
                load(step + 1, saved)
            ends.append(time.perf_counter())
    measured = len(ends) - job["warm_up"]
    stages = {stage: (after - warm_s[stage]) / measured for stage, after in seconds.items()}
    step_s = [after - before for before, after in itertools.pairwise(ends[job["warm_up"] - 1 :])]
    print(json.dumps({"step_s": step_s, "stages": stages}))


if __name__ == "__main__":
    main()
