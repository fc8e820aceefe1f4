"""DeepSeek-R1, its distillations and DeepSeek V3.1: `<think>REASONING</think>ANSWER`.

The newer templates end the prompt with `<think>` (or, with `thinking` off in V3.1, with `</think>`), so the answer has
only the closing tag; with the older ones the model writes both. Without any tag the answer has not come to its end:
all of it is reasoning.
"""

from __future__ import annotations

from typing import ClassVar

from tokenmill.serve.reasoning.base import TaggedReasoning


class DeepSeekR1(TaggedReasoning):
    name: ClassVar[str] = "deepseek_r1"
    openings: ClassVar[tuple[str, ...]] = ("<think>",)
    closings: ClassVar[tuple[str, ...]] = ("</think>",)
    markers: ClassVar[tuple[str, ...]] = (*openings, *closings)
    end_marker: ClassVar[str] = closings[0]
    closing: ClassVar[str] = closings[0]
    implied: ClassVar[bool] = True

    @classmethod
    def writes(cls, template: str) -> bool:
        return "</think>" in template and "<｜Assistant｜>" in template
