// Dialogs whose forms call the API: they ask first, show what went wrong, and show a secret this once.
import { call } from "/static/app.js";

/** Returns the fields of a form as JSON: numbers by data-type="number", lists of nothing, null by data-null. */
function body(form) {
  const values = {};
  for (const field of form.elements) {
    if (!field.name || (field.type === "checkbox" && !field.checked)) continue;
    if (field.hasAttribute("data-null")) values[field.name] = null;
    else if (field.dataset.type === "number") values[field.name] = Number(field.value);
    else if (field.value !== "" || field.required) values[field.name] = field.value;
  }
  return values;
}

function showSecret(form, secret) {
  const place = form.querySelector("[data-secret]");
  const field = place.querySelector("input");
  field.value = place.dataset.secret.startsWith("/") ? `${location.origin}${place.dataset.secret}${secret}` : secret;
  for (const part of form.querySelectorAll("[data-before]")) part.hidden = true;
  place.hidden = false;
  form.querySelector(".buttons").replaceChildren(...closers(form));
  field.focus();
  field.select();
}

function closers(form) {
  const place = form.querySelector("[data-secret]");
  const copy = document.createElement("button");
  Object.assign(copy, { type: "button", className: "primary", textContent: place.dataset.copy });
  copy.addEventListener("click", async () => {
    place.querySelector("input").select();
    await navigator.clipboard?.writeText(place.querySelector("input").value).catch(() => document.execCommand("copy"));
    copy.textContent = place.dataset.copied;
  });
  const close = document.createElement("button");
  Object.assign(close, { type: "button", textContent: place.dataset.close });
  close.addEventListener("click", () => location.reload());
  // Escape closes it too, and the list behind it is old then.
  form.closest("dialog").addEventListener("close", () => location.reload());
  return [close, copy];
}

async function send(event) {
  event.preventDefault();
  const form = event.target;
  const problem = form.querySelector("[role=alert]");
  const buttons = form.querySelectorAll("button");
  problem.hidden = true;
  for (const button of buttons) button.disabled = true;
  try {
    const values = body(form);
    const sends = form.dataset.call !== "DELETE" && !form.hasAttribute("data-empty");
    const answer = await call(form.dataset.call, form.dataset.path, sends ? values : undefined);
    if (answer?.secret) showSecret(form, answer.secret);
    else {
      sessionStorage.setItem("posttrain-message", form.dataset.message ?? "");
      location.reload();
      return;
    }
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
  }
  for (const button of buttons) button.disabled = false;
}

for (const form of document.querySelectorAll("form[data-call]")) form.addEventListener("submit", send);
for (const button of document.querySelectorAll("[data-open]")) {
  button.addEventListener("click", () => document.getElementById(button.dataset.open).showModal());
}
for (const button of document.querySelectorAll("[data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}

// On a phone the tabs scroll sideways.
document.querySelector(".tabs [aria-current]")?.scrollIntoView({ inline: "nearest", block: "nearest" });
for (const place of document.querySelectorAll("[data-reload]")) {
  setTimeout(() => location.reload(), 1000 * Number(place.dataset.reload));
}

// What was done is said after the page has been read again.
const message = document.getElementById("message");
const text = sessionStorage.getItem("posttrain-message");
sessionStorage.removeItem("posttrain-message");
if (message && text) {
  message.hidden = false;
  message.textContent = text;
}
