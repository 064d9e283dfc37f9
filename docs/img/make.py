"""Make the README's pictures anew from a run of the demo: `python docs/img/make.py [key=value ...]`, some minutes.

It starts the demo in `runs/pictures`, photographs its live page halfway, and its report at the
end, in Chromium (`make browser`), and copies the run's own plots.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from pipeline.cli.answers import read_saved_config
from pipeline.cli.dashboard import open_server
from pipeline.config.paths import RunPaths
from pipeline.observe.graph_page import PATH
from pipeline.observe.journal import journal_exists
from tests.support.browser import chromium

HERE = Path(__file__).resolve().parent
RUN = Path("runs/pictures/demo")
COMMAND = (sys.executable, "-m", "pipeline.cli")
SIZE = {"width": 1280, "height": 1000}


def main() -> None:
    with subprocess.Popen([*COMMAND, "run", "conf/run/demo.yaml", f"runs_dir={RUN.parent}", *sys.argv[1:]]) as run:
        while not journal_exists(RunPaths(RUN).events) and run.poll() is None:
            time.sleep(0.5)
        live_page(read_saved_config(str(RUN)).steps // 2)
    if run.returncode:
        raise SystemExit(run.returncode)
    photograph((RUN / "report.html").resolve().as_uri(), "report.png")
    for plot in ("curves.png", "timeline.png"):
        shutil.copy(RunPaths(RUN).plots / plot, HERE / plot)


def live_page(step: int) -> None:
    """Photograph the page of the running run when `step` steps are done."""
    with open_server(read_saved_config(str(RUN)), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        photograph(f"http://127.0.0.1:{server.server_port}/{PATH}", "stageline_page.png", f"step {step} of")
        server.shutdown()


def photograph(url: str, name: str, text: str | None = None) -> None:
    """Write a picture of a page, as soon as the page shows `text`."""
    with chromium() as browser:
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        if text is not None:
            page.get_by_text(text).wait_for(timeout=600_000)
        page.screenshot(path=HERE / name)


if __name__ == "__main__":
    main()
