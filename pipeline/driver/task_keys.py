"""What tasks are called on Dask's dashboard: a function of the node, no Dask in it.

    ("generate-000003", 1)          shard 1 of step 3 being computed; a later attempt adds its name
    ("generate-commit-000003", 1)   its marker: whether it has its commit

Dask takes what stands before the number for the task's name, by which it counts and colours, and all of the first part
for its group, one for each stage of a step: groups named by the stage alone would depend on each other in circles,
which Dask's page of groups cannot draw.

May import storage.address.
"""

from __future__ import annotations

from storage.address import Address

_COMMIT = "-commit"
_NAMES = {
    "value": "value-forward",
    "canary": "canary-check",
    "canary_logprob": "canary_logprob-forward",
    "evaluate_reference": "evaluate_reference-model",
}
"""Stages that are called something else than they are: Dask draws its colours from 18 by a hash of the name, and these
would share another's."""


def task_key(address: Address, attempt: str | None = None) -> tuple[object, ...]:
    """Of an attempt at a node; `attempt` names any but the first."""
    name = _NAMES.get(address.stage, address.stage)
    key = f"{name}-{address.step:06d}", address.shard
    return key if attempt is None else (*key, attempt)


def marker_key(address: Address) -> tuple[str, int]:
    """Of the marker of a node's commit."""
    return f"{address.stage}{_COMMIT}-{address.step:06d}", address.shard


def marker_stage(key: object) -> str | None:
    """The stage of a marker, by its key; None of any other task's."""
    match key:
        case (str(group), int(_)) if (name := group.rpartition("-")[0]).endswith(_COMMIT):
            return name.removesuffix(_COMMIT)
    return None


def build_key(worker: str, incarnation: int, executor: str, what: str = "build") -> tuple[object, ...]:
    """Of the build of a worker, or of what goes before it."""
    return f"{what}-process", worker, incarnation, executor
