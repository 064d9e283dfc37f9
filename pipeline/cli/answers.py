"""What a user sees of a command: its output, one message where something is wrong, and an exit code.

May import everything below.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from pipeline.cli.exit_codes import BAD_INPUT, INTERRUPTED, STAGE_FAILED
from pipeline.config.errors import ConfigError
from pipeline.driver.context import StageFailed
from pipeline.observe.plain import print_plain
from pipeline.observe.visible import visible
from pipeline.workers.errors import ReplayMismatch
from storage.errors import StoreError


def exit_code(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """What a command returns, or, where it fails of what a user can cause, one message and the code for it."""
    try:
        return command(options)
    except (ConfigError, StoreError) as error:
        return complain("refused", str(error), BAD_INPUT)
    except (StageFailed, ReplayMismatch) as error:
        return complain("failed", str(error), STAGE_FAILED)
    except KeyboardInterrupt:
        return complain("interrupted", options.command, INTERRUPTED)


def output() -> Console:
    """Where a command prints what it was asked for."""
    return Console(file=sys.stdout)


def print_line(text: str) -> None:
    """One line of output, as it is: no markup, and not folded; control characters can be seen, and do nothing."""
    print_plain(output(), text)


def note(text: str) -> None:
    """One line on stderr: what is no part of the output, and no error."""
    Console(stderr=True).print(Text(visible(text)), soft_wrap=True)


def complain(what: str, text: str, code: int) -> int:
    """One message on stderr, on one line however long (a terminal folds it); returns the exit code."""
    Console(stderr=True).print(Text.assemble((what, "bold red"), " ", visible(text)), soft_wrap=True)
    return code
