"""Errors as HTTP answers, in the OpenAI shape. Every rejection by the server is one of these, with its status and
remedy.

Knows nothing of routes; the adapters for other APIs turn the same errors into their own shapes.
"""

from __future__ import annotations

from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """`param` names the field at fault, `code` is for programs; `retry_after` in seconds becomes a header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def type(self) -> str:
        if self.code == "insufficient_quota":  # OpenAI says it in both places
            return self.code
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "internal_error")

    def body(self) -> dict[str, Any]:
        code = self.code if self.code is not None else self.status
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": code}}

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"retry-after": str(max(1, round(self.retry_after + 0.5)))}
        if self.code == "insufficient_quota":
            headers["x-should-retry"] = "false"  # clients of OpenAI and Anthropic would try again at once
        return headers


def context_exceeded(message: str, context: int, param: str) -> ApiError:
    """Ends with OpenAI's own sentence: clients look for it before they try a model with a longer context."""
    told = f"{message} This model's maximum context length is {context} tokens."
    return ApiError(400, told, param=param, code="context_length_exceeded")


def deadline_passed() -> ApiError:
    return ApiError(429, "the deadline passed before the first token", code="deadline", retry_after=1)


def engine_gone(message: str, retry_after: float = 2.0) -> ApiError:
    return ApiError(503, message, code="engine_unavailable", retry_after=retry_after)
