"""Status codes and exceptions: what every other module answers with when something is wrong.

This module knows no other module of the package. It owns four promises:

* every problem with the *value* of an argument is one class, ``LLMException`` and ``ValueError`` at once;
* every argument of the wrong *type* is a ``TypeError``;
* a ``None`` where an object is required is a ``TypeError`` and an ``AttributeError`` at once;
* exceptions survive pickling together with their status, so that they can cross a process boundary.
"""
from __future__ import annotations

from enum import IntEnum

_BASE = 0x5010B000


class NamedIntEnum(IntEnum):
    """IntEnum whose text is ``Class.MEMBER`` on every Python version, in ``str`` and in an f-string."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, format_spec: str) -> str:
        # Python 3.10, 3.11 and 3.12 disagree about format() of an IntEnum that has a __str__ of its own.
        return format(int(self), format_spec) if format_spec else str(self)


class LLMStatusCode(NamedIntEnum):
    """Outcome of an operation; the numbers are those of llm_datadist."""

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_WAIT_PROCESS_TIMEOUT = _BASE + 1
    LLM_KV_CACHE_NOT_EXIST = _BASE + 2
    LLM_REPEAT_REQUEST = _BASE + 3
    LLM_REQUEST_ALREADY_COMPLETED = _BASE + 4
    LLM_PARAM_INVALID = _BASE + 5
    LLM_ENGINE_FINALIZED = _BASE + 6
    LLM_NOT_YET_LINK = _BASE + 7
    LLM_ALREADY_LINK = _BASE + 8
    LLM_LINK_FAILED = _BASE + 9
    LLM_UNLINK_FAILED = _BASE + 10
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = _BASE + 11
    LLM_CLUSTER_NUM_EXCEED_LIMIT = _BASE + 12
    LLM_PROCESSING_LINK = _BASE + 13
    LLM_DEVICE_OUT_OF_MEMORY = _BASE + 14
    LLM_PREFIX_ALREADY_EXIST = _BASE + 15
    LLM_PREFIX_NOT_EXIST = _BASE + 16
    LLM_SEQ_LENOVERLIMIT = _BASE + 17
    LLM_NO_FREE_BLOCK = _BASE + 18
    LLM_BLOCKS_OUT_OF_MEMORY = _BASE + 19
    LLM_EXIST_LINK = _BASE + 24
    LLM_FEATURE_NOT_ENABLED = _BASE + 25
    LLM_TIMEOUT = _BASE + 26
    LLM_LINK_BUSY = _BASE + 27
    LLM_OUT_OF_MEMORY = _BASE + 28
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057
    LLM_UNKNOWN_ERROR = -1


class LLMException(RuntimeError):
    """An operation could not be done; ``status_code`` says why, LLM_FAILED if nothing else does.

    ``failed_request`` is the place of the request that failed in a call that takes several, else None; ``done_requests`` are the
    places of those that were done, where the call does not go through them in order.
    """

    failed_request: int | None = None
    done_requests: tuple[int, ...] | None = None

    def __init__(self, *args: object, status_code: LLMStatusCode = LLMStatusCode.LLM_FAILED) -> None:
        super().__init__(*args)
        # Kept in the instance's __dict__, which BaseException.__reduce__ carries along when it is pickled.
        self._status_code = status_code

    @property
    def status_code(self) -> LLMStatusCode:
        """The reason, as a status code."""
        return self._status_code


class LLMParamError(LLMException, ValueError):
    """The value of an argument, or a combination of values, is not allowed. Always LLM_PARAM_INVALID."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args, status_code=LLMStatusCode.LLM_PARAM_INVALID)


class LLMNoneError(TypeError, AttributeError):
    """``None`` was given where an object is required."""


def link_busy(text: str) -> LLMException:
    """Return (not raise) the error for a call that would have to wait for itself."""
    return LLMException(text, status_code=LLMStatusCode.LLM_LINK_BUSY)


def status_from_value(value: int) -> LLMStatusCode:
    """Return the status code with this number; a number that is nobody's means LLM_FAILED."""
    try:
        return LLMStatusCode(value)
    except ValueError:
        return LLMStatusCode.LLM_FAILED


def error_for_status(status: int, message: str) -> LLMException:
    """Return (not raise) the exception for a status that is no success; unknown numbers mean LLM_FAILED."""
    code = status_from_value(status)
    if code is LLMStatusCode.LLM_PARAM_INVALID:
        return LLMParamError(message)
    return LLMException(message, status_code=code)


class Status:
    """A status code with a question attached: was it a success?"""

    def __init__(self, status: LLMStatusCode) -> None:
        self._status_code = status

    def is_ok(self) -> bool:
        """True for LLM_SUCCESS and nothing else."""
        return self._status_code == LLMStatusCode.LLM_SUCCESS

    @property
    def status_code(self) -> LLMStatusCode:
        """The status code itself."""
        return self._status_code

    def __repr__(self) -> str:
        return f"Status({self._status_code})"
