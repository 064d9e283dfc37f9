"""Check a reward model's training before it starts: its model, judgements and directory on disk."""

from __future__ import annotations

import dataclasses
from itertools import chain

from pipeline.config.memory import gpus_here
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import check_trackers, check_writable, holds_run
from pipeline.config.reward_model import RewardModelConfig
from pipeline.config.role_models import read_model
from pipeline.errors import ConfigError, refusal
from stages.models.hf_files import head_problem, is_classifier, read_tokenizer, read_vocabulary, tensor_shape
from stages.models.layouts import adapter_problems, blocks_problems, layout_problems
from stages.models.protocol import Role
from stages.models.spec import SCORE_WEIGHT, ModelSpec
from stages.preferences.data import JudgedRows, tokenise_judgements
from stages.preferences.training import TrainingParts, training_steps
from storage.preferences import Judgement, PreferencesError, load_split

EXPORT = "model"
"""Name of the trained model's directory, inside the training's directory."""


def check_training(config: RewardModelConfig) -> TrainingParts:
    """Check a reward model's training: its models, data, directory and GPUs. Return its preference data (training,
    validation and held-out) as rows of tokens.

    Raises:
        ConfigError: the first problem that is found, with the key path of the setting at fault.
    """
    spec = read_model("model.path", config.model.path)
    if config.model.blocks is not None:
        if config.model.blocks > spec.num_layers:
            raise ConfigError("model.blocks", f"given {config.model.blocks}; the model has {spec.num_layers}")
        spec = dataclasses.replace(spec, num_layers=config.model.blocks)
    _check_scorer(config, spec)
    for number, path in enumerate(config.teacher.paths):
        _check_teacher(config, f"teacher.paths[{number}]", path, spec)
    if (config.run_dir / EXPORT).exists():
        raise already_trained_error(config)
    if holds_run(RunPaths(config.run_dir)):
        need = f"{config.run_dir} holds a run: choose another name=..., or another runs_dir=..."
        raise ConfigError("name", f"given {config.name!r}; {need}")
    check_writable("runs_dir", config.runs_dir, config.run_dir)
    check_trackers(config.tracking)
    gpus = gpus_here()
    if gpus and config.workers > gpus:
        raise ConfigError("workers", f"given {config.workers}; this host has {gpus} GPUs, one for each rank")
    try:
        return read_parts(config)
    except PreferencesError as error:
        raise ConfigError(error.key, error.message) from error


def already_trained_error(config: RewardModelConfig) -> ConfigError:
    """Return the error for a directory whose reward model is already trained."""
    return ConfigError(
        "name",
        f"given {config.name!r}; {config.run_dir} holds a trained reward model already: choose another name=..., or "
        "remove that directory",
    )


def read_parts(config: RewardModelConfig) -> TrainingParts:
    """Return the judgements of a config as rows of tokens. They depend only on the config and its files. Raises
    PreferencesError if there are no usable judgements, and ConfigError if the model has no usable tokenizer."""
    try:
        tokenizer = read_tokenizer(config.model.path)
        _ = tokenizer.pad_id  # the exported model's config may have to name it
    except (OSError, ValueError) as error:
        raise ConfigError("model.path", f"given {config.model.path!r}; no usable tokenizer there: {error}") from error
    split = load_split(config.data, config.seed)

    def tokenised(judgements: list[Judgement]) -> JudgedRows:
        return tokenise_judgements(judgements, tokenizer, config.data, seed=config.seed)

    parts = TrainingParts(*map(tokenised, (split.train, split.validation, split.held_out)))
    if not any(training_steps(parts.train, config.data, config.train, config.seed)):
        need = f"no group of data.group_texts = {config.data.group_texts} texts has a pair"
        raise PreferencesError("data.min_gap", f"given {config.data.min_gap}; {need}")
    return parts


def _check_teacher(config: RewardModelConfig, key: str, path: str, student: ModelSpec) -> None:
    """Raise ConfigError if a teacher is no usable reward model. Also raise it if the teacher's context is shorter than
    `data.max_tokens`, if its vocabulary is smaller than the student's or has other tokens, or if the training's layout
    cannot divide the teacher."""
    spec = read_model(key, path)
    wrong = head_problem(path, spec)
    if not is_classifier(path) or tensor_shape(path, SCORE_WEIGHT) is None:
        wrong = "it is no reward model: give RUN/model, which `stageline reward train` exports"
    if wrong is None and config.data.max_tokens > spec.max_positions:
        wrong = f"its context is {spec.max_positions}, data.max_tokens is {config.data.max_tokens}"
    own, its = read_vocabulary(config.model.path), read_vocabulary(path)
    if wrong is None and (spec.vocab_size < student.vocab_size or (own is not None and its is not None and own != its)):
        wrong = f"its tokens are others than those of model.path ({config.model.path!r})"
    if wrong is not None:
        raise ConfigError(key, f"given {path!r}; {wrong}")
    for problem in layout_problems(config.trained_model(path), Role.CRITIC, spec, config.layout):
        raise ConfigError(key, f"given {path!r}; {problem.key} = {problem.given}: {problem.need}")


def _check_scorer(config: RewardModelConfig, spec: ModelSpec) -> None:
    model, key = config.trained_model(), "model.path"
    for problem in chain(
        blocks_problems(model, Role.CRITIC, spec),
        adapter_problems(model.lora, Role.CRITIC, spec),
        layout_problems(model, Role.CRITIC, spec, config.layout),
    ):
        # The trainer treats the model as a critic, and the problem calls it so.
        need = problem.need.replace(f"the {Role.CRITIC}", "the model").replace("model.critic.", "optimizer.")
        raise refusal(dataclasses.replace(problem, need=need))
    wrong = head_problem(config.model.path, spec)
    if wrong is not None:
        raise ConfigError(key, f"given {config.model.path!r}; {wrong}")
    if config.data.max_tokens > spec.max_positions:
        need = f"the model's context is {spec.max_positions}"
        raise ConfigError("data.max_tokens", f"given {config.data.max_tokens}; {need}")
