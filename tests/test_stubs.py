"""The stubs beside the extensions say what the built modules show: no name more, none less, the same arguments."""
from __future__ import annotations

import ast
import inspect
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shmkv

FILES = [file for folder in shmkv.__path__ for file in Path(folder).iterdir()]
EXTENSIONS = sorted({file.name.partition(".")[0] for file in FILES if file.name.endswith(tuple(EXTENSION_SUFFIXES))})
STUBS = {file.stem: ast.parse(file.read_text()) for file in FILES if file.suffix == ".pyi"}
CONSTRUCTORS = [
    pytest.param(extension, node.name, method.args, id=f"{extension}.{node.name}")
    for extension, stub in STUBS.items()
    for node in stub.body if isinstance(node, ast.ClassDef)
    for method in node.body if isinstance(method, ast.FunctionDef) and method.name == "__init__"
]

# What Cython and Python put into a class besides the names in its source. `__cinit__` has no name at all, so how an object is
# made is tested apart; the buffer protocol has one from Python 3.12 on only.
LEFTOVERS = {
    "__doc__", "__module__", "__init__", "__new__", "__pyx_vtable__", "__buffer__",
    "__reduce__", "__setstate__", "__reduce_cython__", "__setstate_cython__",
}


# The one slot whose arguments the interpreter does not know.
CALL = "callable"


def is_shown(name: str) -> bool:
    """Is a class's name one for its stub? Special methods are, private names are not."""
    return name not in LEFTOVERS and (not name.startswith("_") or name.endswith("__"))


# -- {name: what it is}, as a stub declares it -------------------------------------------------------------------------

def declared(stub: ast.Module) -> dict[str, str]:
    found = {}
    for node in stub.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Subscript):
            found[ast.unparse(node.target)] = "constant " + ast.unparse(node.annotation.slice).partition("[")[0]
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = declared_function(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = "class"
            found |= {f"{node.name}.{method.name}": declared_function(method) for method in node.body
                      if isinstance(method, ast.FunctionDef) and is_shown(method.name)}
    return {name: what for name, what in found.items() if not name.startswith("_")}


def declared_function(node: ast.FunctionDef) -> str:
    if node.name == "__call__":
        return CALL
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if "property" in decorators:
        return "property"
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return " ".join([*decorators, f"({ast.unparse(node.args)})"])


# -- the same, as the built module shows it ----------------------------------------------------------------------------

def built(module: ModuleType) -> dict[str, str]:
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_") or inspect.ismodule(value) or getattr(value, "__module__", module.__name__) != module.__name__:
            continue
        if inspect.isclass(value):
            found[name] = "class"
            found |= {f"{name}.{member}": built_member(thing) for member, thing in vars(value).items() if is_shown(member)}
        else:
            found[name] = built_function(value) if callable(value) else f"constant {type(value).__name__}"
    return found


def built_member(value: Any) -> str:
    if inspect.isdatadescriptor(value):
        return "property"
    if isinstance(value, staticmethod):
        return f"staticmethod {built_function(value.__func__)}"
    return built_function(value)


def built_function(value: Any) -> str:
    """Names, order and defaults of the arguments; the annotations are the stub's own affair."""
    if getattr(value, "__name__", "") == "__call__":
        return CALL
    signature = inspect.signature(value)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    shown = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return shown.replace(", /)", ")")       # a slot of the type, such as __len__


# -- the tests ---------------------------------------------------------------------------------------------------------

def test_every_extension_has_a_stub_and_every_stub_an_extension() -> None:
    assert "_core" in EXTENSIONS
    assert sorted(STUBS) == EXTENSIONS


@pytest.mark.parametrize("extension", sorted(STUBS))
def test_stub_shows_what_the_module_shows(extension: str) -> None:
    assert declared(STUBS[extension]) == built(import_module(f"shmkv.{extension}"))


@pytest.mark.parametrize(("extension", "name", "arguments"), CONSTRUCTORS)
def test_constructor_takes_the_arguments_of_the_stub(extension: str, name: str, arguments: ast.arguments) -> None:
    """Arguments are counted and named before their types are looked at: an object of no use must fail by its type."""
    kind = getattr(import_module(f"shmkv.{extension}"), name)
    by_place = arguments.args[1:]
    given = {argument.arg: object() for argument in by_place + arguments.kwonlyargs}
    with pytest.raises(TypeError) as refused:
        kind(**given)
    assert not any(word in str(refused.value) for word in ("keyword", "positional", "unexpected", "takes"))
    with pytest.raises(TypeError, match=rf"takes (exactly|at most) {len(by_place)} positional"):
        kind(*[object()] * (len(by_place) + 1), **{argument.arg: object() for argument in arguments.kwonlyargs})
