"""What a run would be refused for that takes a look at the disk: model, prompts, reward, run directory. Nothing starts.

May import torch, stages.models (spec, hf_files, layouts), stages.prompts, stages.rewards.{config, registry}, storage;
of stages.engines how a model is cut, how large its cache is, and what another environment has.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from pipeline.config.changes import change_problems, sections
from pipeline.config.devices import THIS_HOST, all_here, device_problems
from pipeline.config.errors import ConfigError, all_of, refusal, refusals, together
from pipeline.config.filesystems import network_filesystem
from pipeline.config.host_limits import memory_limits, planned_run
from pipeline.config.identity import FILE, Identity, edited, read_identity
from pipeline.config.loading import config_hash, read_saved
from pipeline.config.memory import memory_problems, row_cache_bytes
from pipeline.config.paths import RunPaths
from pipeline.config.role_models import (
    check_exported,
    check_output_layer,
    check_reward_models,
    model_paths,
    read_model,
    role_models,
)
from pipeline.config.run import RunConfig
from pipeline.config.tracking import SQLITE
from stages.engines.capabilities import Device, able
from stages.engines.config import OTHER_ENVIRONMENTS
from stages.engines.embedded.ranks.sharding import check_division
from stages.engines.remote.environment import ENVIRONMENTS, environment_problem
from stages.models.hf_files import Tokenizer, read_tokenizer
from stages.models.layouts import adapter_problems, blocks_problems, layout_problems
from stages.models.protocol import Role
from stages.models.spec import ModelSpec
from stages.prompts import PromptTable, read_source, tokenise
from stages.rewards.config import RewardPartsConfig
from stages.rewards.protocol import ReadsFields
from stages.rewards.registry import UnfitReward, build_parts, close_parts
from storage.errors import StoreError
from storage.problems import plain_name
from storage.prompts import PromptItem, PromptsError


@dataclass(frozen=True)
class Preflight:
    """What was read on the way, so that a run need not read it again."""

    tokenizer: Tokenizer
    prompts: PromptTable
    lost_prompts: str | None = None
    """What is wrong with the prompts of a run that is continued, where they had to be read from their source again."""


def check_run(config: RunConfig, *, resume: bool) -> Preflight:
    """`check_run_directory` and `preflight`, and at once what both refuse."""
    saved = RunPaths(config.run_dir).prompts if resume else None
    directory = partial(check_run_directory, config, resume=resume)
    checked: Preflight = all_of(directory, lambda: preflight(config, saved))[1]
    return checked


def preflight(config: RunConfig, saved: Path | None = None) -> Preflight:
    """What a run needs, read and checked. `saved`: where a run that is continued has its prompts; they are its prompts,
    whatever has become of their source, which is read only where they are lost.

    A number of held-out prompts that the config leaves open is set in it.

    Raises:
        ConfigError: names the key path of everything that cannot work.
    """
    others = (
        lambda: _check_tracking(config),
        *(partial(check_exported, key, path) for path, key in model_paths(config).items()),
        *(_checks_of_this_host(config) if config.cluster.kind == "local" else ()),
    )
    try:
        model = _check_model(config)
    except ConfigError as error:
        source = [partial(_read_items, config)] if saved is None else []
        raise together([error, *refusals(*source, lambda: _check_rewards(config, None), *others)]) from error
    _, tokenised, models, fields, *_ = all_of(
        lambda: _check_context(config, model),
        lambda: _check_prompts(config, saved),
        lambda: _check_roles(config, model),
        lambda: _check_rewards(config, model),
        lambda: _check_token_ids(config, model),
        lambda: _check_replicas(config, model),
        *others,
    )
    if config.cluster.kind == "local":
        limits = memory_limits(config)
        for problem in memory_problems(planned_run(config, models, limits), limits):
            raise refusal(problem)
    found: Preflight = tokenised
    _check_fields(fields, found.prompts)
    return found


def _checks_of_this_host(config: RunConfig) -> Iterator[Callable[[], None]]:
    """Other hosts are looked at when their workers join."""
    for check in (_check_engine, _check_devices, _check_cuda_only):
        yield partial(check, config)


def _check_roles(config: RunConfig, model: ModelSpec) -> Mapping[Role, ModelSpec]:
    """The models by role, if the layouts of their gangs can cut them."""
    models = role_models(config, model)
    for role, of_role in models.items():
        _check_layout(config, role, of_role)
        for problem in adapter_problems(config.model.lora, role, of_role):
            raise refusal(problem)
    return models


def _check_prompts(config: RunConfig, saved: Path | None) -> Preflight:
    """Tokenizer and prompts, read; and how many prompts are held out, where that is left open."""
    try:
        tokenizer = read_tokenizer(config.model.path)
    except (OSError, ValueError) as error:
        raise ConfigError("model.path", f"given {config.model.path!r}; no usable tokenizer there: {error}") from error
    prompts, lost = _prompts_of(config, tokenizer, saved)
    config.prompts.held_out = len(prompts.held_out)
    return Preflight(tokenizer, prompts, lost)


def check_run_directory(config: RunConfig, *, resume: bool) -> None:
    """Refuses a directory that cannot be written, and one that holds a run: another one, or, unless it is to be
    resumed, any; where it is to be, an edited config, and a change that the run may not have. Creates nothing."""
    for problem in plain_name("name", config.name):  # of a run that goes on: whatever its directory was moved to
        raise refusal(problem)
    paths = RunPaths(config.run_dir)
    check_writable("runs_dir", config.runs_dir, paths.root)
    for name, gang in config.placement.gangs.items():
        if gang.weights_dir is not None:
            check_writable(f"placement.gangs.{name}.weights_dir", gang.weights_dir, Path(gang.weights_dir))
    identity = read_identity(paths.root) if resume else None
    if config.prompts.held_out is None:
        config.prompts.held_out = _held_out_before(paths, identity)
    if identity is not None:
        _check_same_run(config, paths, identity)
        return
    if paths.config.exists() and config_hash(read_saved(paths.config)) != config_hash(config):
        raise ConfigError(
            "name",
            f"given {config.name!r}; {paths.root} holds a run with another config ({paths.config}). Choose another "
            "name=..., or remove that directory",
        )
    if not resume and holds_run(paths):
        raise ConfigError(
            "name",
            f"given {config.name!r}; {paths.root} holds this run already: `stageline resume {paths.root}` continues "
            "it, another name=... starts a new one",
        )


def _held_out_before(paths: RunPaths, identity: Identity | None) -> int | None:
    """Of the run that a directory holds: how many prompts it has set aside; None where it holds none."""
    if identity is not None:
        return int(identity.latest.config["prompts"]["held_out"])
    return read_saved(paths.config).prompts.held_out if paths.config.exists() else None


def holds_run(paths: RunPaths) -> bool:
    """Whether a directory is that of a run that has begun. (An empty ledger may be a disk that waits for one.)"""
    return paths.events.exists() or paths.first_full_events.exists() or any(paths.ledger.glob("*"))


def _check_same_run(config: RunConfig, paths: RunPaths, identity: Identity) -> None:
    """Whether a run may go on with this config, and its directory holds the one that it was stated with."""
    if paths.config.exists():
        found = edited(identity, sections(read_saved(paths.config)))
        if found:
            raise ConfigError(
                str(paths.config),
                f"is not what the run was stated with: {'; '.join(map(str, found))}. Put it back, or remove the file, "
                f"which is then written anew from {FILE}. What may change is given with the command: `stageline resume "
                f"{paths.root} key=value`",
            )
    problems = list(change_problems(identity.latest.config, config))
    if problems:
        listed = "; ".join(f"{problem.key}={problem.given}: {problem.need}" for problem in problems)
        raise ConfigError(
            problems[0].key,
            f"cannot change in a run that goes on ({listed}). Another name=... starts a new run with it",
        )


def _check_tracking(config: RunConfig) -> None:
    """Whether a file of MLflow's that runs share is on a filesystem that hosts share: SQLite's locks do not hold there,
    and one run's driver would write over another's."""
    uri = config.tracking.uri
    if config.cluster.kind == "local" or uri is None or not uri.startswith(SQLITE):
        return
    file = Path(uri.removeprefix(SQLITE)).absolute()
    kind = network_filesystem(file)
    if kind is None or file.is_relative_to(config.run_dir.absolute()):
        return
    raise ConfigError(
        "tracking.uri",
        f"given {uri!r}; it is a file for several runs on a filesystem for several hosts ({kind}), where SQLite cannot "
        f"lock it: a server's URI (http://...), or a file of this run alone, {SQLITE}{config.run_dir}/mlflow.db",
    )


def check_writable(key: str, given: str, directory: Path) -> None:
    """Whether a directory is, or can be, made and written to."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(
            key,
            f"given {given!r}; cannot write to {existing}: {error.strerror}. Set {key}=... to a directory that you may "
            "write to",
        ) from error


def _check_model(config: RunConfig) -> ModelSpec:
    model = read_model("model.path", config.model.path)
    check_output_layer("model.path", config.model.path)
    for problem in blocks_problems(config.model, Role.POLICY, model):
        raise refusal(problem)
    return model


def _check_context(config: RunConfig, model: ModelSpec) -> None:
    context, new = model.max_positions, config.sampling.max_new_tokens
    if config.seq <= context:
        return
    row = f"a row of prompts.max_tokens + sampling.max_new_tokens has {config.seq} tokens"
    if new >= context:
        raise ConfigError("sampling.max_new_tokens", f"given {new}; {row}, but the model's context is {context}")
    raise ConfigError(
        "prompts.max_tokens",
        f"given {config.prompts.max_tokens}; {row}, but the model's context is {context}: at most {context - new}",
    )


def _check_token_ids(config: RunConfig, model: ModelSpec) -> None:
    named = {
        "sampling.suppress_token_ids": config.sampling.suppress_token_ids,
        "model.eos_token_ids": config.model.eos_token_ids,
    }
    for key, tokens in named.items():
        for token in tokens:
            if not 0 <= token < model.vocab_size:
                raise ConfigError(key, f"given {token}; the model has token ids 0 to {model.vocab_size - 1}")


def _check_layout(config: RunConfig, role: Role, model: ModelSpec) -> None:
    """Whether the layout of the gang that holds a role can cut the role's model."""
    gang = config.placement.roles[role]
    layout, prefix = config.placement.gangs[gang].layout, f"placement.gangs.{gang}."
    for problem in layout_problems(config.model, role, model, layout, prefix):
        raise refusal(problem)


def _check_replicas(config: RunConfig, model: ModelSpec) -> None:
    """Whether an engine's ranks can share this model and keep a row of it."""
    engine = config.engine
    try:
        check_division(model, engine.tensor_parallel, engine.pipeline_parallel)
    except ValueError as error:
        key, _, rest = str(error).partition(": ")
        raise ConfigError(key, rest) from error
    row_bytes = row_cache_bytes(config, model)
    if engine.kv_budget_mb * 2**20 < row_bytes:
        raise ConfigError(
            "engine.kv_budget_mb",
            f"given {engine.kv_budget_mb}; the keys and values of one row of {config.seq} tokens (prompts.max_tokens + "
            f"sampling.max_new_tokens) take {-(-row_bytes // 2**20)}, and of all engine.slots "
            f"{-(-engine.slots * row_bytes // 2**20)}",
        )


def _check_engine(config: RunConfig) -> None:
    """Whether the engine runs on what this host has, and the environment of one of another project has it."""
    kind, python = config.engine.kind, config.engine.python
    device: Device = "cuda" if torch.cuda.device_count() else "cpu"
    if device not in config.capabilities(device).devices:
        others = " or ".join(able(config.engine, device, lambda can: device in can.devices))
        raise ConfigError("engine.kind", f"given {kind!r}; it needs a GPU, and this host has none: {others}")
    if python is None:
        return
    found = environment_problem(python, ENVIRONMENTS[kind])
    if found is not None:
        need = f"{found}. `{OTHER_ENVIRONMENTS[kind]}` makes an environment, or engine.kind=embedded"
        raise ConfigError("engine.python", f"given {python!r}; {need}")


def _check_rewards(config: RunConfig, policy: ModelSpec | None) -> dict[str, frozenset[str]]:
    """Whether every part of both rewards can be built, a user's own included, reward models suit the policy (where that
    is known), and judges' answers can be written down.
    Returns which fields of the prompts a part reads, by its key."""
    sections = {"reward": config.reward, "evaluate.reward": config.evaluate.reward}
    of_sections = all_of(*(partial(_check_parts, section, key) for key, section in sections.items()))
    fields = {key: names for found in of_sections for key, names in found.items()}
    if policy is not None:
        check_reward_models(config, policy)
    for key, directory in config.answer_caches().items():
        check_writable(key, directory, Path(directory))
    return fields


def _check_parts(section: RewardPartsConfig, key: str) -> dict[str, frozenset[str]]:
    try:
        parts = build_parts(section, key)
    except UnfitReward as error:
        raise refusal(error.problem) from error
    close_parts(parts)
    keys = {name: where for name, (where, _) in section.named(key).items()}
    return {keys[part.name]: part.reward.fields for part in parts if isinstance(part.reward, ReadsFields)}


def _check_fields(fields: Mapping[str, frozenset[str]], prompts: PromptTable) -> None:
    """Whether every prompt has the fields that rewards read."""
    for key, names in fields.items():
        for number, extra in enumerate(prompts.extra):
            missing = sorted(names - extra.keys())
            if missing:
                has = ", ".join(extra) or "no other fields"
                need = f"reads the field {missing[0]!r} of the prompts, which prompt {number} lacks (it has {has})"
                raise ConfigError(f"{key}.args", need)


def _check_devices(config: RunConfig) -> None:
    """Whether every worker finds the GPUs that it needs on this host."""
    gangs = config.gangs()
    placement, gpus = config.placement, {THIS_HOST: torch.cuda.device_count()}
    share, turns = placement.share_devices, placement.turns
    for problem in device_problems(gangs, config.replica_ranks, all_here(gangs), gpus, share=share, turns=turns):
        raise refusal(problem)


def _check_cuda_only(config: RunConfig) -> None:
    """What means nothing where everything is computed on CPUs."""
    if torch.cuda.device_count():
        return
    if config.model.tf32:
        need = "TF32 is how NVIDIA GPUs may multiply float32, and this host has none: false"
        raise ConfigError("model.tf32", f"given {config.model.tf32}; {need}")
    for name, gang in config.placement.gangs.items():
        if gang.offload == "idle":
            need = "this host has no GPU whose memory would be freed: none, or gradients, which frees a CPU's too"
            raise ConfigError(f"placement.gangs.{name}.offload", f"given {gang.offload!r}; {need}")


def _prompts_of(config: RunConfig, tokenizer: Tokenizer, saved: Path | None) -> tuple[PromptTable, str | None]:
    """A run's prompts, and what is wrong with those that it has saved, where they must be read from their source."""
    if saved is None:
        return _read_prompts(config, tokenizer), None
    try:
        table, identity = PromptTable.load(saved), read_identity(config.run_dir)
        if identity is None or table.digest() == identity.prompts:
            return table, None
        lost = f"{saved} or {saved.with_suffix('.jsonl').name} is not what was written"
    except StoreError as error:
        lost = str(error)
    try:
        return _read_prompts(config, tokenizer), lost
    except ConfigError as error:
        raise ConfigError(error.key, f"{error.message}; and of the run's own: {lost}") from error


def _read_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptTable:
    items = _read_items(config)
    with _of_prompts():
        return tokenise(items, tokenizer, config.prompts, config.seed, config.evaluate.shards)


def _read_items(config: RunConfig) -> list[PromptItem]:
    with _of_prompts():
        return read_source(config.prompts)


@contextmanager
def _of_prompts() -> Iterator[None]:
    try:
        yield
    except PromptsError as error:
        key, _, rest = str(error).partition(": ")
        raise ConfigError(key, rest) from error
