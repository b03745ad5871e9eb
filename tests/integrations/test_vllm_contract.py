"""The comparison with vLLM's base class: what it says of one that is as it was, and of one that is not. Without vLLM."""
from __future__ import annotations

import ast
import logging
import logging.handlers
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import pytest

from shmkv.integrations import vllm
from shmkv.integrations.vllm.contract import (
    ABSTRACT,
    HYBRID,
    NAMES,
    OPTIONAL,
    TESTED_VERSIONS,
    Calls,
    differences,
    missing,
    untested,
)
from shmkv.integrations.vllm.vllm_log import speak_in_vllms_log

Changes = dict[str, Callable[..., None] | None]


def base_class(must: Calls, may: Calls, changes: Changes) -> type:
    """A class like one of vLLM's, with some calls changed or, with None, left out."""
    calls: dict[str, Callable[..., None]] = {}
    for name, parameters in {**must, **may}.items():
        scope: dict[str, Callable[..., None]] = {}
        exec(f"def call({', '.join(('self', *parameters))}): pass", scope)
        calls[name] = abstractmethod(scope["call"]) if name in must else scope["call"]
    calls.update({name: call for name, call in changes.items() if call is not None})
    return type("Base", (ABC,), {name: call for name, call in calls.items() if changes.get(name, call) is not None})


BASE, SECOND = base_class(ABSTRACT, OPTIONAL, {}), base_class(HYBRID, {}, {})


def test_base_classes_as_they_were() -> None:
    assert differences(BASE, SECOND) == []


@pytest.mark.parametrize(("changes", "said"), [
    ({"wait_for_save": lambda self: None}, "wait_for_save is not abstract any more: does vLLM still call it?"),
    ({"wait_for_save": abstractmethod(lambda self, layers: None)},
     "wait_for_save takes (layers), ShmkvConnector was written for ()"),
    ({"wait_for_event": abstractmethod(lambda self: None)},
     "wait_for_event is abstract now and ShmkvConnector was written without it"),
    ({"get_finished": None}, "get_finished is gone: vLLM does not call it any more"),
])
def test_what_changed_is_said_in_a_sentence(changes: Changes, said: str) -> None:
    assert differences(base_class(ABSTRACT, OPTIONAL, changes), SECOND) == [f"{said} (written for {TESTED_VERSIONS})"]


def test_what_changed_for_models_with_several_groups_is_said_too() -> None:
    changed = base_class(HYBRID, {}, {"request_finished_all_groups": abstractmethod(lambda self, request: None)})
    assert differences(BASE, changed) == [
        "request_finished_all_groups takes (request), ShmkvConnector was written for (request, block_ids) "
        f"(written for {TESTED_VERSIONS})"]


def imported_from_vllm() -> dict[str, set[str]]:
    """What the files of the connector import of vLLM as soon as they are imported themselves."""
    found: dict[str, set[str]] = {}
    for path in Path(vllm.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                found.setdefault(str(node.module), set()).update(name.name for name in node.names)
            assert not isinstance(node, ast.Import) or not any(name.name.startswith("vllm") for name in node.names)
    return found


def test_all_names_of_vllm_that_are_imported_are_in_the_list() -> None:
    assert imported_from_vllm() == {module: set(names) for module, names in NAMES.items()}


def test_a_name_that_is_somewhere_else_now_is_said_in_a_sentence() -> None:
    written = f"(written for {TESTED_VERSIONS})"
    assert missing({"json": ("loads", "dumps")}) == []
    assert missing({"json": ("loads", "reads"), "json.elsewhere": ("dumps",)}) == [
        f"json has no reads any more {written}", f"json.elsewhere cannot be imported: No module named 'json.elsewhere' {written}"]


def test_the_connector_of_an_engine_that_has_moved_what_it_needs_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.cache_hit_source", None)
    monkeypatch.delitem(sys.modules, "shmkv.integrations.vllm.connector", raising=False)
    with pytest.raises(ImportError, match=r"vllm\.v1\.metrics\.cache_hit_source cannot be imported: .*written for vllm >= 0\.32"):
        _ = vllm.ShmkvConnector


@pytest.mark.parametrize(("version", "is_tested"), [
    ("0.32.0", True), ("0.32.1", True), ("0.32.0rc1+cpu", True), ("0.31.9", False), ("0.33.0", False), ("0.33.0rc1", False),
    ("1.32.0", False), ("dev", False)])
def test_a_version_that_it_was_not_tested_with_is_said(version: str, is_tested: bool) -> None:
    said = untested(version)
    assert (said is None) == is_tested
    assert is_tested or f"tested with {TESTED_VERSIONS}, and this is {version}:" in str(said)


def test_the_versions_are_those_of_the_extra() -> None:
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'vllm = ["{TESTED_VERSIONS.replace(" ", "")}"]' in project


def hears(monkeypatch: pytest.MonkeyPatch, name: str) -> logging.handlers.BufferingHandler:
    """The only handler of a logger, for this test."""
    handler = logging.handlers.BufferingHandler(100)
    monkeypatch.setattr(logging.getLogger(name), "handlers", [handler])
    return handler


def test_words_go_where_those_of_vllm_go(monkeypatch: pytest.MonkeyPatch) -> None:
    own = logging.getLogger("shmkv")
    theirs = hears(monkeypatch, "vllm")
    monkeypatch.setattr(own, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(own, "level", own.level)
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.INFO)
    for _ in range(2):
        speak_in_vllms_log()
    own.info("said once")
    assert [record.getMessage() for record in theirs.buffer] == ["said once"]
    logging.Manager._clear_cache(own.manager)       # which levels it lets through: not for other tests


def test_words_that_somebody_hears_already_go_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = hears(monkeypatch, "shmkv"), hears(monkeypatch, "vllm")
    speak_in_vllms_log()
    logging.getLogger("shmkv").warning("mine")
    assert (len(mine.buffer), len(theirs.buffer)) == (1, 0)


def test_the_package_needs_no_vllm_before_the_connector_is_asked_for() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        _ = vllm.Connector
