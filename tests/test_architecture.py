"""Imports point downwards only, and what belongs to one room appears in no other."""
from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "shmkv"
TABLE_LINE = re.compile(r"^\| (?P<row>\d+) \| (?P<files>[^|]*) \|", re.MULTILINE)


def rows_of(text: str) -> tuple[tuple[str, ...], ...]:
    """The rooms of each row, in the order of the table in docs/architecture.md; C headers import nothing and are left out."""
    rows: dict[int, list[str]] = {}
    for line in TABLE_LINE.finditer(text):
        names = re.findall(r"`([^`]+)`", line["files"])
        rows.setdefault(int(line["row"]), []).extend(re.sub(r"\.py$|/$", "", name) for name in names if not name.endswith(".h"))
    assert list(rows) == list(range(len(rows))), "the rows of docs/architecture.md are not in order"
    return tuple(tuple(row) for row in rows.values())


# The rooms. A module may import from rows above its own and, in its row, from modules that stand before it. Imports under
# `if TYPE_CHECKING:` are for type checkers alone and may point anywhere in the table.
ROWS = rows_of((ROOT / "docs" / "architecture.md").read_text())
ORDER = [module for row in ROWS for module in row]

# Foreign packages and the rooms that may know them.
ONLY_IN: dict[str, set[str]] = {
    "posix_ipc": {"segment"}, "mmap": {"segment"},
    "torch": {"integrations"}, "vllm": {"integrations"}, "transformers": {"integrations"},
    "typer": {"cli"}, "rich": {"cli"},
}
MAY_READ_ENVIRONMENT = {"config", "cli"}
MAY_PRINT = {"cli"}

CYTHON_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<module>[\w.]+)[ \t]+c?import[ \t]+(?P<names>\([^)]*\)|[^\n]*)"
    r"|c?import[ \t]+(?P<plain>[\w., \t]+))", re.MULTILINE)


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".pyx", ".pxd"))


def room_of(path: Path) -> str:
    """The module a file belongs to; everything in a subpackage is one room."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else path.stem


def without_comments(text: str) -> str:
    """Cython source without docstrings and comments, which speak of imports too."""
    return re.sub(r"#[^\n]*", "", re.sub(r'"""[\s\S]*?"""', '""', text))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    for child in ast.iter_child_nodes(tree):
        if not is_type_checking(child):
            yield child
            yield from nodes(child)


def python_imports(text: str) -> Iterator[str]:
    """Dotted names, `from package import name` as package.name."""
    for node in nodes(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def cython_imports(text: str) -> Iterator[str]:
    for found in CYTHON_IMPORT.finditer(without_comments(text)):
        if found["module"]:
            names = re.findall(r"[\w*]+(?:[ \t]+as[ \t]+\w+)?", found["names"])
            yield from (f"{found['module']}.{name.split()[0]}" for name in names)
        else:
            yield from (name.split()[0] for name in found["plain"].split(",") if name.strip())


def imports(path: Path) -> Iterator[str]:
    text = path.read_text()
    return python_imports(text) if path.suffix == ".py" else cython_imports(text)


def target(name: str) -> str:
    """The room that a dotted name of this package leads to."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ORDER else "__init__"


def faults(room: str, names: Iterator[str]) -> list[str]:
    """What is wrong with the imports of one file, as sentences."""
    found = []
    for name in names:
        top = name.split(".")[0]
        if not top:
            found.append(f"{room} imports {name}: relative")
        elif top == "shmkv":
            if target(name) != room and ORDER.index(target(name)) >= ORDER.index(room):
                found.append(f"{room} imports {name}: upwards")
        elif room not in ONLY_IN.get(top, {room}):
            found.append(f"{room} imports {name}: {'only ' + ', '.join(sorted(ONLY_IN[top])) if ONLY_IN[top] else 'nobody'} may")
    return found


def test_the_table_of_the_documentation_has_every_file_once_and_no_other() -> None:
    assert len(ORDER) == len(set(ORDER))
    assert {room_of(path) for path in sources()} == set(ORDER)


def test_rows_are_read_in_order_and_without_headers() -> None:
    text = "| row | file |\n| --- | --- |\n| 0 | `a.py`, `_b` | x |\n| 1 | `c.h` | `no` |\n| 1 | `d/`, `__main__.py` | y |\n"
    assert rows_of(text) == (("a", "_b"), ("d", "__main__"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    assert faults(room_of(path), imports(path)) == []


def test_imports_are_found_at_all() -> None:
    seen = {room: {name.split(".")[1] for name in names if name.startswith("shmkv.")}
            for room, names in ((path.stem, list(imports(path))) for path in sources() if path.suffix == ".pyx")}
    assert {"_attached", "_copy", "_futex", "_layout", "_link", "_lookup", "_plan"} <= seen["_core"]
    assert "_ranges" in seen["_tables"]


@pytest.mark.parametrize(("room", "text", "complaint"), [
    ("segment", "import shmkv.caches", "segment imports shmkv.caches: upwards"),
    ("segment", "from shmkv import membership", "segment imports shmkv.membership: upwards"),
    ("membership", "from shmkv import segment", ""),
    ("caches", "def f():\n    from shmkv.cluster import Cluster", "caches imports shmkv.cluster.Cluster: upwards"),
    ("kv_cache", "if TYPE_CHECKING:\n    from shmkv.datadist import LLMDataDist", ""),
    ("config", "import shmkv", "config imports shmkv: upwards"),
    ("config", "from . import types", "config imports ..types: relative"),
    ("link", "import posix_ipc", "link imports posix_ipc: only segment may"),
    ("kv_cache", "import torch.utils", "kv_cache imports torch.utils: only integrations may"),
    ("segment", "import mmap", ""),
])
def test_the_rules_catch_a_wrong_python_import(room: str, text: str, complaint: str) -> None:
    assert faults(room, python_imports(text)) == ([complaint] if complaint else [])


@pytest.mark.parametrize(("room", "text", "complaint"), [
    ("_plan", "from shmkv._copy cimport (\n    move,\n)", "_plan imports shmkv._copy.move: upwards"),
    ("_layout", "from shmkv._layout cimport *", ""),
    ("_copy", "cimport shmkv._core as core", "_copy imports shmkv._core: upwards"),
    ("_copy", '"""from shmkv._core cimport move"""\n# import shmkv._core', ""),
    ("_view", "import numpy as np, mmap", "_view imports mmap: only segment may"),
])
def test_the_rules_catch_a_wrong_cython_import(room: str, text: str, complaint: str) -> None:
    assert faults(room, cython_imports(text)) == ([complaint] if complaint else [])


@pytest.mark.parametrize("path", [p for p in sources() if p.suffix == ".py"], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_environment_and_output_have_one_room_each(path: Path) -> None:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv"):
            found.add("environment")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write"):
            found.add("print")
    allowed = {"environment"} if room_of(path) in MAY_READ_ENVIRONMENT else set()
    assert found - allowed - ({"print"} if room_of(path) in MAY_PRINT else set()) == set()


@pytest.mark.parametrize("path", [p for p in sources() if p.suffix != ".py"], ids=lambda p: p.name)
def test_cython_neither_prints_nor_includes(path: Path) -> None:
    code = without_comments(path.read_text())
    environment = "" if path.stem == "_crash" else r"|\bos\.environ|\bgetenv\("        # a test build's switch, no setting
    assert re.findall(rf"\bprint\(|^\s*include\b|^\s*DEF\b{environment}", code, re.MULTILINE) == []
    if path.suffix == ".pyx":
        assert path.read_text().startswith("# cython: language_level=3")
    assert list(PACKAGE.rglob("*.pxi")) == []
