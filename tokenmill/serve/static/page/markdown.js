// Markdown of an answer as elements, while it is still being written. Text of a model is never markup: every node is
// made here, raw HTML stays visible as text, images become links, and links lead to http, https or mailto only.
// Repetitions in expressions are bounded, so that no answer can make the page hang.

import { copy, el, iconButton } from "./dom.js";

const DEEPEST = 8;  // lists in quotes in lists ...
const MARKER = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*)|$)/;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^(#{1,6}) +(.*?)(?: +#+)?$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const indent = (line) => line.length - line.trimStart().length;

// --- blocks ---

// Each block has its kind and its lines, from which it can be told whether it changed.
export function blocksOf(lines, depth = 0) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [kind, end] = blockAt(lines, at, depth);
    blocks.push({ kind, lines: lines.slice(at, end) });
    at = end;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return ["code", fenceEnd(lines, at)];
  if (HEADING.test(line)) return ["heading", at + 1];
  if (RULE.test(line)) return ["rule", at + 1];
  if (depth < DEEPEST && line.startsWith(">")) return ["quote", whileLines(lines, at, (each) => each.startsWith(">"))];
  if (depth < DEEPEST && MARKER.test(line)) return ["list", listEnd(lines, at)];
  if (isTable(lines, at)) return ["table", whileLines(lines, at, (each) => each.includes("|"))];
  return ["paragraph", whileLines(lines, at, (each, place) => each.trim() && (place === at || !opens(lines, place)))];
}

function whileLines(lines, at, holds) {
  let end = at;
  while (end < lines.length && holds(lines[end], end)) end += 1;
  return Math.max(end, at + 1);
}

const opens = (lines, at) => {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || line.startsWith(">") || MARKER.test(line) ||
    isTable(lines, at);
};

function fenceEnd(lines, at) {
  const fence = FENCE.exec(lines[at])[1];
  const end = lines.findIndex((line, place) => place > at && line.trim().startsWith(fence) &&
    !line.trim().replaceAll(fence[0], ""));
  return end < 0 ? lines.length : end + 1;
}

function listEnd(lines, at) {
  const own = indent(lines[at]), counted = /^ *\d/.test(lines[at]);
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (indent(line) <= own && MARKER.test(line) && /^ *\d/.test(line) !== counted) break;  // the other kind of list
    if (!line.trim()) {  // a list goes on after an empty line only with an item or an indented line
      const next = lines.slice(end).find((each) => each.trim());
      if (next === undefined || (indent(next) <= own && !MARKER.test(next))) break;
    } else if (indent(line) <= own && !MARKER.test(line) && (opens(lines, end) || !lines[end - 1].trim())) break;
  }
  return end;
}

const cellsOf = (line) => {
  const cells = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
};

const isTable = (lines, at) => lines[at].includes("|") && (lines[at + 1] ?? "").includes("-") &&
  cellsOf(lines[at + 1]).every((cell) => /^:?-+:?$/.test(cell)) &&
  cellsOf(lines[at]).length === cellsOf(lines[at + 1]).length;

// --- elements of blocks ---

const MAKERS = {
  code: ({ lines }) => {
    const [, fence, language] = FENCE.exec(lines[0]);
    const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
    return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), language.trim().split(" ")[0]);
  },
  heading: ({ lines }) => {
    const [, marks, text] = HEADING.exec(lines[0]);
    return el(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text));  // below the page's own headings
  },
  rule: () => el("hr"),
  quote: ({ lines }, depth) => el("blockquote", {}, ...elementsOf(lines.map((line) => line.replace(/^> ?/, "")), depth + 1)),
  list: ({ lines }, depth) => list(lines, depth),
  table: ({ lines }) => table(lines),
  paragraph: ({ lines }) => el("p", {}, ...inline(lines.map((line) => line.trim()).join("\n"))),
};

const elementsOf = (lines, depth) => blocksOf(lines, depth).map((block) => MAKERS[block.kind](block, depth));

export function codeBlock(text, language = "") {
  const code = el("code", {}, text);
  const button = iconButton("copy", "Copy the code", () => copy(code.textContent, button));
  return el("figure", { class: "code" },
    el("figcaption", {}, el("span", {}, language || "text"), button),
    el("pre", { tabindex: "0", role: "group", "aria-label": `Code, ${language || "text"}` }, code));
}

function list(lines, depth) {
  const own = indent(lines[0]), first = MARKER.exec(lines[0])[2], items = [];
  for (const line of lines) {
    const match = MARKER.exec(line);
    if (match && match[1].length <= own + 1) items.push([match[3] ?? ""]);
    else items.at(-1).push(line);
  }
  const ordered = /\d/.test(first);
  return el(ordered ? "ol" : "ul", ordered ? { start: parseInt(first, 10) } : {}, ...items.map((item) => {
    const inner = item.slice(1).filter((line) => line.trim()).map(indent);
    const cut = Math.min(...inner, own + 4);
    const made = elementsOf([item[0], ...item.slice(1).map((line) => line.slice(Math.min(cut, indent(line))))], depth + 1);
    if (made[0]?.tagName === "P") made.splice(0, 1, ...made[0].childNodes);  // items are not set apart like paragraphs
    return el("li", {}, ...made);
  }));
}

function table(lines) {
  const sides = cellsOf(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "start"));
  const row = (line, tag) => el("tr", {}, ...cellsOf(line).slice(0, sides.length).map((cell, place) =>
    el(tag, { class: sides[place], ...(tag === "th" ? { scope: "col" } : {}) }, ...inline(cell))));
  return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" }, el("table", {},
    el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")))));
}

// --- text within a block ---

const wrap = (tag) => (match, depth) => el(tag, {}, ...inline(match[1] ?? match[2], depth + 1));
const RULES = {
  "\\": [[/\\([\\`*_{}[\]()#+\-.!|~>])/y, (match) => match[1]]],
  "`": [[/(`{1,3})(?!`)([^]{1,2000}?)(?<!`)\1(?!`)/y, (match) => el("code", {}, match[2].replace(/^ (.+) $/, "$1"))]],
  "*": [
    [/\*\*(?=[^\s*]|\*[^\s*])([^]{1,2000}?)(?<=\S)\*\*(?!\*)/y, wrap("strong")],
    [/\*(?=[^\s*])((?:[^*]|\*\*[^*]{1,500}\*\*){1,2000}?)(?<=\S)\*(?!\*)/y, wrap("em")],
  ],
  _: [
    [/(?<!\w)__(?=\S)([^]{1,2000}?)(?<=\S)__(?!\w)/y, wrap("strong")],
    [/(?<!\w)_(?=[^\s_])([^_]{1,2000}?)(?<=\S)_(?!\w)/y, wrap("em")],
  ],
  "~": [[/~~(?=\S)([^]{1,2000}?)(?<=\S)~~/y, wrap("del")]],
  "!": [[/!\[([^\]\n]{0,500})\]\(([^()\s]{1,2000})(?: +"[^"]{0,500}")?\)/y, (match) => link(match[2], [match[1] || match[2]])]],
  "[": [[/\[([^\]\n]{1,500})\]\(((?:[^()\s]|\([^()\s]{0,200}\)){1,2000})(?: +"[^"]{0,500}")?\)/y,
    (match, depth) => link(match[2], inline(match[1], depth + 1))]],
  "<": [[/<(https?:[^\s<>]{1,2000}|mailto:[^\s<>]{1,300})>/y, (match) => link(match[1], [match[1]])]],
  h: [[/(?<![\w/])https?:\/\/[^\s<>"'`]{1,2000}?(?=[.,;:!?)\]}*_]{0,5}(?:[\s<>"'`]|$))/y, (match) => link(match[0], [match[0]])]],
  "\n": [[/\n/y, () => el("br")]],
};

// An address that is not plainly of the web stays text.
function link(address, children) {
  const found = URL.canParse(address) ? new URL(address) : null;
  if (!found || !["http:", "https:", "mailto:"].includes(found.protocol)) return el("span", {}, ...children);
  return el("a", { href: found.href, target: "_blank", rel: "noopener noreferrer nofollow", title: found.href }, ...children);
}

export function inline(text, depth = 0) {
  const nodes = [];
  let plain = "";
  for (let at = 0; at < text.length;) {
    const found = depth < DEEPEST && ruleAt(text, at);
    if (!found) { plain += text[at]; at += 1; continue; }
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(found.make(found.match, depth));
    at += found.match[0].length;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function ruleAt(text, at) {
  for (const [pattern, make] of RULES[text[at]] ?? []) {
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    if (match) return { match, make };
  }
  return null;
}

// --- a text that grows ---

// Blocks that did not change keep their elements, so that a selection or a scrolled table stays while the rest comes.
export class Markdown {
  constructor(container) {
    this.container = container;
    this.shown = [];
  }

  update(text) {
    const blocks = blocksOf(text.replaceAll("\r", "").replaceAll("\t", "    ").split("\n"));
    const keys = blocks.map((block) => block.kind + "\n" + block.lines.join("\n"));
    let same = 0;
    while (same < keys.length && keys[same] === this.shown[same]) same += 1;
    const last = this.container.children[same];
    blocks.slice(same).forEach((block, number) => {
      const made = MAKERS[block.kind](block, 0);
      if (number === 0 && block.kind === "code" && last?.matches("figure.code") &&
          last.querySelector("span").textContent === made.querySelector("span").textContent) {
        last.querySelector("code").textContent = made.querySelector("code").textContent;
      } else if (this.container.children[same + number]) this.container.children[same + number].replaceWith(made);
      else this.container.append(made);
    });
    while (this.container.children.length > blocks.length) this.container.lastChild.remove();
    this.shown = keys;
  }
}
