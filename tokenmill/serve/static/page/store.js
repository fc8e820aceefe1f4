// What is kept in this browser: conversations, each under a key of its own so that two tabs do not overwrite each
// other, and the settings that a new conversation begins with. The API key is never part of it (api.js).
//
// conversation  {id, title, updated, columns: [model], settings, turns: [turn]}
// turn          {prompt, answers: [answer or null, by column]}
// answer        {model, steps: [step]}: more than one where tools were called
// step          {role: "assistant", content, reasoning, calls, usage, first, seconds, finish, error, json, logprobs}
//               {role: "tool", id, name, content}

import { toast } from "./dom.js";

const PREFIX = "tokenmill.conversation.", SETTINGS = "tokenmill.settings", FORMAT = "tokenmill-conversations-1";
export const MAX_COLUMNS = 4;

export const DEFAULTS = {
  system: "", temperature: "", max_tokens: "", top_p: "", top_k: "", min_p: "", repetition_penalty: "", seed: "",
  stop: "", logprobs: false, format: "text", schema: "", tools: "", tool_choice: "auto",
};

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : null);
const list = (value) => (Array.isArray(value) ? value : []);

export function newConversation(columns, settings) {
  const id = crypto.getRandomValues(new Uint32Array(3)).join("-");
  return { id, title: "", updated: Date.now(), columns, settings: { ...settings }, turns: [] };
}

// From storage or a file, which anyone may have edited: only what is known, and of the right kind.
export function readConversation(found) {
  if (!found || typeof found !== "object" || !Array.isArray(found.turns)) return null;
  const settings = Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) =>
    [name, typeof found.settings?.[name] === typeof value ? found.settings[name] : value]));
  return {
    id: /^[\d-]{1,64}$/.test(found.id) ? found.id : newConversation([], {}).id,
    title: text(found.title).slice(0, 200), updated: number(found.updated) ?? Date.now(), settings,
    columns: list(found.columns).map(text).slice(0, MAX_COLUMNS),
    turns: found.turns.map((turn) => ({
      prompt: text(turn?.prompt), answers: list(turn?.answers).slice(0, MAX_COLUMNS).map(readAnswer),
    })),
  };
}

const readAnswer = (answer) => answer && { model: text(answer.model), steps: list(answer.steps).map(readStep) };

function readStep(step) {
  if (step?.role === "tool") return { role: "tool", id: text(step.id), name: text(step.name), content: text(step.content) };
  const error = step?.error && {
    message: text(step.error.message), status: number(step.error.status) ?? 0, code: text(step.error.code),
  };
  return {
    role: "assistant", content: text(step?.content), reasoning: text(step?.reasoning), finish: text(step?.finish),
    calls: list(step?.calls).map((call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) })),
    usage: step?.usage && typeof step.usage === "object" ? step.usage : null,
    first: number(step?.first), seconds: number(step?.seconds), error: error || null, logprobs: [], json: step?.json === true,
  };
}

// Log-probabilities are left out: a long answer with alternatives would fill a browser's storage.
const written = (conversation) =>
  JSON.stringify(conversation, (name, value) => (name === "logprobs" && Array.isArray(value) ? undefined : value));

export function save(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, written(conversation));
    localStorage.setItem(SETTINGS, JSON.stringify({ ...conversation.settings, columns: conversation.columns }));
  } catch {
    toast("This browser's storage is full: export conversations and delete some.");
  }
}

export const remove = (id) => localStorage.removeItem(PREFIX + id);

function parse(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

export function lastSettings() {
  const found = parse(SETTINGS) ?? {};
  const { settings, columns } = readConversation({ settings: found, columns: found.columns, turns: [] });
  return { settings, columns };
}

// Newest first.
export function conversations() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  return names.map((name) => readConversation(parse(name))).filter(Boolean).sort((a, b) => b.updated - a.updated);
}

export const exported = () =>
  JSON.stringify({ format: FORMAT, conversations: conversations().map((each) => JSON.parse(written(each))) }, null, 1);

// How many were taken from the text of a file; those with the id of one that is here replace it.
export function imported(content) {
  let found;
  try {
    found = JSON.parse(content);
  } catch {
    throw new Error("That file is not JSON.");
  }
  if (found?.format !== FORMAT) throw new Error("That file holds no conversations exported from this page.");
  const taken = list(found.conversations).map(readConversation).filter(Boolean);
  for (const each of taken) localStorage.setItem(PREFIX + each.id, written(each));
  return taken.length;
}
