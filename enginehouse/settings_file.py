"""Reading the YAML settings file so that every key remembers its line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Location = tuple[str | int, ...]


class YamlError(ValueError):
    """The file is not usable YAML; `str(error)` starts with file and line."""


@dataclass(frozen=True, slots=True)
class YamlFile:
    """Parsed settings and the 1-based line on which each of them stands."""

    path: Path
    values: dict[str, Any]
    lines: dict[Location, int]

    def line_of(self, location: Location) -> int | None:
        """Line of the setting, or of the nearest enclosing one; None when the file has neither."""
        for end in range(len(location), 0, -1):
            if location[:end] in self.lines:
                return self.lines[location[:end]]
        return None


def load_yaml(path: Path) -> YamlFile:
    """Raises `YamlError` for bad syntax, a key given twice, or a document that is not a mapping, and `OSError`
    when the file cannot be read."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        values = loader.construct_document(node) if node is not None else {}
    except UnicodeDecodeError as error:
        raise YamlError(f"{path}: not UTF-8 text: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise YamlError(f"{path}:{line}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise YamlError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise YamlError(f"{path}:1: expected sections such as 'server:', not a {type(values).__name__}")
    lines: dict[Location, int] = {}
    if node is not None:
        _record_lines(node, (), lines, path)
    return YamlFile(path, values, lines)


def _record_lines(node: yaml.Node, location: Location, lines: dict[Location, int], path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if (*location, key.value) in lines:
                raise YamlError(f"{path}:{line}: {_dotted((*location, key.value))} is set twice")
            lines[*location, key.value] = line
            _record_lines(value, (*location, key.value), lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*location, index] = item.start_mark.line + 1
            _record_lines(item, (*location, index), lines, path)


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location)


def deep_merge(base: Mapping[str, Any], stronger: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `stronger` on top, section by section; neither is changed.

    Where `base` has something else than a section, that stays: it is a mistake to be told, not to be covered.
    """
    merged = dict(base)
    for key, value in stronger.items():
        below = merged.get(key)
        if not isinstance(value, Mapping) or below is None:
            merged[key] = value
        elif isinstance(below, Mapping):
            merged[key] = deep_merge(below, value)
    return merged
