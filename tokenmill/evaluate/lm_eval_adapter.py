"""lm-evaluation-harness on our engine: its LM interface, where `lm_eval` is installed.

`lm_eval.simple_evaluate(TokenmillLM("smollm2"), tasks=["arc_easy"])`. Requests become pairs of tokens or prompts for
the engine; nothing of the harness is copied. Imported by users and tests only; tokenmill itself never needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.evaluate.likelihood import Continuation, continuation_logprobs
from tokenmill.evaluate.task_run import task_config
from tokenmill.evaluate.tasks.choices import encode_pair
from tokenmill.types import SamplingParams

_MAX_TOKENS = 256


@register_model("tokenmill")
class TokenmillLM(LM):
    def __init__(self, pretrained: str = "smollm2", batch_size: Any = None, **options: Any) -> None:
        """`options` are those of LLM. `batch_size` is the harness's; the engine forms its own batches."""
        del batch_size
        super().__init__()
        self._llm = LLM(pretrained, task_config(pretrained, EngineConfig.from_options(options)))
        self._llm.use_only_lora()

    @property
    def max_length(self) -> int:
        return self._llm.parts.config.context

    @property
    def tokenizer_name(self) -> str:
        return self._llm.parts.path.name

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        del disable_tqdm
        tokenizer = self._llm.parts.tokenizer
        pairs = [encode_pair(tokenizer, *request.args) for request in requests]
        return [(score.logprob, score.greedy) for score in self._score(pairs)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, each token scored once with as much before it as fits."""
        del disable_tqdm
        totals = []
        for request in requests:
            tokens = self._llm.parts.tokenizer.encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, self._opening(), self.max_length, 1)
            scores = self._score([make_disjoint_window(window) for window in windows])
            totals.append(sum(each.logprob for each in scores))
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        del disable_tqdm
        prompts, params = [], []
        for request in requests:
            prompt, settings = request.args
            each = _params(settings)
            room = self.max_length - each.max_tokens
            if room < 1:
                raise UserError(f"an answer of {each.max_tokens} tokens fills the context", "raise context")
            prompts.append(self._llm.parts.tokenizer.encode(prompt, parse_special=True)[-room:])
            params.append(each)
        return [output.outputs[0].text for output in self._llm.generate(prompts, params)]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise UserError("a chat that ends in the middle of an answer is not supported", "end it with a user's turn")
        return self._llm.render_chat(chat_history)

    def _score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Continuation]:
        fitting = [(list(before)[-(self.max_length + 1 - len(after)) :], after) for before, after in pairs]
        return continuation_logprobs(self._llm.parts, fitting)

    def _opening(self) -> int:
        """The token before the first of a text."""
        tokenizer = self._llm.parts.tokenizer
        opening = tokenizer.bos_id if tokenizer.bos_id is not None else next(iter(tokenizer.eos_ids), None)
        if opening is None:
            raise UserError("the model has neither a BOS nor an EOS token", "leave rolling tasks out")
        return opening


def _params(settings: Mapping[str, Any]) -> SamplingParams:
    """The harness's generation settings as ours. Sampling is off unless it is asked for."""
    until = settings.get("until") or []
    sample = bool(settings.get("do_sample", False))
    return SamplingParams(
        max_tokens=int(settings.get("max_gen_toks") or settings.get("max_tokens") or _MAX_TOKENS),
        temperature=float(settings.get("temperature") or 0.0) if sample else 0.0,
        top_p=float(settings.get("top_p", 1.0)) if sample else 1.0,
        stop=(until,) if isinstance(until, str) else tuple(text for text in until if text),
    )
