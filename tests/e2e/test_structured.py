"""Structured output and tool calls on a real model: through a server, driven by the official openai client, and in
process, where neighbours can be compared token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.e2e import structured_suite
from tests.e2e.serving import RunningServer, serving
from tokenmill import LLM, SamplingParams, UserError
from tokenmill.types import StructuredSpec

_MODEL = "smollm2-test"
_MESSAGES: Any = [{"role": "user", "content": "Tell me about a person."}]
_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
_WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 10}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
        },
    },
}
_CLOCK: Any = {"type": "function", "function": {"name": "now", "description": "The time."}}


@pytest.fixture(scope="module")
def server(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    with serving(
        model_path("smollm2"), "--served-model-name", _MODEL, "--context", "1024", "--max-num-seqs", "8"
    ) as up:
        yield up
        up.wait_idle()  # no page is left behind, whatever was refused or cut


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def _chat(client: openai.OpenAI, **options: Any) -> Any:
    wanted = {"model": _MODEL, "messages": _MESSAGES, "max_tokens": 80, "temperature": 0} | options
    return client.chat.completions.create(**wanted)


def _token(client: openai.OpenAI, text: str) -> int:
    ids = httpx.post(str(client.base_url.join("/tokenize")), json={"prompt": text}).json()["tokens"]
    return int(ids[-1])


def _schema_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_strict_schemas_are_kept_beside_free_requests(client: openai.OpenAI) -> None:
    def free(number: int) -> Any:
        messages = [{"role": "user", "content": f"Say something about the number {number}."}]
        return _chat(client, messages=messages, max_tokens=24).choices[0]

    def strict(seed: int) -> Any:
        return _chat(client, response_format=_schema_format(_PERSON), temperature=1.0, seed=seed).choices[0]

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(strict, seed) for seed in range(4)]
        beside = [pool.submit(free, number) for number in range(4)]
        for each in answers:
            assert each.result().finish_reason == "stop"
            jsonschema.validate(json.loads(each.result().message.content), _PERSON)
        assert all("number" in each.result().message.content for each in beside)


def test_an_answer_cut_by_length_is_the_beginning_of_a_valid_one(client: openai.OpenAI) -> None:
    whole = _chat(client, response_format=_schema_format(_PERSON)).choices[0]
    cut = _chat(client, response_format=_schema_format(_PERSON), max_tokens=5).choices[0]
    assert (whole.finish_reason, cut.finish_reason) == ("stop", "length")
    assert cut.message.content
    assert whole.message.content.startswith(cut.message.content)


def test_a_json_object_is_one(client: openai.OpenAI) -> None:
    choice = _chat(client, response_format={"type": "json_object"}).choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:
        assert choice.message.content.startswith("{")


def test_text_with_structural_tags(client: openai.OpenAI) -> None:
    tag = {"begin": "<person>", "content": {"type": "json_schema", "json_schema": _PERSON}, "end": "</person>"}
    rule = {"type": "triggered_tags", "triggers": ["<"], "tags": [tag], "at_least_one": True}
    wanted: Any = {"type": "structural_tag", "format": rule | {"stop_after_first": True}}
    bias = {"logit_bias": {str(_token(client, "<")): 20}}  # the model would rather talk
    choice = _chat(client, response_format=wanted, max_tokens=120, extra_body=bias).choices[0]
    text, found, rest = choice.message.content.partition("<person>")
    assert found, text
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(rest.removesuffix("</person>")), _PERSON)
        assert rest.endswith("</person>")
    with pytest.raises(openai.BadRequestError, match="triggers"):
        _chat(client, response_format={"type": "structural_tag", "structures": [tag]})


@pytest.mark.parametrize(
    ("guided", "valid"),
    [
        ({"guided_choice": ["red", "green"]}, ("red", "green")),
        ({"structured_outputs": {"choice": ["red", "green"]}}, ("red", "green")),
        ({"guided_regex": "^[ab]{3}$"}, tuple(x + y + z for x in "ab" for y in "ab" for z in "ab")),
        ({"guided_grammar": 'root ::= "x" ("1" | "2") "y"'}, ("x1y", "x2y")),
        ({"guided_json": {"enum": [1, 2]}}, ("1", "2")),
    ],
)
def test_the_fields_of_vllm(client: openai.OpenAI, guided: Any, valid: tuple[str, ...]) -> None:
    choice = _chat(client, extra_body=guided).choices[0]
    assert choice.message.content in valid
    assert choice.finish_reason == "stop"
    completion = client.completions.create(model=_MODEL, prompt="Colour:", extra_body=guided, max_tokens=20)
    assert completion.choices[0].text in valid


def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI) -> None:
    wanted = {"response_format": _schema_format(_PERSON)}
    whole = _chat(client, **wanted).choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in _chat(client, stream=True, **wanted))
    assert streamed == whole


@pytest.mark.parametrize(
    ("format", "named"),
    [
        (_schema_format({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (_schema_format({"not": {"type": "string"}}), "not"),
        (_schema_format({"$ref": "https://example.com/schema.json"}), "example.com"),
        (_schema_format({"type": "strnig"}), "strnig"),
        (_schema_format({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_by_name(client: openai.OpenAI, format: Any, named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        _chat(client, response_format=format)
    with pytest.raises(openai.BadRequestError, match=named):
        _chat(client, response_format=format, stream=True)


def test_a_bad_grammar_is_refused_alone(client: openai.OpenAI) -> None:
    doubling = "".join(f"X{number}: X{number + 1} X{number + 1}\n" for number in range(40))
    bad = [
        {"guided_grammar": "start: missing"},
        {"guided_regex": "["},
        {"guided_grammar": f'start: X0\n{doubling}X40: "a"\n'},
        {"guided_choice": []},
    ]
    with ThreadPoolExecutor(5) as pool:
        neighbour = pool.submit(_chat, client, max_tokens=24)
        for refused in [pool.submit(_chat, client, extra_body=body) for body in bad]:
            assert isinstance(refused.exception(), openai.BadRequestError)
        assert neighbour.result().usage.completion_tokens == 24


def _called(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_is_right(client: openai.OpenAI, choice: Any) -> None:
    tools = [_WEATHER, _CLOCK] if choice != "required" else [_WEATHER]
    answer = _chat(client, tools=tools, tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    ((name, arguments),) = _called(answer.message)
    assert name == "get_weather"
    jsonschema.validate(arguments, _WEATHER["function"]["parameters"])
    assert answer.message.tool_calls[0].id.startswith("call_")


def test_a_streamed_call_is_the_whole_call(client: openai.OpenAI) -> None:
    wanted: Any = {"tools": [_WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    whole = _chat(client, **wanted).choices[0].message.tool_calls[0].function
    name, pieces, reasons = "", [], []
    for chunk in _chat(client, stream=True, **wanted):
        choice = chunk.choices[0]
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            name += call.function.name or ""
            pieces.append(call.function.arguments)
    assert (name, "".join(pieces)) == (whole.name, whole.arguments)
    assert pieces[0] == ""  # the name goes out before its arguments; how many tokens come together is the load's affair
    assert len(pieces) > 1
    assert reasons[-1] == "tool_calls"


def test_a_conversation_goes_on_after_a_call(client: openai.OpenAI) -> None:
    first = _chat(client, tools=[_WEATHER], tool_choice="required", parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "21 degrees"}
    messages = [*_MESSAGES, first.model_dump(exclude_none=True), result]
    answer = _chat(client, messages=messages, tools=[_WEATHER], max_tokens=8).choices[0]
    assert answer.message.content or answer.message.tool_calls


def test_tools_that_cannot_be_used_are_refused(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "other"}}
    bad: list[Any] = [
        {"tools": [_WEATHER], "tool_choice": named},
        {"tools": [_WEATHER, _WEATHER]},
        {"tools": [{"type": "function", "function": {"name": "no spaces"}}]},
        {"tools": [_WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
    ]
    for options in bad:
        with pytest.raises(openai.BadRequestError):
            _chat(client, **options)


def test_the_anthropic_shape_of_a_call(server: RunningServer) -> None:
    body = {
        "max_tokens": 80,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Weather in Paris?"}],
        "tools": [{"name": "get_weather", "input_schema": _WEATHER["function"]["parameters"]}],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }
    whole = server.http.post("/v1/messages", json=body).json()
    assert whole["stop_reason"] == "tool_use"
    (block,) = whole["content"]
    assert (block["type"], block["name"]) == ("tool_use", "get_weather")
    jsonschema.validate(block["input"], _WEATHER["function"]["parameters"])
    streamed = server.http.post("/v1/messages", json={**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    pieces = [each["delta"].get("partial_json", "") for each in events if each["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == block["input"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "21 degrees"}
    turns = [*body["messages"], {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    answer = server.http.post("/v1/messages", json={**body, "messages": turns, "tool_choice": {"type": "none"}})
    assert answer.json()["content"][0]["type"] == "text"


def test_the_ollama_shape_of_a_schema(server: RunningServer) -> None:
    body = {"messages": _MESSAGES, "format": _PERSON, "stream": False, "options": {"num_predict": 80}}
    answer = server.http.post("/api/chat", json=body).json()
    jsonschema.validate(json.loads(answer["message"]["content"]), _PERSON)


_PROMPTS = ["Once upon a time", "The little dog", "One day, Tom", "She was happy"]


def test_neighbours_keep_their_tokens(model_path: Callable[[str], Path]) -> None:
    """Eight in a batch, four of them constrained in different ways. Reference kernels: the same in any batch."""
    options = {"context": 128, "concurrency": 8, "kernels": "ref", "executor": "eager", "threads": 1}
    free = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    specs = [
        StructuredSpec("json_schema", json.dumps(_PERSON)),
        StructuredSpec("json_object"),
        StructuredSpec("regex", "[0-9]{4}"),
        StructuredSpec("choice", choices=("red", "green")),
    ]
    with LLM(model_path("stories15m"), **options) as llm:
        alone = [llm.generate(prompt, free)[0].outputs[0].token_ids for prompt in _PROMPTS]
        bound = [SamplingParams(max_tokens=40, temperature=1.0, seed=1, structured=spec) for spec in specs]
        outputs = llm.generate(_PROMPTS * 2, [*([free] * 4), *bound])
        assert [each.outputs[0].token_ids for each in outputs[:4]] == alone
        assert outputs[6].outputs[0].text.isdecimal()
        assert outputs[7].outputs[0].text in ("red", "green")


def test_siblings_keep_to_the_grammar_each_for_itself(model_path: Callable[[str], Path]) -> None:
    options = {"context": 96, "concurrency": 6, "kernels": "ref", "executor": "eager"}
    spec = StructuredSpec("regex", "([a-z]{3}-){5}end")
    params = SamplingParams(n=3, max_tokens=40, temperature=1.0, seed=3, structured=spec)
    with LLM(model_path("stories15m"), **options) as llm:
        plenty = llm.generate(_PROMPTS[:2], params)
        texts = [completion.text for output in plenty for completion in output.outputs]
        assert len(set(texts)) > 1
        assert all(len(text) == 23 and text.endswith("-end") for text in texts)
        with pytest.raises(UserError, match="look-around"):
            llm.generate("x", SamplingParams(structured=StructuredSpec("regex", "(?=a)")))


def test_schemas_from_the_field(model_path: Callable[[str], Path], data_path: Path) -> None:
    """A few of the schemas that structured_suite.py runs in full."""
    suite = structured_suite.load_schemas(data_path / "json" / "json_schema_test_suite.jsonl.gz")
    some = [*suite[::48], *structured_suite.load_schemas(data_path / "json" / "schemastore.jsonl.gz")]
    with LLM(model_path("smollm2"), concurrency=8, context=256) as llm:
        tally = structured_suite.run(llm, some, max_tokens=40)
    assert not tally.problems
    assert tally.ended > 0
    assert tally.cut > 0
