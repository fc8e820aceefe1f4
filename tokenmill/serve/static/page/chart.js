// A small line chart in SVG: one or two lines over the last minutes, the newest value in large, a reading under the
// pointer. Knows nothing of what it shows.

import { el, svg } from "./dom.js";

const POINTS = 180, FEWEST = 40, WIDTH = 180, HEIGHT = 60;  // readings; a new chart does not begin as a needle

export class Chart {
  // spec: {id, title, lines: [name], format, top?: the fixed end of the scale, whole?: whole numbers, holds?: a value
  // stays where none comes: an average has none while nobody asks}
  constructor(spec) {
    this.spec = spec;
    this.values = spec.lines.map(() => []);
    this.now = spec.lines.map((name, place) => el("span", { class: `value line-${place}` }, el("b", {}, "–"), ` ${name}`));
    this.top = el("span", { class: "top" });
    this.note = el("p", { class: "hint" });
    this.areas = spec.lines.map((_name, place) => svg("path", { class: `area line-${place}` }));
    this.paths = spec.lines.map((_name, place) => svg("path", { class: `stroke line-${place}` }));
    this.cursor = svg("path", { class: "cursor" });
    this.drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      ...this.areas, ...this.paths, this.cursor);
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => this.point(null));
    this.element = el("section", { class: "chart", id: `chart-${spec.id}` }, el("h3", {}, spec.title),
      el("p", { class: "values" }, ...this.now), el("div", { class: "plot" }, this.top, this.drawing), this.note);
    this.at = null;  // the place under the pointer, counted from the newest
    this.draw();
  }

  add(values, note) {
    values.forEach((value, place) => {
      const line = this.values[place], kept = value === null && this.spec.holds ? line.at(-1) ?? null : value;
      this.values[place] = [...line, kept].slice(-POINTS);
    });
    this.note.textContent = note;
    this.draw();
  }

  // Averages that few requests make have gaps: the last one stays in large.
  newest(place) {
    return this.at === null ? this.values[place].findLast((value) => value !== null) : this.values[place].at(-1 - this.at);
  }

  draw() {
    const { spec, values } = this, shown = values.flat().filter((value) => value !== null);
    const largest = Math.max(0, ...shown), top = spec.top ?? (spec.whole ? Math.max(4, Math.ceil(largest)) : largest * 1.1 || 1);
    this.span = Math.max(FEWEST, values[0].length) - 1;
    const dot = (value, back) => `${WIDTH - (back * WIDTH) / this.span},${HEIGHT - 2 - ((HEIGHT - 6) * value) / top}`;
    values.forEach((line, place) => {
      const dots = line.flatMap((value, index) => (value === null ? [] : [dot(value, line.length - 1 - index)]));
      this.paths[place].setAttribute("d", dots.length ? `M${dots[0]}L${dots.join("L")}` : "");  // one reading is a dot
      const ends = dots.length ? [dots[0], dots.at(-1)].map((each) => each.split(",")[0]) : [];
      this.areas[place].setAttribute("d", dots.length ? `M${ends[0]},${HEIGHT}L${dots.join("L")}L${ends[1]},${HEIGHT}Z` : "");
    });
    const told = spec.lines.map((name, place) => {
      const value = this.newest(place), text = value === null || value === undefined ? "–" : spec.format(value);
      this.now[place].firstChild.textContent = text;
      return `${text} ${name}`;
    });
    this.top.textContent = shown.length || spec.top ? spec.format(top) : "";
    this.drawing.setAttribute("aria-label", `${spec.title}: ${told.join(", ")}`);
    const x = WIDTH - ((this.at ?? 0) * WIDTH) / this.span;
    this.cursor.setAttribute("d", this.at === null ? "" : `M${x},0V${HEIGHT}`);
  }

  point(event) {
    const box = this.drawing.getBoundingClientRect();
    const back = event && Math.round(((box.right - event.clientX) / box.width) * this.span);
    this.at = event && back >= 0 && back < this.values[0].length ? back : null;
    this.draw();
  }
}
