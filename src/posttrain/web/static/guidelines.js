// The page of the guideline: saves a new version.

import { call } from "./app.js";

const form = document.getElementById("write");
let isSaved = false;

form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = form.querySelector("button");
  const problem = document.getElementById("problem");
  button.disabled = true;
  problem.hidden = true;
  try {
    const note = form.elements.note.value.trim();
    // The form's text has the line ends of the network; the same text must be the same version.
    await call("POST", "/api/guidelines", { text: form.elements.text.value.replace(/\r\n?/g, "\n"), note: note || null });
    isSaved = true;
    location.assign("/guidelines");
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
    button.disabled = false;
  }
});

addEventListener("beforeunload", (event) => {
  const field = form?.elements.text;
  if (field && !isSaved && field.value !== field.defaultValue) event.preventDefault();
});
