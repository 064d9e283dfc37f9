"""Remove passwords, tokens and keys from settings and texts before anybody but the run itself sees them.

    settings   a value whose name says that it is a secret (`api_key`, `Authorization`, `headers`), at any depth
    URLs       user and password, and every value of a query (if the URL names a host)
    texts      `name=value`, `{name: value}` and `--name value`, where the name says that it is a secret; `Bearer ...`;
               keys of well-known shapes

`redacted` or `redacted_text` is called before anything is written to the journal, the terminal, identity.json, MLflow,
the report or the pages. A secret is not found if it has a harmless name and none of these forms. Redacting twice
changes nothing. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

MARK = "***"
_NAMES = frozenset(
    ("key", "keys", "passwd", "passphrase", "pass", "pwd", "secrets", "passwords", "authorization", "auth", "bearer",
     "credential", "credentials", "cookie", "cookies", "headers", "signature")
)  # fmt: skip
_ENDINGS = ("password", "secret", "token", "apikey", "accesskey", "secretkey", "privatekey")
"""Endings of the last word of a name: they match `access_token` and `accesstoken` alike."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^\s'\"<>`]+)")
_PASSWORD = re.compile(r"(\s*[A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#@:]*:[^\n]*@")
"""Matches the beginning of a setting's value that is a URL with a password, up to the last `@` of the line. Here the
password may contain spaces and quotes, because the whole value is the URL. (In a longer text, a URL ends at a space or
a quote: see `_URL`.)"""
_VALUE = r"(\"[^\"]*\"|'[^']*'|\{[^{}]*\}|\[[^\[\]]*\]|[^\s,;&'\"{}\[\]()]+)"
_EXAMPLE = r"(?!key=value[`.,;:)]*(?:\s|$))"
"""Part of a pattern for secrets. It prevents a match at the words `key=value`, so that these words are not redacted.
Messages use them to show how a setting is written."""
_ASSIGNED = re.compile(rf"((?:(?<![\w.-])|(?<![\w.-])--){_EXAMPLE}([A-Za-z_][\w.-]*)=){_VALUE}")
_MAPPED = re.compile(rf"([{{,('\"]\s*['\"]?([A-Za-z_][\w.-]*)['\"]?\s*:\s*){_VALUE}")
_OPTION = re.compile(rf"(--([A-Za-z][\w-]*)\s+){_VALUE}")
_BEARER = re.compile(r"(?i)\b(bearer\s+|authorization['\"]?\s*[:=]\s*['\"]?\w+\s+)[^\s'\",;]{8,}")
_SHAPES = re.compile(r"\b(?:sk-|hf_|gh[opsu]_|glpat-|xox[abp]-|AKIA)[A-Za-z0-9_-]{16,}|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]+")


def is_secret(name: str) -> bool:
    """Return True if a setting of this name holds a secret: `api_key`, `x-api-key`, `apiKey`, `body.token`. Return
    False for related names that hold none (`key_env`, `max_tokens`, `token_ids`, `pad_token`, `tokens_per_pass`)."""
    words = [word.lower() for word in _WORD.findall(name.rpartition(".")[2])]
    last = words[-1] if words else ""
    is_other = words == ["pad", "token"] or words[-2:] == ["per", "pass"]
    return (last in _NAMES or last.endswith(_ENDINGS)) and not is_other


def redacted(content: Any) -> Any:
    """Return settings without secrets. `content`: a mapping, a sequence or a single value, of JSON's types. Every value
    below a secret's name is replaced by `MARK`, except null, true, false and empty texts. Secrets inside other texts
    are replaced by `redacted_text`."""
    if isinstance(content, Mapping):
        return {key: _hidden(value) if is_secret(str(key)) else redacted(value) for key, value in content.items()}
    if isinstance(content, str):
        begins = _PASSWORD.match(content)
        return redacted_text(f"{begins[1]}{MARK}@{content[begins.end() :]}" if begins else content)
    if isinstance(content, Sequence):
        after = (None, *content)  # word before each word: an option's value follows it
        return [
            _hidden(value) if isinstance(before, str) and before.startswith("-") and is_secret(before)
            else redacted(value)
            for before, value in zip(after, content, strict=False)
        ]  # fmt: skip
    return content


def redacted_text(text: str) -> str:
    """Return a text without its secrets."""
    text = _URL.sub(lambda match: match[1] + _redacted_url(match[2]), text)
    text = _BEARER.sub(rf"\1{MARK}", text)  # first: the other patterns hide only `Basic` of `Authorization: Basic ...`
    for pattern in (_ASSIGNED, _MAPPED, _OPTION):
        text = pattern.sub(_value_hidden, text)
    return _SHAPES.sub(MARK, text)


def split_credentials(url: str) -> tuple[str, str, str]:
    """Return (URL without user and password, user, password). User and password are decoded, and empty if the URL has
    none."""
    scheme, separator, rest = url.partition("://")
    credentials, rest = _userinfo(rest)
    user, _, password = credentials.partition(":")
    return f"{scheme}{separator}{rest}", unquote(user), unquote(password)


def marked(content: Mapping[str, Any]) -> list[str]:
    """Return the key paths of the settings whose secret was replaced by `MARK`. `content`: key path -> value of the
    setting."""
    marks = (MARK, f"://{MARK}@", f"={MARK}")
    return [key for key, value in content.items() if str(value) == MARK or any(m in str(value) for m in marks[1:])]


def _hidden(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _hidden(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_hidden(one) for one in value]
    return value if value is None or isinstance(value, bool) or value == "" else MARK


def _value_hidden(match: re.Match[str]) -> str:
    return f"{match[1]}{MARK}" if is_secret(match[2]) else match[0]


def _userinfo(rest: str) -> tuple[str, str]:
    """Split what follows `://` into user information and the remainder. A password may hold an `@`, `/`, `?` or `#`
    that should have been encoded. So everything between a colon and the last `@` counts as the password."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    searched = rest if ":" in authority else authority
    at = searched.rfind("@")
    return (rest[:at], rest[at + 1 :]) if at >= 0 else ("", rest)


def _redacted_url(rest: str) -> str:
    credentials, rest = _userinfo(rest)
    place, mark, fragment = rest.partition("#")
    path, asks, query = place.partition("?")
    if asks and not path.startswith("/"):  # `sqlite:///file?...` names no host that could ask for a secret
        query = "&".join(f"{name}={MARK}" if equals else MARK
                         for name, equals, _ in (one.partition("=") for one in query.split("&")) if name)  # fmt: skip
    return f"{MARK}@" * bool(credentials) + path + asks + query + mark + fragment
