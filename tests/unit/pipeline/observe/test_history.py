"""A run's numbers, read back from commits that were written by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.graph.graph import GraphSpec
from pipeline.observe.engine_metrics import is_shard_metric, shard_metrics, step_metrics
from pipeline.observe.history import History, canary_alarm_text, distinct_bigrams, evaluation_metrics
from stages.engines.protocol import EngineStats
from storage.address import Address
from storage.commits import Commit, Provenance
from storage.config import Layout, Layouts
from storage.ledger import Ledger
from storage.records import ReferenceLogprobs, Rollout, Scores
from storage.rollouts import RolloutStore
from tests.support.sampled_rows import rollout_of

SPEC = GraphSpec(steps=3, shards=2, staleness=1, eval_every=2, eval_shards=2)


@pytest.fixture
def history(tmp_path: Path) -> History:
    ledger = Ledger(str(tmp_path / "ledger"))
    layout = Layout(2, 1, 6)
    return History(SPEC, ledger, RolloutStore(str(tmp_path), ledger, Layouts(layout, layout)), rows_per_step=2)


def provenance(started: float) -> Provenance:
    return Provenance((), (), 0, "test", "w", "h", 1, started)


def commit(
    history: History, stage: str, step: int, started: float, seconds: float, shard: int = 0, **metrics: float
) -> None:
    address = Address(stage, step, shard)
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    finished = started + seconds
    history.ledger.commit(Commit(address, "a0", None, 0, {}, provenance(started), finished, named))


def rollout(tokens: list[list[int]], prompts: list[int]) -> Rollout:
    """Rows of a one-token prompt and a response; 0 pads."""
    lengths = np.array([len(row) for row in tokens], np.int32)
    padded = np.array([[9, *row, *[0] * (5 - len(row))] for row in tokens], np.int32)
    mask = (np.arange(6) >= 1) & (np.arange(6) <= lengths[:, None])
    return rollout_of(padded, mask, prompt_index=np.array(prompts))


def a_step(history: History) -> None:
    """Step 1: published at 100, trained into version 2, which is published at 108."""
    commit(history, "publish", 1, 99.5, 0.5)
    commit(history, "generate", 1, 100.0, 2.0, 0, generate__tokens=30, score__mean=0.5)
    commit(history, "generate", 1, 101.0, 3.0, 1, generate__tokens=50, score__mean=0.7)
    commit(history, "advantage", 1, 104.0, 0.25, reward__mean=0.5, kl__ref=2.0, staleness__fraction_0=0.5,
           staleness__fraction_1=0.5)  # fmt: skip
    commit(history, "update_policy", 1, 105.0, 2.5, policy__lr=0.1)
    commit(history, "publish", 2, 107.5, 0.5)


def test_metrics_of_a_step(history: History) -> None:
    a_step(history)
    found = history.read_step_metrics(1)
    assert found == pytest.approx(
        {
            "generate/tokens": 80,  # summed over shards
            "score/mean": 0.6,  # mean over shards
            "reward/mean": 0.5,
            "kl/ref": 2.0,
            "staleness/fraction_0": 0.5,
            "staleness/fraction_1": 0.5,
            "policy/lr": 0.1,
            "time/generate_s": 5.0,
            "time/advantage_s": 0.25,
            "time/update_policy_s": 2.5,
            "time/publish_s": 0.5,
            "time/step_s": 8.0,  # from the publication of version 1 to that of version 2
            "samples_per_s": 2 / 8,
            "tokens_per_s": 10.0,
        }
    )


def test_the_trunks_hit_rate_is_of_all_who_asked_it(history: History) -> None:
    """The first forward of a step computes its rows, the others find them."""
    commit(history, "reference", 1, 100.0, 1.0, 0, trunk__rows=8, trunk__computed_rows=8)
    commit(history, "value", 1, 101.0, 1.0, 0, trunk__rows=8, trunk__computed_rows=2)
    commit(history, "update_policy", 1, 102.0, 1.0, trunk__rows=16, trunk__computed_rows=0)
    found = history.read_step_metrics(1)
    assert (found["trunk/rows"], found["trunk/hit_rate"]) == (32, 1 - 10 / 32)


def test_a_canary_is_reported_with_the_step_that_trains_its_version(tmp_path: Path) -> None:
    """eta = 2: its node is among those of the step after."""
    spec = GraphSpec(steps=4, shards=1, staleness=2, has_canaries=True)
    ledger = Ledger(str(tmp_path / "ledger"))
    store = RolloutStore(str(tmp_path), ledger, Layouts(Layout(1, 1, 6)))
    history = History(spec, ledger, store, rows_per_step=1)
    commit(history, "canary", 1, 100.0, 1.0, mismatch__canary_mean_abs=0.25)
    commit(history, "canary", 2, 101.0, 1.0, mismatch__canary_mean_abs=0.5)
    assert [history.read_step_metrics(step).get("mismatch/canary_mean_abs") for step in (1, 2)] == [0.25, 0.5]


def test_an_alarm_is_told_with_its_numbers() -> None:
    metrics = {"mismatch/alarm": 1.0, "mismatch/alarm_nats": 0.01, "mismatch/canary_mean_abs": 0.25}
    text = canary_alarm_text(7, metrics)
    assert text is not None
    assert "differ by 0.25 nats a token at version 7" in text
    behind = {**metrics, "mismatch/alarm_nats": 0.3, "mismatch/canary_moved": 0.0}
    assert "the engine has moved by 0 since older weights: it seems to have those still" in str(
        canary_alarm_text(7, behind)
    )
    assert canary_alarm_text(7, {**metrics, "mismatch/alarm": 0.0}) is None
    assert canary_alarm_text(7, {}) is None


def test_a_step_that_a_stop_interrupted_has_no_step_time(history: History) -> None:
    a_step(history)
    assert "time/step_s" in history.read_step_metrics(1, driver_starts=[99.0, 108.5])
    interrupted = history.read_step_metrics(1, driver_starts=[103.0])
    assert not {"time/step_s", "samples_per_s", "tokens_per_s"} & interrupted.keys()
    assert interrupted["time/update_policy_s"] == pytest.approx(2.5)


def test_numbers_of_a_step(history: History) -> None:
    a_step(history)
    numbers = history.read_step_numbers(1)
    assert (numbers.step, numbers.reward, numbers.kl) == (1, 0.5, 2.0)
    assert (numbers.num_samples, numbers.num_tokens) == (2, 80)
    assert dict(numbers.staleness) == {0: 1, 1: 1}


def test_when_a_step_is_over(history: History) -> None:
    a_step(history)
    assert history.finished_steps() == []
    commit(history, "update_critic", 1, 108.0, 1.0)
    assert history.finished_steps() == [1]
    commit(history, "update_policy", 2, 110.0, 1.0)
    commit(history, "update_critic", 2, 110.0, 1.0)
    assert history.finished_steps() == [1], "its records of rows and advantages were damaged: no number of it is known"
    commit(history, "advantage", 2, 109.0, 1.0)
    commit(history, "generate", 2, 108.0, 1.0, 0)
    commit(history, "generate", 2, 108.0, 1.0, 1)
    assert history.finished_steps() == [1, 2]
    assert history.step_ends(2) == [Address("update_policy", 2), Address("update_critic", 2), Address("publish", 3)]


def test_an_evaluation_is_there_when_all_its_shards_are(history: History) -> None:
    for shard, (prompt, score) in enumerate([(7, 0.25), (3, 1.0)]):
        assert history.read_evaluation(2) is None
        rows = rollout([[4, 5, 4, 5]], [prompt])
        history.store.write(Address("evaluate", 2, shard), rows, provenance(1.0))
        scores = Scores(np.array([score], np.float32))
        history.store.write(Address("evaluate_score", 2, shard), scores, provenance(1.0))
    (evaluation,) = history.read_evaluations()
    assert (evaluation.version, evaluation.mean) == (2, 0.625)
    assert dict(evaluation.scores) == {7: 0.25, 3: 1.0}
    assert evaluation.distinct_bigrams == pytest.approx(2 / 6)  # 45 54 45, twice
    assert (evaluation.kl, evaluation.length) == (None, 4.0), "the reference has not looked at it yet"
    assert evaluation_metrics(evaluation) == {"eval/reward_mean": 0.625, "eval/length_mean": 4.0}


def test_the_kl_of_an_evaluation_is_that_of_what_was_sampled(history: History) -> None:
    """Four tokens a response, each of them 0.5 nats likelier to the sampler in one shard and 1.5 in the other."""
    for shard, distance in enumerate([0.5, 1.5]):
        rows = rollout([[4, 5, 4, 5]], [shard])
        reference = np.where(rows.response_mask, rows.sampler_logprobs - np.float32(distance), 0)
        scores = Scores(np.array([shard], np.float32), {"a": np.float32([1 + shard]), "b": np.float32([-1])})
        history.store.write(Address("evaluate", 2, shard), rows, provenance(1.0))
        history.store.write(Address("evaluate_score", 2, shard), scores, provenance(1.0))
        record = ReferenceLogprobs(reference.astype(np.float32))
        history.store.write(Address("evaluate_reference", 2, shard), record, provenance(1.0))
    (evaluation,) = history.read_evaluations()
    assert evaluation.kl == pytest.approx(4.0)
    assert evaluation.parts == {"a": 1.5, "b": -1.0}
    assert evaluation_metrics(evaluation) == {
        "eval/reward_mean": 0.5, "eval/kl": pytest.approx(4.0), "eval/length_mean": 4.0, "eval/a/mean": 1.5,
        "eval/b/mean": -1.0,
    }  # fmt: skip


def test_distinct_bigrams_by_hand() -> None:
    assert distinct_bigrams(rollout([[1, 2, 3], [1, 2], [4]], [0, 1, 2])) == pytest.approx(2 / 3)  # 12 23 12
    assert distinct_bigrams(rollout([[1], [2]], [0, 1])) is None


def engine_stats(**changes: object) -> EngineStats:
    values: dict[str, object] = {
        "tokens": 100, "rows": 4, "decode_steps": 10, "mean_occupancy": 0.5, "kv_peak_fraction": 0.25, "preemptions": 1,
        "refit_s": 0.5, "busy_s": 2.0, "prompt_tokens": 30, "shared_tokens": 10,
    }  # fmt: skip
    return EngineStats(**(values | changes))  # type: ignore[arg-type]


def test_a_step_of_two_shards() -> None:
    """The second shard was generated by a faster, emptier replica that drafted."""
    second = engine_stats(
        tokens=300, decode_steps=30, mean_occupancy=0.1, kv_peak_fraction=0.75, preemptions=0, busy_s=3.0,
        prompt_tokens=50, shared_tokens=30, drafted_tokens={"lookup-3": 40}, accepted_tokens={"lookup-3": 10},
        draft_lengths={0: 75, 2: 25},
    )  # fmt: skip
    committed = [
        shard_metrics(engine_stats(), fetch_s=0.25, fetched_bytes=7, peak_bytes=900),
        shard_metrics(second, peak_bytes=500),
    ]
    assert all(is_shard_metric(name) for shard in committed for name in shard)
    assert step_metrics(committed) == pytest.approx(
        {
            "generate/busy_s": 5.0,
            "generate/refit_s": 1.0,
            "generate/fetch_s": 0.25,
            "generate/fetched_bytes": 7,
            "generate/tokens_per_busy_s": 400 / 5,
            "generate/occupancy": (0.5 * 10 + 0.1 * 30) / 40,
            "generate/kv_peak_fraction": 0.75,
            "generate/peak_memory_bytes": 900,
            "generate/preemptions": 1,
            "generate/prompt_tokens": 80,
            "generate/shared_fraction": 40 / 120,
            "generate/drafted/lookup-3": 40,
            "generate/acceptance/lookup-3": 0.25,
            "generate/draft_length/0": 0.75,
            "generate/draft_length/2": 0.25,
        }
    )


def test_a_shard_that_another_one_asked_for() -> None:
    """Two shards in one engine: the second one to ask finds no counts."""
    nothing = engine_stats(tokens=0, decode_steps=0, mean_occupancy=0.0, busy_s=0.0, refit_s=0.0, kv_peak_fraction=0.0,
                    preemptions=0, prompt_tokens=0, shared_tokens=0)  # fmt: skip
    assert step_metrics([shard_metrics(engine_stats()), shard_metrics(nothing)]) == step_metrics(
        [shard_metrics(engine_stats())]
    )
    assert step_metrics([shard_metrics(nothing)])["generate/occupancy"] == 0.0
