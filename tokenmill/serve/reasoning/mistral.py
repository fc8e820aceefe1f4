"""Magistral and later Mistral models: `[THINK]REASONING[/THINK]ANSWER`; both markers are control tokens."""

from __future__ import annotations

from typing import ClassVar

from tokenmill.serve.reasoning.base import TaggedReasoning


class Mistral(TaggedReasoning):
    name: ClassVar[str] = "mistral"
    openings: ClassVar[tuple[str, ...]] = ("[THINK]",)
    closings: ClassVar[tuple[str, ...]] = ("[/THINK]",)
    markers: ClassVar[tuple[str, ...]] = (*openings, *closings)
    end_marker: ClassVar[str] = closings[0]

    @classmethod
    def writes(cls, template: str) -> bool:
        return "[THINK]" in template
