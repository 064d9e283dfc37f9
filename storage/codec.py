"""The JSON of records: files of a run's directory, and messages between processes.

`encode` writes every field of a dataclass, and of the dataclasses in its fields. `decode` refuses unknown and missing
fields and values of other types. It uses pydantic, which is imported when the first record is decoded, because
`stageline --help` and `status` decode no records.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, overload

from storage.errors import StoreError

T = TypeVar("T")


class NotARecord(ValueError):
    """An error for a text or a document that does not fit the record's type. The message names the fields."""


def encode(record: object, **layout: Any) -> str:
    """Return a record as JSON. `layout`: arguments of `json.dumps`. Raises TypeError for a value that is not JSON."""
    return json.dumps(record, default=_fields, **layout)


@overload
def decode(kind: type[T], text: str | bytes, *, strict: bool = ..., complete: bool = ...) -> T: ...
@overload
def decode(kind: UnionType, text: str | bytes, *, strict: bool = ..., complete: bool = ...) -> Any: ...
def decode(kind: Any, text: str | bytes, *, strict: bool = True, complete: bool = True) -> Any:
    """Return the record that `encode` wrote as `text`. `kind`: type of the record, or a union of possible types. Raises
    NotARecord if the text does not fit.

    Args:
        strict: refuse values of other types. Otherwise the text "NaN" is read as a float, and 1 as true.
        complete: refuse a text that lacks a field, even if the field has a default.
    """
    return _checked(lambda: _validator(kind, complete).validate_json(text, strict=strict, extra="forbid"))


def from_document(kind: Callable[..., T], document: Any) -> T:
    """Return the record of type `kind` that a parsed JSON document describes. Raises NotARecord if the document does
    not fit."""
    record: T = _checked(lambda: _validator(kind, True).validate_python(document, extra="forbid"))
    return record


def digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON document. It does not depend on the order of the keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def document(data: str | bytes, form: int, where: str) -> dict[str, Any]:
    """Return the JSON object in `data`, without its field `format`. Raises StoreError, naming `where`, if `data` is no
    JSON object or has another format than `form`."""
    try:
        content = json.loads(data)
    except ValueError as error:  # not UTF-8, or not JSON
        raise StoreError(f"{where}: is not what was written ({error})") from error
    stated = content.pop("format", None) if isinstance(content, dict) else None
    if stated != form:
        raise StoreError(f"{where}: format {stated!r}, this version reads {form}")
    return dict(content)


def _checked(validate: Callable[[], Any]) -> Any:
    try:
        return validate()
    except ValueError as error:  # pydantic's ValidationError
        errors: list[Any] = error.errors(include_url=False)  # type: ignore[attr-defined]
        faults = (f"{'.'.join(map(str, one['loc'])) or 'the record'}: {one['msg']}" for one in errors)
        raise NotARecord("; ".join(faults)) from error


@cache
def _validator(kind: Any, complete: bool) -> Any:
    schema = importlib.import_module("pydantic").TypeAdapter(kind).core_schema
    make = importlib.import_module("pydantic_core").SchemaValidator
    return make(_without_defaults(schema) if complete else schema)


def _without_defaults(schema: Any) -> Any:
    """Return a copy of `schema`, a core schema of pydantic, in which every field is required, even if it has a
    default."""
    if isinstance(schema, list):
        return [_without_defaults(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "default":
        return _without_defaults(schema["schema"])
    return {key: _without_defaults(value) for key, value in schema.items()}


def _fields(record: object) -> dict[str, Any]:
    if not is_dataclass(record):
        raise TypeError(f"{type(record).__name__} is not JSON: {record!r}")
    return vars(record)
