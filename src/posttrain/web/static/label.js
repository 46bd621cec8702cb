// The page on which people label: shows an item while the next one is fetched, and sends answers in the background.

import { call } from "./app.js";
import { createEditor } from "./label_editors.js";
import { Outbox } from "./label_outbox.js";
import { announce, ask, h, hasShortcuts, meter, page, percent, showAnswer, showContent, spoken, takesText, text, wireHelp } from "./label_parts.js";

const POLL = 10_000;
const PROGRESS = 3_000;
const IDLE = 15 * 60_000;  // leases of somebody who went away must end

const part = (id) => document.getElementById(id);
const batch = page.dataset.batch || null;

let current = null;
let later = [];  // items that are leased and shown next
let editor = null;
let clock = null;
let isExhausted = false;
let pauseReason = null;
let lastItem = null;
let guideline = Number(page.dataset.guideline);
let lastInput = performance.now();
let progressAt = -PROGRESS;
let progressTimer = null;
let emptyItem = null;

const outbox = new Outbox(page.dataset.account, (state, unsent) => {
  part("state").textContent = unsent ? text("unsent", { count: unsent }) : "";
  const problem = { waiting: "connection", "sign-in": "session_ended", "other-account": "other_account" }[state];
  const banner = part("connection");
  if (problem) {
    const line = text(problem, { count: unsent, name: page.dataset.account });
    // Only what has changed is read again.
    if (banner.hidden || banner.dataset.line !== line) {
      const link = problem === "connection" ? null : h("a", { href: "/sign-in", target: "_blank", rel: "noopener" }, text("sign_in"));
      banner.replaceChildren(line, " ", link ?? "");
      banner.dataset.line = line;
      banner.hidden = false;
    }
  } else if (state === "sent") banner.hidden = true;
});

/** Measures the time for which an item is looked at: not while the tab is hidden. */
class Stopwatch {
  constructor() {
    this.total = 0;
    this.since = document.hidden ? null : performance.now();
  }
  toggle() {
    if (document.hidden && this.since !== null) {
      this.total += performance.now() - this.since;
      this.since = null;
    } else if (!document.hidden) this.since ??= performance.now();
  }
  get seconds() {
    return Math.round(this.total + (this.since === null ? 0 : performance.now() - this.since)) / 1000;
  }
}

// ---- items

function held() {
  return [current, ...later].filter(Boolean).map((task) => task.item).concat(outbox.waiting);
}

function isHeld(task) {
  return held().includes(task.item) || outbox.entries[0]?.item === task.item;
}

/** Takes up what the server sent: an item, none, or the sentence that the account is paused. */
function receive(task, paused) {
  if (paused) {
    pauseReason = paused;
    giveBack([current, ...later].filter(Boolean));
    later = [];
    current = null;
    return show();
  }
  pauseReason = null;
  if (!task) isExhausted = true;
  else if (!isHeld(task)) {
    isExhausted = false;
    later.push(task);
  }
  if (!current) show();
  part("item").dataset.ahead = later.length;
  // The item after the one that is shown, so that it is there when a key asks for it.
  if (current && !later.length && !isExhausted) fill();
}

function fill() {
  // Whatever is on its way brings the next item along, or asks for it when it is done.
  if (outbox.entries.length) return;
  outbox.add({
    path: "/api/items/next",
    body: () => ({ batch, besides: held().slice(0, 4) }),
    done: (reply) => receive(reply.task, reply.paused),
    failed: (error) => problem(error.message),
  });
}

function show() {
  current = later.shift() ?? null;
  editor = null;
  part("item").dataset.item = current?.item ?? "";
  part("item").dataset.ahead = later.length;
  part("work").hidden = !current;
  part("empty").hidden = Boolean(current);
  part("undo").disabled = false;
  if (!current) return showNothing();
  const task = current;
  clock = new Stopwatch();
  editor = createEditor(task, { immediate: true, submit });
  part("item-content").replaceChildren(...showContent(task, task.kind === "spans"));
  part("why").hidden = !task.reason;
  part("why").replaceChildren(h("b", {}, text("why")), " ", task.reason ?? "");
  part("editor").replaceChildren(editor.element);
  if (task.suggestion && PREFILLED.has(task.kind)) editor.set(task.suggestion.answer);
  part("kind").textContent = text("kind." + task.kind);
  drawSuggestion();
  part("submit").hidden = isImmediate(task);
  window.scrollTo(0, 0);
  const suggestion = task.suggestion ? text("suggested_spoken", { answer: plainAnswer(task), confidence: percent(task.suggestion.confidence) }) : "";
  announce(`${spoken(task)}. ${suggestion}`);
  if (!(WRITTEN.has(task.kind) && editor.focus?.())) part("item").focus({ preventScroll: true });
  if (task.guideline !== guideline) refreshGuideline(task.guideline);
  askProgress();
}

// Suggestions of these kinds stand in the editor from the start, as what is right with them is kept.
const PREFILLED = new Set(["choices", "spans", "text", "rewrite", "conversation", "ranking"]);
const IMMEDIATE = new Set(["choice", "rating", "preference"]);
const WRITTEN = new Set(["text", "rewrite", "conversation"]);

/** Whether one key is the answer. */
function isImmediate(task) {
  return IMMEDIATE.has(task.kind) && Boolean(task.labels || task.kind !== "choice");
}

function plainAnswer(task) {
  return showAnswer(task, task.suggestion.answer).textContent;
}

function drawSuggestion() {
  const { suggestion } = current;
  const box = part("suggestion");
  box.hidden = !suggestion;
  part("accept").hidden = !suggestion || !isImmediate(current);
  if (!suggestion) return;
  const confidence = typeof suggestion.confidence === "number"
    ? h("span", { class: "confidence" }, meter(suggestion.confidence, text("confidence")), ` ${text("sure", { percent: percent(suggestion.confidence) })}`)
    : "";
  box.replaceChildren(h("b", {}, text("suggested")), h("span", { class: "suggested" }, showAnswer(current, suggestion.answer)), confidence);
}

function showNothing() {
  const isWaiting = pauseReason === null && (!isExhausted || outbox.entries.length > 0);
  const before = part("empty").textContent;
  part("empty-title").textContent = text(pauseReason !== null ? "paused_title" : isWaiting ? "loading" : "nothing_title");
  part("empty-text").textContent = pauseReason ?? (isWaiting ? "" : text("nothing_text"));
  if (isWaiting) fill();
  // Read once, not each time that the server is asked.
  else if (part("empty").textContent !== before) {
    announce(`${part("empty-title").textContent} ${part("empty-text").textContent}`);
    part("item").focus({ preventScroll: true });
    askProgress(true);
  }
}

setInterval(() => {
  if (!current && !document.hidden) fill();
}, POLL);

// ---- answers

/** Sends an entry about the current item, and shows the next one at once. */
function send(action, values) {
  const task = current;
  const seconds = clock.seconds;
  lastItem = task.item;
  part("message").hidden = true;
  let isAsking = false;
  outbox.add({
    path: `/api/items/${task.item}/${action}`,
    item: task.item,
    body: () => {
      isAsking = !later.length && held().length <= 4;
      return { ...values, seconds, ...(isAsking ? { next: true, batch, besides: held() } : {}) };
    },
    done: (reply) => {
      askProgress();
      if (isAsking || reply.paused) receive(reply.next, reply.paused);
      else if (!later.length) fill();
    },
    failed: (error) => {
      if (error.status === 422) {
        // It does not fit, which is a defect of the page: the person may answer in another way, and loses nothing.
        later.unshift(task);
        if (!current) show();
      }
      problem(error.message);
      if (!later.length) fill();
    },
  });
  current = null;
  show();
}

function submit() {
  const answer = editor.value();
  if (answer === undefined) return problem(text(current.kind === "ranking" ? "rank_all" : "answer_first"));
  // One key too early would say that none applies.
  if (Array.isArray(answer) && !answer.length && emptyItem !== current.item) {
    emptyItem = current.item;
    return problem(text("confirm_none"), "note");
  }
  send("answer", { answer });
}

function accept() {
  if (!current?.suggestion) return submit();
  editor.set(current.suggestion.answer);
  submit();
}

/** Enter: the answer in the editor, if there is one; else the suggestion. */
function enter() {
  if (editor.value() !== undefined && !isImmediate(current)) submit();
  else if (current.suggestion) accept();
  else submit();
}

async function skip() {
  const fields = await ask(part("skip-dialog"));
  if (fields) send("skip", { reason: fields.get("other").trim() || fields.get("reason") || null });
}

async function flag() {
  const value = editor.value();
  const hasAnswer = value !== undefined && !(Array.isArray(value) && !value.length);
  part("flag-answer").hidden = !hasAnswer;
  const fields = await ask(part("flag-dialog"));
  const note = fields?.get("note").trim();
  if (note) send("flag", { note, answer: hasAnswer ? value : null });
  else if (fields) problem(text("flag_note"));
}

function undo() {
  part("undo").disabled = true;
  outbox.add({
    path: "/api/undo",
    body: () => (lastItem ? { item: lastItem } : {}),
    done: (reply) => {
      lastItem = null;
      if (!reply.task) { part("undo").disabled = false; return problem(text("undone_taken")); }
      later = [reply.task, ...[current, ...later].filter((task) => task && task.item !== reply.task.item)];
      pauseReason = null;
      current = null;
      show();
      problem(text("undone"), "note");
      askProgress();
    },
    failed: (error) => {
      lastItem = null;
      part("undo").disabled = false;
      problem(error.status === 404 ? text("nothing_to_undo") : error.message);
    },
  });
}

function problem(line, kind = "alert") {
  const message = part("message");
  message.className = kind;
  message.textContent = line;
  message.hidden = false;
  announce(line);
}

// ---- what else is on the page

/** Asks for the batch's progress, at most once in some seconds; at once where the last answer was given. */
function askProgress(atOnce = false) {
  if (progressTimer && !atOnce) return;
  clearTimeout(progressTimer);
  const wait = atOnce ? 0 : Math.max(0, progressAt + PROGRESS - performance.now());
  progressTimer = setTimeout(async () => {
    progressTimer = null;
    progressAt = performance.now();
    const name = current?.batch ?? batch ?? part("progress").dataset.batch;
    if (!name) return;
    const [state] = await call("GET", `/api/batches?name=${encodeURIComponent(name)}`, undefined, { stay: true }).catch(() => []);
    if (!state) return;
    part("progress").dataset.batch = name;
    const done = state.done + state.dropped + state.review;
    part("progress").replaceChildren(
      h("span", {}, text("progress_mine", { mine: state.mine })), h("span", {}, text("progress_batch", { batch: name, done, items: state.items })),
      h("progress", { max: String(Math.max(1, state.items)), value: String(done), "aria-label": text("progress") }),
      h("span", {}, text("progress_left", { left: state.left })));
  }, wait);
}

async function refreshGuideline(version) {
  guideline = version;
  const newest = await call("GET", `/api/guidelines/${version}`, undefined, { stay: true }).catch(() => null);
  if (!newest) return;
  // Rendered by the server without any of the text's own tags; see web/guideline_text.py.
  part("guideline-text").innerHTML = newest.html;
  part("guideline-title").textContent = text("guideline_version", { version });
  problem(text("guideline_changed", { version }), "note");
}

function giveBack(tasks) {
  for (const task of tasks) call("DELETE", `/api/items/${task.item}/lease`, undefined, { stay: true, keepalive: true }).catch(() => {});
}

const leaseSeconds = Number(page.dataset.leaseSeconds);
setInterval(async () => {
  if (document.hidden || performance.now() - lastInput > IDLE) return;
  for (const task of [current, ...later].filter(Boolean)) {
    await call("PUT", `/api/items/${task.item}/lease`, undefined, { stay: true }).catch((error) => {
      if (error.status !== 409) return;
      if (task === current) problem(text("lease_ended"), "note");
      later = later.filter((other) => other !== task);
    });
  }
  if (!later.length && current && !isExhausted) fill();
}, Math.max(5, leaseSeconds / 3) * 1000);

const openHelp = wireHelp();
const COMMANDS = { s: skip, f: flag, u: undo, "?": openHelp, "/": () => editor?.search?.(), g: toggleGuideline };

function toggleGuideline() {
  const details = part("guideline");
  details.open = !details.open;
  if (details.open) details.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  lastInput = performance.now();
  if (event.isComposing || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (current && event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    return enter();
  }
  if (event.altKey || event.metaKey) return;
  if (current && (hasShortcuts() || takesText(event.target) || event.key.length > 1) && editor.key(event)) return event.preventDefault();
  if (event.ctrlKey) return;
  if (takesText(event.target)) {
    if (event.key === "Escape") part("item").focus();
    else if (event.key === "Enter" && event.target.matches("[role=combobox]")) { event.preventDefault(); if (current) enter(); }
    return;
  }
  // Enter on a button or a link is theirs.
  const isControl = event.target.closest?.("button, a, summary");
  if (event.key === "Enter" && current && !isControl && !event.repeat) { event.preventDefault(); return enter(); }
  const command = COMMANDS[event.key];
  if (!command || event.repeat || !hasShortcuts() || (!current && !["u", "?", "g"].includes(event.key))) return;
  event.preventDefault();
  command();
});

document.addEventListener("pointerdown", () => (lastInput = performance.now()));
document.addEventListener("visibilitychange", () => clock?.toggle());
for (const [id, action] of Object.entries({ accept, submit, skip, flag, undo, keys: openHelp })) part(id).addEventListener("click", action);

// A number picks a reason and Enter sends the note, so that the hands stay on the keys.
part("skip-dialog").addEventListener("keydown", (event) => {
  if (takesText(event.target) || !hasShortcuts()) return;
  const box = part("skip-dialog").querySelectorAll("[name=reason]")[Number(event.key) - 1];
  if (box) { box.checked = true; box.focus(); event.preventDefault(); }
});
for (const id of ["skip-dialog", "flag-dialog"]) {
  part(id).addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target.matches("button")) return;
    event.preventDefault();
    part(id).querySelector("form").requestSubmit(part(id).querySelector("[value=ok]"));
  });
}

addEventListener("beforeunload", (event) => {
  if (outbox.unsent) event.preventDefault();
});
addEventListener("pagehide", () => giveBack(later));
addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload();
});

const isNarrow = matchMedia("(max-width: 900px)");
if (isNarrow.matches) part("guideline").open = false;
fill();
