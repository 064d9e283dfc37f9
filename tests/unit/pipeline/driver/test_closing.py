"""When the records of steps that are over go into segments, and what a resumed run starts from."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.driver.retention import LedgerCompactor, is_complete
from pipeline.graph.graph import GraphSpec, run_nodes, step_nodes, window_size
from storage.address import Address
from storage.ledger import SPAN, Ledger
from tests.support.commits import commit_empty

SPEC = GraphSpec(steps=2 * SPAN + 20, shards=2, staleness=2, eval_every=5, has_canaries=True)


def go_on(ledger: Ledger, steps: range) -> LedgerCompactor:
    """A driver to which these steps are over, in an order that is not theirs."""
    books = LedgerCompactor(SPEC, ledger)
    for step in [*steps[1::2], *steps[::2]]:
        for node in step_nodes(SPEC, step):
            commit_empty(ledger, node.address)
    for step in [*steps[1::2], *steps[::2]]:
        books.on_step_finished(step, [node.address for node in step_nodes(SPEC, step)])
    return books


def test_steps_are_closed_well_behind_those_that_are_over(tmp_path: Path) -> None:
    """So every version that an open step reads is published by a step that is open too."""
    ledger, last = Ledger(str(tmp_path)), SPAN + 2 * window_size(SPEC)
    assert go_on(ledger, range(last - 1)).first_step == ledger.closed_until() == 0
    books = LedgerCompactor(SPEC, ledger)
    for step in range(last - 1):
        books.on_step_finished(step, [node.address for node in step_nodes(SPEC, step)])
    assert ledger.closed_until() == 0
    for node in step_nodes(SPEC, last - 1):
        commit_empty(ledger, node.address)
    books.on_step_finished(last - 1, [node.address for node in step_nodes(SPEC, last - 1)])
    assert books.first_step == ledger.closed_until() == SPAN
    nodes = {node.address for step in range(last) for node in step_nodes(SPEC, step)}
    assert set(ledger.open_addresses()) == {address for address in nodes if address.step >= SPAN}
    assert set(ledger.addresses()) == nodes


def test_a_resumed_driver_goes_on_from_the_first_open_step(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    go_on(ledger, range(SPAN + 12))
    books = go_on(ledger, range(SPAN, SPEC.steps))
    assert books.first_step == ledger.closed_until() == 2 * SPAN
    assert is_complete(SPEC, Ledger(str(tmp_path)))


@pytest.mark.parametrize("missing", [Address("publish", 2 * SPAN), Address("update_critic", SPEC.steps - 1)])
def test_a_hole_is_noticed(tmp_path: Path, missing: Address) -> None:
    ledger = Ledger(str(tmp_path))
    for node in run_nodes(SPEC):
        if node.address != missing:
            commit_empty(ledger, node.address)
    ledger.close(0, [address for address in ledger.addresses() if address.step < SPAN])
    ledger.close(SPAN, [address for address in ledger.addresses() if SPAN <= address.step < 2 * SPAN])
    assert not is_complete(SPEC, ledger)
    commit_empty(ledger, missing)
    assert is_complete(SPEC, ledger)


def test_a_segment_that_was_opened_again_does_not_hide_those_after_it(tmp_path: Path) -> None:
    """A record in it was damaged. What is closed behind it would otherwise be taken for missing, and all of the run
    trained once more."""
    ledger = Ledger(str(tmp_path))
    go_on(ledger, range(SPEC.steps))
    assert ledger.closed_until() == 2 * SPAN
    ledger.reopen([Address("score", 3)])
    books = LedgerCompactor(SPEC, ledger)
    assert books.first_step == 0
    assert set(ledger.addresses(from_step=books.first_step)) == {node.address for node in run_nodes(SPEC)}
    assert is_complete(SPEC, ledger)
