"""Reads YAML into plain values and the line of every key, so that errors name `policy.yaml:7`.

PyYAML's node graph carries the marks that `safe_load` throws away, so the graph is walked here and only
scalars are left to SafeLoader. What a policy never needs and what makes YAML surprising is refused: duplicate
keys (the last one would silently win), anchors and merges (a value would have two lines), tags.
ruamel.yaml keeps marks too, but is a second YAML library for the same 60 lines.
"""

from typing import Any, NamedTuple, TypeAlias

import yaml

KeyPath: TypeAlias = tuple[str | int, ...]

MAX_FILE_BYTES = 1 << 20
_MAP_TAG = "tag:yaml.org,2002:map"
_SEQ_TAG = "tag:yaml.org,2002:seq"


class YamlError(ValueError):
    """The text is not the YAML we read; `line` counts from 1, 0 where there is none."""

    def __init__(self, sentence: str, line: int) -> None:
        super().__init__(sentence)
        self.line = line


class Marked(NamedTuple):
    """A document: its value, and the line (from 1) of every key and item by path."""

    value: Any
    lines: dict[KeyPath, int]


def read(text: str) -> Marked:
    """Return the only document in `text`; an empty one is an empty mapping. Raises YamlError."""
    if len(text) > MAX_FILE_BYTES:
        raise YamlError(f"{len(text)} characters are more than a policy may have ({MAX_FILE_BYTES})", 0)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return Marked({}, {})
        return Marked(*_Walk(loader).document(node))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        sentence = ", ".join(part for part in (error.context, error.problem) if part)
        raise YamlError(f"not valid YAML: {sentence}", mark.line + 1 if mark else 0) from error
    except yaml.YAMLError as error:  # control characters: no mark, the position is in the text
        raise YamlError(f"not valid YAML: {' '.join(str(error).split())}", 0) from error
    except ValueError as error:  # a scalar that looks like a date or number and is none
        if isinstance(error, YamlError):
            raise
        raise YamlError(f"a value cannot be read: {error}; put it in quotes", 0) from error
    except RecursionError as error:
        raise YamlError("nested too deeply", 0) from error


class _Walk:
    """One walk over a node graph; collects lines."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self._seen: set[int] = set()
        self._lines: dict[KeyPath, int] = {}

    def document(self, node: yaml.Node) -> tuple[Any, dict[KeyPath, int]]:
        return self._value(node, ()), self._lines

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        if id(node) in self._seen:
            raise YamlError("anchors and aliases are not read here; write the value out", line)
        self._seen.add(id(node))
        self._lines.setdefault(path, line)
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP_TAG:
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ_TAG:
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._loader.construct_object(node)
        raise YamlError(f"the tag {node.tag} is not read here; remove it", line)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise YamlError("a key must be a plain word", line)
            key = key_node.value
            if key == "<<":
                raise YamlError("merge keys are not read here; write the values out", line)
            here = (*path, key)
            if key in values:
                raise YamlError(f"{key!r} is written twice, first in line {self._lines[here]}", line)
            self._lines[here] = line
            values[key] = self._value(value_node, here)
        return values
