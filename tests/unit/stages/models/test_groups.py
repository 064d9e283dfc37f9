"""The process groups of a gang."""

from __future__ import annotations

from pathlib import Path

from megatron.core import parallel_state

from stages.models import parallel
from stages.models.config import LayoutConfig
from stages.models.parallel import Rank


def test_megatron_makes_no_second_copies_of_the_groups(tmp_path: Path) -> None:
    """On GPUs each group would have one over gloo too: connections among all hosts that nothing uses."""
    parallel.join(Rank(0, 1, f"file://{tmp_path}/rendezvous", 1), LayoutConfig(distributed_optimizer=True), 0)
    try:
        copies = {name: group for name, group in vars(parallel_state).items() if name.endswith("_GROUP_GLOO")}
        assert copies
        assert set(copies.values()) == {None}
        assert parallel_state.get_data_parallel_group().size() == 1
    finally:
        parallel.leave()
