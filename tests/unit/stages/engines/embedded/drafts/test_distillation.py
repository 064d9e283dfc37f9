"""The draft head's training data and its loss, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stages.engines.embedded.drafts.distillation import FinishedRows, Student, Teacher, masked_loss
from stages.engines.embedded.drafts.draft_head import LearnedDrafter
from stages.engines.embedded.kernels.reference import TorchKernels
from stages.engines.protocol import Request
from stages.models.config import SamplingConfig
from tests.support.engines import row_of


def test_ring_of_rows() -> None:
    """Eight places: rows of 3 and 4 tokens fit; one of 2 starts over and cuts the first down to its last token."""
    rows = FinishedRows(8, 1)
    rows.add(torch.tensor([[1.0], [2.0], [3.0]]), [11, 12, 13])
    rows.add(torch.tensor([[4.0], [5.0], [6.0], [7.0]]), [14, 15, 16, 17])
    assert rows.starts().tolist() == [0, 1, 3, 4, 5]  # the last token of a row is followed by nothing
    rows.add(torch.tensor([[8.0], [9.0]]), [18, 19])
    assert rows.starts().tolist() == [0, 3, 4, 5]
    assert rows.tokens.tolist() == [18, 19, 13, 14, 15, 16, 17, 0]
    assert rows.hidden[:, 0].tolist() == [8, 9, 3, 4, 5, 6, 7, 0]
    rows.add(torch.arange(10.0)[:, None], list(range(10)))  # longer than the ring: its end is kept
    assert rows.tokens.tolist() == list(range(2, 10))


def test_loss_by_hand() -> None:
    """Two tokens. The first place: taught (1/4, 3/4), logits equal: entropy ln 2; states 2 apart: |2| - 1/2 = 1.5,
    times 0.1. The second place is not there."""
    logits = torch.zeros(1, 2, 2)
    taught = torch.tensor([[[0.25, 0.75], [1.0, 0.0]]])
    made, wanted = torch.zeros(1, 2, 1), torch.full((1, 2, 1), 2.0)
    loss = masked_loss(logits, taught, made, wanted, torch.tensor([[True, False]]))
    assert loss.item() == pytest.approx(math.log(2) + 0.15)


def make_student(head_vocab: int, budget_bytes: int = 2**20) -> Student:
    table = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    teacher = Teacher(
        embedding=lambda tokens: table[torch.tensor(tokens)],
        out=lambda tokens: table[torch.tensor(tokens)],
        out_name="head",
        norm=torch.ones(8),
        norm_name="norm",
        norm_eps=1e-5,
    )
    return Student(teacher, 32, head_vocab, budget_bytes, torch.device("cpu"))


def add_rows(student: Student, tokens: tuple[int, ...], times: int) -> None:
    for _ in range(times):
        student.add(np.ones((len(tokens), 8), np.float32), tokens)


def test_nothing_is_learned_from_too_little_or_twice_too_often() -> None:
    """512 tokens are enough to begin with; each is looked at 8 times, 64 at once: 64 steps."""
    student = make_student(8)
    add_rows(student, (5, 6, 7, 8), 127)
    assert not student.step()
    add_rows(student, (5, 6, 7, 8), 1)
    steps = 0
    while student.step():
        steps += 1
    assert steps == 512 * 8 // 64


def test_vocabulary_is_what_is_frequent_and_follows_the_responses() -> None:
    """Four of 32 tokens; those missing are filled with the first ids. New frequent tokens push rare ones out, and what
    stays keeps what was learned."""
    student = make_student(4)
    add_rows(student, (9, 20, 9, 20), 128)
    assert student.step()
    before = student.publish()
    assert before.ids.tolist() == [9, 20, 0, 1]
    learned = before.out[0].detach().clone()
    add_rows(student, (9, 30, 31, 30, 31), 128)
    assert student.step()
    after = student.publish()
    assert set(after.ids.tolist()) == {9, 20, 30, 31}
    draft_id = after.ids.tolist().index(9)
    torch.testing.assert_close(after.out[draft_id].detach(), learned, atol=2e-3, rtol=0)  # but for one step


def test_refit_changes_the_teacher_for_the_next_step() -> None:
    """The teacher's rows come from the new tensors, copied: what the caller does with them later does not matter. New
    rows that say something else move the head elsewhere."""
    students = [make_student(8) for _ in range(3)]
    table = torch.full((32, 8), -1.0)
    table[5] = 3.0
    other = {"head": table.clone()}
    for student in students:
        add_rows(student, (5, 6, 7, 8), 256)
        assert student.step()
    students[1].refit(other)
    other["head"].zero_()
    students[2].refit({"head": table})
    outs = []
    for student in students:
        for _ in range(5):
            assert student.step()
        outs.append(student.publish().out.detach())
    assert not torch.equal(outs[0], outs[1])
    assert torch.equal(outs[1], outs[2])


@pytest.mark.parametrize("megabytes", [1, 3])
def test_hidden_states_of_finished_rows_stay_within_their_budget(megabytes: int) -> None:
    """The budget holds for any number of finished rows, and for rows longer than the whole ring: three quarters of
    it."""
    hidden, budget = 8, megabytes << 20
    student = make_student(8, budget)
    kept = student._rows
    places = kept.num_places
    for length in (1, places // 3, places // 2, places, places + 5):
        student.add(np.ones((length, hidden), np.float32), (5,) * length)
        taken = sum(held.untyped_storage().nbytes() for held in (kept.hidden, kept.tokens, kept.ends))
        assert budget * 3 // 4 - 32 < taken <= budget * 3 // 4
    assert student.in_flight_bytes + taken <= budget


def test_hidden_states_of_rows_in_flight_stay_within_their_budget() -> None:
    """A quarter of the budget (`HIDDEN_STATES_BYTES` in a run): of 20 rows whose 200 passes each would take eight times
    as much, the last states are kept, without a gap; what finishes gives its share back."""
    hidden, passes = 8, 200
    student = make_student(8, 2**16)
    drafter = LearnedDrafter(student, TorchKernels(), torch.float32)
    rows = [row_of(Request(i, 0, 0, (1, 2), 0, SamplingConfig(passes + 1))) for i in range(20)]
    for number in range(passes):
        for i, row in enumerate(rows):
            drafter.observe(row, np.full((1, hidden), 1000 * i + number, np.float32))
        held = sum(part.nbytes for states in drafter._hidden.values() for part in states)
        assert drafter.held_bytes == held <= student.in_flight_bytes
    assert drafter.held_bytes > student.in_flight_bytes // 2
    for i, row in enumerate(rows):
        numbers = np.concatenate(drafter._hidden[row])[:, 0] - 1000 * i
        assert numbers.tolist() == list(range(passes - len(numbers), passes))
    for row in rows:
        drafter.finish(row)
    assert drafter.held_bytes == 0


def test_the_last_state_of_every_row_is_kept() -> None:
    """Drafts begin with it, even if there is no room for anything else."""
    drafter = LearnedDrafter(make_student(8, 0), TorchKernels(), torch.float32)
    rows = [row_of(Request(i, 0, 0, (1, 2), 0, SamplingConfig(9))) for i in range(3)]
    for number in range(5):
        for row in rows:
            drafter.observe(row, np.full((2, 8), number, np.float32))
    assert [[part[0, 0] for part in drafter._hidden[row]] for row in rows] == [[4], [4], [4]]
