"""Collectives by the alpha-beta model."""

from __future__ import annotations

import pytest

from pipeline.config.hardware import read_cluster
from pipeline.plan.links import LAUNCH_S, Link, all_reduce_s, gather_s, link_of, send_s

LINK = Link(latency_s=1e-6, bytes_per_s=1e9, launch_s=5e-6)


def test_a_short_all_reduce_goes_up_and_down_a_tree() -> None:
    """8 ranks: 3 levels, both ways."""
    assert all_reduce_s(LINK, 8, 0) == pytest.approx(5e-6 + 6e-6)


def test_a_long_all_reduce_goes_round_a_ring() -> None:
    """4 ranks, 1 GB: 6 of 4 parts of a GB, of which each takes 1/4 s."""
    assert all_reduce_s(LINK, 4, 1e9) == pytest.approx(5e-6 + 6e-6 + 6 / 4)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    link = Link(0.0, 1e9)
    assert 2 * gather_s(link, 16, 3e9) == pytest.approx(all_reduce_s(link, 16, 3e9))


def test_one_rank_sends_nothing_to_itself() -> None:
    assert (all_reduce_s(LINK, 1, 1e9), gather_s(LINK, 1, 1e9)) == (0.0, 0.0)


def test_a_send_by_hand() -> None:
    assert send_s(LINK, 2e9) == pytest.approx(6e-6 + 2)


def test_a_group_uses_the_slowest_link_between_its_ranks() -> None:
    cluster = read_cluster("4x8xH100-80")
    nvlink, network = Link(0.47e-6, 450e9, LAUNCH_S), Link(2.7e-6, 50e9, LAUNCH_S)
    assert link_of(cluster, 8) == nvlink
    assert link_of(cluster, 9) == network
    assert link_of(cluster, 2, stride=8) == network, "the same place on two nodes"
    assert link_of(cluster, 2, stride=4) == nvlink


def test_nvlink_may_join_nodes() -> None:
    cluster = read_cluster("18x4xGB200")
    assert link_of(cluster, 72).bytes_per_s == 900e9
    assert link_of(cluster, 73).bytes_per_s == 50e9


def test_nodes_without_gpus_are_joined_by_the_network() -> None:
    assert link_of(read_cluster("4xcpu"), 4) == Link(25e-6, 12.5e9)
