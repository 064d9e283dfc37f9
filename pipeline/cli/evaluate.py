"""`stageline evaluate MODEL`: sample responses to a config's evaluated prompts with a model of transformers, and score
them.

    prompts, reward, sampling of a config (a run's, or --prompts and --reward)
        ──► transformers: logits ──► drawn tokens ──► Rollout ──► stage `score` ──► table

Neither an engine nor the trainer takes part. With an exported version of a run, the command therefore verifies the
figures of the run's own evaluation, and shows both. Tokens are drawn by the function that the engines use
(stages/engines/embedded/sampling.py), with the same random keys as in the run's evaluations. So the command samples the
same tokens as the run, except where two candidates are so close that rounding decides between them. That is rare in
float32, but not in bfloat16.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from rich.table import Table
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pipeline.cli.answers import SUCCESS, config_from_sources, output_console, print_line, read_saved_config
from pipeline.config.identity import config_sections
from pipeline.config.loading import first_line
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import check_fields, check_parts, evaluation_prompts, open_tokenizer, read_errors
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.errors import ConfigError, StageFailed, join_errors, refusals
from pipeline.observe.evaluations import Evaluation, standard_error
from stages.engines.embedded.sampling import ban, noise_keys, sample
from stages.engines.protocol import Completion, Request
from stages.generate import generate
from stages.models.hf_files import Tokenizer, has_tokenizer, read_vocabulary
from stages.models.spec import cached_in_hub
from stages.prompts import EVALUATION_STEP, PromptTable, held_out_prompts
from stages.rewards.protocol import RewardFailed
from stages.rewards.registry import build_parts, close_parts
from stages.score import score
from storage.checkpoints import version_of
from storage.errors import StoreError
from storage.records import FinishReason, Rollout, Scores


@dataclass(frozen=True)
class EvaluatedModel:
    """The responses of a model to the evaluated prompts, and their scores."""

    rollout: Rollout
    scores: Scores


def command(options: argparse.Namespace) -> int:
    path = cached_in_hub(options.model)
    try:
        config = evaluation_config(path, options.prompts, options.reward, options.sources)
    except ConfigError as error:
        raise join_errors([error, *refusals(lambda: _model_config(path))]) from error
    evaluation = evaluate_model(path, config)
    own = _evaluation_in_run(path, config)
    print_line(f"held-out reward of {path}, {evaluation.rollout.num_rows} prompts")
    output_console().print(_table(evaluation, own))
    if own is not None and config.engine.dtype != "float32":
        print_line(
            f"in {config.engine.dtype}, tokens can round differently here than in the run's engine, so single rows can "
            "have other responses and scores"
        )
    return SUCCESS


def evaluation_config(path: str, prompts: str | None, reward: str | None, sources: Sequence[str]) -> RunConfig:
    """Return the config of an evaluation. Raises ConfigError if an argument or a setting cannot be used.

    Args:
        path: directory of the model.
        prompts: replaces `evaluate.prompts.url`, if given.
        reward: replaces `evaluate.reward.kind`, if given.
        sources: files and key=value changes, merged as for a run."""
    files, changes = [s for s in sources if "=" not in s], [s for s in sources if "=" in s]
    settings = ["evaluate.every=1"]
    if prompts is not None:
        settings += [f"evaluate.prompts.url={prompts}", "evaluate.prompts.max=null", "prompts.held_out=null"]
        settings += ["evaluate.shards=1"]  # all prompts are evaluated together, whatever number there is
    if reward is not None:
        settings += [f"evaluate.reward.kind={reward}"]
    if not files:
        need = "must be given, unless a CONFIG is: a run's config.yaml, for example"
        options = {"--prompts": prompts, "--reward": reward}
        if missing := [ConfigError(option, need) for option, value in options.items() if value is None]:
            raise join_errors(missing)
        # A config needs a `reward` too, but `evaluate.reward` scores.
        settings += ["name=evaluate", f"model.path={path}", f"prompts.url={prompts}", "reward.kind=vader"]
    return config_from_sources([*files, *settings, *changes], runs_here=False)


def evaluate_model(path: str, config: RunConfig) -> EvaluatedModel:
    """Sample responses to the config's evaluated prompts with the model at `path`, and return them with their scores.

    The tokenizer is read from `path`. If it is not there (the export of a random model has none), the tokenizer of
    `model.path` is used.

    Raises:
        ConfigError: the model, the prompts or the reward cannot be used.
        StageFailed: the reward failed.
    """
    key, section = config.held_out_reward
    try:
        tokenizer, table, eos_ids = _check_inputs(path, config)
    except ConfigError as error:
        # The first error hid those of the prompts and the reward. They can be found without the model.
        used = ("prompts." if config.evaluation_source is None else "evaluate.prompts.", f"{key}.")
        raise join_errors([error, *(e for e in read_errors(config, ()) if e.key.startswith(used))]) from error
    model = _Model(_load_model(path, config), eos_ids, config.engine.max_rows)
    parts = build_parts(section, key, trust_answers=config.reward.trust_answers)
    try:
        rollout = generate(
            model,
            held_out_prompts(table, shard=0, shards=1),
            seed=config.seed,
            step=EVALUATION_STEP,
            version=0,
            sampling=config.evaluation_sampling,
            seq=config.seq,
            pad_id=table.pad_id,
        )
        return EvaluatedModel(rollout, score(parts, tokenizer, rollout, *table.for_reward(rollout.prompt_index)))
    except RewardFailed as error:
        raise StageFailed(str(error)) from error
    finally:
        close_parts(parts)


def _evaluation_in_run(path: str, config: RunConfig) -> Evaluation | None:
    """Return the evaluation that a run made of its exported version at `path`. Return None if `path` is no exported
    version of a run, if the run has not evaluated it with the settings of `config`, or if the evaluation cannot be
    read."""
    place = Path(path).absolute()
    version, paths = version_of(place), RunPaths(place.parent.parent)
    if version is None or place != paths.weights(version) or not paths.config.is_file():
        return None
    try:
        run = read_saved_config(str(paths.root))
        same = _deciding_settings(run) == _deciding_settings(config)
        return open_history(run).read_evaluation(version) if same else None
    except (ConfigError, StoreError):
        return None


def _deciding_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide the prompts, responses and scores of an evaluation."""
    sections = config_sections(config)
    sections["evaluate"] |= {"every": None, "shards": None}
    return {name: sections[name] for name in ("seed", "model", "prompts", "sampling", "reward", "evaluate")}


def _check_inputs(path: str, config: RunConfig) -> tuple[Tokenizer, PromptTable, tuple[int, ...]]:
    """Check the model, the prompts and the reward of an evaluation, without the model's weights. Return the tokenizer,
    the prompts and the EOS tokens. Raises ConfigError for the first problem."""
    model = _model_config(path)
    context = getattr(model, "max_position_embeddings", None)
    if context is not None and config.seq > context:
        need = f"with sampling.max_new_tokens a row has {config.seq} tokens, and the model's context is {context}"
        raise ConfigError("prompts.max_tokens", f"given {config.prompts.max_tokens}; {need}")
    tokenizer = _open_tokenizer(path, config)
    _check_token_ids(config, path)
    table = evaluation_prompts(config, tokenizer)
    if not len(table.held_out):
        raise ConfigError("prompts.held_out", "given 0; there is no prompt to evaluate")
    eos_ids = tuple(config.model.eos_token_ids) or tokenizer.eos_ids
    tokens = [*eos_ids, *config.sampling.suppress_token_ids]
    tokens += [int(table.tokens[i, : table.lengths[i]].max(initial=0)) for i in table.held_out]
    if max(tokens) >= model.vocab_size:
        need = (
            f"its vocab_size is {model.vocab_size}, so it has no token {max(tokens)}, which the tokenizer, "
            "model.eos_token_ids or sampling.suppress_token_ids gives: a model and a tokenizer that belong together"
        )
        raise ConfigError("MODEL", f"given {path!r}; {need}")
    key, section = config.held_out_reward
    check_fields(config, check_parts(section, key, config.reward.trust_answers), table)
    return tokenizer, table, eos_ids


def _open_tokenizer(path: str, config: RunConfig) -> Tokenizer:
    """Return the tokenizer at `path`, or that of `model.path` if there is none. Raises ConfigError if neither has
    one."""
    source = path if has_tokenizer(path) else config.model.path
    try:
        return open_tokenizer(config, source)
    except ConfigError as error:
        if error.key != "model.path" or has_tokenizer(source):
            raise
        need = (
            "it has no tokenizer: model.path=DIR takes the tokenizer of another directory (an export of a run that "
            "began with random:tiny needs model.path=random:tiny)"
        )
        raise ConfigError("model.path", f"given {source!r}; {need}") from error


def _check_token_ids(config: RunConfig, path: str) -> None:
    """Raise ConfigError if the config gives token ids, and the model at `path` has another vocabulary than the model of
    `model.path`. The ids are `sampling.suppress_token_ids` and `model.eos_token_ids`. If there is no tokenizer at
    `path`, nothing is checked."""
    ids_by_name = {
        "sampling.suppress_token_ids": config.sampling.suppress_token_ids,
        "model.eos_token_ids": config.model.eos_token_ids,
    }
    if not any(ids_by_name.values()) or not has_tokenizer(path):
        return
    if read_vocabulary(path) != read_vocabulary(cached_in_hub(config.model.path)):
        need = f"{path} has other tokens than {config.model.path}: give its own ids, or []"
        raise join_errors([ConfigError(key, f"given {ids}; {need}") for key, ids in ids_by_name.items() if ids])


def _model_config(path: str) -> PreTrainedConfig:
    """Return the config of the language model at `path`. Raises ConfigError if there is no model with which
    transformers can continue a row token by token."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        need = "it has no config.json: give a directory in Hugging Face layout, or an org/model that was downloaded"
        if RunPaths(folder).config.is_file():
            versions = ", ".join(str(place) for place in sorted(folder.glob("weights/v*")))
            need = f"it is a run's directory: give a version, {versions or f'which `stageline export {path}` writes'}"
        raise ConfigError("MODEL", f"given {path!r}; {need}")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise _unreadable_error(path, error) from error
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if architecture is None:
        need = f"transformers has no causal language model of its kind (model_type = {config.model_type!r})"
        raise ConfigError("MODEL", f"given {path!r}; {need}: give a model that continues a text")
    if "past_key_values" not in inspect.signature(architecture.forward).parameters:
        need = f"{architecture.__name__} has no cache of keys and values (past_key_values), which `evaluate` needs"
        raise ConfigError("MODEL", f"given {path!r}; {need}: give a transformer")
    return config.get_text_config()


def _load_model(path: str, config: RunConfig) -> Any:
    """Load a model with transformers, and return it on the GPU if there is one. Raises ConfigError if it cannot be
    loaded, or if its weights do not fit its config.json."""
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, config.engine.dtype),
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _unreadable_error(path, error) from error
    if unfit := sorted({*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])}):
        need = f"weights and config.json do not fit: {len(unfit)} tensors are missing or have other shapes ({unfit[0]})"
        raise ConfigError("MODEL", f"given {path!r}; {need}")
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _unreadable_error(path: str, error: Exception) -> ConfigError:
    return ConfigError("MODEL", f"given {path!r}; transformers cannot load it: {first_line(error)}")


class _Model:
    """A causal language model of transformers. Its tokens are drawn by the function that Stageline's engines use.
    Implements `stages.generate.Sampler`."""

    def __init__(self, model: Any, eos_ids: tuple[int, ...], max_rows: int) -> None:
        self._model, self._eos_ids, self._max_rows = model, eos_ids, max_rows
        takes = inspect.signature(model.forward).parameters
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        rows = [*requests]
        for start in range(0, len(rows), self._max_rows):
            yield from self._batch(rows[start : start + self._max_rows])

    @torch.inference_mode()
    def _batch(self, rows: Sequence[Request]) -> list[Completion]:
        """Return the responses to some requests, computed as one batch. All requests have the same sampling settings.
        Prompts are padded on the left."""
        sampling, device = rows[0].sampling, self._model.device
        lengths = np.array([len(row.tokens) for row in rows])
        seeds, steps, numbers = np.array([(row.seed, row.step, row.row) for row in rows], np.int64).T
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        seen = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, -len(row.tokens) :], seen[i, -len(row.tokens) :] = torch.tensor(row.tokens), 1
        ids, seen = ids.to(device), seen.to(device)
        drawn: list[torch.Tensor] = []
        logprobs: list[torch.Tensor] = []
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        eos = torch.tensor(self._eos_ids, dtype=torch.int64, device=device)
        cache = None
        while len(drawn) < sampling.max_new_tokens and not bool(ended.all()):
            places = (seen.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            out = self._model(ids, attention_mask=seen, position_ids=places, past_key_values=cache, use_cache=True,
                              **self._only_last)  # fmt: skip
            cache, logits = out.past_key_values, out.logits[:, -1].float()
            banned = {*sampling.suppress_token_ids, *(self._eos_ids if len(drawn) < sampling.min_new_tokens else ())}
            ban(logits, [tuple(sorted(banned))] * len(rows))
            keys = noise_keys(seeds, steps, numbers, lengths + len(drawn))
            tokens, logprob = sample(logits, [sampling.temperature] * len(rows), keys)
            drawn.append(tokens)
            logprobs.append(logprob)
            ended |= torch.isin(tokens, eos)
            ids, seen = tokens[:, None], torch.cat([seen, torch.ones_like(tokens)[:, None]], 1)
        generated = zip(rows, torch.stack(drawn, 1).cpu().numpy(), torch.stack(logprobs, 1).cpu().numpy(), strict=True)
        return [self._completion(row, tokens, numbers_of) for row, tokens, numbers_of in generated]

    def _completion(self, row: Request, tokens: np.ndarray, logprobs: np.ndarray) -> Completion:
        """Return a response. It ends with its first EOS token, if it has one."""
        ends = np.flatnonzero(np.isin(tokens, self._eos_ids))
        num = int(ends[0]) + 1 if ends.size else len(tokens)
        reason = FinishReason.STOP if ends.size else FinishReason.LENGTH
        versions = np.full(num, row.version, np.int32)
        return Completion(row.row, tokens[:num].astype(np.int32), logprobs[:num], versions, reason)


def _table(evaluated: EvaluatedModel, own: Evaluation | None) -> Table:
    """Return a table of the evaluation's figures for the terminal. `own`: the run's evaluation of the same version."""
    scores, rollout = evaluated.scores.scores, evaluated.rollout
    table = Table(show_header=False)
    error = standard_error(scores.tolist())
    table.add_row("reward", f"{scores.mean():.4f}" + ("" if error is None else f" ± {error:.4f}"))
    if own is not None:
        same = sum(ours == theirs for ours, theirs in zip(scores.tolist(), own.scores.values(), strict=False))
        table.add_row("in the run", f"{own.mean:.4f} ({same} of {len(scores)} scores are the same)")
    for name, numbers in evaluated.scores.parts.items() if len(evaluated.scores.parts) > 1 else ():
        table.add_row(f"part {name}", f"{numbers.mean():.4f}")
    table.add_row("response", f"{rollout.response_lengths.mean():.1f} tokens")
    table.add_row("cut", f"{(rollout.finish_reason == FinishReason.LENGTH).mean():.0%}")
    return table
