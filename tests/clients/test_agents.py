"""openai-agents: an agent that must use a tool, over chat completions and over responses, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest

from tests.clients.conftest import MODEL

agents = pytest.importorskip("agents", reason="make test-clients installs it")


@pytest.fixture(autouse=True)
def _untraced() -> None:
    agents.set_tracing_disabled(True)


def _agent(v1: str, face: str, called: list[str]) -> Any:
    def get_weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather in a city."""
        called.append(city)
        return f"Sunny in {city}"

    client = openai.AsyncOpenAI(base_url=v1, api_key="none", max_retries=0, timeout=60)
    model = agents.OpenAIResponsesModel if face == "responses" else agents.OpenAIChatCompletionsModel
    return agents.Agent(
        name="weather",
        instructions="Use the tool.",
        model=model(model=MODEL, openai_client=client),
        model_settings=agents.ModelSettings(
            tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=64
        ),
        tools=[agents.function_tool(get_weather)],
        tool_use_behavior="stop_on_first_tool",
    )


@pytest.mark.parametrize("face", ["chat", "responses"])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_tool_runs(v1: str, face: str, streamed: bool) -> None:
    called: list[str] = []
    agent = _agent(v1, face, called)

    async def run() -> Any:
        if not streamed:
            return await agents.Runner.run(agent, "What is the weather in Oslo?", max_turns=3)
        running = agents.Runner.run_streamed(agent, "What is the weather in Oslo?", max_turns=3)
        async for _ in running.stream_events():
            pass
        return running

    result = asyncio.run(run())
    assert len(called) == 1
    assert result.final_output == f"Sunny in {called[0]}"
