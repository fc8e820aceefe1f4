"""Bodies of requests -> token ids, exactly as a replica computes them, so that the names of their pages agree.

Templates run in text workers, as in the server: they come with the weights. What cannot be read here (another API, no
tokenizer on this machine, a body that the replica will refuse) is routed by load alone. Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tokenmill.checkpoint.chat_template import ChatTemplate
from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import tokenizer_of
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.route.feed import ServedModel
from tokenmill.serve.api.chat import chat_prompt
from tokenmill.serve.api.protocol import ChatBody, CompletionBody
from tokenmill.serve.api.tool_messages import tools_of
from tokenmill.serve.callers import Caller
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError
from tokenmill.serve.server import make_text_workers
from tokenmill.serve.styles import choose_styles
from tokenmill.serve.tenants.keys import Client
from tokenmill.serve.workers.jobs import Encode, Render
from tokenmill.serve.workers.pool import WorkerPool
from tokenmill.serve.workers.text import TextWork

_log = get_logger(__name__)
_LONG_TEXT = 4096  # characters: longer ones are tokenized by a worker
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class ModelTexts:
    """The tokenizer and the chat template of one model; what the chat route asks of a service."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, workers: WorkerPool) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.workers = workers
        self.tool_style = choose_styles(ServeConfig(), template, tokenizer)[0]
        self._text = TextWork(workers)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        *,
        client: Client,
    ) -> str:
        listed = None if tools is None else [dict(tool) for tool in tools]
        job = Render([dict(message) for message in messages], listed, add_generation_prompt, dict(extra or {}))
        return await self._text.render(job, client)

    async def encode(self, text: str, chat: bool, special: bool, client: Client) -> list[int]:
        if len(text) > _LONG_TEXT:
            return (await self._text.encode(Encode([text], chat, special), client))[0]
        return self.tokenizer.encode(text, special and not chat, parse_special=chat)

    async def token_ids(self, path: str, body: Mapping[str, Any], client: Client) -> list[int] | None:
        """Of the only prompt; None if there is none, or several."""
        if path == CHAT:
            chat = ChatBody.model_validate(body)
            tools = tools_of(self, chat) if chat.tools or chat.tool_choice is not None else None
            prompt = await chat_prompt(self, chat, Caller(client), tools)
            return await self.encode(prompt, chat=True, special=True, client=client)
        completion = CompletionBody.model_validate(body)
        prompts = completion.prompts()
        if len(prompts) != 1:
            return None
        if isinstance(prompts[0], str):
            special = completion.add_special_tokens is not False
            return await self.encode(prompts[0], chat=False, special=special, client=client)
        return list(prompts[0])


class Texts:
    """By model: made when a replica first tells what it serves."""

    def __init__(self, stated: str) -> None:
        """`stated`: the model whose tokenizer is used for all; "": each replica's own, where its files are here."""
        self._path = resolve(stated).path if stated else None
        self._made: dict[tuple[str, str], asyncio.Task[ModelTexts | None]] = {}
        self._client = Client("router")

    async def token_ids(self, path: str, body: Mapping[str, Any], model: ServedModel | None) -> list[int] | None:
        """None: not known here."""
        if path not in (COMPLETIONS, CHAT) or model is None:
            return None
        prompt = body.get("prompt")
        if path == COMPLETIONS and isinstance(prompt, list) and set(map(type, prompt)) == {int}:
            return prompt  # nothing to tokenize
        making = self._of(model)
        texts = making.result() if making.done() else None
        if texts is None:
            return None
        try:
            return await texts.token_ids(path, body, self._client)
        except (ApiError, UserError, ValidationError, ValueError):
            return None  # the replica says what is wrong

    def _of(self, model: ServedModel) -> asyncio.Task[ModelTexts | None]:
        path = str(self._path or model.path)
        key = (path, model.chat_template)
        if key not in self._made:
            self._made[key] = asyncio.create_task(self._make(Path(path), model))
        return self._made[key]

    async def prepare(self, model: ServedModel) -> bool:
        """Whether its prompts can be tokenized here."""
        return await self._of(model) is not None

    async def _make(self, path: Path, model: ServedModel) -> ModelTexts | None:
        try:
            if not path.exists():
                raise UserError(f"{path} is not on this machine", "give --tokenizer-of")
            found = await asyncio.to_thread(tokenizer_of, path, model.load_format, model.chat_template)
        except (UserError, OSError, ValueError) as error:
            _log.warning("prompts of %s are routed by load alone: %s", model.names[0], error)
            return None
        workers = make_text_workers(path, model.load_format, ServeConfig(), model.chat_template)
        return ModelTexts(*found, workers)

    async def close(self) -> None:
        for making in self._made.values():
            texts = await making
            if texts is not None:
                await texts.workers.close()
