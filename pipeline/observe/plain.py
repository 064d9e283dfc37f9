"""Text on a console as it is: no markup in it is obeyed, and control characters can be seen and do nothing. May import
rich and pipeline.observe.visible."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from pipeline.observe.visible import visible


def plain(text: object, style: str = "") -> Text:
    """For tables and panels, where a word that does not fit is folded."""
    return Text(visible(str(text)), style=style, overflow="fold")


def print_plain(console: Console, line: str) -> None:
    """One line, and not folded."""
    console.print(visible(line), markup=False, highlight=False, soft_wrap=True)
