// The dashboard: what /metrics says each second, as numbers and small charts of the last minutes; what was spent, from
// /v1/usage. Counters become rates between two readings.

import { getJson, request } from "./api.js";
import { $, dollars, el, shorten } from "./dom.js";
import { Chart } from "./chart.js";

const EVERY_MS = 1000, SPENDING_EVERY = 5;
const LARGEST = ["kv_cache_usage_ratio", "predicted_ttft_seconds"];  // of several models the largest is shown
const WINDOW = 30;  // readings over which hits are counted

// The numbers of a Prometheus text by name, summed over labels.
export function readMetrics(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const match = /^tokenmill_(\w+?)(?:_total)?(?:\{.*\})? (\S+)$/.exec(line);
    if (!match) continue;
    const [, name, value] = match, before = values[name] ?? 0;
    values[name] = LARGEST.includes(name) ? Math.max(before, Number(value)) : before + Number(value);
  }
  return values;
}

const seconds = (value) => (value < 1 ? `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`);
const percent = (value) => `${(100 * value).toFixed(1)} %`;

// What is drawn. `read`: (now, rate, mean, share) -> a value for each line, null where there is none; `holds`: then the last one stays.
const CHARTS = [
  {
    id: "speed", title: "Tokens per second", lines: ["generated"], format: shorten, read: (_now, rate) => [rate("generation_tokens")],
    note: (now) => `${shorten(now.generation_tokens)} generated in all`,
  },
  {
    id: "batch", title: "Sequences", lines: ["running", "waiting"], format: shorten, whole: true,
    read: (now) => [now.requests_running, now.requests_waiting],
    note: (now) => `${shorten(now.preemptions)} preempted, ${shorten(now.admission_rejections ?? 0)} refused in all`,
  },
  {
    id: "kv", title: "KV cache in use", lines: ["held"], format: percent, top: 1,
    read: (now) => [now.kv_cache_usage_ratio], note: (now) => `${shorten(now.kv_pages_cached)} pages kept for reuse`,
  },
  {
    id: "hits", title: "Prefix cache hits", lines: ["of prompt tokens"], format: percent, top: 1, holds: true,
    read: (_now, _rate, _mean, share) => [share("prefix_cache_hits", "prefix_cache_queries")],
    note: (now) => (now.prefix_cache_queries ? `${percent(now.prefix_cache_hits / now.prefix_cache_queries)} since the start` : "nothing asked yet"),
  },
  {
    id: "ttft", title: "Time to first token", lines: ["mean"], format: seconds, holds: true,
    read: (_now, _rate, mean) => [mean("ttft_seconds")],
    note: (now) => (now.predicted_ttft_seconds < 0.001 ? "no wait for the next request" : `${seconds(now.predicted_ttft_seconds)} expected for the next request`),
  },
  {
    id: "itl", title: "Between tokens", lines: ["mean"], format: seconds, holds: true,
    read: (_now, _rate, mean) => [mean("itl_seconds")],
    note: (now) => `${shorten(now.engine_steps)} steps of the engine in all`,
  },
  {
    id: "busy", title: "Engine at work", lines: ["of the time"], format: percent, top: 1,
    read: (_now, rate) => [Math.min(1, rate("engine_busy_seconds"))],
    note: (now) => (now.engine_restarts ? `${shorten(now.engine_restarts)} restarts` : "never restarted"),
  },
  {
    id: "prompts", title: "Prompt tokens per second", lines: ["read"], format: shorten, read: (_now, rate) => [rate("prompt_tokens")],
    note: (now) => `${shorten(now.requests ?? 0)} answers ended in all`,
  },
  {
    id: "cost", title: "Cost per hour", lines: ["requests", "device"], format: dollars,
    read: (now, rate) => [now.key_cost_dollars === undefined ? null : 3600 * rate("key_cost_dollars"),
      now.device_cost_dollars === undefined ? null : 3600 * rate("device_cost_dollars")],
    note: (now) => (now.key_cost_dollars === undefined ? "no prices yet: serve with --price" : `${dollars(now.key_cost_dollars)} spent in all`),
  },
];

export class Board {
  // `on`: {state(kind, text)}.
  constructor(on) {
    this.on = on;
    this.barred = null;  // the state to show while the key may not read metrics; wrong keys are not tried again
    this.readings = [];
    this.count = 0;
    this.charts = CHARTS.map((spec) => new Chart(spec));
    this.problem = el("p", { class: "notice", role: "status", hidden: true });
    this.grid = el("div", { class: "charts" }, ...this.charts.map((chart) => chart.element));
    this.spending = el("div", { class: "spending" });
    $("board").replaceChildren(el("h2", { class: "unseen" }, "Dashboard"), this.problem, this.grid, this.spending);
  }

  async run() {
    for (;;) {
      if (!document.hidden) await this.poll();
      await new Promise((done) => { setTimeout(done, EVERY_MS); });
    }
  }

  resume() {
    this.barred = null;
  }

  async poll() {
    try {
      if (this.barred) {
        await request("readyz");  // needs no key
        this.on.state(...this.barred);
      } else {
        this.take({ time: performance.now(), ...readMetrics(await (await request("metrics")).text()) });
        this.say("");
      }
    } catch (error) {
      this.readings = [];
      this.failed(error);
    }
    if (!$("board").hidden && this.count++ % SPENDING_EVERY === 0) await this.spent();
  }

  failed(error) {
    if (error.status === 403) {
      this.barred = ["up", "connected"];
      this.say("This key may not see the numbers of all keys together; its own are below.");
    } else if (error.status === 401) {
      this.barred = ["down", "key needed"];
      this.say("The numbers are shown to those with an API key.");
    } else {
      this.on.state("down", error.status ? "error" : "no connection");
      this.say(error.status ? error.message : "The server does not answer. The numbers go on when it does.");
    }
    if ([401, 403].includes(error.status)) this.on.state(...this.barred);
  }

  say(text) {
    this.problem.hidden = !text;
    this.problem.textContent = text;
    this.grid.classList.toggle("stale", Boolean(text));
  }

  take(now) {
    const last = this.readings.at(-1), oldest = this.readings.at(-WINDOW) ?? this.readings[0];
    this.readings = [...this.readings, now].slice(-WINDOW);
    const ready = now.engine_up > 0;
    const change = (name, before = last) => (before ? Math.max(0, (now[name] ?? 0) - (before[name] ?? 0)) : 0);
    const rate = (name) => (last ? (1000 * change(name)) / (now.time - last.time) : 0);
    const mean = (name) => (change(`${name}_count`) ? change(`${name}_sum`) / change(`${name}_count`) : null);
    const share = (part, whole) => (change(whole, oldest) ? change(part, oldest) / change(whole, oldest) : null);
    if (last) this.charts.forEach((chart) => chart.add(chart.spec.read(now, rate, mean, share), chart.spec.note(now)));
    const speed = rate("generation_tokens");
    this.on.state(ready ? "up" : "down", !ready ? "engine restarting" : speed ? `${shorten(speed)} tokens/s` : "ready");
  }

  // What the key has used; all keys, where it may see them.
  async spent() {
    const found = await getJson("v1/usage").catch(() => null);
    if (!found) return;
    const rows = (found.keys ?? [found]).flatMap((account) => Object.entries(account.models).map(([model, used]) => [
      account.key || "without a key", model, shorten(used.requests), shorten(used.prompt_tokens), shorten(used.completion_tokens), dollars(used.cost)]));
    const cells = (row, tag) => row.map((cell, place) => el(tag, { class: place > 1 ? "end" : "", ...(tag === "th" ? { scope: "col" } : {}) }, cell));
    const heads = ["Key", "Model", "Requests", "Prompt tokens", "Generated", "Cost"];
    this.spending.replaceChildren(el("h3", {}, "Use by key"), rows.length
      ? el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Use by key" }, el("table", {},
        el("thead", {}, el("tr", {}, ...cells(heads, "th"))), el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row, "td"))))))
      : el("p", { class: "hint" }, "Nothing was asked since the start."), ...budget(found.budget));
  }
}

function budget(found) {
  if (!found) return [];
  return [el("p", { class: "hint" }, `${dollars(found.spent)} of this key's budget of ${dollars(found.max_budget)} is spent.`)];
}
