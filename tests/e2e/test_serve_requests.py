"""Fields of requests that decide which tokens go in, which may come out and which are shown, on a random model whose
words are its tokens; and what the operator states in place of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.serving import RunningServer, serving
from tests.e2e.word_model import make_word_model, text_of

_END, _ANSWER = 3, 4  # tokens that the template puts after each message and before the answer
_TEMPLATE = (
    "{% for message in messages %}{{ message.content }} "
    f"{text_of(_END)} "
    "{% endfor %}{% if add_generation_prompt %}"
    f"{text_of(_ANSWER)}"
    "{% endif %}"
)
_CONTEXT, _LIMIT = 128, 7
_CHAT = "/v1/chat/completions"
_MESSAGES = [{"role": "user", "content": text_of(10, 11)}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_word_model(tmp_path_factory.mktemp("words"), "{{ not_this_one }}")
    stored = {"temperature": 0.9, "repetition_penalty": 1.3, "max_new_tokens": _LIMIT}
    (folder / "generation_config.json").write_text(json.dumps(stored))
    template = folder / "stated.jinja"
    template.write_text(_TEMPLATE)
    flags = ("--served-model-name", "tiny", "--context", str(_CONTEXT), "--max-num-seqs", "8")
    override = ("--override-generation-config", '{"temperature": 0}')
    with serving(folder, *flags, "--chat-template", str(template), *override) as running:
        yield running
        running.wait_idle()


def _post(server: RunningServer, path: str, status: int = 200, **fields: Any) -> Any:
    answer = server.http.post(path, json={"ignore_eos": True, **fields})
    assert answer.status_code == status, answer.text
    return answer.json()


def _stream(server: RunningServer, path: str, **fields: Any) -> list[Any]:
    answer = server.http.post(path, json={"ignore_eos": True, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_chat_shows_its_tokens_whole_and_streamed(server: RunningServer) -> None:
    wanted = {"messages": _MESSAGES, "max_tokens": 9, "return_token_ids": True}
    whole = _post(server, _CHAT, **wanted)
    assert whole["prompt_token_ids"] == [10, 11, _END, _ANSWER]
    ids = whole["choices"][0]["token_ids"]
    assert whole["choices"][0]["message"]["content"].split() == [f"w{token_id}" for token_id in ids]
    chunks = _stream(server, _CHAT, **wanted)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    choices = [chunk["choices"][0] for chunk in chunks[1:]]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == ids
    assert "token_ids" not in _post(server, _CHAT, messages=_MESSAGES)["choices"][0]


def test_completions_show_their_tokens_whole_and_streamed(server: RunningServer) -> None:
    wanted = {"prompt": [[20, 21], [22]], "max_tokens": 5, "return_token_ids": True}
    choices = _post(server, "/v1/completions", **wanted)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == wanted["prompt"]
    streamed: list[list[int]] = [[], []]
    prompts: list[list[int]] = [[], []]
    for chunk in _stream(server, "/v1/completions", **wanted):
        choice = chunk["choices"][0]
        streamed[choice["index"]] += choice["token_ids"]
        prompts[choice["index"]] += choice.get("prompt_token_ids", [])
    assert streamed == [choice["token_ids"] for choice in choices]
    assert prompts == wanted["prompt"]


def test_the_last_message_is_continued(server: RunningServer) -> None:
    messages = [*_MESSAGES, {"role": "assistant", "content": text_of(12, 13)}]
    wanted = {"messages": messages, "return_token_ids": True, "continue_final_message": True}
    assert _post(server, _CHAT, **wanted)["prompt_token_ids"] == [10, 11, _END, 12, 13]
    for more in (
        {"add_generation_prompt": True},
        {"thinking_token_budget": 4},
        {"messages": [messages[0] | {"content": ""}]},
    ):
        assert _post(server, _CHAT, 400, **wanted | more)["error"]["param"]


def test_the_anthropic_api_continues_a_last_message_of_the_assistant(server: RunningServer) -> None:
    begun = {"role": "assistant", "content": text_of(12, 13)}
    answer = _post(server, "/v1/messages", messages=[*_MESSAGES, begun], max_tokens=3)
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 5  # 10, 11, the end of the message, 12, 13
    said = _post(server, _CHAT, messages=[*_MESSAGES, begun], max_tokens=3, continue_final_message=True)
    assert answer["content"][0]["text"] == said["choices"][0]["message"]["content"]


def test_prompts_are_cut_only_where_the_request_says_so(server: RunningServer) -> None:
    prompt = [20 + number % 90 for number in range(200)]
    wanted = {"prompt": prompt, "max_tokens": 8, "return_token_ids": True}
    assert _post(server, "/v1/completions", 400, **wanted)["error"]["code"] == "context_length_exceeded"
    for limit, kept in ((5, 5), (-1, _CONTEXT - 8)):
        answer = _post(server, "/v1/completions", **wanted, truncate_prompt_tokens=limit)
        assert answer["choices"][0]["prompt_token_ids"] == prompt[-kept:]
        assert answer["usage"]["prompt_tokens"] == kept
        assert answer["usage"]["prompt_tokens_details"]["truncated_tokens"] == len(prompt) - kept
    echoed = _post(
        server, "/v1/completions", prompt=text_of(*prompt), max_tokens=0, echo=True, truncate_prompt_tokens=2
    )
    assert echoed["choices"][0]["text"].split() == [f"w{token_id}" for token_id in prompt[-2:]]
    long = [{"role": "user", "content": text_of(*prompt)}]
    chat = _post(server, _CHAT, messages=long, truncate_prompt_tokens=6, return_token_ids=True)
    assert chat["prompt_token_ids"] == [*prompt[-4:], _END, _ANSWER]
    embedded = _post(server, "/v1/embeddings", input=[prompt], truncate_prompt_tokens=-1)
    assert embedded["usage"]["prompt_tokens"] == _CONTEXT - 1
    assert _post(server, "/v1/completions", 400, **wanted, truncate_prompt_tokens=0)["error"]["param"]


def test_tokens_that_may_come_and_words_that_may_not(server: RunningServer) -> None:
    wanted = {"prompt": [30], "max_tokens": 12, "return_token_ids": True, "repetition_penalty": 1.0}
    free = _post(server, "/v1/completions", **wanted)["choices"][0]["token_ids"]
    allowed = _post(server, "/v1/completions", **wanted, temperature=1.0, allowed_token_ids=[40, 41, 42])
    assert set(allowed["choices"][0]["token_ids"]) <= {40, 41, 42}
    without = _post(server, "/v1/completions", **wanted, bad_words=[text_of(free[0]), text_of(50, 51)])
    ids = without["choices"][0]["token_ids"]
    assert free[0] not in ids
    pair = ids[:2]
    apart = _post(server, "/v1/completions", **wanted, bad_words=[text_of(free[0]), text_of(*pair)])
    again = apart["choices"][0]["token_ids"]
    assert again[0] == pair[0]
    assert again[1] != pair[1]
    assert _post(server, "/v1/completions", 400, **wanted, allowed_token_ids=[9999])["error"]["message"]


def test_the_best_of_several_answers(server: RunningServer) -> None:
    wanted = {"prompt": [33, 34], "max_tokens": 6, "temperature": 1.0, "seed": 5}
    every = _post(server, "/v1/completions", **wanted, n=5, logprobs=0)["choices"]
    means = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in every}
    best = _post(server, "/v1/completions", **wanted, n=2, best_of=5)
    assert [choice["text"] for choice in best["choices"]] == sorted(means, key=lambda text: -means[text])[:2]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 30
    for wrong in ({"n": 3, "best_of": 2}, {"best_of": 99}, {"best_of": 2, "stream": True}):
        assert _post(server, "/v1/completions", 400, **wanted, **wrong)["error"]["param"] == "best_of"


def test_defaults_of_sampling_are_the_models_unless_stated(server: RunningServer) -> None:
    first = _post(server, _CHAT, messages=_MESSAGES)
    assert first["usage"]["completion_tokens"] == _LIMIT
    assert _post(server, _CHAT, messages=_MESSAGES)["choices"] == first["choices"]  # temperature 0
    stated = {"messages": _MESSAGES, "max_tokens": _LIMIT, "temperature": 0}
    same = _post(server, _CHAT, **stated, repetition_penalty=1.3)
    assert same["choices"][0]["message"] == first["choices"][0]["message"]
    longer = _post(server, _CHAT, messages=_MESSAGES, max_tokens=_LIMIT + 20)
    assert longer["usage"]["completion_tokens"] == _LIMIT + 20
    response = _post(server, "/v1/responses", input="hello", max_output_tokens=2)
    assert (response["temperature"], response["top_p"]) == (0.0, 1.0)
    assert "repetition_penalty 1.3" in server.log


def test_beams_are_the_most_probable_answers(server: RunningServer) -> None:
    fields = {"prompt": [[10, 11], [12]], "max_tokens": 6, "return_token_ids": True}
    answer = _post(server, "/v1/completions", **fields, n=3, use_beam_search=True)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices) == 36
    assert answer["usage"]["prompt_tokens"] == 3
    for own, prompt in ((choices[:3], [10, 11]), (choices[3:], [12])):
        scores = [choice["cumulative_logprob"] for choice in own]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(choice["token_ids"]) for choice in own}) == 3
        for choice in own:  # its score is what the model says of the text
            whole = [*prompt, *choice["token_ids"]]
            scored = _post(server, "/v1/completions", prompt=whole, echo=True, logprobs=1, max_tokens=0)["choices"][0]
            said = sum(scored["logprobs"]["token_logprobs"][len(prompt) :])
            assert choice["cumulative_logprob"] == pytest.approx(said, abs=1e-3)
    greedy = _post(server, "/v1/completions", **fields, temperature=0, repetition_penalty=1.0)["choices"]
    single = _post(server, "/v1/completions", **fields, use_beam_search=True)["choices"]
    assert [choice["token_ids"] for choice in single] == [choice["token_ids"] for choice in greedy]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (_CHAT, {"messages": _MESSAGES, "use_beam_search": True}, "use_beam_search"),
        ("/v1/completions", {"prompt": [9], "use_beam_search": True, "stream": True}, "stream"),
        ("/v1/completions", {"prompt": [9], "use_beam_search": True, "stop": ["x"]}, "stop"),
        ("/v1/completions", {"prompt": [9], "use_beam_search": True, "n": 17}, "n"),
        ("/v1/completions", {"prompt": [9], "use_beam_search": True, "max_tokens": 200}, "max_tokens"),
        (_CHAT, {"messages": _MESSAGES, "chat_template": "{{ messages }}"}, "chat_template"),
        (_CHAT, {"messages": _MESSAGES, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/responses", {"input": "x", "return_token_ids": True}, "return_token_ids"),
        ("/v1/responses", {"input": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    server: RunningServer, path: str, fields: dict[str, Any], param: str
) -> None:
    assert _post(server, path, 400, **fields)["error"]["param"] == param
