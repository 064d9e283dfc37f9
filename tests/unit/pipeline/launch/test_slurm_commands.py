"""The reading of Slurm's answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.errors import ConfigError
from pipeline.launch.commands import job_state, submit
from tests.support.fake_slurm import FakeSlurm


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "REVOKED"])
def test_states_after_which_nothing_comes(fake_slurm: FakeSlurm, state: str) -> None:
    fake_slurm.job_is("12", state)
    known = job_state("12")
    assert known is not None
    assert known.over


@pytest.mark.parametrize(
    "state", ["PENDING", "RUNNING", "COMPLETING", "SPECIAL_EXIT", "STOPPED", "RESIZING", "REQUEUED", "REQUEUE_HOLD"]
)
def test_a_job_in_any_other_state_is_under_way(fake_slurm: FakeSlurm, state: str) -> None:
    fake_slurm.job_is("12", state)
    known = job_state("12")
    assert known is not None
    assert not known.over


def test_a_job_is_forgotten_only_where_slurm_says_so(fake_slurm: FakeSlurm) -> None:
    assert job_state("12") is None
    (fake_slurm.folder / "commands/scontrol").write_text("#!/bin/bash\necho Job 12_7 not found\nexit 1\n")
    assert job_state("12_7") is None, "as it is said of an array's task"


def test_a_controller_that_does_not_answer_has_forgotten_nothing(fake_slurm: FakeSlurm) -> None:
    fake_slurm.job_is("12", "RUNNING")
    fake_slurm.answer_nothing()
    with pytest.raises(ConfigError, match=r"^slurm: Slurm does not answer: Unable to contact slurm controller \(conn"):
        job_state("12")


@pytest.mark.parametrize(
    ("complaint", "key", "said"),
    [
        ("sbatch: error: invalid partition specified: p", "slurm.partition", "invalid partition specified: p"),
        ("sbatch: fatal: No memory", "slurm", "No memory"),
        ("sbatch: unrecognized option '--x'", "slurm", "unrecognized option '--x'"),
    ],
)
def test_a_refusal_is_in_the_words_of_slurm(fake_slurm: FakeSlurm, complaint: str, key: str, said: str) -> None:
    fake_slurm.refuse(complaint)
    with pytest.raises(ConfigError) as refused:
        submit(Path("script"))
    assert str(refused.value) == f"{key}: Slurm refuses the job: {said}"
