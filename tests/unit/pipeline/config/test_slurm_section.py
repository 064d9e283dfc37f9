"""The section `slurm`: what of it cannot work, by its key and before anything is submitted."""

from __future__ import annotations

import pytest

from pipeline.config.loading import load_config
from pipeline.config.slurm import parse_time_limit
from pipeline.errors import ConfigError
from tests.support.paths import TINY


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("90:30", 90 * 60 + 30),
        ("1:30:00", 5400),
        ("2-0", 2 * 86400),
        ("1-12:30", 36 * 3600 + 30 * 60),
        ("0-00:00:10", 10),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(limit: str, expected: float) -> None:
    assert parse_time_limit(limit) == expected


@pytest.mark.parametrize(
    ("change", "key", "need"),
    [
        ("slurm.time_limit=tomorrow", "slurm.time_limit", "days-hours:minutes:seconds"),
        ("slurm.time_limit=1:30:00", "slurm.time_limit", "in quotes"),  # YAML reads 5400
        ("slurm.time_limit=0-00:02:00", "slurm.time_limit", "more than slurm.signal_lead_s = 180"),
        ("slurm.account='a b'", "slurm.account", "must be one word"),
        ("slurm.partition=$(id)", "slurm.partition", "must be one word"),
        ("slurm.environment=['']", "slurm.environment[0]", "must be one line"),
        ("slurm.sbatch=[mem=0]", "slurm.sbatch[0]", "must be one option of sbatch"),
        (
            "slurm.sbatch=[--array=0-3]",
            "slurm.sbatch[0]",
            "as stageline sweep --at-once says",
        ),
        ("slurm.sbatch=[--mem=0, --mem=0 --no-requeue]", "slurm.sbatch[1]", "--no-requeue is in the script already"),
        ("slurm.sbatch=[-o x]", "slurm.sbatch[0]", "-o is in the script already, and must be as it is"),
        ("slurm.command=''", "slurm.command", "must be a command"),
        ("slurm.gangs={trian: {}}", "slurm.gangs.trian", "placement.gangs has generate, score, train"),
        ("slurm.gangs={train: {nodes: 2}}", "slurm.gangs.train.nodes", "must divide the workers of train, which are 1"),
        ("slurm.gangs={score: {beside: train}}", "slurm.gangs.score.beside", "a gang with nodes of its own (none)"),
        ("slurm.gangs={train: {nodes: 1, beside: score}}", "slurm.gangs.train.beside", "must be null where"),
        ("slurm.gangs={train: {nodes: 0}}", "slurm.gangs.train.nodes", "must be 1 or more"),
    ],
)
def test_what_cannot_work_is_refused(change: str, key: str, need: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([TINY], [change])
    assert refused.value.key == key
    assert "given" in str(refused.value)
    assert need in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "key", "need"),
    [
        (('slurm.command="it\'s"',), "slurm.command", "a command as a shell reads it (No closing quotation)"),
        (("slurm.gangs={train: {nodes: 1, partition: p}}", "slurm.job=plain"), "slurm.job", "auto, or heterogeneous"),
        (
            ("engine.tensor_parallel=2", "slurm.gangs={generate: {gpus_per_worker: 1}}"),
            "slurm.gangs.generate.gpus_per_worker",
            "a worker of generate has 2 ranks",
        ),
        (
            ("placement.device_sharing=[[generate,train]]", "slurm.gangs={train: {nodes: 1}, generate: {nodes: 1}}"),
            "placement.device_sharing.0",
            "on the same nodes: slurm.gangs.train.beside=generate",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: tuple[str, ...], key: str, need: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([TINY], changes)
    assert refused.value.key == key
    assert need in str(refused.value)
