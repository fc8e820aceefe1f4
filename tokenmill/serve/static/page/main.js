// The page around the conversation: views, panels, theme, settings, the list of conversations, the question for a key.

import { getJson, getKey, setKey } from "./api.js";
import { Board } from "./board.js";
import { Chat } from "./chat.js";
import { $, announce, download, el, iconButton, toast } from "./dom.js";
import { EXAMPLE_SCHEMA, EXAMPLE_TOOLS, readSchema, readTools } from "./request.js";
import * as store from "./store.js";

const THEMES = ["", "light", "dark"], THEME_NAMES = ["as the system", "light", "dark"];
const FIELDS = Object.keys(store.DEFAULTS).map((name) => [name, $(name === "stop" ? "stop-strings" : name)]);
const narrow = matchMedia("(max-width: 999px)");

const chat = new Chat({
  changed: listConversations, refused: () => askForKey(), settings: () => panel("settings", true), reload: loadModels,
});
const board = new Board({ state: showState });

// --- views and panels ---

function view(name) {
  for (const each of ["chat", "board"]) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  document.body.classList.toggle("on-board", name === "board");
  if (name === "board") {
    panels(!narrow.matches);
    board.spent();
  }
}

const BUTTONS = { conversations: "open-list", settings: "open-settings" };

// On a narrow screen a panel lies over the rest, which then takes no keys.
function panel(name, open) {
  if (open && narrow.matches) Object.keys(BUTTONS).filter((each) => each !== name).forEach((each) => panel(each, false));
  $(name).hidden = !open;
  $(BUTTONS[name]).setAttribute("aria-expanded", String(open));
  const over = narrow.matches && Object.keys(BUTTONS).some((each) => !$(each).hidden);
  $("veil").hidden = !over;
  for (const each of ["chat", "board"]) $(each).inert = over;
  if (over && open) $(name).querySelector(".close").focus();
}

function panels(open) {
  for (const name of Object.keys(BUTTONS)) panel(name, open);
}

for (const [name, opener] of Object.entries(BUTTONS)) $(opener).addEventListener("click", () => panel(name, $(name).hidden));
for (const each of [$("veil"), ...document.querySelectorAll(".close")]) each.addEventListener("click", () => panels(false));
narrow.addEventListener("change", () => panels(!narrow.matches));
for (const name of ["chat", "board"]) {
  $(`tab-${name}`).addEventListener("click", () => view(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const other = name === "chat" ? "board" : "chat";
    view(other);
    $(`tab-${other}`).focus();
  });
}

function theme(chosen) {
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("tokenmill.theme", chosen);
  $("theme").setAttribute("aria-label", `Theme: ${THEME_NAMES[THEMES.indexOf(chosen)]}`);
  $("theme").title = $("theme").getAttribute("aria-label");
}
$("theme").addEventListener("click", () => {
  theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "") + 1) % THEMES.length]);
});

// Said aloud when it turns, not with each number.
function showState(kind, text) {
  if ($("status").className !== kind) announce(`Server: ${text}`);
  $("status").className = kind;
  $("status").textContent = text;
}

// --- the key ---

function askForKey() {
  if ($("key-dialog").open) return;
  $("key-problem").textContent = getKey()
    ? "The server does not know this key. Another one?"
    : "It is kept until this tab is closed and sent to this server only.";
  $("key-dialog").showModal();
}

function useKey(key) {
  setKey(key.trim());
  $("key").value = getKey();
  board.resume();
  loadModels();
}
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  $("key-dialog").close();
  useKey($("key-asked").value);
  $("key-asked").value = "";
});
$("key-later").addEventListener("click", () => $("key-dialog").close());
$("key").addEventListener("change", () => useKey($("key").value));

// --- settings ---

function showSettings() {
  const { settings } = chat.conversation;
  for (const [name, field] of FIELDS) {
    if (field.type === "checkbox") field.checked = settings[name];
    else field.value = settings[name];
  }
  checkSettings();
}

function checkSettings() {
  const { settings } = chat.conversation;
  $("schema-field").hidden = settings.format !== "json_schema";
  complain("schema", () => settings.format === "json_schema" && readSchema(settings.schema));
  complain("tools", () => readTools(settings.tools));
}

function complain(name, check) {
  let problem = "";
  try {
    check();
  } catch (error) {
    problem = error.message;
  }
  $(`${name}-error`).textContent = problem;
  $(`${name}-error`).hidden = !problem;
  $(name).setAttribute("aria-invalid", String(Boolean(problem)));
}

function takeSettings() {
  const { settings } = chat.conversation;
  for (const [name, field] of FIELDS) settings[name] = field.type === "checkbox" ? field.checked : field.value;
  if (settings.format === "json_schema" && !settings.schema) {
    settings.schema = $("schema").value = JSON.stringify(EXAMPLE_SCHEMA, null, 2);
  }
  checkSettings();
  chat.keep();
}
$("settings-form").addEventListener("input", takeSettings);
$("settings-form").addEventListener("submit", (event) => event.preventDefault());
$("tools-example").addEventListener("click", () => {
  $("tools").value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
  takeSettings();
});

// --- conversations ---

function listConversations() {
  const all = store.conversations(), current = chat.conversation?.id;
  $("conversation-list").replaceChildren(...all.map((each) => el("li", { class: each.id === current ? "current" : "" },
    el("button", { type: "button", "aria-current": each.id === current ? "true" : null, onclick: () => show(each) },
      el("span", { class: "title" }, each.title || "Untitled"), el("span", { class: "hint" }, when(each.updated))),
    iconButton("trash", `Delete “${each.title}”`, () => discard(each)))));
  if (!all.length) $("conversation-list").append(el("li", { class: "hint" }, "Conversations will be listed here."));
  $("export").disabled = all.length === 0;
}

function when(time) {
  const date = new Date(time), today = date.toDateString() === new Date().toDateString();
  return today ? date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : date.toLocaleDateString();
}

function show(conversation) {
  chat.open(conversation);
  showSettings();
  listConversations();
  if (narrow.matches) panels(false);
}

function begin() {
  const { settings, columns } = store.lastSettings();
  show(store.newConversation(columns, settings));
  if (!narrow.matches) $("prompt").focus();
}

function discard(conversation) {
  store.remove(conversation.id);
  if (conversation.id === chat.conversation.id) begin();
  else listConversations();
  toast("The conversation is deleted.", "Undo", () => {
    store.save(conversation);
    listConversations();
  });
}
$("new").addEventListener("click", begin);
addEventListener("storage", listConversations);  // another tab
$("export").addEventListener("click", () => download("tokenmill-conversations.json", store.exported()));
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async () => {
  try {
    const count = store.imported(await $("import-file").files[0].text());
    toast(count === 1 ? "One conversation imported." : `${count} conversations imported.`);
  } catch (error) {
    toast(error.message);
  }
  $("import-file").value = "";
  listConversations();
});

// --- writing ---

// Where the style sheet's field-sizing is not known.
function grow() {
  if (CSS.supports("field-sizing", "content")) return;
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
}

function send() {
  if (!chat.submit($("prompt").value)) return;
  $("prompt").value = "";
  grow();
}
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => {
  chat.stop();
  $("prompt").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("key-dialog").open) return;
  if (!$("veil").hidden) panels(false);
  else chat.stop();
});

// --- the start ---

async function loadModels() {
  try {
    chat.models = (await getJson("v1/models")).data;
  } catch (error) {
    chat.problem = error;
    if (error.status === 401) askForKey();
  }
  const { conversation } = chat;
  conversation.columns = chat.served(conversation.columns);
  if (!chat.running.size) chat.render();
  document.title = chat.models.length ? `${chat.models[0].id} · tokenmill` : "tokenmill";
}

theme(localStorage.getItem("tokenmill.theme") ?? "");
$("key").value = getKey();
panels(!narrow.matches);
begin();
await loadModels();
board.run();
