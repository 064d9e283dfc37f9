"""HTML that the report and the page `/stageline` share: the styles and scripts of `static/`, a content security policy
that allows only these, and JSON that is safe inside an HTML element. The pages load no files from other hosts.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

_STATIC = Path(__file__).parent / "static"


@cache
def read_static(*names: str) -> str:
    """Return the contents of these files of `static/`, joined in the given order."""
    return "\n".join((_STATIC / name).read_text("utf8") for name in names)


def content_security_policy(style: str, script: str, *further_directives: str) -> str:
    """Return a content security policy. The policy allows this style and this script, and what the `further_directives`
    allow. It forbids everything else. The further directives are appended to the policy."""
    own = f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}"
    return "; ".join([own, *further_directives])


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def to_embedded_json(shown: Any) -> str:
    """Return a value as JSON that is safe inside an HTML element, because it contains no `<`. Dataclasses become JSON
    objects."""
    text = json.dumps(shown, default=_fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _fields(value: Any) -> Any:
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{type(value).__name__} cannot be shown on a page")
    return vars(value)
