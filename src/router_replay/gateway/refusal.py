"""Refusal: what the gateway answers when it does not do what a client asked, in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """Ends a request with the HTTP `status`, a `message`, and OpenAI's fields `param` (which field) and `code`."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "engine_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
