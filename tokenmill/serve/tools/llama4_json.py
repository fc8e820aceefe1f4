"""Llama 4, asked for JSON: `<|python_start|>{"name": ..., "parameters": {...}}<|python_end|>`, or several with `;`.

The objects are those of llama3_json.py; either tag may be missing.
"""

from __future__ import annotations

from typing import ClassVar

from tokenmill.serve.tools.llama3_json import Llama3Json


class Llama4Json(Llama3Json):
    name: ClassVar[str] = "llama4_json"
    marker: ClassVar[str] = "<|python_start|>"
    tag: ClassVar[str] = marker
    closing: ClassVar[str] = "<|python_end|>"

    @classmethod
    def writes(cls, template: str) -> bool:
        return cls.tag in template
