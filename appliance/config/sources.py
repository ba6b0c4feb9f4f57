"""Reads settings from their sources, flag > environment > file > default, and explains errors by source.

The sources are overlaid into one tree of plain values before the model sees it, and every value keeps
the name of its source (`policy.yaml:7`, `KVTIER_LEASES__TTL`, `--set leases.ttl`). pydantic-settings was
rejected: it overlays the sources, but does not keep where a value came from, which errors have to name.

Two underscores are between keys (`KVTIER_TIERS__DRAM__CAPACITY`); other variables are read if they are a
setting. Kubernetes injects `KVTIER_PORT`, `KVTIER_SERVICE_HOST` and such into every pod that sits
beside a Service named kvtier, and `KVTIER_A__B_PORT` beside `kvtier-a--b`; refusing those would break
correct installations, so what follows the names of a Service that has both host and port is passed over.
"""

import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ...v1.files import read_regular_file
from ..errors import StartError
from . import marked_yaml
from .marked_yaml import KeyPath

ENVIRONMENT_PREFIX = "KVTIER_"
POLICY_FILE_VARIABLE = "KVTIER_POLICY"  # names the file; it is no setting of that name
VERSION_KEY = "schema_version"
NEWER_FILE = "a newer kvtier wrote this file: upgrade, or write it for this one"


class Problem(NamedTuple):
    """One thing wrong with the settings: where it was written, which setting, what to do."""

    source: str  # "policy.yaml:7", "KVTIER_LEASES__TTL", "--set leases.ttl"
    path: str  # "tiers.dram.capacity"; empty for the document itself
    sentence: str

    def __str__(self) -> str:
        path = "" if self.source == f"--set {self.path}" else self.path  # the source names it already
        return ": ".join(part for part in (self.source, path, self.sentence) if part)


def note_of_empty(file: str) -> Problem:
    """Return the warning for a policy file that sets nothing."""
    return Problem(file, "", "sets nothing; built-in defaults are used")


class SettingsError(StartError):
    """The settings are refused, with every problem found. Its text has one line a problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems
        super().__init__("\n".join(map(str, problems)))
        self.problems = list(problems)


@dataclass(slots=True)
class Gathered:
    """Plain values of all sources, overlaid, and the source of each path that was written."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[KeyPath, str] = field(default_factory=dict)
    #: Names the policy file when it sets nothing; empty otherwise.
    empty_file: str = ""

    def source_of(self, path: KeyPath) -> str:
        """Return where `path`, the nearest thing around it, or one below it was written."""
        for length in range(len(path), -1, -1):
            if source := self.sources.get(path[:length]):
                return source
        return next((one for p, one in self.sources.items() if p[: len(path)] == path), "default")

    def set(self, path: Sequence[str], value: object, source: str) -> None:
        """Overlay one value. Mutates `values`. Raises SettingsError when `path` leads through a value."""
        here = self.values
        for depth, key in enumerate(path[:-1], 1):
            if here.get(key) is None:
                here[key] = {}
            here = here[key]
            if not isinstance(here, dict):
                above = ".".join(path[:depth])
                raise SettingsError(
                    [Problem(source, ".".join(path), f"{above} is a value; nothing is below")]
                )
        here[path[-1]] = value
        key_path = tuple(path)
        for written in [p for p in self.sources if p[: len(key_path)] == key_path]:
            del self.sources[written]
        self.sources[key_path] = source


def _of_services(environment: Mapping[str, str]) -> set[str]:
    """Return the variables that Kubernetes sets for Services in the pod's namespace."""
    hosts = [name.removesuffix("_SERVICE_HOST") for name in environment if name.endswith("_SERVICE_HOST")]
    services = [name for name in hosts if f"{name}_SERVICE_PORT" in environment]
    begins = tuple(f"{name}_{word}_" for name in services for word in ("SERVICE", "PORT"))
    ports = {f"{name}_PORT" for name in services}
    return {name for name in environment if name.startswith(begins) or name in ports}


def gather(
    model: type[BaseModel],
    path: Path | None,
    environment: Mapping[str, str],
    overrides: Iterable[str],
    text: str | None = None,
) -> Gathered:
    """Return file, environment and `KEY.KEY=VALUE` overrides, overlaid.

    `text` stands for what is in the file, which is then not read. Raises SettingsError.
    """
    gathered = _read_file(path, text) if path is not None else Gathered()
    known = {name.upper(): name for name in keys_of(model)}
    for variable in sorted(environment.keys() - _of_services(environment)):
        words = variable.removeprefix(ENVIRONMENT_PREFIX).split("__")
        if not variable.startswith(ENVIRONMENT_PREFIX) or (words[0] not in known and len(words) == 1):
            continue  # not two underscores: Kubernetes has none, and a misspelt setting is refused
        if variable == POLICY_FILE_VARIABLE:
            continue
        keys = [word.lower() for word in words]
        gathered.set(keys, _scalar(environment[variable], variable), variable)
    for override in overrides:
        name, equals, text = override.partition("=")
        source = f"--set {name}"
        keys = name.strip().split(".")
        if not equals or not all(keys):
            raise SettingsError(
                [Problem(f"--set {override}", "", "write it like --set tiers.dram.capacity=1GiB")]
            )
        gathered.set(keys, _scalar(text, source), source)
    return gathered


def read_policy(path: Path) -> str:
    """Return the text of a policy file. Raises OSError and UnicodeDecodeError."""
    return read_regular_file(path, marked_yaml.MAX_FILE_BYTES).decode("utf-8")


def _read_file(path: Path, text: str | None) -> Gathered:
    try:
        document = marked_yaml.read(read_policy(path) if text is None else text)
    except OSError as error:
        raise SettingsError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise SettingsError([Problem(str(path), "", "is not UTF-8 text")]) from error
    except marked_yaml.YamlError as error:
        where = f"{path}:{error.line}" if error.line else str(path)
        raise SettingsError([Problem(where, "", str(error))]) from error
    if not isinstance(document.value, dict):
        line = document.lines[()]
        raise SettingsError([Problem(f"{path}:{line}", "", "a policy is a mapping, such as `tiers: ...`")])
    sources = {key_path: f"{path}:{line}" for key_path, line in document.lines.items()}
    return Gathered(document.value, sources, "" if document.value else str(path))


def _scalar(text: str, source: str) -> object:
    """Read a value from outside a file in the language of the file: `64MiB`, `null`, `[0, 1]`."""
    try:
        return marked_yaml.read(text).value if text.strip() else ""
    except marked_yaml.YamlError as error:
        raise SettingsError([Problem(source, "", str(error))]) from error


# ------------------------------------------------------------------------- errors, in our own words


def explain(error: ValidationError, model: type[BaseModel], gathered: Gathered) -> SettingsError:
    """Translate pydantic's refusal into problems that name source, path and what is allowed."""
    problems = []
    details = error.errors()
    of_version = [detail for detail in details if detail["loc"] == (VERSION_KEY,)]
    for detail in of_version or details:  # of another format nothing else that is said would be true
        path: KeyPath = detail["loc"]
        context = detail.get("ctx", {})
        if "key" in context:  # a check of several fields says which one to change
            path = (*path, *context["key"].split("."))
        sentence = _sentence(detail["type"], detail["msg"], detail["input"], context, model, path)
        problems.append(Problem(gathered.source_of(path), ".".join(map(str, path)), sentence))
    return SettingsError(problems)


def _sentence(
    kind: str, message: str, value: object, context: Mapping[str, Any], model: type[BaseModel], path: KeyPath
) -> str:
    """Return what is wrong with `value` and what would be right."""
    match kind:
        case "extra_forbidden":
            allowed = keys_of(model_at(model, path[:-1]))
            near = _places_of(str(path[-1]), model) or difflib.get_close_matches(str(path[-1]), allowed, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"unknown key; allowed here: {', '.join(allowed)}{hint}"
        case "missing":
            return f"must be given: {_fields(model_at(model, path[:-1]))[str(path[-1])].description}"
        case "literal_error" if path == (VERSION_KEY,):
            expected = int(context["expected"])
            is_newer = isinstance(value, int) and value > expected
            advice = NEWER_FILE if is_newer else f"write {VERSION_KEY}: {expected}"
            return f"must be {context['expected']}; is {value!r}: {advice}"
        case "literal_error":
            return f"must be {context['expected']}; is {value!r}"
        case "model_type" | "model_attributes_type":
            return (
                f"must be a mapping with the keys {', '.join(keys_of(model_at(model, path)))}; is {value!r}"
            )
        case "bool_type":
            return f"must be true or false; is {value!r}"
        case "int_type":
            return f"must be a whole number; is {value!r}"
        case "list_type":
            return f"must be a list, such as [0, 1]; is {value!r}"
        case "value_error":
            return str(context["error"])
        case "kvtier":
            return message
        case _:
            return f"{message.replace('Input should', 'must', 1)}; is {value!r}"


def keys_of(model: type[BaseModel]) -> list[str]:
    """Return the keys a mapping of `model` may have in a file."""
    return list(_fields(model))


def model_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel]:
    """Return the model of the mapping at `path`. Raises KeyError.

    Also inside optional mappings, lists and mappings with free keys (tenants).
    """
    keys = iter(path)
    for key in keys:
        if isinstance(key, int):  # an index; the model of the list's items is known already
            continue
        known = _fields(model).get(str(key))
        annotation = known.annotation if known is not None else _of_free_keys(model)
        if typing.get_origin(annotation) is list:
            annotation = typing.get_args(annotation)[0]
        elif typing.get_origin(annotation) is dict:
            annotation = typing.get_args(annotation)[1]
            next(keys, None)  # the name that was chosen
        found = _model_of(annotation)
        if found is None:
            raise KeyError(key)
        model = found
    return model


def _of_free_keys(model: type[BaseModel]) -> object:
    """Return the type of the values under keys that a model does not name; None where it allows no such."""
    extra = typing.get_type_hints(model).get("__pydantic_extra__")
    return (typing.get_args(extra) or (None, None))[1]


def _model_of(annotation: object) -> type[BaseModel] | None:
    """Return the model of a mapping, an optional one too."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _places_of(key: str, model: type[BaseModel]) -> list[str]:
    """Return where in a file a key of this name may stand, the shallowest first; `tiers.nvme.path`."""
    found = [key] if key in _fields(model) else []
    for name, info in _fields(model).items():
        inner = _model_of(info.annotation)
        found += [f"{name}.{place}" for place in _places_of(key, inner)] if inner is not None else []
    return sorted(found, key=lambda place: place.count("."))


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return a model's fields under the names they have in a file."""
    return {info.alias or name: info for name, info in model.model_fields.items()}
