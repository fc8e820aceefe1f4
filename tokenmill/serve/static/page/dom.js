// Making elements. Text is always set as text: nothing in this page writes markup, and the page's policy
// (trusted-types 'none') makes the browser refuse it if something tries.

export const $ = (id) => document.getElementById(id);

// attributes: `on...` are listeners, true and false set or leave out an attribute, the rest is set as it is.
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((each) => each !== null && each !== undefined && each !== false));
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(document.querySelector("svg").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const icon = (name) => svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));

// An icon with its name for screen readers and as a tooltip.
export function iconButton(name, label, onclick, extra = {}) {
  return el("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...extra }, icon(name));
}

let fading = 0;

export function toast(text, label, action) {
  const shown = $("toast"), hide = () => { shown.hidden = true; };
  clearTimeout(fading);
  shown.replaceChildren(el("span", {}, text));
  if (action) {
    shown.append(el("button", { type: "button", class: "quiet", onclick: () => { hide(); action(); } }, label));
  }
  shown.hidden = false;
  fading = setTimeout(hide, action ? 8000 : 4000);
}

export const announce = (text) => { $("announce").textContent = text; };

// Outside of https and localhost there is no clipboard object: the older way copies a selection.
export async function copy(text, from) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  const use = from.querySelector("use"), before = use.getAttribute("href");
  if (!done) return toast("The browser does not let this page copy.");
  use.setAttribute("href", "#i-check");
  announce("Copied");
  setTimeout(() => use.setAttribute("href", before), 1200);
}

export function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

export const shorten = (value) =>
  value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : value < 100 ? 1 : 0 });

// Fractions of a cent are the rule: three digits that mean something.
export function dollars(value) {
  if (!value) return "$0";
  if (value >= 100) return "$" + value.toLocaleString("en", { maximumFractionDigits: 0 });
  const digits = Math.min(12, Math.max(2, 2 - Math.floor(Math.log10(Math.abs(value)))));
  return "$" + value.toFixed(digits).replace(/(\.\d\d\d*?)0+$/, "$1");
}
