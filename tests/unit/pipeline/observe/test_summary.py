"""Every number of the summary, computed by hand from a small journal.

seconds        0    1    2    3    4    5    6    7    8    9   10
gen   (g0)     [ generate 0  |s]    [ generate 1   ]                  s: the last second on the store
train (t0)                    . .[ update 0        ]   .[ update 1 ]
"""

import json
import math

import pytest

from pipeline.observe.evaluations import Evaluation
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.learning import ADVICE
from pipeline.observe.summary import StepNumbers, summarise
from pipeline.observe.timeline import read_boxes
from storage.address import Address

GEN0, GEN1 = Address("generate", 0), Address("generate", 1)
UPD0, UPD1 = Address("update_policy", 0), Address("update_policy", 1)
PARENTS = {GEN0: (), GEN1: (), UPD0: (GEN0,), UPD1: (GEN1, UPD0)}


def _node(address: Address, gang: str, worker: str, submitted: float, start: float, end: float, store: float = 0.0):
    where = {"stage": address.stage, "step": address.step, "shard": address.shard, "gang": gang, "worker": worker}
    return [
        Event(submitted, EventKind.SUBMITTED, **where),
        Event(start, EventKind.STARTED, **where),
        Event(end, EventKind.FINISHED, **where, seconds=end - start, store_s=store),
    ]


EVENTS = [
    Event(-5.0, EventKind.RUN_STARTED),
    Event(-1.0, EventKind.PUBLISHED, stage="publish", step=0),
    *_node(GEN0, "gen", "g0", 0.0, 0.0, 3.0, store=1.0),
    *_node(UPD0, "train", "t0", 0.0, 3.5, 6.5),
    Event(6.5, EventKind.PUBLISHED, stage="publish", step=1),
    *_node(GEN1, "gen", "g0", 0.0, 4.0, 7.0),
    *_node(UPD1, "train", "t0", 0.0, 7.25, 10.0, store=0.5),
    Event(10.0, EventKind.PUBLISHED, stage="publish", step=2),
]
STEPS = [StepNumbers(0, 0.1, 0.0, 8, 40, {0: 8}), StepNumbers(1, 0.3, 0.5, 8, 60, {0: 2, 1: 6})]
EVALS = [Evaluation(0, {7: 0.0, 8: 0.25, 9: 0.5}, 0.9), Evaluation(2, {7: 0.25, 8: 0.75, 9: 1.25}, 0.8)]


def test_hand_computed_numbers() -> None:
    s = summarise(EVENTS, STEPS, EVALS, PARENTS, {})
    assert (s.steps, s.versions["weights"], s.wall_s) == (2, 3, 10.0)
    assert (s.samples_per_s, s.tokens_per_s) == (1.6, 10.0)
    assert s.stage_s == {"generate": 6.0, "update_policy": 5.75}
    assert s.busiest_gang == "gen"
    # gen: store 1 s; idle 3..4 with generate 1 submitted at 0 and without parents: 1 s. (1 + 1) / 10.
    assert s.overhead_fraction == pytest.approx(0.2)
    # both gangs busy: 4..6.5
    assert s.overlap_fraction == pytest.approx(0.25)
    assert s.idle == pytest.approx({"gen": 0.4, "train": 0.425})
    assert (s.staleness.max, s.staleness.mean, s.staleness.histogram) == (1, 6 / 16, {"0": 10, "1": 6})
    assert (s.reward, s.kl, s.kl_final) == ([0.1, 0.3], [0.0, 0.5], 0.5)
    assert s.distinct_bigrams == {"before": 0.9, "after": 0.8}
    assert (s.eval.before, s.eval.after, s.eval.num_prompts) == (0.25, 0.75, 3)
    # differences 0.25, 0.5, 0.75: mean 0.5, sd 0.25, t = 0.5 / (0.25 / sqrt 3)
    assert s.eval.paired_t == pytest.approx(2 * math.sqrt(3))
    required = {"steps", "wall_s", "samples_per_s", "tokens_per_s", "stage_s", "overhead_fraction", "staleness", "eval",
                "reward", "kl", "versions"}  # fmt: skip
    assert required <= json.loads(s.to_json()).keys()


def test_predictions_stand_beside_what_was_measured() -> None:
    """10 s of wall time, 6 s of generation and 5.75 s of updates in 2 steps; no value nodes ran."""
    said = {"step": 4.0, "generate": 2.0, "update_policy": 3.0, "value": 1.0}
    found = summarise(EVENTS, STEPS, EVALS, PARENTS, {}, predicted_s=said).predictions
    assert found == {"step": (4.0, 5.0), "generate": (2.0, 3.0), "update_policy": (3.0, 2.875)}
    assert summarise([], [], [], {}, {}, predicted_s=said).predictions == {}


def test_waiting_for_a_parent_is_no_overhead() -> None:
    """The busiest gang is train (by one second): it waits for generate 1 in 6.5..7, and for nothing in 7..7.25."""
    longer = [*EVENTS[:-4], *_node(UPD1, "train", "t0", 0.0, 7.25, 11.0, store=0.5)]
    s = summarise(longer, STEPS, [], PARENTS, {})
    assert s.busiest_gang == "train"
    assert s.overhead_fraction == pytest.approx((0.5 + 0.25) / 11)
    assert s.eval is None


def test_the_time_between_a_stop_and_a_resume_does_not_count() -> None:
    resumed = [*EVENTS, Event(1000.0, EventKind.RUN_STARTED)]
    resumed += _node(Address("generate", 2), "gen", "g0", 1001.0, 1002.0, 1004.0)
    s = summarise(resumed, STEPS, [], PARENTS, {})
    assert s.wall_s == 13.0
    assert s.overhead_fraction == pytest.approx((1 + 1 + 1) / 13), "1001..1002: ready, not started"


def test_what_losing_the_trainer_cost() -> None:
    """Lost at 12 and, while it is built, at 13; built at 15; the update that was lost with it runs from 15.5 to 20. A
    replica's loss is none of a trainer. Lost once more at 21, and the driver dies; its next one is at work from 100 on,
    and has trained at 104."""
    update, last = Address("update_policy", 2), Address("update_policy", 3)
    events = [
        *EVENTS,
        Event(11.0, EventKind.GANG_LOST, gang="gen", worker="g0", detail="its process ended"),
        Event(12.0, EventKind.GANG_LOST, gang="train", worker="t0", detail="its process ended"),
        Event(13.0, EventKind.GANG_LOST, gang="train", worker="t0", detail="while it was built"),
        Event(15.0, EventKind.GANG_BUILT, gang="train", worker="t0"),
        *_node(update, "train", "t0", 15.25, 15.5, 20.0),
        Event(21.0, EventKind.GANG_LOST, gang="train", worker="t0", detail="its process ended"),
        *_node(Address("generate", 3), "gen", "g0", 20.5, 21.0, 22.0),
        Event(90.0, EventKind.RUN_STARTED),
        Event(99.0, EventKind.GANG_BUILT, gang="train", worker="t0"),
        *_node(last, "train", "t0", 100.0, 101.0, 104.0),
    ]
    s = summarise(events, STEPS, [], PARENTS, {})
    assert [(loss.t, loss.gang, loss.reason) for loss in s.trainer_losses] == [
        (12.0, "train", "its process ended"),
        (13.0, "train", "while it was built"),
        (21.0, "train", "its process ended"),
    ]
    assert [(loss.built_s, loss.lost_s) for loss in s.trainer_losses] == [(3.0, 8.0), (2.0, 7.0), (1.0, 1.0 + 4.0)]
    assert s.trainer_lost_s == 8.0 + 5.0, "from 12 to 20 once; from 21 to 22 and from 100 to 104"
    assert json.loads(s.to_json())["trainer_losses"][0]["lost_s"] == 8.0
    never = summarise(events[:-3], STEPS, [], PARENTS, {})
    assert (never.trainer_losses[-1].lost_s, never.trainer_lost_s) == (None, 8.0)


def test_alarms_of_a_run_that_learned_little_come_back_as_hints() -> None:
    """Each rule's last alarm, with advice, causes first; an alarm about something else is no hint."""
    events = [
        Event(1.0, EventKind.ALARM, step=2, rule="equal_groups", detail="80% were equal"),
        Event(2.0, EventKind.ALARM, step=4, rule="kl", detail="far away"),
        Event(2.5, EventKind.ALARM, step=4, rule="staleness", detail="at its bound"),
        Event(3.0, EventKind.ALARM, step=9, rule="equal_groups", detail="90% were equal"),
        Event(4.0, EventKind.ALARM, step=3, stage="canary", detail="differs"),
    ]
    assert summarise(events, [], [], {}, {}).hints == (
        f"after 5 steps: far away. Advice: {ADVICE['kl']}",
        f"after 10 steps: 90% were equal. Advice: {ADVICE['equal_groups']}",
    )
    assert summarise(events, [], EVALS, {}, {}).hints == (), "the held-out reward has grown: paired t is 3.5"


def test_nothing_happened() -> None:
    s = summarise([], [], [], {}, {})
    assert (s.wall_s, s.overhead_fraction, s.stage_s, s.busiest_gang, s.eval) == (0.0, 0.0, {}, None, None)


def test_ranks_of_a_node_count_once_by_stage() -> None:
    ranks = [Event(2.0, EventKind.FINISHED, stage="value", step=0, rank=r, gang="t", worker=f"t{r}", seconds=2.0)
             for r in range(2)]  # fmt: skip
    assert [b.rank for b in read_boxes(ranks)] == [0, 1]
    assert summarise(ranks, [], [], {}, {}).stage_s == {"value": 2.0}
