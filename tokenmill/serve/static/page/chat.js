// The conversation on the screen: sending a message to every column, stopping, regenerating, editing.

import { $, announce, el, iconButton, toast } from "./dom.js";
import { errorBox } from "./api.js";
import { AnswerView } from "./answer.js";
import { bodyOf, fill, newStep, readSchema, readTools } from "./request.js";
import { MAX_COLUMNS, save } from "./store.js";

const SUGGESTIONS = [
  "Explain in two sentences why the sky is blue.",
  "Write a Python function that tells whether a number is prime.",
  "Compare tea and coffee in a table.",
];

export class Chat {
  // `on`: {changed(), refused(), settings(), reload()}: the list, the question for a key, the settings, the models.
  constructor(on) {
    this.on = on;
    this.models = [];
    this.problem = null;  // why there are none
    this.running = new Map();  // answer -> AbortController
    this.views = new Map();  // answer -> AnswerView
    this.conversation = null;
    this.frame = 0;
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.conversation.columns = this.served(conversation.columns);
    this.render();
  }

  // Models that this server no longer has are replaced, so that the next message can be answered.
  served(columns) {
    const ids = this.models.map((model) => model.id);
    if (!ids.length) return columns;
    return (columns.length ? columns : ids.slice(0, 1)).map((each) => (ids.includes(each) ? each : ids[0]));
  }

  // --- on the screen ---

  render() {
    const { turns } = this.conversation;
    this.views.clear();
    this.renderColumns();
    $("log").replaceChildren(...(turns.length ? turns.map((turn) => this.turnView(turn)) : [this.empty()]));
    $("log").scrollTop = $("log").scrollHeight;
    this.busy();
  }

  renderColumns() {
    const { columns } = this.conversation;
    $("columns").replaceChildren(...columns.map((chosen, column) => el("div", { class: "column" },
      el("select", { "aria-label": `Model of column ${column + 1}`, onchange: (event) => this.choose(column, event.target.value) },
        ...this.models.map(({ id }) => el("option", { value: id, selected: id === chosen }, id))),
      columns.length > 1 && iconButton("close", `Remove column ${column + 1}`, () => this.removeColumn(column)))));
    if (columns.length < MAX_COLUMNS && this.models.length) {
      $("columns").append(el("button", { type: "button", class: "quiet", id: "compare", onclick: () => this.addColumn() }, "+ Compare"));
    }
    document.documentElement.style.setProperty("--columns", columns.length);
    $("chat").classList.toggle("several", columns.length > 1);
  }

  empty() {
    const found = this.models.find(({ id }) => id === this.conversation.columns[0]), own = found?.tokenmill;
    if (!found) {
      const again = this.problem?.status === 401 ? ["Enter a key", () => this.on.refused()] : ["Try again", () => this.on.reload()];
      return el("div", { class: "empty" }, el("h2", {}, this.problem ? "No model to talk to" : "Connecting"), this.problem &&
        errorBox(this.problem, el("button", { type: "button", class: "main", onclick: again[1] }, again[0])));
    }
    const facts = [own?.architecture, own?.quantization, found?.max_model_len && `${found.max_model_len.toLocaleString("en")} tokens of context`];
    return el("div", { class: "empty" }, el("h2", {}, `Talk to ${this.conversation.columns.join(" and ")}`),
      el("p", { class: "hint" }, facts.filter(Boolean).join(" · ")),
      el("div", { class: "suggestions" }, ...SUGGESTIONS.map((text) =>
        el("button", { type: "button", onclick: () => this.submit(text) }, text))));
  }

  turnView(turn) {
    const edit = iconButton("edit", "Edit this message", () => this.edit(turn, element));
    const answers = el("div", { class: "answers" }, ...turn.answers.map((answer) =>
      (answer ? this.answerView(turn, answer).element : el("p", { class: "hint answer" }, "Not asked."))));
    const element = el("div", { class: "turn" },
      el("div", { class: "user" }, el("p", { class: "said" }, turn.prompt), edit), answers);
    return element;
  }

  answerView(turn, answer) {
    const column = () => turn.answers.indexOf(answer);
    const view = new AnswerView(answer, {
      ready: () => this.ready(), stop: () => this.running.get(answer)?.abort(),
      redo: () => this.redo(turn, column()), retry: () => this.redo(turn, column()),
      results: (step, texts) => {
        step.calls.forEach((call, place) => answer.steps.push({ role: "tool", id: call.id, name: call.name, content: texts[place] }));
        this.ask(turn, column());
      },
    });
    this.views.set(answer, view);
    this.update(answer);
    return view;
  }

  update(answer) {
    const last = this.conversation.turns.at(-1)?.answers.includes(answer);
    this.views.get(answer)?.update(this.running.has(answer), last);
  }

  // Events come faster than frames: an answer is drawn at most once in each.
  changed() {
    this.frame ||= requestAnimationFrame(() => {
      const log = $("log"), pinned = log.scrollHeight - log.scrollTop - log.clientHeight < 100;
      this.frame = 0;
      for (const answer of this.running.keys()) this.update(answer);
      if (pinned) log.scrollTop = log.scrollHeight;
    });
  }

  busy() {
    const running = this.running.size > 0;
    $("send").hidden = running;
    $("stop").hidden = !running;
  }

  // --- columns ---

  choose(column, model) {
    this.conversation.columns[column] = model;
    if (!this.conversation.turns.length) this.render();
    this.keep();
  }

  addColumn() {
    const { columns } = this.conversation, unused = this.models.find(({ id }) => !columns.includes(id));
    columns.push((unused ?? this.models[0]).id);
    this.render();
    this.keep();
    $("columns").querySelectorAll("select")[columns.length - 1].focus();
  }

  removeColumn(column) {
    const { conversation } = this, before = structuredClone({ columns: conversation.columns, turns: conversation.turns });
    for (const turn of conversation.turns) {
      this.running.get(turn.answers[column])?.abort();
      turn.answers.splice(column, 1);
    }
    const model = conversation.columns.splice(column, 1)[0];
    this.render();
    this.keep();
    toast(`The column of ${model} and its answers are removed.`, "Undo", () => {
      Object.assign(conversation, before);
      this.render();
      this.keep();
    });
  }

  // --- asking ---

  // False, with the place of the mistake shown, if the settings cannot be sent.
  ready() {
    const { settings } = this.conversation;
    try {
      readTools(settings.tools);
      if (settings.format === "json_schema") readSchema(settings.schema);
      return true;
    } catch (error) {
      toast(error.message);
      this.on.settings();
      return false;
    }
  }

  submit(text) {
    const { conversation } = this, prompt = text.trim();
    if (!prompt || this.running.size || !this.models.length || !this.ready()) return false;
    const turn = { prompt, answers: [] };
    conversation.title ||= prompt.slice(0, 80);
    conversation.turns.push(turn);
    this.askAll(turn);
    return true;
  }

  askAll(turn) {
    turn.answers = this.conversation.columns.map((model) => ({ model, steps: [] }));
    this.render();
    turn.answers.forEach((_answer, column) => this.ask(turn, column));
  }

  redo(turn, column) {
    if (!this.ready()) return;
    const answer = turn.answers[column];
    answer.steps.pop();
    answer.model = this.conversation.columns[column];
    this.views.get(answer).element.querySelector("h2").textContent = answer.model;
    this.ask(turn, column);
  }

  async ask(turn, column) {
    const { conversation } = this, answer = turn.answers[column], step = newStep(conversation.settings);
    const body = bodyOf(conversation, turn, column), controller = new AbortController();
    answer.steps.push(step);
    this.running.set(answer, controller);
    this.update(answer);
    this.busy();
    await fill(step, body, controller.signal, () => this.changed());
    this.running.delete(answer);
    if (conversation === this.conversation) {
      const log = $("log"), pinned = log.scrollHeight - log.scrollTop - log.clientHeight < 100;
      this.update(answer);
      if (pinned) log.scrollTop = log.scrollHeight;
    }
    this.busy();
    conversation.updated = Date.now();
    save(conversation);
    this.on.changed();
    announce(step.error ? `${answer.model}: ${step.error.message}` : `${answer.model} has answered`);
    if (step.error?.status === 401) this.on.refused();
  }

  stop() {
    for (const controller of this.running.values()) controller.abort();
  }

  edit(turn, element) {
    this.stop();
    const field = el("textarea", { "aria-label": "Edit the message", rows: "3" });
    const close = () => form.replaceWith(shown);
    const form = el("form", { class: "editing", onsubmit: (event) => {
      event.preventDefault();
      if (!field.value.trim() || !this.ready()) return;
      const { turns } = this.conversation;
      turns.splice(turns.indexOf(turn) + 1);
      turn.prompt = field.value.trim();
      this.askAll(turn);
    }, onkeydown: (event) => {
      if (event.key === "Escape") close();
    } }, field, el("div", { class: "actions" },
      el("button", { type: "button", class: "quiet", onclick: close }, "Cancel"), el("button", { class: "main" }, "Send again")));
    const shown = element.querySelector(".user");
    field.value = turn.prompt;
    shown.replaceWith(form);
    field.focus();
  }

  keep() {
    if (this.conversation.turns.length) save(this.conversation);
    this.on.changed();
  }
}
