"""Runs for reports, written by hand: records of a few tokens a row, metrics and a journal, of any length and with any
text. Token t of the vocabulary is `words[t]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.graph.graph import GraphSpec, run_nodes
from pipeline.observe.history import History
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.report.source import RunSource, Sameness
from pipeline.observe.summary import summarise
from storage.address import Address
from storage.commits import Provenance
from storage.config import Durability, Layout, Layouts
from storage.ledger import Ledger
from storage.records import Advantages, PolicyLogprobs, Record, ReferenceLogprobs, Rollout, Scores, Values
from storage.rollouts import RolloutStore
from tests.support.sampled_rows import rollout_of

PROMPT, RESPONSE = 2, 4
"""Tokens of every prompt and response."""
SEQ = PROMPT + RESPONSE
WORDS = ("<pad>", "the", " cat", " sat", " on", " a", " mat", ".")
STAGES = (("generate", "engine", 0.4), ("score", "judge", 0.1), ("reference", "train", 0.2), ("logprob", "train", 0.2),
          ("value", "train", 0.1), ("advantage", "judge", 0.05), ("update_policy", "train", 0.5),
          ("update_critic", "train", 0.3), ("publish", "train", 0.02))  # fmt: skip
"""(stage, gang, seconds) of a step, one after another."""


SAME = Sameness("m", "t", "m", "r", "r", "s")


@dataclass(frozen=True)
class WrittenRun:
    """How a run is to be written."""

    name: str = "run"
    steps: int = 4
    rows: int = 8
    words: Sequence[str] = WORDS
    critic: bool = True
    eval_every: int = 2
    parts: bool = False
    gain: float = 0.1
    """Gain of the score from a step to the next."""
    settings: dict[str, object] = field(default_factory=dict)
    sameness: Sameness = SAME
    events: tuple[Event, ...] = ()
    """Beside those of nodes."""
    done: int | None = None
    """Steps that were finished; None: all."""


def write_run(folder: Path, run: WrittenRun) -> RunSource:
    """Writes a run into `folder` and opens it. Two shards a step, one of an evaluation."""
    ledger = Ledger(str(folder / "ledger"), Durability(fsync=False))
    layouts = Layouts(Layout(2, run.rows // 2, SEQ), Layout(1, run.rows, SEQ))
    store = RolloutStore(str(folder), ledger, layouts, durability=Durability(fsync=False))
    spec = GraphSpec(
        steps=run.steps, shards=2, staleness=1, eval_every=run.eval_every, has_critic=run.critic, eval_shards=1
    )
    history = History(spec, ledger, store, run.rows)
    done = run.steps if run.done is None else run.done
    for step in range(done):
        _write_step(store, run, step)
    evaluated = [v for v in range(done + 1) if run.eval_every and v % run.eval_every == 0] if done else []
    for version in evaluated:
        _write_evaluation(store, run, version)
    events = [
        Event(0.0, EventKind.RUN_STARTED, detail="start", command="stageline run x.yaml", host="box"),
        *run.events,
    ]
    events += _node_events(run, done)
    if done == run.steps:
        events.append(Event(events[-1].t, EventKind.RUN_FINISHED))
    events.sort(key=lambda event: event.t)
    numbers = [history.read_step_numbers(step) for step in history.finished_steps()]
    parents = {node.address: node.parents for node in run_nodes(spec)}
    return RunSource(
        name=run.name,
        directory=str(folder),
        settings={"steps": run.steps, "ppo.advantage": "gae" if run.critic else "rloo", **run.settings},
        history=history,
        summary=summarise(events, numbers, history.read_evaluations(), parents, {}),
        events=events,
        decode=lambda tokens: "".join(run.words[t] for t in tokens),
        sameness=run.sameness,
        software={"torch": "2"},
    )


def rollout(run: WrittenRun, version: int, rows: Sequence[int], seed: int = 0) -> Rollout:
    """Rows with words from the vocabulary; sampler log-probs are -1."""
    random = np.random.default_rng([seed, version])
    prompts = np.random.default_rng(0).integers(1, len(run.words), (64, PROMPT))[np.asarray(rows) % 64]
    tokens = np.concatenate([prompts, random.integers(1, len(run.words), (len(rows), RESPONSE))], axis=1)
    mask = np.broadcast_to(np.arange(SEQ) >= PROMPT, tokens.shape).copy()
    return rollout_of(
        tokens, mask, version=version, row=np.array(rows, np.int64), prompt_index=np.array(rows, np.int64)
    )


def by_token(values: float | np.ndarray) -> np.ndarray:
    """An array that has a number at sampled tokens, and 0 elsewhere."""
    array = np.asarray(values, np.float32)
    return np.where(np.arange(SEQ) >= PROMPT, array, 0).astype(np.float32)


def _write_step(store: RolloutStore, run: WrittenRun, step: int) -> None:
    """The reference's log-probs are -1.25, the trainer's -1.0 but for one token a row, which is -1.5 - step / 100."""
    half = run.rows // 2
    for shard in range(2):
        rows = list(range(shard * half, (shard + 1) * half))
        ours = np.tile(by_token(-1.0), (half, 1))
        ours[:, PROMPT + 1] = -1.5 - step / 100
        scores = np.array([run.gain * step + row / 100 for row in rows], np.float32)
        parts = {"tone": scores / 2, "length": scores / 2} if run.parts else {}
        said = {"score/mean": float(scores.mean()), "generate/tokens": float(half * RESPONSE)}
        version = max(0, step - 1)
        _commit(store, run, "generate", step, shard, rollout(run, version, rows, seed=step), said, versions=(version,))
        _commit(store, run, "score", step, shard, Scores(scores, parts))
        _commit(store, run, "reference", step, shard, ReferenceLogprobs(np.tile(by_token(-1.25), (half, 1))))
        _commit(store, run, "logprob", step, shard, PolicyLogprobs(ours, np.tile(by_token(0.5), (half, 1))))
        if run.critic:
            values = Values(np.tile(by_token(0.5), (half, 1)), np.zeros(half, np.float32))
            _commit(store, run, "value", step, shard, values)
    whole = np.tile(by_token(1.0), (run.rows, 1))
    mask = whole > 0
    metrics = {"reward/mean": run.gain * step + (run.rows - 1) / 200, "kl/ref": 0.5, "policy/clipfrac": 0.01 * step,
               "staleness/fraction_0": float(step == 0), "staleness/fraction_1": float(step > 0)}  # fmt: skip
    if run.parts:
        metrics |= {"reward/tone/mean": 0.1 * step, "reward/length/mean": 0.2}
    _commit(store, run, "advantage", step, 0, Advantages(whole, whole * 0.75, whole, mask), metrics)
    for stage in ("update_policy", "update_critic") if run.critic else ("update_policy",):
        _commit(store, run, stage, step, 0, None, {"policy/grad_norm": 1.0})
    _commit(store, run, "publish", step + 1, 0, None)


def _write_evaluation(store: RolloutStore, run: WrittenRun, version: int) -> None:
    """Scores of version v: gain * v + row / 100, and 0.01 more on even rows after version 0."""
    rows = list(range(run.rows))
    scores = np.array([run.gain * version + row / 100 + 0.01 * (version > 0 and row % 2 == 0) for row in rows])
    _commit(store, run, "evaluate", version, 0, rollout(run, version, rows, seed=99))
    _commit(store, run, "evaluate_score", version, 0, Scores(scores.astype(np.float32)))


def _commit(
    store: RolloutStore,
    run: WrittenRun,
    stage: str,
    step: int,
    shard: int,
    record: Record | None,
    metrics: dict[str, float] | None = None,
    versions: tuple[int, ...] = (),
) -> None:
    address = Address(stage, step, shard)
    made = Provenance((), versions, 0, "c", "w", "box", 1, _begin(stage, step))
    if record is not None:
        store.write(address, record, made, metrics=metrics or {})
    else:
        store.commit_only(address, made, metrics=metrics or {})


def _begin(stage: str, step: int) -> float:
    """Seconds: steps are 2 s apart, their stages one after another."""
    begin = 100.0 + 2.0 * (step - 1 if stage == "publish" else step)
    for name, _, seconds in STAGES:
        if name == stage:
            break
        begin += seconds
    return begin


def _node_events(run: WrittenRun, done: int) -> list[Event]:
    found = []
    for step in range(done):
        for stage, gang, seconds in STAGES:
            if stage in ("value", "update_critic") and not run.critic:
                continue
            number = step + 1 if stage == "publish" else step
            end = _begin(stage, number) + seconds
            named = {"stage": stage, "step": number, "shard": 0, "gang": gang, "worker": f"{gang}-0"}
            found.append(Event(end, EventKind.FINISHED, rank=0, seconds=seconds, store_s=0.0, **named))  # type: ignore[arg-type]
            if stage == "publish":
                found.append(Event(end, EventKind.PUBLISHED, step=number))
    return found
