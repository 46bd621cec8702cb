// Keeps the dashboard alive: parts of the page are read again when the loop moves on, and log lines are added.
import { listen } from "/static/app.js";

const LINES = 500, LEAST_MS = 3000, SYSTEM_MS = 15000;
const shown = new Map();
let asked = 0, reading = false;

function isUsed(element) {
  // Nobody likes a chart that changes under the pointer, or a focus that is lost.
  return element.matches(":hover") || element.contains(document.activeElement);
}

function replace(old, fresh) {
  const { drawn, mount } = window.posttrainCharts ?? {};
  for (const figure of old.querySelectorAll("figure.chart")) {
    drawn?.get(figure)?.chart.dispose();
    drawn?.delete(figure);
  }
  old.replaceWith(fresh);
  mount?.(fresh);
}

async function refresh() {
  if (reading || document.hidden) return;
  reading = true;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, redirect: "error" });
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const old of document.querySelectorAll("[data-live]")) {
      const fresh = page.getElementById(old.id);
      if (!fresh || shown.get(old.id) === fresh.innerHTML || isUsed(old)) continue;
      shown.set(old.id, fresh.innerHTML);
      replace(old, document.adoptNode(fresh));
    }
  } catch {
    // The server is away; the stream says so, and connects again by itself.
  } finally {
    reading = false;
    asked = Date.now();
  }
}

let timer;
function refreshSoon() {
  clearTimeout(timer);
  timer = setTimeout(refresh, Math.max(200, asked + LEAST_MS - Date.now()));
}

const log = document.getElementById("log");
function addLine(line) {
  log.querySelector(".empty")?.remove();
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 30;
  const row = document.createElement("p");
  row.textContent = line;
  log.append(row);
  while (log.childElementCount > LINES) log.firstElementChild.remove();
  if (follows) log.scrollTop = log.scrollHeight;
}

const place = document.getElementById("stream");
function say(live) {
  if (place.classList.contains("on") === live && place.querySelector("b").textContent) return;
  place.classList.toggle("on", live);
  place.querySelector("b").textContent = live ? place.dataset.on : place.dataset.off;
}

let first = true;
const source = listen({
  status: () => {
    // The page that was just read has the first state.
    if (!first) refreshSoon();
    first = false;
  },
  training: refreshSoon,
  log: ({ line }) => addLine(line),
});
source.addEventListener("open", () => say(true));
source.addEventListener("error", () => say(false));
setInterval(refresh, SYSTEM_MS);
