"""DeepSeek V3.1: the tags of V3 without a type and without a fenced block.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tokenmill.serve.tools.deepseek_v3 import BEGIN, CALL, CALL_END, END, SEPARATOR, DeepSeekV3
from tokenmill.serve.tools.functions import Function
from tokenmill.serve.tools.json_calls import named_rules


class DeepSeekV31(DeepSeekV3):
    name: ClassVar[str] = "deepseek_v31"

    @classmethod
    def writes(cls, template: str) -> bool:
        return SEPARATOR in template and "```json" not in template

    @classmethod
    def grammar(cls, functions: Sequence[Function], parallel: bool) -> str:
        more = " call*" if parallel else ""
        return f'calls: "{BEGIN}" call{more} "{END}"\n{named_rules(functions, CALL, SEPARATOR, CALL_END)}'
