"""The comparison with vLLM's base class: what it says of one that is as it was, and of one that is not. Without vLLM."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest

from shmkv.integrations import vllm
from shmkv.integrations.vllm.contract import ABSTRACT, OPTIONAL, TESTED_VERSIONS, differences


def base_class(**changes: Callable[..., None] | None) -> type:
    """A class like vLLM's, with some calls changed or, with None, left out."""
    calls: dict[str, Callable[..., None]] = {}
    for name, parameters in {**ABSTRACT, **OPTIONAL}.items():
        scope: dict[str, Callable[..., None]] = {}
        exec(f"def call({', '.join(('self', *parameters))}): pass", scope)
        calls[name] = abstractmethod(scope["call"]) if name in ABSTRACT else scope["call"]
    calls.update({name: call for name, call in changes.items() if call is not None})
    return type("Base", (ABC,), {name: call for name, call in calls.items() if changes.get(name, call) is not None})


def test_a_base_class_as_it_was() -> None:
    assert differences(base_class()) == []


@pytest.mark.parametrize(("changes", "said"), [
    ({"wait_for_save": lambda self: None}, "wait_for_save is not abstract any more: does vLLM still call it?"),
    ({"wait_for_save": abstractmethod(lambda self, layers: None)},
     "wait_for_save takes (layers), ShmkvConnector was written for ()"),
    ({"wait_for_event": abstractmethod(lambda self: None)},
     "wait_for_event is abstract now and ShmkvConnector was written without it"),
    ({"get_finished": None}, "get_finished is gone: vLLM does not call it any more"),
])
def test_what_changed_is_said_in_a_sentence(changes: dict[str, Callable[..., None] | None], said: str) -> None:
    assert differences(base_class(**changes)) == [f"{said} (written for {TESTED_VERSIONS})"]


def test_the_package_needs_no_vllm_before_the_connector_is_asked_for() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        _ = vllm.Connector
