// What the pages of labelling share: elements, texts, an item's content, and answers as they are read.

const root = document.querySelector("[data-texts]");
const texts = JSON.parse(root?.dataset.texts ?? "{}");

/** The element that holds the page's settings as data attributes. */
export const page = root;

/** Returns a text in the page's language; parts in braces are filled in, and nouns after a count of 1 are singular. */
export function text(key, values = {}) {
  const template = (texts[key] ?? key).replace(/\{(\w+)\} (answer|item)s( are)?\b/g, (whole, name, noun, verb) =>
    (String(values[name]) === "1" ? `{${name}} ${noun}${verb ? " is" : ""}` : whole));
  return template.replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}

/**
 * Creates an element. Record text only ever gets here as a child or an attribute, never as HTML.
 * @param {string} tag
 * @param {Object<string, any>} [attributes] functions are listeners; null and false leave an attribute out
 * @param {...(Node|string|null)} children
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Returns a label's text with places to break behind its underscores: a browser takes it for one word. */
export function breakable(label) {
  return String(label).split(/(?<=_)/).flatMap((piece, index) => (index ? [h("wbr"), piece] : [piece]));
}

/** Tells a screen reader something without moving the focus. */
export function announce(line) {
  const region = document.getElementById("live");
  // Emptied first: the same line twice would be read once.
  region.textContent = "";
  setTimeout(() => (region.textContent = line), 30);
}

export function percent(share) {
  return typeof share === "number" ? `${Math.round(100 * share)}%` : "";
}

/** Shows a share as a bar. */
export function meter(share, label) {
  const bar = h("span", {});
  bar.style.width = percent(share);
  return h("span", { class: "meter", role: "meter", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100",
    "aria-valuenow": String(Math.round(100 * share)), "aria-valuetext": percent(share) }, bar);
}

/** Shows a key as on a keyboard; hidden from screen readers, which read `aria-keyshortcuts`. */
export function keyCap(name) {
  return h("kbd", { "aria-hidden": "true" }, name);
}

function turn(role, content, label = text("role." + role)) {
  return h("div", { class: `turn ${["user", "assistant", "system", "tool"].includes(role) ? role : ""}` },
    h("span", { class: "role" }, label), h("div", { class: "words", dir: "auto" }, content));
}

/** Shows turns of a conversation. */
export function showTurns(turns) {
  return h("div", { class: "turns" }, turns.map((each) => turn(each.role, each.content)));
}

/** The text that spans are parts of, as `label/answer_kinds.py` has it: the last turn, or the plain text. */
export function spanText(content) {
  return content.prompt?.length ? content.prompt.at(-1).content : (content.text ?? "");
}

/**
 * Shows what an item is about: all turns or the text, and the model's answer; candidates are the editor's.
 * @param {object} task with `kind` and `content`
 * @param {boolean} marked the text is shown by the editor, which marks its parts
 */
export function showContent(task, marked = false) {
  const { prompt, text: plain, answer, meta } = task.content;
  const parts = [];
  const turns = prompt?.length ? (marked ? prompt.slice(0, -1) : prompt) : [];
  if (turns.length) parts.push(showTurns(turns));
  if (plain !== null && plain !== undefined && !prompt?.length && !marked) {
    parts.push(h("div", { class: "turn plain" }, h("div", { class: "words", dir: "auto" }, plain)));
  }
  if (typeof answer === "string" && answer) parts.push(turn("assistant", answer, text("model_answer")));
  const facts = Object.entries(meta ?? {});
  if (facts.length) {
    const rows = facts.map(([name, value]) => [
      h("dt", {}, name), h("dd", { dir: "auto" }, typeof value === "string" ? value : JSON.stringify(value)),
    ]);
    parts.push(h("details", { class: "meta" }, h("summary", {}, text("meta")), h("dl", {}, rows)));
  }
  return parts;
}

/** Splits a text into pieces at the borders of spans, each with the spans that cover it; offsets are code points. */
export function pieces(characters, spans) {
  const borders = [...new Set([0, characters.length, ...spans.flatMap((span) => [span.start, span.end])])];
  borders.sort((left, right) => left - right);
  return borders.slice(0, -1).map((start, index) => ({
    start,
    end: borders[index + 1],
    spans: spans.filter((span) => span.start <= start && span.end >= borders[index + 1]),
  }));
}

/** Returns the class that gives a label its colour. */
export function hue(labels, label) {
  return `hue-${Math.max(0, (labels ?? []).indexOf(label)) % 8}`;
}

/** Shows a text with its spans marked. */
export function showSpans(content, spans, labels) {
  const characters = [...spanText(content)];
  return pieces(characters, spans).map((piece) => {
    const words = characters.slice(piece.start, piece.end).join("");
    if (!piece.spans.length) return words;
    const names = piece.spans.map((span) => span.label);
    // The name stands once, after the piece that ends the span.
    const ended = piece.spans.filter((span) => span.end === piece.end).map((span) => span.label);
    return h("mark", { class: hue(labels, names.at(-1)) }, words,
      ended.length ? h("span", { class: "tag" }, ended.join(", ")) : null);
  });
}

/** Shows an answer of any kind. */
export function showAnswer(task, answer) {
  const candidates = task.content.candidates ?? [];
  if (answer === null || answer === undefined) return h("span", { class: "soft" }, text("no_answer"));
  switch (task.kind) {
    case "choice": return h("span", { class: "chip", dir: "auto" }, breakable(answer));
    case "choices":
      return answer.length
        ? h("span", { class: "chips" }, answer.map((label) => h("span", { class: "chip", dir: "auto" }, breakable(label))))
        : h("span", { class: "soft" }, text("none_of_them"));
    case "spans": return h("div", { class: "words", dir: "auto" }, showSpans(task.content, answer, task.labels));
    case "rating": return h("span", { class: "chip" }, text("rating_of", { rating: answer }));
    case "preference":
      return answer === "tie" ? h("span", { class: "chip" }, text("tie")) : candidate(answer, candidates);
    case "ranking": return h("ol", { class: "ranks" }, answer.map((index) => h("li", {}, candidate(index, candidates))));
    case "conversation": return showTurns(answer);
    default: return h("div", { class: "words", dir: "auto" }, String(answer));
  }
}

function candidate(index, candidates) {
  return h("span", {}, h("span", { class: "chip" }, text("candidate", { number: index + 1 })), " ",
    h("span", { class: "excerpt", dir: "auto" }, candidates[index] ?? ""));
}

/** Returns the words of an item that a screen reader hears when it is shown. */
export function spoken(task) {
  const { prompt, text: plain } = task.content;
  return [...(prompt?.length ? prompt.at(-1).content : (plain ?? ""))].slice(0, 400).join("");
}

/** Returns whether keys typed at an element are text. */
export function takesText(element) {
  return element instanceof HTMLElement && element.matches("input:not([type=radio], [type=checkbox]), textarea, select");
}

/**
 * Opens a dialog and waits for it.
 * @returns {Promise<FormData|null>} the fields of its form; null if it was cancelled
 */
export function ask(dialog) {
  const form = dialog.querySelector("form");
  form.reset();
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok" ? new FormData(form) : null), { once: true });
  });
}

const SHORTCUTS_OFF = "posttrain-keys=off";

/** Whether keys without a modifier are commands; who dictates or has a tremor switches them off (WCAG 2.1.4). */
export function hasShortcuts() {
  return !document.cookie.split("; ").includes(SHORTCUTS_OFF);
}

/** Wires the dialog with the keys, and its switch. */
export function wireHelp() {
  const dialog = document.getElementById("help");
  const box = dialog.querySelector("[name=keys]");
  box.checked = hasShortcuts();
  box.addEventListener("change", () => {
    const age = box.checked ? 0 : 365 * 86400;
    document.cookie = `${SHORTCUTS_OFF}; max-age=${age}; path=/; samesite=lax`;
  });
  return () => dialog.showModal();
}
