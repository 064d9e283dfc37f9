"""A reference on a gang of its own works beside the policy's log-probs, with the bits that it has on the trainer's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faulty_runtimes import SIDE_BY_SIDE
from tests.support.run_results import outputs
from tests.support.runs import QUIET, configure, finish, placement, use_runtime

pytestmark = [pytest.mark.processes, pytest.mark.full]

APART = placement(
    "{generate: {}, train: {}, reference: {}}", generate="generate", reference="reference", others="train"
)
TOGETHER = placement("{generate: {}, train: {}}", generate="generate", others="train")


def test_reference_and_logprob_of_a_shard_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = (*QUIET, "steps=2", "ppo.proximal=recompute", "evaluate.every=0")
    together = finish(configure(tmp_path, "together", TOGETHER, *changes))
    use_runtime(monkeypatch, "tests.support.faulty_runtimes:MeetingRuntime")
    apart = finish(configure(tmp_path, "apart", APART, *changes))
    ledger = apart.stored.ledger()
    reference, logprob = (ledger.get(address) for address in SIDE_BY_SIDE)
    assert reference.provenance.started < logprob.finished
    assert logprob.provenance.started < reference.finished
    assert outputs(apart) == outputs(together)
