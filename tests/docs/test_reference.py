"""Every public name has a docstring, stands in the Python reference, and has an example there that runs."""

import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import kvtier
import kvtier.clients
import kvtier.policies
import kvtier.testing

from .reference import OTHERS, PAGES, SESSION, described, failures

#: Imported here. The other packages need a runtime; what they export is read from their `__all__`.
IMPORTED = (kvtier, kvtier.clients, kvtier.testing, kvtier.policies)
PAGE_OF = {name: page for page in PAGES for name in described(page.read_text())}
NEEDS_TORCH = "transformers"


CLIENT_ROOMS = ("aio", "connector", "fake", "links", "memory", "operations", "sync", "values")
#: Packages of the client itself; what is public of them is in `kvtier.clients.__all__`.
ROOMS = {f"kvtier.clients.{name}" for name in CLIENT_ROOMS}


def _runtimes() -> list[str]:
    """Return the packages for one runtime each."""
    clients = pkgutil.iter_modules(kvtier.clients.__path__, "kvtier.clients.")
    return [module.name for module in clients if module.ispkg and module.name not in ROOMS]


def _objects() -> Iterator[tuple[str, Any]]:
    for module in IMPORTED:
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)


OBJECTS = dict(_objects())


def _resolved(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_public_name_is_in_the_reference() -> None:
    on_pages = {id(_resolved(path)) for path in PAGE_OF if path in OBJECTS}
    assert [path for path, one in OBJECTS.items() if id(one) not in on_pages] == []


def test_the_reference_describes_public_names_only() -> None:
    public = {*OBJECTS, *(f"{module}.{name}" for module in _runtimes() for name in exported(module))}
    assert sorted(set(PAGE_OF) - public) == []


def exported(module: str) -> list[str]:
    """Return the `__all__` of a package for a runtime; the package itself imports none."""
    return list(importlib.import_module(module).__all__)


@pytest.mark.parametrize("module", _runtimes())
def test_what_runtimes_load_is_in_the_reference(module: str) -> None:
    assert [name for name in exported(module) if f"{module}.{name}" not in PAGE_OF] == []


def _without_docstring(path: str, one: Any) -> Iterator[str]:
    if not inspect.getdoc(one):
        yield path
    if inspect.isclass(one):
        for name, member in vars(one).items():
            is_code = isinstance(member, FunctionType | classmethod | staticmethod | property)
            if is_code and not name.startswith("_") and not inspect.getdoc(member):
                yield f"{path}.{name}"


def test_every_public_name_and_method_has_a_docstring() -> None:
    assert [gap for path, one in OBJECTS.items() for gap in _without_docstring(path, one)] == []


@pytest.mark.parametrize("path", PAGE_OF)
def test_every_name_has_an_example(path: str) -> None:
    said = described(PAGE_OF[path].read_text())[path]
    examples = SESSION.findall(said) + re.findall(r"^```(?:json|yaml|sh)\n(.*?)^```$", said, re.M | re.S)
    name = path.rpartition(".")[2]
    assert any(re.search(rf"\b{name}\b", example) for example in examples), f"no example uses {name}"


@pytest.mark.parametrize(
    "page", [page for page in (*PAGES, *OTHERS) if page.stem != NEEDS_TORCH], ids=lambda one: one.stem
)
def test_the_examples_of_a_page_run(page: Path) -> None:
    assert failures(page.name, page.read_text()) == []


def test_the_examples_for_transformers_run() -> None:
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        pytest.skip("torch and transformers are not installed; `make test-transformers` runs this")
    (page,) = (page for page in PAGES if page.stem == NEEDS_TORCH)
    assert failures(page.name, page.read_text()) == []


def test_an_example_that_shows_something_else_is_noticed() -> None:
    page = "```pycon\n>>> one = 1\n\n```\n\n```pycon\n>>> one + 1\n3\n\n```\n"
    (problem,) = failures("page", page)
    assert "Expected:\n    3\nGot:\n    2" in problem


def test_configurations_of_runtimes_name_what_there_is() -> None:
    (page,) = (page for page in PAGES if page.stem == "plugins")
    blocks = re.findall(r"^```json\n(.*?)^```$", page.read_text(), re.M | re.S)
    named = [pair for block in blocks for pair in _named(json.loads(block))]
    assert len(named) == 3
    assert [pair for pair in named if pair[1] not in exported(pair[0])] == []


def _named(config: Any) -> Iterator[tuple[str, str]]:
    """Yield (module, class) of every plug-in in a configuration."""
    if isinstance(config, dict):
        module = config.get("module_path") or config.get("kv_connector_module_path")
        name = config.get("class_name") or config.get("type") or config.get("kv_connector")
        if module:
            yield str(module), str(name)
        for value in config.values():
            yield from _named(value)
    elif isinstance(config, list):
        for value in config:
            yield from _named(value)
