// One answer of one model as elements: reasoning, text or tokens, tool calls and their results, speed and cost.

import { errorBox } from "./api.js";
import { copy, dollars, el, icon, iconButton } from "./dom.js";
import { Markdown, codeBlock } from "./markdown.js";
import { speedOf } from "./request.js";
import { Tokens } from "./tokens.js";

const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
};

// "first token 0.12 s", "48.1 tokens/s", ...: what is known of a step.
export function facts(step) {
  const said = [], { usage } = step, speed = speedOf(step);
  const add = (kind, text) => said.push(el("span", { class: kind }, text));
  if (step.first !== null) add("ttft", `${step.first.toFixed(2)} s to first token`);
  if (speed !== null) add("speed", `${speed.toFixed(1)} tokens/s`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    add("count", `${usage.completion_tokens} tokens`);
    add("count", `${usage.prompt_tokens} in the prompt${cached ? `, ${cached} cached` : ""}`);
    if (usage.cost !== undefined) add("cost", dollars(usage.cost));
  }
  if (step.finish === "length") add("cut", "cut off at max tokens");
  if (step.finish === "stopped") add("cut", "stopped");
  return said;
}

// `act`: {ready(), results(step, texts), retry()}.
class StepView {
  constructor(step, act) {
    this.step = step;
    this.act = act;
    this.mode = "tokens";
    this.reasoning = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), el("div", { class: "text" }));
    this.thoughts = new Markdown(this.reasoning.lastChild);
    this.text = el("div", { class: "text body" });
    this.markdown = new Markdown(this.text);
    this.tokens = new Tokens();
    this.switch = el("div", { class: "switch", role: "group", "aria-label": "Show as", hidden: true },
      ...["tokens", "text"].map((mode) => el("button", { type: "button", "data-mode": mode, onclick: () => this.choose(mode) },
        mode === "tokens" ? "Tokens" : "Text")));
    this.calls = el("div", { class: "calls" });
    this.note = el("p", { class: "note" });
    this.failure = el("div");
    this.element = el("div", { class: "step" }, this.reasoning, this.switch, this.text, this.tokens.element, this.calls,
      this.failure, this.note);
  }

  choose(mode) {
    this.mode = mode;
    this.update(false, false);
  }

  update(running, waiting) {
    const { step } = this, asTokens = step.logprobs.length > 0 && this.mode === "tokens";
    this.reasoning.hidden = !step.reasoning;
    if (step.reasoning) this.thoughts.update(step.reasoning);
    this.switch.hidden = step.logprobs.length === 0;
    for (const each of this.switch.children) each.setAttribute("aria-pressed", String(each.dataset.mode === this.mode));
    this.text.hidden = asTokens;
    this.tokens.element.hidden = !asTokens;
    if (asTokens) this.tokens.update(step.logprobs);
    else if (step.json && step.content) this.text.replaceChildren(codeBlock(running ? step.content : pretty(step.content), "json"));
    else this.markdown.update(step.content);
    this.element.classList.toggle("waiting", running && step.first === null);
    if (!running) {
      this.note.replaceChildren(...facts(step));
      if (step.error && !this.failure.firstChild) {
        this.failure.append(errorBox(step.error, el("button", { type: "button", onclick: () => this.act.retry() }, "Try again")));
      }
    }
    this.showCalls(running, waiting);
  }

  // While the answer comes, calls are rewritten; the fields for results appear once, when it is complete.
  showCalls(running, waiting) {
    if (!this.step.calls.length || this.asking) return;
    this.calls.replaceChildren(...this.step.calls.map((call) => el("div", { class: "call", role: "group", "aria-label": `Call of ${call.name}` },
      el("p", { class: "name" }, icon("tool"), call.name), codeBlock(running ? call.arguments : pretty(call.arguments), "arguments"),
      waiting && el("label", {}, "Result", el("textarea", { class: "code", rows: "2", spellcheck: "false", placeholder: "What the function returns" })))));
    this.asking = waiting;
    if (waiting) {
      const fields = [...this.calls.querySelectorAll("textarea")];
      this.calls.append(el("button", { type: "button", class: "main give", onclick: () => {
        if (!this.act.ready()) return;
        this.asking = false;
        this.showCalls(false, false);
        this.act.results(this.step, fields.map((field) => field.value));
      } }, fields.length > 1 ? "Send results" : "Send result"));
    }
  }
}

function resultView(step) {
  return el("div", { class: "result" }, el("p", { class: "name" }, icon("tool"), `${step.name} returned`), codeBlock(pretty(step.content), "result"));
}

// `act`: as of a step, {stop(), redo()} besides; `last`: whether the answer may still change.
export class AnswerView {
  constructor(answer, act) {
    this.answer = answer;
    this.act = act;
    this.views = [];
    this.steps = el("div", { class: "steps" });
    this.stop = iconButton("stop", "Stop this answer", () => act.stop());
    this.copy = iconButton("copy", "Copy the answer", () => copy(this.answer.steps.map((step) => step.content).join("\n\n"), this.copy));
    this.redo = iconButton("redo", "Regenerate", () => act.redo(), { class: "icon redo" });
    this.element = el("article", { class: "answer", "aria-label": `Answer of ${answer.model}` },
      el("header", {}, el("h2", {}, answer.model), this.stop, this.copy, this.redo), this.steps);
  }

  update(running, last) {
    const { steps } = this.answer;
    while (this.views.length > steps.length || (this.views.length && this.views.at(-1).step !== steps[this.views.length - 1])) {
      this.views.pop().element.remove();
    }
    for (const step of steps.slice(this.views.length)) {
      const view = step.role === "tool" ? { step, element: resultView(step), update() {} } : new StepView(step, this.act);
      this.views.push(view);
      this.steps.append(view.element);
    }
    this.views.forEach((view, place) => {
      const isLast = place === steps.length - 1;
      if (isLast || !running) view.update(running && isLast, !running && last && isLast && view.step.calls?.length > 0);
    });
    this.element.setAttribute("aria-busy", String(running));
    this.stop.hidden = !running;
    this.copy.hidden = running || !steps.some((step) => step.content);
    this.redo.hidden = running || !last;
  }
}
