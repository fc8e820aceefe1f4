// The tokens of an answer with their log-probabilities: shaded by how sure the model was, with the alternatives in a
// tip under the pointer, or at the token that the arrow keys have reached.

import { $, el } from "./dom.js";

const SURE = [0.9, 0.5, 0.2, 0.05];  // shades: at least this probable; the last one is for less
let counter = 0;

const probability = (logprob) => Math.exp(logprob);
const percent = (logprob) => `${(100 * probability(logprob)).toFixed(logprob > -4.6 ? 1 : 3)} %`;
const seen = (token) => token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

function shade(logprob) {
  const place = SURE.findIndex((least) => probability(logprob) >= least);
  return place < 0 ? SURE.length : place;
}

export class Tokens {
  constructor() {
    this.tokens = [];
    this.active = -1;
    this.element = el("div", {
      class: "tokens", role: "listbox", tabindex: "0", "aria-label": "Tokens and their probabilities",
      onkeydown: (event) => this.move(event), onblur: () => this.leave(),
      onpointerover: (event) => this.hover(event.target), onpointerleave: () => this.leave(),
    });
  }

  update(tokens) {
    this.tokens = tokens;
    for (let place = this.element.children.length; place < tokens.length; place += 1) {
      const { token, logprob } = tokens[place];
      this.element.append(el("span", {
        id: `token-${counter += 1}`, role: "option", class: `token sure-${shade(logprob)}`, "aria-selected": "false",
        "aria-label": `${seen(token)}, ${percent(logprob)}`,
      }, token.endsWith("\n") ? token.slice(0, -1) + "↵\n" : token));
    }
  }

  hover(target) {
    const place = [...this.element.children].indexOf(target);
    if (place >= 0) this.activate(place);
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") this.leave();
    if (!step) return;
    event.preventDefault();
    this.activate(Math.min(this.tokens.length - 1, Math.max(0, this.active + step)));
  }

  activate(place) {
    this.leave();
    const shown = this.element.children[place];
    if (!shown) return;
    this.active = place;
    shown.setAttribute("aria-selected", "true");
    this.element.setAttribute("aria-activedescendant", shown.id);
    tip(shown, this.tokens[place]);
  }

  leave() {
    this.element.children[this.active]?.setAttribute("aria-selected", "false");
    this.element.removeAttribute("aria-activedescendant");
    this.active = -1;
    $("token-tip").hidden = true;
  }
}

function tip(at, { token, logprob, top_logprobs: top }) {
  const box = $("token-tip"), others = top ?? [];
  box.replaceChildren(
    el("p", {}, el("code", {}, seen(token)), ` ${percent(logprob)}`, el("span", { class: "hint" }, ` log ${logprob.toFixed(3)}`)),
    el("table", {}, el("tbody", {}, ...others.map((each) => {
      const bar = el("span", { class: "bar" });
      bar.style.width = `${Math.max(1, 100 * probability(each.logprob))}%`;
      return el("tr", { class: each.token === token ? "chosen" : "" },
        el("td", {}, el("code", {}, seen(each.token))), el("td", {}, percent(each.logprob)), el("td", {}, bar));
    }))));
  box.hidden = false;
  const { left, bottom, top: above } = at.getBoundingClientRect(), own = box.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(left, innerWidth - own.width - 8))}px`;
  box.style.top = `${bottom + own.height + 8 > innerHeight ? above - own.height - 6 : bottom + 6}px`;
}
