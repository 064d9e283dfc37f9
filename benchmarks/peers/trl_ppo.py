"""TRL's PPOTrainer on the workload of `benchmarks/ppo_step.py`, in an environment of its own, which that script makes.

    python trl_ppo.py JOB.json        prints one JSON line: seconds of each step after the warm-up, and of its stages

Stages are timed by wrapping the functions that TRL's loop calls; nothing of its logic is changed, but that the reward
is a function of the text (the share of its characters that are vowels) instead of a fourth model. It imports nothing of
Stageline's.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ACCELERATE_USE_CPU": "1",
}

import torch
import trl.experimental.ppo.ppo_trainer as loop
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    logging,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

VOWELS = frozenset("aeiou")


def share_of_vowels(text: str) -> float:
    return sum(c in VOWELS for c in text) / max(1, len(text))


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text("utf8"))
    torch.set_num_threads(job["threads"])
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    seconds: defaultdict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[name] += time.perf_counter() - started
            return result

        return wrapped

    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.pad_token = tokenizer.unk_token  # TRL masks what equals the padding
    dtype = getattr(torch, job["dtype"])
    policy = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    reference = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    critic, unused = (
        AutoModelForSequenceClassification.from_pretrained(job["model"], num_labels=1, dtype=dtype) for _ in range(2)
    )
    for model in (policy, reference, critic, unused):
        model.config.pad_token_id = tokenizer.pad_token_id
    policy.generation_config.eos_token_id = None  # every response has all of its tokens, as on the other side
    steps = job["warm_up"] + job["steps"]
    rows, micro = len(job["prompts"]), job["micro_batch_rows"]
    prompts = Dataset.from_dict({"input_ids": job["prompts"] * max(steps, 4)})
    ends: list[tuple[float, dict[str, float]]] = []

    class Ends(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append((time.perf_counter(), dict(seconds)))

    with tempfile.TemporaryDirectory() as scratch:
        config = PPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=rows // micro,
            num_mini_batches=1,
            num_ppo_epochs=job["epochs"],
            response_length=job["new"],
            total_episodes=rows * steps,
            local_rollout_forward_batch_size=micro,
            stop_token_id=job["stop_token"],
            learning_rate=1e-5,
            temperature=1.0,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            eval_strategy="no",
            num_sample_generations=0,
            logging_steps=1,
            disable_tqdm=True,
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
        )
        lora = None
        if job["lora_rank"]:
            # of the policy, whose reference is the model without adapters; TRL's critic is trained whole
            targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            lora = LoraConfig(r=job["lora_rank"], lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
        trainer = PPOTrainer(
            args=config,
            processing_class=tokenizer,
            model=policy,
            ref_model=None if lora else reference,
            peft_config=lora,
            reward_model=unused,
            value_model=critic,
            train_dataset=prompts,
            eval_dataset=prompts.select(range(rows)),
            callbacks=[Ends()],
        )
        forward, get_reward = loop.forward, loop.get_reward
        values = timed("value", get_reward)
        reference_forward, update_forward = timed("reference", forward), timed("update_forward", forward)

        def reward_of(model: Any, tokens: torch.Tensor, pad_id: int, context: int) -> Any:
            if model is not trainer.reward_model:
                return values(model, tokens, pad_id, context)
            texts = tokenizer.batch_decode(tokens[:, context:], skip_special_tokens=True)
            time.sleep(job["seconds_per_row"] * len(texts))
            scores = torch.tensor([share_of_vowels(text) for text in texts])
            return None, scores, torch.full((len(tokens),), tokens.shape[1] - 1)

        loop.get_reward = timed("reward", reward_of)
        loop.forward = lambda model, *args, **kwargs: (
            reference_forward if model is trainer.ref_model else update_forward
        )(model, *args, **kwargs)
        loop.batch_generation = timed("generate", loop.batch_generation)
        trainer.accelerator.backward = timed("update_backward", trainer.accelerator.backward)
        trainer.optimizer.step = timed("update_optimizer", trainer.optimizer.step)
        trainer.train()
    (_, before), (_, after) = ends[job["warm_up"] - 1], ends[-1]
    times = [end for end, _ in ends[job["warm_up"] - 1 :]]
    stages = {name: (after[name] - before.get(name, 0.0)) / job["steps"] for name in after}
    stages["reward"] = stages.get("reward", 0.0) - stages.get("value", 0.0)
    print(json.dumps({"step_s": [b - a for a, b in itertools.pairwise(times)], "stages": stages}))


if __name__ == "__main__":
    main()
