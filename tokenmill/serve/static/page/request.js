// From a conversation to the body of a request, and from the events of a stream to a step of an answer.

import { stream } from "./api.js";

const TOP = 5;  // alternatives to each token
const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];

export const EXAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_weather", description: "The weather in a city now",
    parameters: {
      type: "object", properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } }, required: ["city"],
    },
  },
}];
export const EXAMPLE_SCHEMA = {
  type: "object", properties: { name: { type: "string" }, year: { type: "integer" } }, required: ["name", "year"],
  additionalProperties: false,
};

// Tools as the API wants them, from a list of them or of bare functions, or one. Raises Error with what is wrong.
export function readTools(text) {
  if (!text.trim()) return [];
  const found = parse(text), tools = Array.isArray(found) ? found : [found];
  return tools.map((tool) => {
    const whole = tool?.type === "function" ? tool : { type: "function", function: tool };
    if (typeof whole.function?.name !== "string") throw new Error("A function needs a name.");
    return whole;
  });
}

export function readSchema(text) {
  if (!text.trim()) throw new Error("Write a JSON schema.");
  return parse(text);
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`Not JSON: ${error.message}`);
  }
}

// A call that nobody answered is only told: templates expect a result after each.
function messageOf(step, place, steps) {
  if (step.role === "tool") return { role: "tool", tool_call_id: step.id, content: step.content };
  if (step.calls.length && steps[place + 1]?.role !== "tool") {
    return { role: "assistant", content: step.content || step.calls.map((call) => `${call.name}(${call.arguments})`).join("\n") };
  }
  const calls = step.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role: "assistant", content: step.content, ...(calls.length ? { tool_calls: calls } : {}) };
}

// What a column has seen up to and with `turn`. Turns that it did not answer are none of its history.
export function messagesOf(conversation, turn, column) {
  const { system } = conversation.settings, last = conversation.turns.indexOf(turn), messages = [];
  if (system.trim()) messages.push({ role: "system", content: system.trim() });
  conversation.turns.slice(0, last + 1).forEach((each, place) => {
    const said = (each.answers[column]?.steps ?? []).filter((step) => step.role === "tool" || step.content || step.calls.length);
    if (place < last && !said.length) return;
    messages.push({ role: "user", content: each.prompt }, ...said.map(messageOf));
  });
  return messages;
}

export function bodyOf(conversation, turn, column) {
  const { settings } = conversation, tools = readTools(settings.tools);
  const body = {
    model: conversation.columns[column], messages: messagesOf(conversation, turn, column),
    stream: true, stream_options: { include_usage: true }, return_timeline: true,
  };
  for (const name of NUMBERS) {
    if (settings[name] !== "" && Number.isFinite(Number(settings[name]))) body[name] = Number(settings[name]);
  }
  const stops = settings.stop.split(",").map((each) => each.trim().replaceAll("\\n", "\n")).filter(Boolean);
  if (stops.length) body.stop = stops;
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: TOP });
  if (tools.length) {
    const answered = turn.answers[column]?.steps.some((step) => step.role === "tool");
    // A model that must call once would have to call for ever.
    Object.assign(body, { tools, tool_choice: answered && settings.tool_choice === "required" ? "auto" : settings.tool_choice });
  }
  if (settings.format === "json_object") body.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    body.response_format = {
      type: "json_schema", json_schema: { name: "answer", strict: true, schema: readSchema(settings.schema) },
    };
  }
  return body;
}

export const newStep = (settings) => ({
  role: "assistant", content: "", reasoning: "", calls: [], usage: null, first: null, seconds: null, finish: "",
  error: null, logprobs: [], json: settings.format !== "text",
});

// Fill `step` from the answer to `body`; `changed` is called for each event.
export async function fill(step, body, signal, changed) {
  const began = performance.now(), since = () => (performance.now() - began) / 1000;
  try {
    for await (const event of stream("v1/chat/completions", body, signal)) {
      step.usage = event.usage ?? step.usage;
      const choice = event.choices?.[0], delta = choice?.delta;
      step.finish = choice?.finish_reason ?? step.finish;
      for (const token of choice?.logprobs?.content ?? []) step.logprobs.push(token);
      step.content += delta?.content ?? "";
      step.reasoning += delta?.reasoning_content ?? "";
      for (const piece of delta?.tool_calls ?? []) {
        const call = step.calls[piece.index] ??= { id: "", name: "", arguments: "" };
        call.id ||= piece.id ?? "";
        call.name ||= piece.function?.name ?? "";
        call.arguments += piece.function?.arguments ?? "";
      }
      if (step.first === null && (step.content || step.reasoning || step.calls.length)) step.first = since();
      if (choice) step.seconds = since();
      takeTimes(step, event.timeline?.prompts?.[0]);
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") step.finish = "stopped";
    else step.error = { message: error.message, status: error.status ?? -1, code: error.code ?? "", retryAfter: error.retryAfter ?? 0 };
  }
}

// The server's own times, which its last event brings: a busy page or server passes many tokens on at once, and late.
// The first token is there when the engine has computed the last piece of the prompt.
function takeTimes(step, times) {
  if (!times?.decode) return;
  const last = times.prefill.chunks.at(-1);
  step.first = Math.min(times.first_token_at, last.at + last.seconds);
  step.seconds = times.decode.at + times.decode.seconds;
}

// Tokens per second after the first one; null where there is nothing to divide.
export function speedOf(step) {
  const count = step.usage?.completion_tokens ?? 0;
  return step.first !== null && count > 1 && step.seconds > step.first ? (count - 1) / (step.seconds - step.first) : null;
}
