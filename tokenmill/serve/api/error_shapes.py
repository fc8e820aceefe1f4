"""An error in the shape of the API that the path belongs to: Anthropic's, Ollama's or OpenAI's."""

from __future__ import annotations

from starlette.responses import Response

from tokenmill.serve.api.anthropic import PATH as ANTHROPIC_PATH
from tokenmill.serve.api.anthropic import anthropic_error
from tokenmill.serve.api.exchange import error_response, json_response
from tokenmill.serve.errors import ApiError


def shaped_error(error: ApiError, path: str) -> Response:
    if path.startswith(ANTHROPIC_PATH):
        return json_response(anthropic_error(error), error.status, error.headers())
    if path.startswith("/api/"):
        return json_response({"error": error.message}, error.status, error.headers())
    return error_response(error)
