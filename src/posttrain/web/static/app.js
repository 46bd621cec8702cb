// What the pages of the server share: calls of the API, and the stream of events.

let csrf = document.querySelector('meta[name="csrf-token"]')?.content;

/** An answer of the API that is not a success: its status, and its one line. */
export class ApiError extends Error {
  constructor(status, line) {
    super(line);
    this.status = status;
  }
}

/**
 * Calls the API.
 * @param {string} method GET, POST, PUT or DELETE
 * @param {string} path such as "/api/session"
 * @param {object} [body] sent as JSON
 * @param {object} [options]
 * @param {boolean} [options.stay] do not leave for the page of signing in: this one holds what is not sent yet
 * @param {boolean} [options.keepalive] the request outlives the page
 * @returns {Promise<any>} the answer's JSON; null if it has none
 * @throws {ApiError}
 */
export async function call(method, path, body, { stay = false, keepalive = false } = {}) {
  const headers = { Accept: "application/json" };
  if (csrf) headers["X-CSRF-Token"] = csrf;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    credentials: "same-origin",
    redirect: "error",
    keepalive,
  });
  if (answer.status === 401 && !stay) {
    // The session ended meanwhile; the page comes back after signing in.
    location.assign(`/sign-in?next=${encodeURIComponent(location.pathname + location.search)}`);
  }
  if (answer.status === 204) return null;
  const content = await answer.json().catch(() => ({ error: answer.statusText }));
  if (!answer.ok) throw new ApiError(answer.status, content.error ?? answer.statusText);
  return content;
}

/** Takes up the session that was begun in another tab, after this page's has ended; returns it, with `isNew`. */
export async function renewSession() {
  const session = await call("GET", "/api/session", undefined, { stay: true });
  const isNew = session.csrf !== csrf;
  csrf = session.csrf;
  return { ...session, isNew };
}

/**
 * Listens to the stream of events; the browser connects again by itself.
 * @param {Object<string, function(any): void>} handlers by kind: "status", "training", "log"
 * @returns {EventSource} close() ends it
 */
export function listen(handlers) {
  const source = new EventSource("/api/events");
  for (const [kind, handle] of Object.entries(handlers)) {
    source.addEventListener(kind, (event) => handle(JSON.parse(event.data)));
  }
  return source;
}

// The secret of a one-time link must not stay in the address bar, nor be sent twice.
if (location.pathname === "/sign-in" && location.search.includes("token=")) history.replaceState(null, "", location.pathname);
for (const form of document.querySelectorAll("form[data-once]")) {
  form.addEventListener("submit", () => setTimeout(() => form.querySelector("button")?.setAttribute("disabled", "")));
}
