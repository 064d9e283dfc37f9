"""Stageline in a notebook or a script.

config = stageline.load_config("conf/run/tiny.yaml", "steps=4")     as on the command line
run = stageline.run(config, callbacks=[lambda step, metrics: ...])   to the last step (docs/python.md)

A run's directory as xarray and pandas (docs/open_data.md):

run = stageline.open_run("runs/demo")
run.rows()            one line per response: prompt, response, score and its parts, KL, length, advantage, ...
run.tokens([3])       one line per sampled token of some steps
run.evaluations()     one line per held-out response of every evaluated version
run.metrics()         one line per step: what MLflow has, too
run.arrays([3, 4])    xarray: every stored array over (step, row, token)
"""

from importlib.metadata import version

from pipeline.cli.opened_run import OpenedRun, open_run
from pipeline.cli.python_run import load_config, run
from pipeline.errors import ConfigError, StageFailed

__version__ = version("stageline")
__all__ = ["ConfigError", "OpenedRun", "StageFailed", "__version__", "load_config", "open_run", "run"]
