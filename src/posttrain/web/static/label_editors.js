// One editor for each kind of answers of `label/answer_kinds.py`.
//
// An editor has `element`, `value()` (undefined: not complete yet), `set(answer)`, `key(event)` (true: it was taken) and
// may have `focus()` (true: it took the focus) and `search()`. `options.immediate` says that one key or
// click is an answer, and `options.submit` sends it.

import { announce, breakable, h, hue, keyCap, pieces, spanText, takesText, text } from "./label_parts.js";

const KEYS = 9;

/** Returns the editor of a task. */
export function createEditor(task, options) {
  return EDITORS[task.kind](task, options);
}

/** Returns the index that a digit stands for, 0 for "1"; -1 for another key. */
function digit(event) {
  return /^[1-9]$/.test(event.key) && !event.repeat ? Number(event.key) - 1 : -1;
}

function labelEditor(task, options, several) {
  const labels = task.labels ?? [];
  const chosen = new Set();
  const isSearched = labels.length > KEYS;
  // A digit picks one of the options, unless labels have digits by which people look for them.
  const digitsPick = !labels.some((label) => /[1-9]/.test(label));
  let shown = labels;
  let active = 0;
  const list = h("ul", isSearched
    ? { role: "listbox", id: "labels", class: "options searched", "aria-label": text("labels"), "aria-multiselectable": several ? "true" : null }
    : { class: "options", "aria-label": text("labels") });
  const input = isSearched ? h("input", {
    role: "combobox", id: "search", type: "text", autocomplete: "off", spellcheck: "false", autocapitalize: "none",
    "aria-expanded": "true", "aria-controls": "labels", "aria-autocomplete": "list", "aria-keyshortcuts": "/",
    input: () => { active = 0; filter(); },
  }) : null;

  function take(label) {
    if (several) {
      if (!chosen.delete(label)) chosen.add(label);
      announce(text(chosen.has(label) ? "added" : "removed", { label }));
    } else {
      chosen.clear();
      chosen.add(label);
    }
    draw();
    options.change?.();
    if (!several && options.immediate) options.submit();
  }

  function filter() {
    const words = input.value.toLowerCase().split(/[\s_-]+/).filter(Boolean);
    shown = labels.filter((label) => words.every((word) => label.toLowerCase().includes(word)));
    draw();
  }

  function draw() {
    list.replaceChildren(...shown.map((label, index) => {
      const suggested = label === task.suggestion?.answer && options.immediate;
      const cap = index < KEYS ? keyCap(String(index + 1)) : h("span", { class: "no-key" });
      const isChosen = chosen.has(label);
      const mark = several ? h("span", { class: "box", "aria-hidden": "true" }, isChosen ? "✓" : "") : null;
      if (isSearched) {
        return h("li", { role: "option", id: `label-${index}`, "aria-selected": String(isChosen), dir: "auto",
          class: `${index === active ? "active" : ""} ${suggested ? "is-suggested" : ""}`, click: () => { active = index; take(label); } }, cap, mark, h("span", {}, breakable(label)));
      }
      return h("li", {}, h("button", { type: "button", class: `option ${suggested ? "is-suggested" : ""}`, "aria-pressed": several || !options.immediate ? String(isChosen) : null,
        "aria-keyshortcuts": String(index + 1), dir: "auto", click: () => take(label) }, cap, mark, h("span", {}, breakable(label))));
    }));
    if (!isSearched) return;
    if (!shown.length) list.append(h("li", { class: "soft", role: "option", "aria-selected": "false", "aria-disabled": "true" }, text("no_label")));
    if (shown.length) input.setAttribute("aria-activedescendant", `label-${active}`);
    else input.removeAttribute("aria-activedescendant");
    const option = list.querySelector(".active");
    if (option && document.activeElement === input) option.scrollIntoView({ block: "nearest" });
  }

  draw();
  return {
    element: h("div", { class: "labels" },
      isSearched ? h("label", { for: "search" }, text("search"), " ", keyCap("/")) : null, input, list),
    value: () => (several ? labels.filter((label) => chosen.has(label)) : [...chosen][0]),
    set: (answer) => {
      chosen.clear();
      for (const label of several ? answer : [answer]) chosen.add(label);
      draw();
    },
    search: () => { input?.focus(); return Boolean(input); },
    key(event) {
      const isTyping = event.target === input;
      const index = digit(event);
      if (index >= 0 && index < shown.length && (!isTyping || digitsPick) && (isTyping || !takesText(event.target))) {
        take(shown[index]);
        if (isTyping) { input.value = ""; filter(); }
        return true;
      }
      if (!isTyping) return false;
      const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 }[event.key];
      if (step && shown.length) {
        active = Math.min(shown.length - 1, Math.max(0, active + step));
        draw();
        return true;
      }
      if (event.key === "Enter" && !event.ctrlKey && shown.length && (input.value || active)) {
        const label = shown[active];
        input.value = "";
        active = 0;
        filter();
        take(label);
        return true;
      }
      return false;
    },
  };
}

function textEditor(task, options, start) {
  const field = h("textarea", { id: "answer", rows: "5", dir: "auto", "aria-describedby": "item-content", input: () => options.change?.() });
  field.value = start;
  return {
    element: h("div", {}, h("label", { for: "answer" }, text(task.kind === "rewrite" ? "rewritten" : "your_answer")), field),
    value: () => (field.value.trim() ? field.value : undefined),
    set: (answer) => { field.value = answer; },
    focus: () => { field.focus(); return true; },
    key: () => false,
  };
}

function spansEditor(task, options) {
  const labels = task.labels ?? [];
  const characters = [...spanText(task.content)];
  // Words, and each other character alone, so that the arrow keys go over every part of the text.
  const tokens = [];
  for (const match of characters.join("").matchAll(/[\p{L}\p{N}\p{M}_]+|[^\s]/gu)) {
    const start = [...match.input.slice(0, match.index)].length;
    tokens.push({ start, end: start + [...match[0]].length });
  }
  let spans = [];
  let range = null;  // {start, end} in code points
  let anchor = -1;  // words, by their index
  let head = -1;
  const field = h("div", { class: "words markable", tabindex: "0", role: "group", dir: "auto", "aria-label": text("spans_text"),
    "aria-describedby": "spans-help", pointerup: readSelection, keyup: () => {} });
  const list = h("ul", { class: "span-list", "aria-label": text("spans_list") });
  const words = (span) => characters.slice(span.start, span.end).join("");

  function readSelection() {
    const selection = getSelection();
    if (!selection.rangeCount || selection.isCollapsed || !field.contains(selection.anchorNode) || !field.contains(selection.focusNode)) return;
    const [start, end] = [offset(selection.anchorNode, selection.anchorOffset), offset(selection.focusNode, selection.focusOffset)].sort((a, b) => a - b);
    if (start < end) {
      range = { start, end };
      selection.removeAllRanges();
      draw();
    }
  }

  /** Returns the code points before a point of the text; names of labels in it do not count. */
  function offset(node, place) {
    const before = document.createRange();
    before.setStart(field, 0);
    before.setEnd(node, place);
    const part = before.cloneContents();
    for (const tag of part.querySelectorAll(".tag")) tag.remove();
    return [...part.textContent].length;
  }

  function add(label) {
    if (!range || !label) return announce(text("select_first"));
    const span = { ...range, label };
    if (!spans.some((other) => other.start === span.start && other.end === span.end && other.label === label)) spans.push(span);
    announce(text("added", { label: `${words(span)}: ${label}` }));
    range = null;
    draw();
    options.change?.();
  }

  function remove(span) {
    spans = spans.filter((other) => other !== span);
    announce(text("removed", { label: `${words(span)}: ${span.label}` }));
    draw();
    options.change?.();
    field.focus();
  }

  function move(by, extend, fine) {
    if (!tokens.length) return;
    if (fine) {
      const end = Math.min(characters.length, Math.max((range?.start ?? 0) + 1, (range?.end ?? 1) + by));
      range = { start: range?.start ?? 0, end };
    } else {
      head = Math.min(tokens.length - 1, Math.max(0, head + by));
      if (!extend || anchor < 0) anchor = head;
      const [first, last] = anchor <= head ? [anchor, head] : [head, anchor];
      range = { start: tokens[first].start, end: tokens[last].end };
    }
    draw();
    announce(words(range));
  }

  function draw() {
    const all = range ? [...spans, { ...range, isRange: true }] : spans;
    field.replaceChildren(...pieces(characters, all).map((piece) => {
      const marks = piece.spans.filter((span) => !span.isRange);
      const isIn = piece.spans.some((span) => span.isRange);
      const part = words(piece);
      if (!piece.spans.length) return document.createTextNode(part);
      const ended = marks.filter((span) => span.end === piece.end).map((span) => span.label).join(", ");
      return h("mark", { class: `${marks.length ? hue(labels, marks.at(-1).label) : ""}${isIn ? " selected" : ""}` }, part,
        ended ? h("span", { class: "tag" }, ended) : null);
    }));
    list.replaceChildren(...spans.map((span) => h("li", {},
      h("span", { class: `chip ${hue(labels, span.label)}` }, breakable(span.label)), " ", h("span", { dir: "auto" }, words(span)), " ",
      h("button", { type: "button", class: "quiet", "aria-label": text("remove", { label: `${words(span)}: ${span.label}` }), click: () => remove(span) }, "✕"))));
  }

  const palette = labels.length > KEYS
    ? h("select", { id: "span-label", change: (event) => { add(event.target.value); event.target.value = ""; } },
        h("option", { value: "" }, text("labels")), labels.map((label) => h("option", { value: label }, label)))
    : null;
  const buttons = h("ul", { class: "options inline", "aria-label": text("labels") }, labels.slice(0, KEYS).map((label, index) => h("li", {},
    h("button", { type: "button", class: `option ${hue(labels, label)}`, "aria-keyshortcuts": String(index + 1), dir: "auto",
      // The press must not take the selection away before it is read.
      pointerdown: (event) => event.preventDefault(), click: () => add(label) }, keyCap(String(index + 1)), h("span", {}, breakable(label))))));
  draw();
  return {
    element: h("div", { class: "spans" }, field, h("p", { class: "hint", id: "spans-help" }, text("spans_help")), buttons,
      palette ? h("label", { for: "span-label" }, text("labels")) : null, palette, list),
    value: () => [...spans].sort((a, b) => a.start - b.start || a.end - b.end),
    set: (answer) => { spans = answer.map((span) => ({ ...span })); draw(); },
    focus: () => { field.focus(); return true; },
    key(event) {
      if (takesText(event.target)) return false;
      const index = digit(event);
      if (index >= 0 && index < labels.length) { add(labels[index]); return true; }
      if (event.key === "Backspace" && spans.length) { remove(spans.at(-1)); return true; }
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by && event.target === field) { move(by, event.shiftKey, event.ctrlKey); return true; }
      if (event.key === "Escape" && range) { range = null; draw(); return true; }
      return false;
    },
  };
}

function pickEditor(options, name, choices) {
  let chosen;
  const buttons = choices.map(({ value, content, key, label, large }) => h("button", {
    type: "button", class: large ? "option large" : "option", "aria-keyshortcuts": key, "aria-label": label ?? null,
    "aria-pressed": options.immediate ? null : "false", click: () => take(value) }, keyCap(key), h("span", { class: "words", dir: "auto" }, content)));
  function take(value) {
    set(value);
    options.change?.();
    if (options.immediate) options.submit();
  }
  function set(value) {
    chosen = value;
    if (!options.immediate) choices.forEach((choice, index) => buttons[index].setAttribute("aria-pressed", String(choice.value === value)));
  }
  return {
    element: h("div", { class: "picks", role: "group", "aria-label": name }, buttons),
    value: () => chosen,
    set,
    key(event) {
      const choice = takesText(event.target) || event.repeat ? undefined : choices.find((each) => each.key === event.key);
      if (choice) take(choice.value);
      return Boolean(choice);
    },
  };
}

function ratingEditor(task, options) {
  const choices = [1, 2, 3, 4, 5].map((value) => ({ value, key: String(value), content: text(`rating.${value}`) }));
  const editor = pickEditor(options, text("rating"), choices);
  editor.element.classList.add("ratings");
  return editor;
}

function preferenceEditor(task, options) {
  const choices = (task.content.candidates ?? []).slice(0, 2).map((content, value) => ({ value, key: String(value + 1), content, large: true }));
  const editor = pickEditor(options, text("which_is_better"), [...choices, { value: "tie", key: "0", content: text("tie") }]);
  editor.element.classList.add("pair");
  return editor;
}

function rankingEditor(task, options) {
  const candidates = task.content.candidates ?? [];
  let order = [];
  const list = h("ol", { class: "options ranking", "aria-label": text("candidates") });
  function take(index) {
    order = order.includes(index) ? order.filter((other) => other !== index) : [...order, index];
    const rank = order.indexOf(index) + 1;
    announce(rank ? text("ranked", { number: index + 1, rank }) : text("removed", { label: text("candidate", { number: index + 1 }) }));
    draw(index);
    options.change?.();
  }
  function draw(focused = -1) {
    const hadFocus = list.contains(document.activeElement);
    list.replaceChildren(...candidates.map((content, index) => {
      const rank = order.indexOf(index) + 1;
      return h("li", {}, h("button", { type: "button", class: "option large", "aria-pressed": String(rank > 0), "aria-keyshortcuts": String(index + 1),
        click: () => take(index) }, keyCap(String(index + 1)),
        h("span", { class: "words", dir: "auto" }, content),
        h("span", { class: rank ? "rank" : "rank none" }, rank ? text("rank", { rank }) : text("no_rank"))));
    }));
    if (hadFocus && focused >= 0) list.children[focused].querySelector("button").focus();
  }
  draw();
  return {
    element: h("div", {}, h("p", { class: "hint" }, text("ranking_help")), list),
    value: () => (order.length === candidates.length ? order : undefined),
    set: (answer) => { order = [...answer]; draw(); },
    key(event) {
      if (takesText(event.target)) return false;
      const index = digit(event);
      if (index >= 0 && index < candidates.length) { take(index); return true; }
      if (event.key === "Backspace" && order.length) { take(order.at(-1)); return true; }
      return false;
    },
  };
}

function conversationEditor(task, options) {
  let rows = [];
  const list = h("ol", { class: "turn-list" });
  const last = h("button", { type: "button", click: () => addTurn() }, text("add_turn"));
  function row(role, content) {
    const number = rows.length + 1;
    const select = h("select", { "aria-label": text("turn_role", { number }), change: () => options.change?.() },
      ["user", "assistant", "system", "tool"].map((name) => h("option", { value: name, selected: name === role }, text("role." + name))));
    const field = h("textarea", { rows: "3", dir: "auto", "aria-label": text("turn_text", { number }), input: () => options.change?.() });
    field.value = content;
    const entry = { select, field };
    entry.element = h("li", {}, select, field, h("button", { type: "button", class: "quiet", "aria-label": text("remove", { label: text("turn_text", { number }) }),
      click: () => { rows = rows.filter((other) => other !== entry); entry.element.remove(); options.change?.(); last.focus(); } }, "✕"));
    return entry;
  }
  function addTurn(role = rows.at(-1)?.select.value === "assistant" ? "user" : "assistant", content = "") {
    const entry = row(role, content);
    rows.push(entry);
    list.append(entry.element);
    return entry;
  }
  addTurn("assistant");
  last.addEventListener("click", () => rows.at(-1)?.field.focus());
  return {
    element: h("div", {}, list, last),
    value() {
      const turns = rows.filter(({ field }) => field.value.trim()).map(({ select, field }) => ({ role: select.value, content: field.value }));
      return turns.at(-1)?.role === "assistant" ? turns : undefined;
    },
    set(answer) {
      rows = [];
      list.replaceChildren();
      for (const each of answer) addTurn(each.role, each.content);
    },
    focus: () => { rows[0]?.field.focus(); return true; },
    key: () => false,
  };
}

const EDITORS = {
  choice: (task, options) => (task.labels ? labelEditor(task, options, false) : textEditor(task, options, "")),
  choices: (task, options) => labelEditor(task, options, true),
  text: (task, options) => textEditor(task, options, ""),
  rewrite: (task, options) => textEditor(task, options, options.immediate ? (task.content.answer ?? "") : ""),
  spans: spansEditor,
  rating: ratingEditor,
  preference: preferenceEditor,
  ranking: rankingEditor,
  conversation: conversationEditor,
};

