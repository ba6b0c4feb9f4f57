"""The structure of the planner's source text: one writer, short constructors, no callback set later.

What import-linter and ruff cannot say, read from the syntax trees of appliance/core.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parent.parent / "appliance" / "core"
WRITER, CATALOG = "catalog/transitions.py", "catalog/catalog.py"
#: What says where a fragment is and what protects it: columns of Catalog, and sums of Transitions.
BY_TIER = {"place", "state", "holds", "num_placed", "num_resident", "num_holds", "num_children_placed"}
STATE_COLUMNS = BY_TIER | {"encoding", "num_keepers", "in_segment", "cold_bytes"}
STATE_COLUMNS |= {"arriving_bytes", "resident_bytes", "condemned_bytes"}
MUTATORS = {"append", "extend", "insert", "pop", "remove", "clear", "frombytes", "fromlist", "update"}
MUTATORS |= {"reverse", "byteswap", "setdefault", "popitem", "fromfile"}
#: Functions that get a whole column, and only read it.
READERS = {"column", "any", "all", "sum", "len", "zip", "enumerate", "range", "max", "min", "list", "bool"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield (path below the core, syntax tree) of its modules."""
    for path in sorted(CORE.rglob("*.py")):
        yield str(path.relative_to(CORE)), ast.parse(path.read_text())


def column_writes(tree: ast.AST) -> list[int]:
    """Return the lines on which a state column is written, under its own name or another one."""
    aliases = _aliases(tree)

    def is_column(node: ast.expr) -> bool:
        while isinstance(node, ast.Subscript | ast.Starred):
            node = node.value
        if isinstance(node, ast.Name):
            return node.id in aliases
        return isinstance(node, ast.Attribute) and node.attr in STATE_COLUMNS

    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            is_write = is_column(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            is_write = node.attr in STATE_COLUMNS and not is_own
        elif isinstance(node, ast.Call):
            called = node.func
            is_write = (
                isinstance(called, ast.Attribute) and called.attr in MUTATORS and is_column(called.value)
            )
            is_whole = any(_is_whole_column(argument, is_column) for argument in node.args)
            is_write |= is_whole and not (isinstance(called, ast.Name) and called.id in READERS)
        else:
            continue
        if is_write:
            lines.append(node.lineno)
    return sorted(set(lines))


def _is_whole_column(node: ast.expr, is_column: Callable[[ast.expr], bool]) -> bool:
    """Whether an argument is a column, or the columns of all tiers: not one value of it, nor a slice."""
    depth = 0
    while isinstance(node, ast.Subscript):
        node, depth = node.value, depth + 1
    if not isinstance(node, ast.Attribute) or not is_column(node):
        return False
    is_catalog = ast.unparse(node.value).split(".")[-1] == "catalog"  # others have a `place` of their own
    return depth == 1 if node.attr in BY_TIER and not is_catalog else depth <= int(node.attr in BY_TIER)


def _aliases(tree: ast.AST) -> set[str]:
    """Return the local names that stand for a state column or a tuple of them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if _is_column_value(value):
                    names |= {part.id for part in ast.walk(name) if isinstance(part, ast.Name)}
    return names


def _is_column_value(value: ast.expr) -> bool:
    """Whether an expression is a state column: by tier, or of one tier."""
    if isinstance(value, ast.Subscript):
        value = value.value
    return isinstance(value, ast.Attribute) and value.attr in STATE_COLUMNS


def test_one_module_writes_the_state_columns() -> None:
    found = {name: column_writes(tree) for name, tree in modules() if name not in (WRITER, CATALOG)}
    assert {name: lines for name, lines in found.items() if lines} == {}
    writes = dict(modules())
    assert len(column_writes(writes[WRITER])) > 20, "the test sees those of the one that may"


def test_the_catalog_only_adds_zeros_to_the_state_columns() -> None:
    """A new row is ABSENT everywhere and held by nothing; `Catalog._grow` is all that touches the columns."""
    catalog = next(tree for name, tree in modules() if name == CATALOG)
    grow = next(n for n in ast.walk(catalog) if isinstance(n, ast.FunctionDef) and n.name == "_grow")
    inside = range(grow.lineno, (grow.end_lineno or 0) + 1)
    assert [line for line in column_writes(catalog) if line not in inside] == []


@pytest.mark.parametrize(
    "text",
    [
        "catalog.state[tier][fragment] = 2",
        "self._core.catalog.num_placed[tier][row] += 1",
        "holds = catalog.holds[tier]\nholds[fragment] -= 1",
        "in_hbm, in_dram, in_nvme = catalog.num_placed\nin_dram[row] = 0",
        "a, b = catalog.parent, catalog.place[tier]\nb[fragment] = -1",
        "catalog.num_keepers.append(0)",
        "self.transitions.in_segment[number].append(fragment)",
        "_extend(catalog.num_resident[tier], values)",
        "transitions.resident_bytes[tier] -= 1",
        "del transitions.cold_bytes[number]",
        "catalog.state = []",
        "num_placed[row] = num_holds[row] = 1\nnum_holds = catalog.num_holds[tier]",
    ],
)
def test_a_write_is_seen(text: str) -> None:
    assert column_writes(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "state = catalog.state[tier][fragment]\nother[state] = 1",
        "rows = column(catalog.num_resident[tier])[rows]",
        "self.transitions.hold(fragment, tier)",
        "place, length = catalog.place[tier][fragment], catalog.length_of(fragment)",
        "f(catalog.place[tier][fragment], catalog.state[tier][a:b])",
    ],
)
def test_a_read_is_none(text: str) -> None:
    assert column_writes(ast.parse(text)) == []


# -------------------------------------------------------------------------------- modules and constructors


MAX_PARAMETERS = 7


def long_constructors(tree: ast.AST) -> list[str]:
    """Return the classes whose written-out constructor has more than MAX_PARAMETERS parameters. Records
    (dataclasses and named tuples) have fields instead."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            given = node.args
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
            if count > MAX_PARAMETERS or given.vararg or given.kwarg:
                found.append(f"line {node.lineno}: {count} parameters")
    return found


def test_no_constructor_has_more_than_seven_parameters() -> None:
    found = {name: long_constructors(tree) for name, tree in modules()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_long_constructor_is_seen() -> None:
    names = ", ".join("abcdefgh")
    assert long_constructors(ast.parse(f"class A:\n    def __init__(self, {names}): ..."))
    assert long_constructors(ast.parse("class A:\n    def __init__(self, *rest): ..."))


def callbacks_set_later(tree: ast.AST) -> list[int]:
    """Return the lines that give another object a callback (`x.on_something = ...`)."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr.lstrip("_").startswith("on_")
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]


def test_no_callback_is_given_after_construction() -> None:
    found = {name: callbacks_set_later(tree) for name, tree in modules()}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert callbacks_set_later(ast.parse("self.copies.on_unfit = self.pressure.archive"))


def test_options_are_kept_in_one_place() -> None:
    """Everything else reads `core.options` when it needs it: a change of policy sets one attribute."""
    kept = [
        f"{name}:{node.lineno}"
        for name, tree in modules()
        if name not in ("catalog/core_state.py", "changes.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr.lstrip("_") == "options"
    ]
    assert kept == []


TIER_NAMED = re.compile(r"(?<![a-z0-9])(hbm|dram|nvme|cxl)(?![a-z0-9])", re.IGNORECASE)


def test_no_line_of_the_core_or_of_a_policy_names_a_tier() -> None:
    """They ask the ladder for a role (tiers/ladder.py)."""
    places = [*CORE.rglob("*.py"), *(CORE.parent.parent / "policies").rglob("*.py")]
    found = {
        f"{path.name}:{number}": line
        for path in places
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if TIER_NAMED.search(line)
    }
    assert found == {}


@pytest.mark.parametrize("line", ["tier = Tier.DRAM", "in_nvme[row]", "# stays in hbm", "HBM"])
def test_a_tier_that_is_named_is_seen(line: str) -> None:
    assert TIER_NAMED.search(line)
