// Requests to the server this page came from: the key, errors as people can read them, events of a stream.

import { el } from "./dom.js";

const KEY = "tokenmill.key";
const root = new URL("..", import.meta.url);  // right behind any proxy path
root.username = root.password = "";  // an address typed with credentials cannot be fetched

export const getKey = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class ApiError extends Error {
  constructor(message, status, code = "", retryAfter = 0) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

// Raises ApiError; status 0 where no answer came at all.
export async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (getKey()) headers.authorization = `Bearer ${getKey()}`;
  let answer;
  try {
    answer = await fetch(new URL(path, root), { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?", 0, "no_connection");
  }
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => null);
  const message = found?.error?.message ?? `The server answered with status ${answer.status}.`;
  throw new ApiError(message, answer.status, found?.error?.code ?? "", Number(answer.headers.get("retry-after")) || 0);
}

export const getJson = async (path) => (await request(path)).json();

// The objects of a streamed answer. One that ends without its last event was cut off.
export async function* stream(path, body, signal) {
  const answer = await request(path, {
    method: "POST", body: JSON.stringify(body), signal, headers: { "content-type": "application/json" },
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const cut = () => new ApiError("The connection ended before the answer did.", 0, "no_connection");
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : cut();
    });
    if (done) throw cut();
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, event.error.status ?? 500, event.error.code ?? "");
      yield event;
    }
  }
}

// What to do about an error, beside what the server says.
export function remedy(error) {
  const wait = error.retryAfter ? ` in ${Math.ceil(error.retryAfter)} s` : " in a moment";
  if (error.status === 401) return "Enter an API key under Settings.";
  if (error.status === 403) return "Ask whoever runs this server for a key with this right.";
  if (error.code === "insufficient_quota") return "The budget of this key is spent.";
  if (error.status === 429) return `Too much at once: try again${wait}.`;
  if (error.status === 503) return `The engine restarts or the server shuts down: try again${wait}.`;
  if (error.code === "context_length_exceeded") return "Lower max tokens, shorten the message, or start a new conversation.";
  return "";
}

export const errorBox = (error, ...actions) =>
  el("div", { class: "error", role: "alert" },
    el("p", {}, error.message.charAt(0).toUpperCase() + error.message.slice(1)), remedy(error) && el("p", { class: "hint" }, remedy(error)),
    actions.length > 0 && el("div", { class: "actions" }, ...actions));
