"""Status codes and exceptions: numbers, texts, classes, and the way through pickle."""
from __future__ import annotations

import copy
import pickle

import pytest

from shmkv.errors import (
    LLMException,
    LLMNoneError,
    LLMParamError,
    LLMStatusCode,
    Status,
    error_for_status,
    status_from_value,
)

BASE = 1343270912
OFFSETS = {
    "WAIT_PROCESS_TIMEOUT": 1, "KV_CACHE_NOT_EXIST": 2, "REPEAT_REQUEST": 3, "REQUEST_ALREADY_COMPLETED": 4,
    "PARAM_INVALID": 5, "ENGINE_FINALIZED": 6, "NOT_YET_LINK": 7, "ALREADY_LINK": 8, "LINK_FAILED": 9,
    "UNLINK_FAILED": 10, "NOTIFY_PROMPT_UNLINK_FAILED": 11, "CLUSTER_NUM_EXCEED_LIMIT": 12,
    "PROCESSING_LINK": 13, "DEVICE_OUT_OF_MEMORY": 14, "PREFIX_ALREADY_EXIST": 15, "PREFIX_NOT_EXIST": 16,
    "SEQ_LENOVERLIMIT": 17, "NO_FREE_BLOCK": 18, "BLOCKS_OUT_OF_MEMORY": 19, "EXIST_LINK": 24,
    "FEATURE_NOT_ENABLED": 25, "TIMEOUT": 26, "LINK_BUSY": 27, "OUT_OF_MEMORY": 28,
}
ABSOLUTE = {
    "SUCCESS": 0, "FAILED": 0xFFFFFFFF, "DEVICE_MEM_ERROR": 507053, "SUSPECT_REMOTE_ERROR": 507057,
    "UNKNOWN_ERROR": -1,
}


def test_every_status_code_has_its_number() -> None:
    wanted = {f"LLM_{name}": BASE + offset for name, offset in OFFSETS.items()}
    wanted.update({f"LLM_{name}": value for name, value in ABSOLUTE.items()})
    assert {code.name: int(code) for code in LLMStatusCode} == wanted


def test_text_of_a_status_code_is_its_name_on_every_python() -> None:
    code = LLMStatusCode.LLM_TIMEOUT
    assert str(code) == f"{code}" == "LLMStatusCode.LLM_TIMEOUT"
    assert f"{code:x}" == f"{BASE + 26:x}"


def test_default_status_of_an_exception_is_failed() -> None:
    assert LLMException("boom").status_code is LLMStatusCode.LLM_FAILED
    assert isinstance(LLMException("boom"), RuntimeError)
    assert repr(LLMException("boom")) == "LLMException('boom')"


def test_param_error_is_an_llm_exception_and_a_value_error() -> None:
    error = LLMParamError("bad {brace}")
    assert isinstance(error, LLMException)
    assert isinstance(error, ValueError)
    assert isinstance(error, RuntimeError)
    assert error.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert str(error) == "bad {brace}"


def test_none_error_is_a_type_error_and_an_attribute_error() -> None:
    error = LLMNoneError("missing")
    assert isinstance(error, TypeError)
    assert isinstance(error, AttributeError)
    assert str(error) == "missing"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "error",
    [
        LLMException("a", 2, status_code=LLMStatusCode.LLM_LINK_BUSY),
        LLMException(),
        LLMParamError("b"),
        LLMNoneError("c"),
    ],
    ids=repr,
)
def test_exceptions_survive_pickling_with_their_status(error: Exception, protocol: int) -> None:
    for twin in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert twin.args == error.args
        assert getattr(twin, "status_code", None) is getattr(error, "status_code", None)


def test_a_number_that_is_no_code_means_failed() -> None:
    assert status_from_value(BASE + 21) is LLMStatusCode.LLM_FAILED
    assert status_from_value(BASE + 27) is LLMStatusCode.LLM_LINK_BUSY


def test_error_for_status_chooses_the_class() -> None:
    wrong = error_for_status(LLMStatusCode.LLM_PARAM_INVALID, "size 7")
    busy = error_for_status(BASE + 27, "link 1")
    assert (type(wrong), str(wrong)) == (LLMParamError, "size 7")
    assert (type(busy), busy.status_code) == (LLMException, LLMStatusCode.LLM_LINK_BUSY)


@pytest.mark.parametrize("code", list(LLMStatusCode))
def test_status_is_ok_for_success_only(code: LLMStatusCode) -> None:
    status = Status(code)
    assert status.is_ok() is (code.name == "LLM_SUCCESS")
    assert status.status_code is code
    assert code.name in repr(status)
