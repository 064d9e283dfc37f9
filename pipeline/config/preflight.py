"""Check a run before it starts: its model, prompts, rewards and directory on disk. No worker is started.

The functions in the first section of this file tell which guarantees a run lacks because of its engine or its settings,
for example that a repetition gives the same bits:

    Capabilities of the engine, on the device of its workers
        ──► sentences
              ├─► line and event at the start, tag in MLflow
              ├─► `stageline check CONFIG` and `check RUN`
              └─► beside the result of `stageline replay`
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np

from pipeline.config.devices import THIS_HOST, device_problems, place_all_here
from pipeline.config.fitting import descriptors_needed, max_descriptors, memory_problems
from pipeline.config.identity import (
    FILE,
    Identity,
    change_problems,
    config_changes,
    config_sections,
    edited_settings,
    flatten_sections,
    has_no_effect,
    read_identity,
)
from pipeline.config.loading import config_hash, read_run_config
from pipeline.config.memory import gpus_here, memory_limits, planned_run, row_cache_bytes
from pipeline.config.paths import RunPaths, network_filesystem, write_fault
from pipeline.config.placement import gang_of_role
from pipeline.config.role_models import (
    check_exported,
    check_output_layer,
    check_reward_models,
    check_scorer_layout,
    model_paths,
    read_model,
    role_models,
)
from pipeline.config.run import RunConfig
from pipeline.config.sections import SQLITE, TrackingConfig
from pipeline.config.stored import check_stored
from pipeline.errors import ConfigError, OtherProgramsConfig, join_errors, refusal, refusals, refuse, run_checks
from pipeline.graph.graph import UPDATE_STAGE
from stages.engines.capabilities import Capabilities, Device, able
from stages.engines.config import OTHER_ENVIRONMENTS
from stages.engines.embedded.division import check_division
from stages.engines.remote.process import ENVIRONMENTS, environment_problem
from stages.models.hf_files import PadTokenError, Tokenizer, read_tokenizer
from stages.models.layouts import adapter_problems, blocks_problems, layout_problems
from stages.models.protocol import Role
from stages.models.spec import ModelSpec
from stages.prompts import PromptTable, read_source, tokenise
from stages.rewards.config import RewardPartsConfig
from stages.rewards.registry import UnfitReward, build_parts, close_parts
from storage.config import PromptsConfig
from storage.errors import StoreError
from storage.problems import Problem, mentions, plain_name
from storage.prompts import PromptsError, split
from storage.redaction import MARK, marked

_MAX_CHANGES = 4
"""Maximum number of settings that an error lists."""
DEVICE_ITEM, ENGINE_DEVICE_ITEM = "device", "engine.device"
"""Names of two entries in a worker's numerics: the facts on which the rounding of its results depends
(stages/native/fingerprint.py). `DEVICE_ITEM`: description of the worker's GPU; missing if it has none.
`ENGINE_DEVICE_ITEM`: kind of device, such as cuda, of an engine in its own Python environment."""


def engine_device(numerics: Mapping[str, str]) -> Device:
    """Return the device that the engine of a worker with these numerics computes on."""
    return "cuda" if numerics.get(ENGINE_DEVICE_ITEM) == "cuda" or DEVICE_ITEM in numerics else "cpu"


def recorded_devices(config: RunConfig, identity: Identity | None) -> list[Device]:
    """Return the kinds of device that the run's identity records for its engines, or CPU if it records none."""
    gang = gang_of_role(config.placement, Role.GENERATE)
    known = [] if identity is None else identity.numerics_of(gang)
    devices: list[Device] = sorted({engine_device(one.items) for one in known})
    return devices or ["cpu"]


def engine_line(config: RunConfig, device: Device) -> str:
    """Return a line for users: the engine, its capabilities, and its Python interpreter if it has an environment of its
    own."""
    elsewhere = f"; its Python is {config.engine.python}" if config.engine.python else ""
    return f"engine {config.engine.kind} on {device}: {config.capabilities(device)}{elsewhere}"


def guarantee_lines(config: RunConfig, device: Device) -> list[str]:
    """Return lines for users about a run's guarantees, for example that a repetition gives the same bits. If the run
    has all guarantees, return one line that says so. Otherwise return a line with the capabilities of the engine, and
    one line for each missing guarantee."""
    missing = unproven_guarantees(config, device)
    if not missing:
        return [f"engine {config.engine.kind} on {device}: a run repeats bit for bit, and leaves nothing unproven"]
    return [engine_line(config, device), *(f"not proven: {each}" for each in missing)]


def unproven_guarantees(config: RunConfig, device: Device) -> list[str]:
    """Return one sentence for each guarantee that a run of this config lacks. The sentence names the guarantee and the
    reason."""
    can = config.capabilities(device)
    return [
        *_unproven_draws(can),
        *_unproven_weights(config),
        *_unproven_canaries(config, can),
        *_unproven_corrections(config, can),
    ]


def replay_problem(can: Capabilities) -> str | None:
    """Return why the tokens of a shard cannot be drawn again, or None if they can."""
    if can.draws == "keyed":
        return None
    how = "repeat in the same engine alone" if can.draws == "seeded" else "never repeat"
    return f"its draws are {can.draws}, not keyed by the row: they {how}"


def _unproven_draws(can: Capabilities) -> Iterator[str]:
    problem = replay_problem(can)
    if problem is not None:
        yield f"generate and evaluate cannot be replayed, and shards that are made anew have other tokens: {problem}"
        yield "evaluations of two versions are paired by prompt alone, not by noise: differences are known less well"
    elif can.invariance != "bits":
        yield (
            "the run repeats to rounding, not to the bit: the engine's sums depend on which rows run together, so a "
            "token may differ, and all after it, where two candidates lie within rounding"
        )


def _unproven_weights(config: RunConfig) -> Iterator[str]:
    if config.in_flight:
        yield "shards of several versions cannot be replayed: weights came in as they were published (inflight)"
    elif config.rollout.versions == "latest" and config.staleness:
        yield "which version sampled a shard depends on when nodes ended (rollout.versions=latest)"


def _unproven_canaries(config: RunConfig, can: Capabilities) -> Iterator[str]:
    if config.mismatch.rows and not config.has_canaries:
        yield (
            "that the engine has taken its weights is not proven: it cannot score tokens that it is given, and under "
            "staleness no row is fresh (no canaries; staleness=0 has them)"
        )


def _unproven_corrections(config: RunConfig, can: Capabilities) -> Iterator[str]:
    """Yield a sentence if the difference of engine and trainer is not corrected by the weight w = pi_prox / mu."""
    if config.ppo.anchor == "proximal" and config.ppo.correction == "none":
        stale = " and of stale rows" if config.staleness else ""
        yield f"the difference of engine and trainer{stale} is not corrected for (ppo.correction=none)"


# ---- Checks before a run starts --------------------------------------------------------------------------


@dataclass(frozen=True)
class Preflight:
    """The data that the checks have read. The run uses it, so that nothing is read twice."""

    tokenizer: Tokenizer
    prompts: PromptTable
    lost_prompts: str | None = None
    """Damage of the saved prompts of a resumed run, in words. The prompts were then read from their source again. None:
    no damage."""
    sandboxes: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    """Key path of a reward part that runs code in a sandbox -> the protections on this host. Protections: `files`,
    `network` or `processes` -> the mechanism that protects these from the code, or None if nothing does."""


def check_run(config: RunConfig, *, resume: bool, replaces: bool = False) -> Preflight:
    """Run `check_secrets`, then `check_run_directory` and `preflight`, and return what `preflight` has read. The errors
    of the last two are raised together."""
    saved = RunPaths(config.run_dir).prompts if resume else None
    directory = partial(check_run_directory, config, resume=resume, replaces=replaces)
    check_secrets(config)
    checked: Preflight = run_checks(directory, lambda: preflight(config, saved))[1]
    return checked


def check_secrets(config: RunConfig) -> None:
    """Raise ConfigError if the config lacks secrets because it was read from identity.json, which has none."""
    if lost := marked(flatten_sections(config_sections(config))):
        need = "it is a secret, and config.yaml, which had it, is gone or another user's: give it again, as key=value"
        raise ConfigError(lost[0], f"given {MARK}; {need}")


def preflight(config: RunConfig, saved: Path | None = None) -> Preflight:
    """Read and check everything that a run needs, and return what was read.

    Sets the number of evaluated prompts in the config: `prompts.held_out`, or `evaluate.prompts.max` if evaluations
    have a source of their own.

    Args:
        saved: file of a resumed run's prompts. The run keeps these prompts even if their source has changed. The source
            is read only if the file is lost or damaged.

    Raises:
        ConfigError: names the key paths of the settings that cannot work.
    """
    others = (
        lambda: check_trackers(config.tracking),
        lambda: _check_tracking(config),
        lambda: _check_descriptors(config),
        *(partial(check_exported, key, path) for path, key in model_paths(config).items()),
        *(_checks_of_this_host(config) if config.cluster.kind == "local" else ()),
    )
    try:
        model = _check_model(config)
    except ConfigError as error:
        of_others = (partial(read_model, key, path) for path, key in model_paths(config).items() if key != "model.path")
        source = [partial(_read_items, config)] if saved is None else []
        further = refusals(*of_others, *source, lambda: _check_rewards(config, None), *others)
        raise join_errors([error, *further]) from error
    _, tokenised, models, rewards, *_ = run_checks(
        lambda: _check_context(config, model),
        lambda: read_prompts(config, saved),
        lambda: _check_roles(config, model),
        lambda: _check_rewards(config, model),
        lambda: _check_token_ids(config, model),
        lambda: _check_replicas(config, model),
        *others,
    )
    if config.cluster.kind == "local":
        limits = memory_limits(config)
        planned = planned_run(config, models, on_gpus=limits.num_devices > 0)
        refuse(memory_problems(planned, limits))
    results: Preflight = tokenised
    check_fields(config, rewards, results.prompts)
    return replace(results, sandboxes={part.key: part.protections for part in rewards if part.protections})


def check_shapes(config: RunConfig, *, on_gpus: bool) -> Mapping[Role, ModelSpec]:
    """Run the checks that need only each model's config.json, and return the architecture of each role's model.
    Weights, tokenizer, prompts and directories are not read. `on_gpus`: True if the run will compute on GPUs.

    Raises:
        ConfigError: names the key paths of the settings that cannot work.
    """
    model = read_model("model.path", config.model.path, weights=False)
    _check_blocks(config, model)
    models: Mapping[Role, ModelSpec] = run_checks(
        lambda: _check_roles(config, model, weights=False),
        lambda: _check_context(config, model),
        lambda: _check_token_ids(config, model),
        lambda: _check_replicas(config, model),
        lambda: _check_engine_device(config, "cuda" if on_gpus else "cpu"),
        lambda: _check_cuda_only(config, on_gpus=on_gpus),
        *(
            partial(_check_scorer, config, f"{where}.path", str(args["path"]))
            for where, args in config.scoring_models().items()
        ),
    )[0]
    return models


def _check_scorer(config: RunConfig, key: str, path: str) -> None:
    """Raise ConfigError if a reward's model cannot be read, or the scoring gang's layout cannot divide it."""
    check_scorer_layout(config, path, read_model(key, path, weights=False))


def read_errors(config: RunConfig, refused: Collection[str]) -> list[ConfigError]:
    """Read the model, the prompts and the rewards of a config that is known to have wrong settings, and return the
    errors. So the user sees these errors together with the wrong settings. `refused`: key paths of the wrong settings.
    Errors that name one of these settings are left out."""
    reading = (partial(_check_model, config), partial(_read_items, config), partial(_check_rewards, config, None))
    return errors_of_others(refusals(*reading), refused)


def errors_of_others(found: Iterable[ConfigError], refused: Collection[str]) -> list[ConfigError]:
    """Return the errors in `found`, without the errors that name one of the settings `refused`. An error that combines
    several errors (`ConfigError.errors`) is first split into them. The text of an exception that a user's own reward
    raised may contain any word, so it does not count."""
    errors = [error for several in found for error in several.errors]

    def own_text(error: ConfigError) -> Problem:
        return Problem(error.key, None, error.message.partition(" raised ")[0])

    return [error for error in errors if not mentions(own_text(error), refused)]


def _checks_of_this_host(config: RunConfig) -> Iterator[Callable[[], None]]:
    """Yield functions that check this host's engine and devices. Other hosts are checked when their workers join."""
    yield from (partial(check, config) for check in (_check_engine, _check_devices))
    yield lambda: _check_cuda_only(config, on_gpus=gpus_here() > 0)


def _check_descriptors(config: RunConfig) -> None:
    """Raise ConfigError if a process of the run on this host would need more open files than this account may have."""
    needed, allowed = descriptors_needed(config), max_descriptors()
    if needed > allowed:
        workers = sum(gang.workers for gang in config.gangs())
        raise ConfigError(
            "placement.gangs",
            f"given {workers} workers; a process of the run then has up to {needed} files open, and this account may "
            f"have {allowed} (`ulimit -Hn`). Fewer workers, or a higher limit",
        )


def _check_roles(config: RunConfig, model: ModelSpec, *, weights: bool = True) -> Mapping[Role, ModelSpec]:
    """Return the architecture of each role's model. Raises ConfigError if a model cannot be read, does not fit the
    policy, cannot be divided by the layout of its gang, or cannot have the adapters of `model.lora`."""
    models = role_models(config, model, weights=weights)
    for role, of_role in models.items():
        _check_layout(config, role, of_role)
        refuse(adapter_problems(config.model.lora, role, of_role))
    return models


def read_prompts(config: RunConfig, saved: Path | None = None) -> Preflight:
    """Read the tokenizer and the prompts. Return them and, if the saved prompts are damaged, a description of the
    damage. Set the number of evaluated prompts in the config to the number that was read. Raises ConfigError if they
    cannot be read. `saved`: as for `preflight`."""
    tokenizer = open_tokenizer(config, config.model.path)
    prompts, lost = _prompts_of(config, tokenizer, saved)
    if config.evaluation_source is None:
        config.prompts.held_out = len(prompts.held_out)
    else:
        config.prompts.held_out, config.evaluate.prompts.max = 0, len(prompts.held_out)
    return Preflight(tokenizer, prompts, lost)


def open_tokenizer(config: RunConfig, path: str) -> Tokenizer:
    """Return the tokenizer in a model's directory, with the pad token of the config. Raises ConfigError if there is no
    usable tokenizer, or the pad token is wrong."""
    try:
        tokenizer = read_tokenizer(path, config.model.pad_token)
        _ = tokenizer.pad_id
    except PadTokenError as error:
        raise ConfigError("model.pad_token", f"given {config.model.pad_token!r}; {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError("model.path", f"given {path!r}; no usable tokenizer there: {error}") from error
    return tokenizer


def check_run_directory(config: RunConfig, *, resume: bool, replaces: bool = False) -> None:
    """Check the run's directory and its object store. Leaves no file. If the config does not set the number of
    evaluated prompts, set it to the number that the run in the directory has. `replaces`: True if the run in the
    directory will be moved aside, so that it does not matter what it is.

    Raises:
        ConfigError: the run's name is no plain name. The directory, a `weights_dir` or the store cannot be
            written to. The directory holds another run. Without `resume`: the directory or the store holds this run
            already. With `resume`: config.yaml was edited, a setting differs that a resumed run must keep, or the run's
            data is missing.
    """
    for problem in plain_name().problems(
        {"name": config.name}
    ):  # a resumed run is named by its directory, which may have moved
        raise refusal(problem)
    paths = RunPaths(config.run_dir)
    check_writable("runs_dir", config.runs_dir, paths.root)
    boards = {f"placement.gangs.{name}": gang.weights_dir for name, gang in config.placement.gangs.items()}
    for section, given in (boards | {"cluster": config.cluster.weights_dir}).items():
        if given is not None:
            check_writable(f"{section}.weights_dir", given, Path(given))
    if replaces:
        return
    identity = read_identity(paths.root) if resume else None
    _keep_number_of_evaluated(config, paths, identity)
    if identity is not None:
        _check_same_run(config, paths, identity)
    elif paths.config.exists() and config_hash(read_run_config(paths.config)) != config_hash(config):
        raise _other_config_error(config, paths)
    elif not resume and holds_run(paths):
        had = read_run_config(paths.config).steps if paths.config.exists() else config.steps
        way = f"`stageline resume {paths.root}` continues it, unless it has ended"
        if config.steps > had:
            way = f"`stageline resume {paths.root} steps={config.steps}` makes it longer (it has {had})"
        raise ConfigError(
            "name",
            f"given {config.name!r}; {paths.root} holds this run already: {way}, another name=... starts a new one, "
            "--overwrite (in Python: overwrite=True) moves it aside",
        )
    had_url = identity is not None and identity.latest.config["storage"].get("url") is not None
    check_stored(config.stored, resume=resume, had_url=had_url)


def _keep_number_of_evaluated(config: RunConfig, paths: RunPaths, identity: Identity | None) -> None:
    """If the config does not set the number of evaluated prompts, set it to the number that the run in this directory
    has. Do nothing if there is no run, or if the run and the config name different sources of evaluated prompts."""
    if identity is None and not paths.config.exists():
        return
    before = config_sections(read_run_config(paths.config)) if identity is None else identity.latest.config
    own, then = config.evaluate.prompts, before["evaluate"]["prompts"]
    if own.url != then["url"]:
        return
    if config.prompts.held_out is None:
        config.prompts.held_out = before["prompts"]["held_out"]
    if own.max is None:
        own.max = then["max"]


def will_be_replaced(config: RunConfig) -> bool:
    """Return True if a new run will move the directory of an earlier run of its name aside without being told to."""
    paths = RunPaths(config.run_dir)
    return holds_earlier_run(paths) and reason_to_stay(config) is None and not has_updates(config)


def holds_earlier_run(paths: RunPaths) -> bool:
    """Return True if a directory holds a run, or the config of one, and nothing of another kind: no variant, no
    training of a reward model, no responses that a judge labelled."""
    if not (holds_run(paths) or paths.config.exists()) or paths.variant.exists():
        return False
    try:
        if paths.config.exists():
            read_run_config(paths.config)
    except OtherProgramsConfig:
        return False
    except ConfigError:
        pass  # the config of a run, damaged or of another version
    return True


def reason_to_stay(config: RunConfig) -> str | None:
    """Return why the directory of an earlier run of this name cannot be moved aside, and what to do instead. Return
    None if it can be moved."""
    paths = RunPaths(config.run_dir)
    if paths.root.is_symlink() or paths.job.exists():  # a Slurm job may start it again at any time
        return f"{paths.root} is a link, or belongs to a Slurm job: choose another name=..., or remove it"
    if config.storage.url is not None:  # data at a URL cannot be moved
        return f"the run's data at {config.storage.url} is not moved: choose another storage.url, and name"
    return None


def has_updates(config: RunConfig) -> bool:
    """Return True if an update of the run of this name is committed."""
    stages = {address.stage for address in config.stored.ledger().addresses()}
    return bool(stages.intersection(UPDATE_STAGE.values()))


def holds_run(paths: RunPaths) -> bool:
    """Return True if a directory holds a run that has begun. An empty ledger directory does not count: it may be a disk
    that is mounted for a new run."""
    return paths.events.exists() or paths.first_full_events.exists() or any((paths.root / "ledger").glob("*"))


def _check_same_run(config: RunConfig, paths: RunPaths, identity: Identity) -> None:
    """Raise ConfigError if config.yaml was edited, or if this config changes a setting that a resumed run must keep."""
    if paths.config.exists():
        changes = edited_settings(identity, config_sections(read_run_config(paths.config)))
        if changes:
            raise ConfigError(
                str(paths.config),
                f"differs from what {FILE} recorded: {'; '.join(map(str, changes))}. Restore it, or remove the file, "
                f"which is then written anew from {FILE}. What may change is given with the command: `stageline resume "
                f"{paths.root} key=value`",
            )
    refuse(change_problems(identity.latest.config, config))


def _other_config_error(config: RunConfig, paths: RunPaths) -> ConfigError:
    """Return the error for a directory that holds a run with another config. It names some of the settings that differ,
    and the command that continues that run with the new settings, if such a command works."""
    before = config_sections(read_run_config(paths.config))
    changed = config_changes(before, config_sections(config))
    deciding = [one for one in changed if one.key == "steps" or not has_no_effect(one.key, config)]
    changes = [one.assignment for one in deciding]
    problems = list(change_problems(before, config))
    if not problems:
        way = f"`stageline resume {paths.root} {' '.join(changes)}` continues it. Or choose"
    elif [problem.key for problem in problems] == ["steps"]:
        way = f"For steps, {problems[0].need}. Or choose"
    else:
        way = "Choose"
    more = f" and {len(changes) - _MAX_CHANGES} more" if len(changes) > _MAX_CHANGES else ""
    shown = ", ".join(changes[:_MAX_CHANGES]) + more
    return ConfigError(
        "name",
        f"given {config.name!r}; {paths.root} holds a run without these settings: {shown}. {way} another name=..., or "
        "give --overwrite (in Python: overwrite=True), which moves that directory aside",
    )


def check_trackers(tracking: TrackingConfig) -> None:
    """Raise ConfigError if the package of a tracker in `tracking.also` is not installed."""
    missing = [name for name in tracking.also if not any(metadata.distributions(name=name))]
    if missing:
        need = f"not installed in this environment: `pip install {' '.join(missing)}`, or leave it out"
        raise ConfigError("tracking.also", f"given {', '.join(tracking.also)}; {' and '.join(missing)}: {need}")


def _check_tracking(config: RunConfig) -> None:
    """Raise ConfigError if the SQLite file for tracking cannot be made. Also if a run with attached workers is tracked
    in such a file on a network filesystem, unless the file is in the run's own directory. SQLite's locks do not work on
    such a filesystem. If several runs used the file, one driver would overwrite the records of another."""
    uri = config.tracking.uri
    if uri is None or not uri.startswith(SQLITE):
        return
    file = Path(uri.removeprefix(SQLITE)).absolute()
    check_writable("tracking.uri", uri, file.parent)
    if config.cluster.kind == "local":
        return
    kind = network_filesystem(file)
    if kind is None or file.is_relative_to(config.run_dir.absolute()):
        return
    raise ConfigError(
        "tracking.uri",
        f"given {uri!r}; it is a file for several runs on a filesystem for several hosts ({kind}), where SQLite cannot "
        f"lock it: a server's URI (http://...), or a file of this run alone, {SQLITE}{config.run_dir}/mlflow.db",
    )


def check_writable(key: str, given: str, directory: Path) -> None:
    """Raise ConfigError if a directory cannot be written to. If it does not exist yet, its nearest existing parent is
    checked. `key`, `given`: the setting at fault and its value, for the error."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    fault = write_fault(existing)
    if fault is not None:
        need = f"cannot write to {existing}: {fault}. Set {key}=... to a directory that you may write to"
        raise ConfigError(key, f"given {given!r}; {need}")


def _check_model(config: RunConfig) -> ModelSpec:
    model = read_model("model.path", config.model.path)
    check_output_layer("model.path", config.model.path)
    _check_blocks(config, model)
    return model


def _check_blocks(config: RunConfig, model: ModelSpec) -> None:
    """Raise ConfigError if the policy's model has too few blocks for the policy, or for a critic with this model."""
    same = config.has_critic and config.model.path_of(Role.CRITIC) == config.model.path
    roles = (Role.POLICY, Role.CRITIC) if same else (Role.POLICY,)
    refuse(problem for role in roles for problem in blocks_problems(config.model, role, model))


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
    need = f"the model has token ids 0 to {model.vocab_size - 1}"
    refuse(
        Problem(key, token, need)
        for key, tokens in named.items()
        for token in tokens
        if not 0 <= token < model.vocab_size
    )
    ends = config.model.eos_token_ids if config.sampling.min_new_tokens else ()
    never = {*config.sampling.suppress_token_ids, *ends}
    if len(never) >= model.vocab_size:
        need = "with model.eos_token_ids, which sampling.min_new_tokens forbids at first, no token is left to sample"
        raise ConfigError("sampling.suppress_token_ids", f"given {len(never)} token ids; {need}")


def _check_layout(config: RunConfig, role: Role, model: ModelSpec) -> None:
    """Raise ConfigError if the layout of the role's gang cannot divide the role's model."""
    gang = config.placement.roles[role]
    layout, prefix = config.placement.gangs[gang].layout, f"placement.gangs.{gang}."
    refuse(layout_problems(config.model, role, model, layout, prefix))


def _check_replicas(config: RunConfig, model: ModelSpec) -> None:
    """Raise ConfigError if the ranks of an engine's replica cannot divide this model, or the replica's cache cannot
    hold one row."""
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
            f"sampling.max_new_tokens) take {-(-row_bytes // 2**20)}, and of all engine.max_rows "
            f"{-(-engine.max_rows * row_bytes // 2**20)}",
        )


def _check_engine(config: RunConfig) -> None:
    """Raise ConfigError if the engine does not run on this host's devices, or is not installed in the environment of
    `engine.python`."""
    kind, python = config.engine.kind, config.engine.python
    _check_engine_device(config, "cuda" if gpus_here() else "cpu")
    if python is None:
        return
    problem = environment_problem(python, ENVIRONMENTS[kind])
    if problem is not None:
        need = f"{problem}. `{OTHER_ENVIRONMENTS[kind]}` makes an environment, or engine.kind=embedded"
        raise ConfigError("engine.python", f"given {python!r}; {need}")


def _check_engine_device(config: RunConfig, device: Device) -> None:
    """Raise ConfigError if the engine does not run on this kind of device. Also raise it if the engine shares devices
    with other gangs, but cannot release its memory."""
    can = config.capabilities(device)
    if device not in can.devices:
        others = " or ".join(able(config.engine, device, lambda can: device in can.devices))
        need = f"it needs a GPU, and the host has none: {others}"
        raise ConfigError("engine.kind", f"given {config.engine.kind!r}; {need}")
    if config.shares_devices(config.placement.roles[Role.GENERATE]) and can.sleeps == "nothing":
        others = " or ".join(able(config.engine, device, lambda can: device in can.devices and can.sleeps != "nothing"))
        need = f"engine.kind={config.engine.kind} keeps its memory on a {device} while other gangs use it: {others}"
        raise ConfigError("placement.device_sharing", f"given {config.placement.device_sharing!r}; {need}")


@dataclass(frozen=True)
class _BuiltPart:
    key: str
    fields: frozenset[str]
    """Names of the fields that the reward part reads from each prompt, such as the field with the right answer."""
    protections: Mapping[str, str | None]


def _check_rewards(config: RunConfig, policy: ModelSpec | None) -> list[_BuiltPart]:
    """Build and close every part of `reward` and `evaluate.reward`, and return a description of each. Raises
    ConfigError if a part cannot be built, does not suit the `policy` (None: not compared) or the gang that scores, or
    cannot keep answers."""
    sections = {"reward": config.reward, "evaluate.reward": config.evaluate.reward}
    of_sections = run_checks(
        *(partial(check_parts, section, key, config.reward.trust_answers) for key, section in sections.items())
    )
    if policy is not None:
        check_reward_models(config, policy)
    for key, directory in config.answer_caches().items():
        check_writable(key, directory, Path(directory))
    return [part for built in of_sections for part in built]


def check_parts(section: RewardPartsConfig, key: str, trust_answers: bool) -> list[_BuiltPart]:
    """Build the parts of a reward section, close them, and return a description of each. Raises ConfigError with every
    part that cannot be built. `key`: the section's key path. `trust_answers`: value of `reward.trust_answers`."""
    alone = [RewardPartsConfig(parts={name: part}) for name, part in section.parts.items()]
    checks = (partial(_check_part, one, key, trust_answers) for one in (alone if section.kind is None else [section]))
    return [part for built in run_checks(*checks) for part in built]


def _check_part(section: RewardPartsConfig, key: str, trust_answers: bool) -> list[_BuiltPart]:
    try:
        parts = build_parts(section, key, trust_answers=trust_answers)
    except UnfitReward as error:
        raise refusal(error.problem) from error
    close_parts(parts)
    keys = {name: where for name, (where, _) in section.parts_by_name(key).items()}
    return [_BuiltPart(keys[part.name], part.reward.fields, part.reward.protections) for part in parts]


def prompts_scored_by(config: RunConfig, prompts: PromptTable, section: str) -> list[np.ndarray]:
    """Return the indices of the prompts whose responses are scored by the rewards of a config section (`section`:
    reward or evaluate.reward). The list has an array for the training prompts, an array for the held-out prompts, or
    both."""
    if section != "reward":
        return [prompts.held_out]
    return [prompts.train] if config.evaluate.reward.is_given else [prompts.train, prompts.held_out]


def check_fields(config: RunConfig, rewards: Sequence[_BuiltPart], prompts: PromptTable) -> None:
    """Raise ConfigError if a prompt lacks a field that a reward reads."""
    source = config.evaluation_source
    for part in rewards:
        section = "evaluate.reward" if part.key.startswith("evaluate.") else "reward"
        for number in np.sort(np.concatenate(prompts_scored_by(config, prompts, section))).tolist():
            extra = prompts.extra[number]
            missing = sorted(part.fields - extra.keys())
            if missing:
                has = ", ".join(extra) or "no other fields"
                which = f"prompt {number}"
                if source is not None and number >= len(prompts.train):
                    which = f"prompt {number - len(prompts.train)} of {source.url}"
                need = f"reads the field {missing[0]!r} of the prompts, which {which} lacks (it has {has})"
                raise ConfigError(f"{part.key}.args", need)


def _check_devices(config: RunConfig) -> None:
    """Raise ConfigError if this host has too few GPUs for the workers."""
    gangs = config.gangs()
    placement, gpus = config.placement, {THIS_HOST: gpus_here()}
    share, device_sharing = may_share_gpus(config, gpus_here()), placement.device_sharing
    refuse(device_problems(gangs, place_all_here(gangs), gpus, share=share, device_sharing=device_sharing))


def may_share_gpus(config: RunConfig, num_gpus: int) -> bool:
    """Return True if gangs of a local run may share a GPU: the value of `placement.oversubscribe`. If this is None,
    return True if the host has exactly one GPU."""
    share = config.placement.oversubscribe
    return num_gpus == 1 if share is None else share


def device_notes(config: RunConfig, num_gpus: int, num_cores: int) -> list[str]:
    """Return notes about a local run: gangs that share this host's only GPU, and workers that have more threads than
    the host has cores."""
    if config.cluster.kind != "local":
        return []
    notes = [
        f"placement.gangs.{name}.threads={gang.threads}, but this host has {num_cores} cores: more threads are slower"
        for name, gang in config.placement.gangs.items()
        if gang.threads > num_cores
    ]
    gangs = [gang.name for gang in config.gangs() if gang.gpus]
    if config.placement.oversubscribe is not None or len(gangs) < 2:
        return notes
    together = set(gangs) <= {name for group in config.placement.device_sharing for name in group}
    if together or num_gpus != 1:
        return notes
    return [
        *notes,
        f"the gangs {', '.join(gangs)} share their host's only GPU and its memory. placement.device_sharing="
        f"[[{','.join(gangs)}]] would let them have it one at a time; placement.oversubscribe=false refuses this",
    ]


def _check_cuda_only(config: RunConfig, *, on_gpus: bool) -> None:
    """Raise ConfigError if a setting needs a GPU and there is none."""
    if on_gpus:
        return
    kernels = config.engine.embedded.kernels if config.engine.kind == "embedded" else "auto"
    if kernels == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        need = "the host has no GPU to run Triton's kernels on: auto, native or torch"
        raise ConfigError("engine.embedded.kernels", f"given triton; {need}")
    if config.model.tf32:
        need = "TF32 is how NVIDIA GPUs may multiply float32, and the host has none: false"
        raise refusal(Problem("model.tf32", True, need))
    for name, gang in config.placement.gangs.items():
        if gang.offload == "idle":
            need = "the host has no GPU whose memory would be freed: none, or gradients, which frees a CPU's too"
            raise ConfigError(f"placement.gangs.{name}.offload", f"given {gang.offload!r}; {need}")


def _prompts_of(config: RunConfig, tokenizer: Tokenizer, saved: Path | None) -> tuple[PromptTable, str | None]:
    """Return a run's prompts, and a description of their damage or None. Without `saved` the prompts are read from
    their source. Otherwise they are read from the file `saved`, and from their source only if the file is damaged."""
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
    """Return one table with the training prompts and the evaluated prompts. Raises ConfigError if they cannot be read
    or used."""
    if config.evaluation_source is None:
        return _tokenised(config, tokenizer, config.prompts)
    training: PromptTable
    training, evaluated = run_checks(
        lambda: _tokenised(config, tokenizer, replace(config.prompts, held_out=0)),
        lambda: evaluation_prompts(config, tokenizer),
    )
    return training.evaluated_on(evaluated)


def evaluation_prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptTable:
    """Return a table of prompts. Its held-out prompts are the prompts on which the run is evaluated. If evaluations
    have no source of their own (`evaluate.prompts`), the table also has the training prompts.

    Raises:
        ConfigError: the prompts cannot be read or used. For example, `evaluate.shards` does not divide their number.
    """
    source, most, shards = config.evaluation_source, config.evaluate.prompts.max, config.evaluate.shards
    if source is None:
        return _tokenised(config, tokenizer, config.prompts)
    table = _tokenised(config, tokenizer, source, "evaluate.prompts")
    num = min(len(table.lengths), most or len(table.lengths))
    fits, least = num - num % shards, -(-2 // shards) * shards
    if fits < least:
        need = f"evaluations need {least} prompts or more (evaluate.shards = {shards}), and the source has {num}"
        raise refusal(Problem("evaluate.prompts.url", source.url, need))
    if fits < num:
        need = f"{source.url} has {num} prompts, which evaluate.shards = {shards} must divide: {fits} would work"
        raise refusal(Problem("evaluate.prompts.max", most, need))
    return table.beginning(num)


def _tokenised(config: RunConfig, tokenizer: Tokenizer, source: PromptsConfig, section: str = "prompts") -> PromptTable:
    with _errors_of(section):
        return tokenise(read_source(source), tokenizer, source, config.seed, config.evaluate.shards)


def _read_items(config: RunConfig) -> None:
    """Read all prompt sources, only to check them. Raises ConfigError."""
    sources = {"prompts": config.prompts, "evaluate.prompts": config.evaluation_source}
    run_checks(*(partial(_check_items, source, section) for section, source in sources.items() if source is not None))


def _check_items(source: PromptsConfig, section: str) -> None:
    with _errors_of(section):
        items = read_source(source)
        split(len(items), source.held_out or 0, seed=0)


@contextmanager
def _errors_of(section: str) -> Iterator[None]:
    """Return a context that turns a PromptsError of its block into a ConfigError. `section`: key path of the section
    with the source's URL, format and field."""
    try:
        yield
    except PromptsError as error:
        key, _, rest = str(error).partition(": ")
        own = key in ("prompts.url", "prompts.format", "prompts.field")
        raise ConfigError(f"{section}.{key.removeprefix('prompts.')}" if own else key, rest) from error
