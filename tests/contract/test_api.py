"""Contract, sections 1 to 8: every name, parameter, default and number, against what there is."""
from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import IntEnum
from inspect import Parameter
from typing import Any

import api_table
import pytest

import shmkv
from shmkv import llm_datadist

CALLS = [(owner, name, text) for owner, calls in api_table.CALLS.items() for name, text in calls.items()]
PROPERTIES = [(owner, name.rstrip("="), name.endswith("=")) for owner, names in api_table.PROPERTIES.items()
              for name in names.split()]


def thing(owner: str) -> Any:
    """A class by its name, as a program that imports llm_datadist has it."""
    return llm_datadist.PACKAGE[owner]


def wanted(text: str) -> inspect.Signature:
    """The signature that a row of the table describes."""
    return inspect.signature(eval(f"lambda {text}: None", {"Placement": shmkv.Placement, "LLMStatusCode": shmkv.LLMStatusCode}))


def there(owner: str, name: str) -> inspect.Signature:
    """The signature of a call as its caller writes it."""
    found = inspect.signature(getattr(thing(owner), name) if name else thing(owner))
    if not name or f"{owner}.{name}" in api_table.WITHOUT_INSTANCE:
        return found
    return found.replace(parameters=list(found.parameters.values())[1:])        # without self


def faults(found: inspect.Signature, contract: inspect.Signature) -> Iterator[str]:
    """What a caller who goes by the contract would notice."""
    ours, theirs = list(found.parameters.values()), list(contract.parameters.values())
    for place, one in enumerate(theirs):
        mine = found.parameters.get(one.name)
        if mine is None:
            yield f"{one.name} is missing"
        elif (mine.kind, mine.default) != (one.kind, one.default):
            yield f"{mine} is {mine.kind.description}, not {one} ({one.kind.description})"
        elif one.kind is Parameter.POSITIONAL_OR_KEYWORD and ours[place] is not mine:
            yield f"{one.name} has another place"
    for mine in ours:
        is_extra = mine.name not in contract.parameters
        if is_extra and (mine.kind is not Parameter.KEYWORD_ONLY or mine.default is Parameter.empty):
            yield f"{mine} is not of the contract, and no option"


@pytest.mark.parametrize("name", [
    f"{owner.__name__}.{name}" for owner in (shmkv.LLMDataDist, shmkv.KvCacheManager, shmkv.CacheManager, shmkv.CacheTask)
    for name, call in inspect.getmembers(owner, inspect.isfunction)
    if not name.startswith("_") and len(inspect.signature(call).parameters) > 1
])
def test_help_of_a_call_stands_by_itself_and_says_what_it_raises(name: str) -> None:
    owner, call = name.split(".")
    said = inspect.getdoc(getattr(getattr(shmkv, owner), call)) or ""
    assert not said.startswith(("The same", "`"))
    assert "Raises" in said


def test_all_names_are_there_and_no_other() -> None:
    assert set(llm_datadist.PACKAGE) == {*api_table.NAMES, "v2_list"}
    assert set(llm_datadist.PACKAGE["v2_list"]) <= api_table.NAMES
    assert all(llm_datadist.PACKAGE[name] is getattr(shmkv, name) for name in api_table.NAMES)
    assert llm_datadist.PACKAGE["LlmConfig"] is llm_datadist.PACKAGE["LLMConfig"]


@pytest.mark.parametrize(("owner", "name", "text"), CALLS, ids=lambda value: value[:30])
def test_parameters_and_defaults(owner: str, name: str, text: str) -> None:
    assert list(faults(there(owner, name), wanted(text))) == []


@pytest.mark.parametrize(("contract", "code", "fault"), [
    ("a, b=1", "a, b=1", []), ("a, b=1", "a, b=1, *, c=None", []), ("a, *, c=2", "a, *, d=0, c=2", []),
    ("a, b=1", "a, b=2", ["b=2 is positional or keyword, not b=1 (positional or keyword)"]),
    ("a, b=1", "b=1, a=None", ["a=None is positional or keyword, not a (positional or keyword)", "b has another place"]),
    ("a", "x", ["a is missing", "x is not of the contract, and no option"]),
    ("a", "a, x=1", ["x=1 is not of the contract, and no option"]), ("a", "a, *, x", ["x is not of the contract, and no option"]),
    ("a, *, c=2", "a, c=2", ["c=2 is positional or keyword, not c=2 (keyword-only)"]),
    ("*args", "a", ["args is missing", "a is not of the contract, and no option"]),
])
def test_differences_are_found(contract: str, code: str, fault: list[str]) -> None:
    assert sorted(faults(wanted(code), wanted(contract))) == sorted(fault)


@pytest.mark.parametrize(("owner", "name", "is_set"), PROPERTIES)
def test_properties_and_setters(owner: str, name: str, is_set: bool) -> None:
    found = inspect.getattr_static(thing(owner), name)
    setter = found.fset if isinstance(found, property) else getattr(type(found), "__set__", None)
    assert isinstance(found, property) or hasattr(type(found), "__get__")
    assert (setter is not None) == is_set


def test_a_memory_range_has_its_three_properties() -> None:
    info = shmkv.MemInfo(shmkv.Memtype.MEM_TYPE_HOST, 1, 2)
    assert (info.mem_type, info.addr, info.size) == (shmkv.Memtype.MEM_TYPE_HOST, 1, 2)


@pytest.mark.parametrize("owner", api_table.MEMBERS)
def test_members_and_their_numbers(owner: str) -> None:
    found = {name: member.value for name, member in thing(owner).__members__.items()}
    assert found == {**api_table.MEMBERS[owner], **api_table.MORE_MEMBERS.get(owner, {})}
    assert issubclass(thing(owner), IntEnum) == (owner in ("LLMStatusCode", "LLMRole", "Placement"))


@pytest.mark.parametrize("owner", api_table.KEYS)
def test_all_ways_to_write_a_key(owner: str) -> None:
    keys = [thing(owner)(*args, **kwargs) for args, kwargs in api_table.KEYS[owner]]
    assert len(set(keys)) == 1
    args, defaults = api_table.DEFAULTS[owner]
    assert {name: getattr(thing(owner)(*args), name) for name in defaults} == defaults


def test_the_instance_is_known_to_its_class() -> None:
    assert shmkv.LLMDataDist.llm_engine_instance is None


def test_rows_of_the_table_are_of_names_in_it() -> None:
    assert {*api_table.CALLS, *api_table.PROPERTIES, *api_table.MEMBERS} <= api_table.NAMES
