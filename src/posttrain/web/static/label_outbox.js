// Sends the requests of the labelling page one after another, and keeps each until the server has acknowledged it.

import { ApiError, call, renewSession } from "./app.js";

const LONGEST_WAIT = 15_000;

/** Whether the same request may succeed later; of an answer that is sent twice, one is stored. */
function isPassing(error) {
  // No ApiError: there was no answer at all.
  return !(error instanceof ApiError) || [401, 408, 429, 503, 507].includes(error.status) || error.status >= 500;
}

export class Outbox {
  /**
   * @param {string} account whose answers they are: another one that signs in meanwhile must not send them
   * @param {function(string, number): void} report gets "sent", "sending", "waiting", "sign-in" or "other-account", and
   *   the number of answers that are not stored yet
   */
  constructor(account, report) {
    this.account = account;
    this.report = report;
    this.entries = [];
    this.isRunning = false;
    this.wake = () => {};
    addEventListener("online", () => this.wake());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.wake(); });
  }

  /**
   * @param {{path: string, item?: number, body: function(): object, done: function(any): void, failed: function(ApiError): void}}
   *   entry `item` is set if it is an answer; `body` is called when it is sent
   */
  add(entry) {
    this.entries.push(entry);
    this.tell("sending");
    if (!this.isRunning) this.run();
  }

  /** Items whose answers are not stored yet, besides the one that is being sent. */
  get waiting() {
    return this.entries.slice(1).map((entry) => entry.item).filter(Boolean);
  }

  get unsent() {
    return this.entries.filter((entry) => entry.item).length;
  }

  async run() {
    this.isRunning = true;
    for (let tries = 0; this.entries.length; ) {
      const [entry] = this.entries;
      let reply;
      let problem = null;
      try {
        // The body stays the same in all tries, so that the server knows a repeated answer.
        entry.sent ??= entry.body();
        reply = await call("POST", entry.path, entry.sent, { stay: true });
      } catch (error) {
        if (isPassing(error)) {
          await this.pause(error, tries++);
          continue;
        }
        // A session that was begun in another tab has another value against forged requests.
        if (error.status === 403 && (await this.hasNewSession())) continue;
        problem = error;
      }
      tries = 0;
      this.entries.shift();
      if (problem) entry.failed(problem);
      else entry.done(reply);
      this.tell(this.entries.length ? "sending" : "sent");
    }
    this.isRunning = false;
  }

  tell(state) {
    this.report(state, this.unsent);
  }

  async pause(error, tries) {
    const isSignedOut = error.status === 401;
    this.tell(isSignedOut ? "sign-in" : "waiting");
    await this.sleep(Math.min(LONGEST_WAIT, 500 * 2 ** tries));
    if (isSignedOut) await this.hasNewSession();
  }

  /** Waits for a session of the account that gave these answers; returns whether it is another than the page's. */
  async hasNewSession() {
    for (;;) {
      const session = await renewSession().catch(() => null);
      if (!session || session.name === this.account) return Boolean(session?.isNew);
      this.tell("other-account");
      await this.sleep(LONGEST_WAIT);
    }
  }

  sleep(milliseconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, milliseconds);
      this.wake = () => { clearTimeout(timer); resolve(); };
    });
  }
}
