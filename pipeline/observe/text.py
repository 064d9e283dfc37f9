"""Formatting of numbers and of untrusted text for the terminal.

`format_number` formats scores and KLs for tables, headlines and descriptions. `format_duration` formats times.
`sparkline` draws a curve in one line. `escape_control_characters`, `plain_text` and `print_plain` make text of models,
prompts and rewards safe to print. A response is untrusted. An escape sequence in it could colour or overwrite the
terminal, or change the terminal's title. A direction mark could reverse the text around it. The library rich removes
neither escape sequences nor direction marks.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from storage.redaction import redacted_text

_SMALLEST, _LARGEST = 0.0005, 1e6
"""Smallest and largest absolute value of a number that is shown with three decimals. The second limit is excluded."""
_NOTHING = 1e-6
"""Limit below which a value counts as a rounding error. For example, the computed KL between a model and itself is 1e-8
and not 0."""


def format_number(value: float, *, with_sign: bool = False) -> str:
    """Return a number as text. Its absolute value decides the form:

    - below 1e-6: 0.000, because the number counts as a rounding error
    - from 1e-6 to below 0.0005: at most three significant digits, such as 3.1e-05
    - from 0.0005 to below 1e6: three decimals, such as 0.250
    - 1e6 and above: at most three significant digits, such as 1.25e+30

    NaN becomes nan. If `with_sign` is true, 0 and positive numbers begin with +.
    """
    if abs(value) < _NOTHING:
        value = 0.0  # avoid -0.000
    kind = ".3f" if value == 0 or _SMALLEST <= abs(value) < _LARGEST else ".3g"
    return f"{value:{'+' if with_sign else ''}{kind}}"


def format_duration(seconds: float) -> str:
    """Return a duration as text: 71.6 s, 12 min 05 s, 10 h 01 min."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return the last `width` values as a line of block characters of different heights. NaN and infinity become
    blanks. If all values are equal, the line is flat."""
    shown = list(values)[-width:]
    finite = [value for value in shown if value - value == 0]
    if not finite:
        return " " * len(shown)
    low, span = min(finite), max(finite) - min(finite)
    ticks = "▁▂▃▄▅▆▇█"

    def tick(value: float) -> str:
        if value - value != 0:
            return " "
        return ticks[3] if span == 0 else ticks[min(7, int(8 * (value - low) / span))]

    return "".join(map(tick, shown))


def plain_text(text: object, style: str = "") -> Text:
    """Return a rich `Text` for tables and panels. Control characters are escaped, and markup has no effect. Words that
    are too long for a line are broken."""
    return Text(escape_control_characters(str(text)), style=style, overflow="fold")


def print_plain(console: Console, line: str) -> None:
    """Print one line with secrets redacted and control characters escaped. Markup in the line has no effect, and a long
    line is not broken."""
    console.print(escape_control_characters(redacted_text(line)), markup=False, highlight=False, soft_wrap=True)


_KEPT = frozenset("\n\t")
_DIRECTION_MARKS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Unicode code points that change the direction of writing."""
_CONTROL_PICTURES = 0x2400
"""Unicode code point of the first control picture. The picture of control character c is at 0x2400 + c."""
_TABLE = (
    {code: chr(_CONTROL_PICTURES + code) for code in range(0x20) if chr(code) not in _KEPT}
    | {0x7F: "\N{SYMBOL FOR DELETE}"}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
    | {code: f"\\u{code:04x}" for code in (*_DIRECTION_MARKS, 0x2028, 0x2029)}
)


def escape_control_characters(text: str) -> str:
    """Return the text with visible characters in place of invisible ones. These are control characters (except newline
    and tab), direction marks, and Unicode's line and paragraph separators. For example, ESC becomes ␛, the C1 code CSI
    becomes \\x9b, and the right-to-left override becomes \\u202e."""
    return text.translate(_TABLE)


def progress_bar(console: Console) -> Progress:
    """Return a progress bar with counts and the remaining time. The bar is shown on terminals only."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
