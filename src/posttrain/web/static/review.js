// The page on which reviewers decide items: the answers side by side, and one decision with a note.

import { call } from "./app.js";
import { createEditor } from "./label_editors.js";
import { announce, ask, h, hasShortcuts, keyCap, meter, page, percent, showAnswer, showContent, spoken, takesText, text, wireHelp } from "./label_parts.js";

const POLL = 15_000;
const part = (id) => document.getElementById(id);

let items = [];
let index = 0;
let editor = null;
let options = [];  // the distinct answers that a number takes
let isSending = false;
let lastDecided = null;  // its address

const current = () => items[index] ?? null;

async function load() {
  const { batch, item } = page.dataset;
  const query = new URLSearchParams({ count: "200", ...(batch ? { batch } : {}), ...(item ? { item } : {}) });
  const shown = current()?.id;
  items = await call("GET", `/api/review?${query}`);
  index = Math.max(0, items.findIndex((each) => each.id === shown));
  if (!current() || current().id !== shown) show();
  else drawPosition();
}

function drawPosition() {
  part("position").textContent = items.length ? text("position", { number: index + 1, count: items.length }) : "";
  part("previous").disabled = index === 0;
  part("next").disabled = index >= items.length - 1;
}

function show() {
  const item = current();
  editor = null;
  part("item").dataset.item = item?.id ?? "";
  part("work").hidden = !item;
  part("empty").hidden = Boolean(item);
  for (const id of ["decide", "drop"]) part(id).disabled = !item?.decidable;
  drawPosition();
  if (!item) {
    part("empty-title").textContent = text("nothing_title");
    part("empty-text").textContent = text("nothing_text");
    return;
  }
  part("cause").replaceChildren(h("span", { class: `chip cause-${item.cause ?? "none"}` }, text(`cause.${item.cause ?? "none"}`)), ` ${item.batch} · ${item.record}`,
    item.resolution ? h("span", { class: "soft" }, " · ", text("decided_as", { name: (item.resolution.by ?? []).join(", ") }), showAnswer(item, item.resolution.answer)) : "",
    item.decidable ? "" : h("p", { class: "hint" }, text("own")));
  part("item-content").replaceChildren(...showContent(item));
  part("why").hidden = !item.reason;
  part("why").replaceChildren(h("b", {}, text("why")), " ", item.reason ?? "");
  drawAnswers(item);
  drawPosterior(item);
  editor = createEditor(item, { immediate: false, submit: decide });
  part("editor").replaceChildren(editor.element);
  part("note").value = "";
  window.scrollTo(0, 0);
  announce(`${text(`cause.${item.cause ?? "none"}`)}. ${spoken(item)}`);
  part("item").focus({ preventScroll: true });
}

/** Draws the answers as cards; equal answers share a number. */
function drawAnswers(item) {
  options = [];
  const numberOf = (answer) => {
    const key = JSON.stringify(answer);
    const at = options.findIndex((each) => JSON.stringify(each) === key);
    return at >= 0 ? at : options.push(answer) - 1;
  };
  const card = (name, details, answer, note) => {
    const number = answer === null || answer === undefined ? -1 : numberOf(answer);
    return h("li", { class: "answer" },
      h("div", { class: "who" }, h("b", {}, name), h("span", { class: "soft" }, details.filter(Boolean).join(" · "))),
      h("div", { class: "given" }, showAnswer(item, answer)),
      note ? h("p", { class: "note-text", dir: "auto" }, note) : null,
      number >= 0
        ? h("button", { type: "button", class: "take", "data-number": String(number), "aria-pressed": "false", "aria-keyshortcuts": number < 9 ? String(number + 1) : null,
            "aria-label": `${text("take")}: ${name}`, click: () => take(number) }, number < 9 ? keyCap(String(number + 1)) : null, ` ${text("take")}`)
        : null);
  };
  const cards = item.answers.map((given) => card(given.annotator, [
    given.status === "answered" ? "" : text(`status.${given.status}`),
    typeof given.seconds === "number" ? text("seconds", { seconds: given.seconds < 10 ? given.seconds.toFixed(1) : Math.round(given.seconds) }) : "",
    given.guideline ? text("under", { version: given.guideline }) : "",
  ], given.answer, given.note));
  if (item.suggestion) {
    const { answer, confidence, annotator } = item.suggestion;
    const suggested = card(text("suggestion", { name: annotator ?? text("model") }), [typeof confidence === "number" ? text("sure", { percent: percent(confidence) }) : ""], answer, null);
    suggested.classList.add("of-model");
    cards.push(suggested);
  }
  part("answers").replaceChildren(...cards);
}

function drawPosterior(item) {
  const rows = item.posterior ?? [];
  part("posterior").hidden = !rows.length;
  part("posterior").replaceChildren(h("h3", {}, text("posterior")), h("ul", {}, rows.map(({ answer, probability }) => h("li", {},
    h("span", { class: "given" }, showAnswer(item, answer)),
    meter(probability, text("posterior")), h("span", {}, percent(probability))))),
    h("p", { class: "hint" }, text("posterior_note")));
}

function take(number) {
  editor.set(options[number]);
  for (const button of part("answers").querySelectorAll(".take")) button.setAttribute("aria-pressed", String(Number(button.dataset.number) === number));
  announce(text("taken", { number: number + 1 }));
}

function decide() {
  if (current() && !current().decidable) return problem(text("own"));
  const answer = editor?.value();
  // An empty list may be right, but only if somebody has answered so.
  const isEmpty = (each) => Array.isArray(each) && !each.length;
  if (answer === undefined || (isEmpty(answer) && !options.some(isEmpty))) return problem(text("choose_first"));
  return send("resolve", { answer, note: part("note").value.trim() || null }, text("decided"));
}

async function drop() {
  if (current() && !current().decidable) return problem(text("own"));
  const fields = await ask(part("drop-dialog"));
  if (fields) await send("drop", { note: fields.get("note").trim() || null }, text("dropped"));
}

async function send(action, body, line) {
  if (isSending || !current()) return;
  isSending = true;
  part("message").hidden = true;
  try {
    const item = current();
    const decided = await call("POST", `/api/items/${item.id}/${action}`, body);
    if (page.dataset.item) items[index] = decided;
    else items = items.filter((each) => each.id !== item.id);
    index = Math.min(index, Math.max(0, items.length - 1));
    show();
    problem(line, "note");
    if (!page.dataset.item) {
      // A wrong key must not be for ever: a later decision replaces this one.
      lastDecided = `/review?item=${item.id}`;
      part("message").append(" ", h("a", { href: lastDecided, "aria-keyshortcuts": "u" }, text("change")));
    }
    if (!items.length) await load();
  } catch (error) {
    problem(error.message);
  } finally {
    isSending = false;
  }
}

function move(by) {
  if (!items[index + by]) return;
  index += by;
  part("message").hidden = true;
  show();
}

function problem(line, kind = "alert") {
  part("message").className = kind;
  part("message").textContent = line;
  part("message").hidden = false;
  announce(line);
}

const openHelp = wireHelp();
const COMMANDS = {
  j: () => move(1), k: () => move(-1), ArrowRight: () => move(1), ArrowLeft: () => move(-1), d: drop, "?": openHelp,
  u: () => lastDecided && location.assign(lastDecided),
  n: () => part("note").focus(), "/": () => editor?.search?.() || editor?.focus?.(),
  g: () => { part("guideline").open = !part("guideline").open; },
};

document.addEventListener("keydown", (event) => {
  if (event.isComposing || event.defaultPrevented || document.querySelector("dialog[open]") || event.altKey) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); return decide(); }
  if (event.metaKey) return;
  const inEditor = part("editor").contains(event.target);
  if (editor && inEditor && editor.key(event)) return event.preventDefault();
  if (event.ctrlKey) return;
  if (takesText(event.target)) {
    if (event.key === "Escape") part("item").focus();
    else if (event.key === "Enter" && (event.target === part("note") || event.target.matches("[role=combobox]"))) { event.preventDefault(); decide(); }
    return;
  }
  if (event.key === "Enter" && !event.repeat && !event.target.closest?.("button, a, summary, .markable")) { event.preventDefault(); return decide(); }
  if (!hasShortcuts() && event.key.length === 1) return;
  const number = /^[1-9]$/.test(event.key) ? Number(event.key) - 1 : -1;
  if (number >= 0 && number < options.length && !inEditor) { event.preventDefault(); return take(number); }
  const command = COMMANDS[event.key];
  if (!command || event.repeat || (inEditor && event.key.startsWith("Arrow"))) return;
  event.preventDefault();
  command();
});

part("drop-dialog").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing || event.target.matches("button")) return;
  event.preventDefault();
  part("drop-dialog").querySelector("form").requestSubmit(part("drop-dialog").querySelector("[value=ok]"));
});
for (const [id, action] of Object.entries({ decide, drop, previous: () => move(-1), next: () => move(1), keys: openHelp })) part(id).addEventListener("click", action);

const refresh = () => load().catch((error) => problem(error.message));
// Another reviewer may be deciding the same items; the one that is shown stays.
setInterval(() => { if (!document.hidden && !isSending && !current()) refresh(); }, POLL);
if (matchMedia("(max-width: 900px)").matches) part("guideline").open = false;
refresh();
