"""Llama 4 with its own template: a Python list of calls, `<|python_start|>[f(a=1), g()]<|python_end|>`.

The list is that of pythonic.py; either tag may be missing.
"""

from __future__ import annotations

from typing import ClassVar

from tokenmill.serve.tools.pythonic import Pythonic


class Llama4Pythonic(Pythonic):
    name: ClassVar[str] = "llama4_pythonic"
    marker: ClassVar[str] = "<|python_start|>"
    opening: ClassVar[str] = marker
    closing: ClassVar[str] = "<|python_end|>"

    @classmethod
    def writes(cls, template: str) -> bool:
        return cls.opening in template and "(params_name1=params_value1" in template
