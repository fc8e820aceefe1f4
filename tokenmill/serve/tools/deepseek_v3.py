"""DeepSeek V3 and R1: tags of their own around the name, then the arguments in a fenced block.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    {ARGUMENTS}
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>...<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 is deepseek_v31.py; this parser reads its form too, because the models mix them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from tokenmill.serve.tools.functions import Function
from tokenmill.serve.tools.json_calls import named_rules
from tokenmill.serve.tools.marked_calls import MarkedCallParser

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekV3(MarkedCallParser):
    name: ClassVar[str] = "deepseek_v3"
    marker: ClassVar[str] = CALL
    openings: ClassVar[tuple[str, ...]] = (BEGIN, CALL)
    closings: ClassVar[tuple[str, ...]] = ("```", CALL_END, END)
    header: ClassVar[re.Pattern[str] | None] = re.compile(
        rf"(?:{BEGIN}\s*)?{CALL}\s*(?:function\s*{SEPARATOR}\s*([\w.-]+)\s*```(?:json)?\s*"
        rf"|([\w.-]+)\s*{SEPARATOR}\s*(?:```(?:json)?\s*)?)"
    )

    @classmethod
    def writes(cls, template: str) -> bool:
        return SEPARATOR in template and "```json" in template

    @classmethod
    def grammar(cls, functions: Sequence[Function], parallel: bool) -> str:
        rules = named_rules(functions, f"{CALL}function{SEPARATOR}", "\n```json\n", f"\n```{CALL_END}")
        more = ' ("\\n" call)*' if parallel else ""
        return f'calls: "{BEGIN}" call{more} "{END}"\n{rules}'
