"""Text of models, prompts and rewards as a terminal may show it. Pure. Standard library only.

A response is untrusted: an escape sequence in it would colour, overwrite or rename the terminal of who looks at it, and
a mark of direction would turn the text around it. rich lets both through.
"""

from __future__ import annotations

_KEPT = frozenset("\n\t")
_TURNS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that change the direction of writing."""
_CONTROL_PICTURES = 0x2400
"""In Unicode: of the control character c at 0x2400 + c."""
_TABLE = (
    {code: chr(_CONTROL_PICTURES + code) for code in range(0x20) if chr(code) not in _KEPT}
    | {0x7F: "\N{SYMBOL FOR DELETE}"}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
    | {code: f"\\u{code:04x}" for code in (*_TURNS, 0x2028, 0x2029)}
)


def visible(text: str) -> str:
    """The same text with every control character (but newline and tab) and every mark of direction as a sign that can
    be seen: ESC is ␛, C1 is \\x9b, the override from right to left is \\u202e."""
    return text.translate(_TABLE)
