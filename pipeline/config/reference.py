"""Generate docs/configuration.md from the config's dataclasses: types, defaults, docstrings and constraints.

python -m pipeline.config.reference > docs/configuration.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pipeline.config.reward_model import LabelConfig, RewardModelConfig
from pipeline.config.run import RunConfig
from storage.problems import constraints_of

_INTRODUCTION = """\
# Configuration

Every key of the three configs: of a run, of a reward model's training, and of a labelling. This page is generated from
the code (`python -m pipeline.config.reference > docs/configuration.md`). [Running](running.md#config) says how a config
is merged and checked, and what may change on resume.
"""
_COMMANDS = {
    RunConfig: ("A run", "stageline run"),
    RewardModelConfig: ("A reward model's training", "stageline reward train"),
    LabelConfig: ("A labelling", "stageline reward label"),
}
_TYPES = {int: "integer", float: "number", bool: "true / false", str: "text", type(None): "null"}


def page() -> str:
    """Return the whole page as Markdown."""
    shown: dict[type, str] = {}
    return "\n".join([_INTRODUCTION, *(line for kind in _COMMANDS for line in _config(kind, shown))])


def _config(kind: type, shown: dict[type, str]) -> Iterator[str]:
    title, command = _COMMANDS[kind]
    yield f"## {title}\n\n`{command} CONFIG... [key=value...]`\n"
    inside: dict[str, Any] = {}
    yield from _table(kind(), "", shown, inside)
    for name, section in inside.items():
        yield f"### `{name}`\n"
        yield f"{_prose(inspect.getdoc(section) or '')}\n"
        yield from _table(section, f"{name}.", shown)


def _table(section: Any, prefix: str, shown: dict[type, str], sections: dict[str, Any] | None = None) -> Iterator[str]:
    """Yield the lines of a section's table. `shown`: class -> key path of the section whose table has its keys;
    extended here. `sections`: gets the inner sections, for tables of their own. None: their keys are in this table."""
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    yield from _rows(section, prefix, shown, sections)
    yield ""


def _rows(section: Any, prefix: str, shown: dict[type, str], sections: dict[str, Any] | None = None) -> Iterator[str]:
    hints, docs, constraints = get_type_hints(type(section)), _docstrings(type(section)), constraints_of(section)
    for name, hint in hints.items():
        path, value = f"{prefix}{name}", getattr(section, name)
        inside = _in_mapping(hint) if get_origin(hint) is dict else value
        is_section, inner = dataclasses.is_dataclass(inside), f"{path}.NAME" if get_origin(hint) is dict else path
        if type(inside) in shown:
            yield f"| `{inner}.*` | | | {_cell(docs.get(name, ''))} The keys of `{shown[type(inside)]}.*`. |"
        elif not is_section or get_origin(hint) is dict:
            musts = [f"Must be {constraint.need}." for constraint in constraints[name]]
            meaning = " ".join([docs.get(name, ""), *musts])
            yield f"| `{path}` | {_type(hint)} | {_default(value)} | {_cell(meaning)} |"
        if not is_section or type(inside) in shown:
            continue
        shown[type(inside)] = inner
        if sections is not None:
            sections[inner] = inside
        else:
            yield from _rows(inside, f"{inner}.", shown)


def _in_mapping(hint: Any) -> Any:
    """Return a default section for a setting that maps names to sections, such as `dict[str, GangConfig]`; else
    None."""
    kind = get_args(hint)[1]
    return kind() if dataclasses.is_dataclass(kind) and isinstance(kind, type) else None


def _docstrings(kind: type) -> dict[str, str]:
    """Return field -> the docstring below it, for the fields of a class and its bases."""
    docstrings: dict[str, str] = {}
    for base in reversed([one for one in kind.__mro__ if dataclasses.is_dataclass(one)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for before, after in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    docstrings[before.target.id] = _prose(inspect.cleandoc(text.value))
    return docstrings


def _type(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " \\| ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_type, arguments))
    if origin is list:
        return f"list of {_type(arguments[0])}s" if arguments[0] in _TYPES else "list of lists"
    return "mapping" if origin is dict else _TYPES[hint]


def _default(value: Any) -> str:
    if value == "???":
        return "required"
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def _prose(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").strip()


if __name__ == "__main__":
    print(page(), end="")
