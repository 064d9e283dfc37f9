"""A run's directory as xarray and pandas, in a notebook or a script (docs/open_data.md).

run = stageline.open_run("runs/demo")
run.rows()            one line per response: prompt, response, score and its parts, KL, length, advantage, ...
run.tokens([3])       one line per sampled token of some steps
run.evaluations()     one line per held-out response of every evaluated version
run.metrics()         one line per step: what MLflow has, too
run.arrays([3, 4])    xarray: every stored array over (step, row, token)
"""

from pipeline.cli.opened_run import OpenedRun, open_run

__all__ = ["OpenedRun", "open_run"]
