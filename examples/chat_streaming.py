"""Chat with streaming: two conversations at once on one engine, each printed as it arrives.

python examples/chat_streaming.py [MODEL]        (MODEL needs a chat template; smollm2 has one)
"""

import asyncio
import sys

from tokenmill import AsyncEngine, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
QUESTIONS = ["What is the capital of France?", "Name a colour of the rainbow."]


async def answer(engine: AsyncEngine, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    prompt = engine.parts.chat_template.render(messages)
    text = ""
    async for update in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=24), chat=True):
        text += update.text
        print(f"[{question}] {update.text!r}")
    return text


async def main() -> None:
    async with AsyncEngine(MODEL, context=256) as engine:
        answers = await asyncio.gather(*(answer(engine, question) for question in QUESTIONS))
    for question, text in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n  {text.strip()}")


asyncio.run(main())
