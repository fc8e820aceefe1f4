"""Qwen3 and others with the same tags: `<think>\\nREASONING\\n</think>\\n\\nANSWER`.

With `enable_thinking` false the template ends the prompt with an empty pair of tags and the answer has none; the
thinking-only models (2507) end it with `<think>`. An answer without tags is all for the user.
"""

from __future__ import annotations

from typing import ClassVar

from tokenmill.serve.reasoning.base import TaggedReasoning


class Qwen3(TaggedReasoning):
    name: ClassVar[str] = "qwen3"
    openings: ClassVar[tuple[str, ...]] = ("<think>",)
    closings: ClassVar[tuple[str, ...]] = ("</think>",)
    markers: ClassVar[tuple[str, ...]] = (*openings, *closings)
    end_marker: ClassVar[str] = closings[0]
    closing: ClassVar[str] = closings[0]

    @classmethod
    def writes(cls, template: str) -> bool:
        return "</think>" in template and "<｜Assistant｜>" not in template
