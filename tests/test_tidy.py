"""Order in the source text: what linters do not look at, and reviews should not have to.

Product code is the folders of the package. The limits are those of the house.
"""

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("appliance", "clients", "native", "policies", "sources", "tiers", "proto/kvtier/v1")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_PARAMETERS = 7
BANNED = {
    r"\bpickle\.load|\bpickle as\b|\bfrom pickle\b|Unpickler": "bytes from outside are never unpickled",
    r"(?<![\w.])(eval|exec)\(": "text is never run",
    r"\btime\.sleep\(": "wait for something, with a deadline",
    r"except\s*:": "name what is expected",
    r"except (Base)?Exception:\s+pass\b": "nothing is swallowed",
    r"\b(TODO|FIXME|XXX)\b": "do it, or file it",
    r"\b(hot|warm|cold|memory|storage|cache) levels?\b": "the word is tier; see docs/glossary.md",
}
#: Words that speak of objects as persons. Each folder may have so many lines with one of them; shrinks only.
PERSONS = re.compile(r"\b(who|whose|whom|nobody|whoever|somebody|anybody|everybody)\b", re.IGNORECASE)
MAX_PERSONS: dict[str, int] = {}
#: Class names that stand twice: two runtimes ask for this one.
TWICE = {"KvtierConnector"}
#: Classes with constructors that take more, still.
MANY_PARAMETERS: set[str] = set()
TEXT = {".py", ".pyi", ".md", ".toml", ".yaml", ".yml", ".proto", ".txt", ".sh", ".json", ".svg"}
TEXT |= {".html", ".c", ".h"}
LINKS = {
    **{name: f"../../{name}" for name in ("appliance", "clients", "native", "policies", "sources", "tiers")},
    "v1": "../../proto/kvtier/v1",
}


def product() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every module that people wrote."""
    paths = sorted((ROOT / "src" / "kvtier").glob("*.py"))
    paths += [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in paths:
        if not re.search(r"_pb2(_grpc)?\.py$", path.name):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def test_files_and_functions_are_short() -> None:
    too_long = []
    for name, text in product():
        num_lines = text.count("\n")
        if num_lines > MAX_FILE_LINES:
            too_long.append(f"{name}: {num_lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    too_long.append(f"{name}:{node.lineno} {node.name}: {num_lines} lines")
    assert too_long == []


def test_every_module_says_what_it_is_for() -> None:
    assert [name for name, text in product() if text and not ast.get_docstring(ast.parse(text))] == []


def folder_of(name: str) -> str:
    """Return the folder by which allowances are counted."""
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "appliance" and len(parts) > 2 else parts[0]


def beyond(found: Counter[str], allowed: Mapping[str, int]) -> dict[str, str]:
    """Return the folders that have more than they may."""
    return {
        folder: f"{count}, at most {allowed.get(folder, 0)}"
        for folder, count in found.items()
        if count > allowed.get(folder, 0)
    }


def public_definitions(text: str) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield classes and functions with public names, but for those inside functions."""
    waiting: list[ast.Module | ast.ClassDef] = [ast.parse(text)]
    while waiting:
        for node in waiting.pop().body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_"):
                continue
            yield node
            if isinstance(node, ast.ClassDef):
                waiting.append(node)


def test_objects_are_not_spoken_of_as_persons() -> None:
    benches = [
        (path.relative_to(ROOT).as_posix(), path.read_text()) for path in (ROOT / "bench").rglob("*.py")
    ]
    found = Counter(
        folder_of(name)
        for name, text in [*product(), *benches]
        for line in text.splitlines()
        if PERSONS.search(line)
    )
    assert beyond(found, MAX_PERSONS) == {}


def test_what_is_public_has_a_docstring_of_one_sentence_first() -> None:
    undocumented, unended = [], []
    for name, text in product():
        for node in public_definitions(text):
            documentation = ast.get_docstring(node)
            if documentation is None:
                undocumented.append(f"{name}:{node.lineno}")
            elif not documentation.splitlines()[0].endswith((".", ":")):
                unended.append(f"{name}:{node.lineno}")
    assert undocumented == unended == []


def test_a_class_name_stands_for_one_class() -> None:
    names = Counter(
        node.name
        for _, text in product()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    )
    assert sorted(name for name, count in names.items() if count > 1 and name not in TWICE) == []


def test_constructors_take_few_parameters() -> None:
    found = []
    for name, text in product():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name not in MANY_PARAMETERS:
                for made in node.body:
                    if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                        given = [*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs]
                        if len(given) - 1 > MAX_CONSTRUCTOR_PARAMETERS:
                            found.append(f"{name}: {node.name} takes {len(given) - 1}")
    assert found == []


#: Circles of imports under TYPE_CHECKING that are still to be broken. Shrinks only.
CIRCLES: tuple[set[str], ...] = ()


def module_of(name: str) -> str:
    """Return the dotted name of a product file."""
    dotted = re.sub(r"^(proto/kvtier/|src/kvtier/|src/)?", "", name.removesuffix(".py")).replace("/", ".")
    return f"kvtier.{dotted}".removesuffix(".__init__")


def imports_of(name: str, text: str, modules: Collection[str]) -> set[str]:
    """Return the product's modules that a file imports, under TYPE_CHECKING and on demand, too."""
    package = module_of(name) if name.endswith("__init__.py") else module_of(name).rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= names & set(modules)
            if not names <= set(modules):
                found.add(base)
    return (found & set(modules)) - {module_of(name)}


def circles_in(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of modules that import one another, by way of others or not."""
    while leaves := {module for module, imported in graph.items() if not imported}:
        graph = {module: imported - leaves for module, imported in graph.items() if imported}
    reachable = {module: _reached(module, graph) for module in graph}
    return {frozenset(m for m in reachable[one] if one in reachable[m]) for one in graph} - {frozenset()}


def test_no_imports_go_in_a_circle() -> None:
    """import-linter is told to leave imports for annotations out; they are dependencies, too."""
    texts = {module_of(name): (name, text) for name, text in product()}
    graph = {module: imports_of(*texts[module], texts) for module in texts}
    assert sum(map(len, graph.values())) > 1000, "imports are found"
    assert [sorted(c) for c in circles_in(graph) if not any(c <= known for known in CIRCLES)] == []


def test_a_circle_is_seen() -> None:
    texts = {
        "tiers/a.py": "from .folder.b import B",
        "tiers/folder/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .c import C",
        "tiers/folder/c.py": "from .. import a",
        "tiers/d.py": "from .a import A",
    }
    modules = {module_of(name) for name in texts}
    graph = {module_of(name): imports_of(name, text, modules) for name, text in texts.items()}
    circle = {"kvtier.tiers.a", "kvtier.tiers.folder.b", "kvtier.tiers.folder.c"}
    assert circles_in(graph) == {frozenset(circle)}


def _reached(module: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


@pytest.mark.parametrize("pattern", BANNED)
def test_what_is_banned_is_not_there(pattern: str) -> None:
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()!r}"
        for name, text in product()
        for match in re.finditer(pattern, text)
    ]
    assert found == [], BANNED[pattern]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\bpickle\.load|\bpickle as\b|\bfrom pickle\b|Unpickler", "pickle.loads(text)"),
        (r"(?<![\w.])(eval|exec)\(", "x = eval(text)"),
        (r"\btime\.sleep\(", "time.sleep(1)"),
        (r"except\s*:", "except:"),
        (r"except (Base)?Exception:\s+pass\b", "except Exception:\n    pass"),
        (r"\b(TODO|FIXME|XXX)\b", "# TODO"),
        (r"\b(hot|warm|cold|memory|storage|cache) levels?\b", "the warm level"),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern: str, text: str) -> None:
    assert pattern in BANNED
    assert re.search(pattern, text)


def test_the_links_of_the_package_are_links_to_its_folders() -> None:
    found = {path.name: path for path in (ROOT / "src" / "kvtier").iterdir() if path.name != "__pycache__"}
    links = {name: str(path.readlink()) for name, path in found.items() if path.is_symlink()}
    assert links == LINKS
    assert set(found) - set(links) == {"__init__.py", "__main__.py", "lazy.py", "py.typed", "testing.py"}
    assert not (ROOT / "__init__.py").exists(), "a clone named kvtier would shadow the installed package"
    assert all(path.exists() for path in found.values())


def test_no_file_names_a_machine() -> None:
    """Paths of somebody's checkout or home have no place in a file that others read."""
    places = re.compile(rb"(?<![\w.])/(%s)/[\w.]" % b"|".join([b"work", b"root", rb"home/\w+", b"Users"]))
    ignored = {"src", "build", "dist"}
    found = []
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if path.suffix in TEXT and not any(
            p in ignored or p.startswith(".") or p.endswith(".egg-info") for p in parts
        ):
            found += [
                f"{path.relative_to(ROOT)}: {m.group().decode()}" for m in places.finditer(path.read_bytes())
            ]
    assert found == []


def test_the_readme_is_read_in_a_minute() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 150
    assert [number for number, line in enumerate(lines, 1) if len(line) > 120] == []
