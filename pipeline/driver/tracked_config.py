"""What of a run's config tracking gets, and what of its metrics says nothing under that config. Pure functions.

May import pipeline.config, pipeline.observe.redaction, stages.models.protocol.Role and the standard library.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.loading import flatten
from pipeline.config.run import RunConfig
from pipeline.observe.redaction import without_credentials
from stages.models.protocol import Role


def off_metrics(config: RunConfig) -> frozenset[str]:
    """Metrics that repeat another one, or never change, in a run of this config."""
    return frozenset(_off(config))


def _off(config: RunConfig) -> Iterator[str]:
    roles, ppo = config.placement.roles, config.ppo
    if ppo.kl.target is None:
        yield "kl/coef"
    if ppo.kl.where == "reward" and not ppo.entropy_coef:
        yield "policy/surrogate"  # it is the whole loss
    if config.has_critic and roles.get(Role.CRITIC.value) == roles[Role.POLICY.value]:
        yield "critic/peak_memory_bytes"  # of the same processes
    if config.staleness == 0:
        yield from ("staleness/mean", "staleness/max", "staleness/fraction_0", "mismatch/fresh_fraction")
        yield from ("mismatch/mean_abs_all", "mismatch/exp_abs_all")
    elif config.rollout.versions == "exact":  # from step `staleness` on no token is fresh
        yield from ("mismatch/mean_abs", "mismatch/exp_abs", "mismatch/fresh_fraction")
        yield from (f"staleness/fraction_{age}" for age in range(config.staleness + 1))


def tracked_params(config: RunConfig) -> dict[str, str]:
    """The config's settings less those that the run does not read, and without passwords in URLs."""
    unread = tuple(_unread(config))
    read = {key: value for key, value in flatten(config).items() if not key.startswith(unread)}
    return {key: without_credentials(value) for key, value in read.items()}


def _unread(config: RunConfig) -> Iterator[str]:
    """Beginnings of keys."""
    yield "slurm."  # what was asked for is in the job's tags
    for gang in config.gangs():
        if gang.ordered:
            yield f"placement.gangs.{gang.name}.slots"
        else:
            yield from (f"placement.gangs.{gang.name}.{key}" for key in ("layout.", "offload"))
    for name in config.placement.gangs.keys() - {gang.name for gang in config.gangs()}:
        yield f"placement.gangs.{name}."
    if config.cluster.kind == "local":
        keys = ("interface", "host", "port", "scheduler_file", "arrival_timeout_s", "clock_skew_s")
        yield from (f"cluster.{key}" for key in keys)
    if not config.has_critic:
        yield from ("model.critic.", "model.critic_path", "model.critic_blocks")
    if not config.model.lora.rank:
        yield from ("model.lora.alpha", "model.lora.targets")
    if config.model.dtype != "float16":
        yield "model.loss_scale."
    if not config.evaluate.every:
        yield "evaluate.select."
