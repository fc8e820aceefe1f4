"""GPT-OSS: the `analysis` channel of the harmony format (harmony.py) is reasoning, all other messages are for the user.

For requests with tools the harmony tool-call parser reads the answer alone, reasoning included.
"""

from __future__ import annotations

from typing import ClassVar

from tokenmill.serve.reasoning.base import Reasoning, ReasoningEvent, ReasoningParser, Visible
from tokenmill.serve.reasoning.harmony import CHANNEL, MARKERS, MESSAGE, HarmonyScanner


class GptOss(ReasoningParser):
    name: ClassVar[str] = "gpt_oss"
    markers: ClassVar[tuple[str, ...]] = MARKERS
    end_marker: ClassVar[str] = "<|end|>"

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        self._scanner = HarmonyScanner()

    @classmethod
    def writes(cls, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def _step(self, events: list[ReasoningEvent], final: bool) -> bool:
        pieces = self._scanner.push(self._buffer, final)
        self._buffer = ""
        for piece in pieces:
            if piece.text:
                reasoning = piece.channel == "analysis" and not piece.recipient
                events.append(Reasoning(piece.text) if reasoning else Visible(piece.text))
        return False
