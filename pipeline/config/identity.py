"""A run's identity: written to `identity.json` when the run starts, and compared whenever it is resumed.

    recorded       content                                                   required on resume
    config         every setting, and the digest that commits store          only changes that `change_problems` allows
    model files    digests of weights, config and tokenizer, by role         the same files, in any place
    reward models  digests of their files, by key path of their arguments    the same files, in the same place
    prompts        digest of their tokens and fields, evaluated prompts too  the same prompts
    software       versions of software that results depend on, to the bit   the same, or `cluster.same_numerics: warn`
    numerics       processor, compiler and kernels of each gang's workers    as for software, whenever a gang is built

A driver that finds an allowed difference appends a `Statement`, which records the new config and software. Nothing is
ever removed. So the file tells the configs and the numerics of all commits.

The lists at the top name the settings that may change when a run is resumed. No other setting may change:

    KEYS_WITHOUT_EFFECT    not in the config's digest; may change
    CHANGEABLE_KEYS        in the digest; may change, each for the reason given there
    steps                  may grow, if no learning rate depends on it
    POOL_KEYS              a pool's workers and concurrent_shards may grow or shrink
    all other settings     decide what is computed: another value needs another run

Keys of KEYS_WITHOUT_EFFECT and POOL_KEYS are patterns of `fnmatch`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipeline.config.paths import RunPaths
from pipeline.config.reward_model import LabelConfig, RewardModelConfig
from pipeline.config.run import RunConfig
from storage import codec, files
from storage.commits import Commit
from storage.errors import StoreError
from storage.problems import Problem, value_text
from storage.redaction import redacted

KEYS_WITHOUT_EFFECT = (
    "name",
    "runs_dir",
    "tracking.*",
    "predicted_s*",
    "alarms.*",
    "cluster.*",
    "slurm.*",
    "export.*",
    "checkpoint.*",
    "storage.*",
    "engine.python",
    "placement.oversubscribe",
    "placement.device_sharing",
    "placement.gangs.*.weights_dir",
    "placement.gangs.*.offload",
    "reward.trust_answers",
    *(
        f"{section}.parts.*.{key}"
        for section in ("reward", "evaluate.reward")
        for key in ("timeout_s", "network", "environment", "writes")
    ),
    "evaluate.select.*",
)
"""Settings that do not change what is computed: names, directories, tracking, predictions, alarms, processes, timeouts,
exports, the choice of the best version. (The budgets of judges belong here too, but their keys depend on the names of
the reward's parts: `RunConfig.judge_budgets`.)"""
CHANGEABLE_KEYS = {
    "model.path": "where the model is: its files must be the same",
    "model.reference_path": "where the model is: its files must be the same",
    "model.critic_path": "where the model is: its files must be the same",
    "prompts.url": "a run keeps its prompts; they are read again only where they are lost, and must be the same",
    "model.peak_tflops": "the peak speed that the utilisation metrics are relative to",
    "evaluate.every": "which versions are evaluated; past versions are made again for their evaluation",
    "mismatch.alarm_nats": "the mismatch above which the alarm is raised",
}
"""Settings that may change when a run is resumed, although they are part of the digest of the config: key path -> what
the setting decides, or under which condition a change is harmless. `model.peak_tflops` is used only in metrics of the
speed. A new `evaluate.every` may select versions that are already past: they are then published again, and evaluated.
"""
POOL_KEYS = ("placement.gangs.*.workers", "placement.gangs.*.concurrent_shards")
"""Settings of a gang that may change if the gang is a pool. In a pool, a row's result does not depend on its replica or
on other rows."""
_LOCATION_KEYS = frozenset({"name", "runs_dir"})
"""Settings that make up the path of the run's directory. The recorded values of these settings are not compared,
because the directory may have been moved."""


@dataclass(frozen=True)
class Change:
    """A setting whose value has changed. `before` is None if the old config lacks the key; `after` is None if the new
    config lacks it."""

    key: str
    before: Any
    after: Any

    @property
    def assignment(self) -> str:
        """The new value as a user writes it on the command line: `key=value`."""
        return f"{self.key}={value_text(self.after)}"

    def __str__(self) -> str:
        return f"{self.assignment} (was {value_text(self.before)})"


def config_sections(config: RunConfig | RewardModelConfig | LabelConfig) -> dict[str, Any]:
    """Return a config as nested dicts of sections and keys. All values are JSON values (enums as text)."""
    content = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return dict(json.loads(json.dumps(content)))


def flatten_sections(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return key path -> value for all settings of nested sections. An empty section counts as a value."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten_sections(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the changes between two configs in the form of `config_sections`, sorted by key. `name`, `runs_dir` and
    secrets are ignored: secrets do not change what is computed, and recorded configs lack them."""
    old, new = flatten_sections(redacted(before)), flatten_sections(redacted(after))
    keys = sorted((old.keys() | new.keys()) - _LOCATION_KEYS)
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def has_no_effect(key: str, config: RunConfig) -> bool:
    """Return True if a setting is left out of the digest of this config. `steps` is left out if no learning rate
    depends on it."""
    if key == "steps":
        trained = [config.model.policy, *([config.model.critic] if config.has_critic else [])]
        return all(optimizer.decay == "constant" for optimizer in trained)
    return any(fnmatchcase(key, pattern) for pattern in KEYS_WITHOUT_EFFECT) or key in config.judge_budgets()


def change_problems(before: Mapping[str, Any], config: RunConfig) -> Iterator[Problem]:
    """Compare the recorded config of a run (`before`) with the config with which it is to be resumed. Yield a problem
    for each change that is not allowed."""
    pools = {gang.name for gang in config.gangs() if not gang.is_ordered}
    for change in config_changes(before, config_sections(config)):
        key = change.key
        if key == "steps":
            yield from _steps_problems(change, config)
        elif any(fnmatchcase(key, pattern) for pattern in POOL_KEYS):
            if key.split(".")[2] not in pools:
                yield _change_problem(change, "its ranks act together, and sums depend on how many they are")
        elif not (has_no_effect(key, config) or key in CHANGEABLE_KEYS):
            new = f"`stageline run {config.run_dir}/config.yaml name=... {key}=...` starts a new run with it"
            yield _change_problem(change, f"it decides what is computed. {new}")


def _steps_problems(change: Change, config: RunConfig) -> Iterator[Problem]:
    if change.after < change.before:
        yield _change_problem(change, "a run may become longer, not shorter. Ctrl-C ends it earlier")
    elif not has_no_effect("steps", config):
        decays = "model.policy.decay, model.critic.decay" if config.has_critic else "model.policy.decay"
        why = f"the learning rates depend on it, unless they are constant ({decays})"
        yield _change_problem(change, f"{why}. {_continue_hint(change, config)}")


def _continue_hint(change: Change, config: RunConfig) -> str:
    """Return a sentence with the command of a new run, for a user who wants more steps. The new run begins with this
    run's last version. If the model has random weights, it has no tokenizer, and the new run begins anew."""
    run, name, first = config.run_dir, f"{config.name}-{change.after}", config.model
    if first.path.startswith("random:"):
        return f"A new run of so many steps: `stageline run {run}/config.yaml name={name} steps={change.after}`"
    last = RunPaths(run).weights(change.before)
    if not last.is_dir():
        return (
            f"Finish the run first (`stageline resume {run}`); then this message has the command of a new run that "
            "begins with its last version"
        )
    reference = first.reference_path or first.path
    url = "" if config.storage.url is None else f" storage.url={config.storage.url}-{change.after}"
    own = "schedules and a critic" if config.has_critic else "a schedule"
    return (
        f"A new run, with {own} of its own, begins with its last version: `stageline run "
        f"{run}/config.yaml name={name} steps={change.after - change.before} "
        f"model.path={last} model.reference_path={reference}{url}`"
    )


def _change_problem(change: Change, reason: str) -> Problem:
    need = f"the run has {value_text(change.before)}: {reason}"
    return Problem(change.key, change.after, need)


FORMAT = 1
FILE = "identity.json"
_WAY_ON = "Put it back, or remove it: a run whose commits are all of its config goes on without"


@dataclass(frozen=True)
class Statement:
    """A driver's record of the config and the software of a run. The first statement is written when the run starts.
    Another is appended when the run is resumed, if config or software have changed, or if the run continues from a
    checkpoint and the commits after it were archived."""

    time: float
    """Seconds since the epoch."""
    why: str
    config: Mapping[str, Any]
    """The resolved config, as sections and keys. Secrets are neither written nor compared."""
    config_hash: str
    """Digest of the config. Commits made under the config store the same digest."""
    software: Mapping[str, str]
    """Name -> version of the software on which the bits of results depend."""
    changed: tuple[str, ...] = ()
    """Changes of settings and software since the previous `Statement` of the run, as texts for users. Empty in the
    first statement."""
    anew: bool = False
    """True if the run was resumed from a checkpoint, and the commits after it were archived. Workers are then no longer
    compared with the numerics recorded before."""


@dataclass(frozen=True)
class GangNumerics:
    """The facts that decide the rounding of a worker's results, such as its processor and compiler (`items`). A gang
    has one record for each different set of facts among its workers."""

    gang: str
    fingerprint: str
    """Shortened digest of `items`. Commits store it."""
    items: Mapping[str, str]
    """Name -> value of each fact on which the last bits of a worker's results depend, such as the processor, the
    compiler and the kernels."""
    worker: str
    """Name of the first worker with this fingerprint."""
    time: float
    statement: int
    """Index of an entry in `Identity.statements`: the config and software under which a worker with these facts was
    first seen."""


@dataclass(frozen=True)
class Identity:
    """The facts that are compared when a run is resumed: models, prompts, config, software and machines. The digests of
    models and prompts never change. A change of config or software adds an entry to `statements`. A new kind of machine
    adds an entry to `numerics`. No entry is ever removed."""

    models: Mapping[str, Mapping[str, str]]
    """Key -> {name of a file: its digest}. A key is a role (policy, reference, critic), the key path of a reward
    model's arguments, or the key path of a rubric's file."""
    prompts: str
    statements: tuple[Statement, ...]
    numerics: tuple[GangNumerics, ...] = field(default=())

    @property
    def latest(self) -> Statement:
        return self.statements[-1]

    @property
    def config_hashes(self) -> frozenset[str]:
        """Digests of all configs that the run has had."""
        return frozenset(statement.config_hash for statement in self.statements)

    def numerics_of(self, gang: str) -> list[GangNumerics]:
        """Return the records about the machines of a gang's workers, the oldest first. The run may have been resumed
        from a checkpoint, with all later commits archived (`Statement.anew`). Then return only the records that were
        added since the last such resume."""
        since = max((number for number, statement in enumerate(self.statements) if statement.anew), default=0)
        return [known for known in self.numerics if known.gang == gang and known.statement >= since]


def read_identity(run_dir: Path) -> Identity | None:
    """Return the identity of a run, or None if there is no file. Raises StoreError if the file is damaged."""
    path = run_dir / FILE
    data = files.read(files.open_root(str(run_dir)), FILE)
    if data is None:
        return None
    try:
        document = codec.document(data, FORMAT, str(path))
        if document.pop("digest", None) != codec.digest({"format": FORMAT, **document}):
            raise StoreError(f"{path}: is not what was written (its digest differs)")
        return codec.from_document(Identity, document)
    except (codec.NotARecord, StoreError) as error:
        raise StoreError(f"{error}. {_WAY_ON}") from error


def write_identity(run_dir: Path, identity: Identity) -> None:
    """Write a run's identity.json atomically. Secrets are left out, since other users may read the file. Raises OSError
    if it cannot be written."""
    stated = tuple(replace(one, config=redacted(one.config)) for one in identity.statements)
    document = {"format": FORMAT, **asdict(replace(identity, statements=stated))}
    document["digest"] = codec.digest(json.loads(json.dumps(document)))
    files.write_local(run_dir / FILE, (json.dumps(document, indent=1) + "\n").encode())


def edited_settings(identity: Identity, saved: Mapping[str, Any]) -> list[Change]:
    """Return the changes that a user made in the saved config of a run, compared with the newest recorded config. If
    the saved config equals the newest or the second newest recorded config, return an empty list. The second newest is
    allowed because a driver may die between two writes: first it records a new config, then it saves this config.

    Args:
        identity: its `statements` are the recorded configs.
        saved: the config in the run's directory, as nested sections.
    """
    changes = [config_changes(statement.config, saved) for statement in identity.statements[-2:]]
    return [] if [] in changes else changes[-1]


def differences(stated: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """Return a text for each item in which two mappings differ. The text has both values."""
    names = sorted(stated.keys() | present.keys())
    return [
        f"{name}: {present.get(name, 'none')} (was {stated.get(name, 'none')})"
        for name in names
        if stated.get(name) != present.get(name)
    ]


def fingerprint(items: Mapping[str, str]) -> str:
    """Return the digest of a worker's numerics, shortened to the length that commits store."""
    return codec.digest(dict(items))[:12]


def identity_faults(identity: Identity | None, saved: Mapping[str, Any], commits: Iterable[Commit]) -> Iterator[str]:
    """Yield a text for each contradiction between a run's identity and its saved config or commits. Without an
    identity, yield one text that says so. `saved`: the config in the run's directory, as sections."""
    if identity is None:
        yield f"{FILE} is missing: nothing says which config, models and prompts the commits were made with"
        return
    for change in edited_settings(identity, saved):
        yield f"config.yaml is not what was stated: {change}"
    fingerprints = {known.fingerprint for known in identity.numerics}
    for commit in commits:
        made = commit.provenance
        if made.config_hash not in identity.config_hashes:
            yield f"{commit.address}: made under config {made.config_hash or 'unknown'}, which {FILE} does not list"
        if made.numerics not in fingerprints:
            yield f"{commit.address}: made on numerics {made.numerics or 'unknown'}, which {FILE} does not list"
