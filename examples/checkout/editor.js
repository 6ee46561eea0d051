// Keeps the customer while somebody works on it: a word to the server when he types, at most every third of the
// time that it is his, and when he comes back to the window. If the customer is not his any more, he reads why,
// and what he has typed stays where it is. Nobody who leaves the window open keeps others out.
"use strict";

const form = document.querySelector("form[data-renew]");
const state = document.querySelector("#state");
const ttl = form.dataset.ttl * 1000;
let asked = Date.now();
let timer, lost;

function show(text, kind) {
  state.textContent = text;
  state.className = "state " + kind;
}

function kept() {
  clearTimeout(timer);
  timer = setTimeout(() => show("your time is up: typing takes it back, unless somebody has it by then", "used"), ttl);
}

async function renew(pause) {
  if (lost || Date.now() - asked < pause) return;
  asked = Date.now();
  try {
    const body = new URLSearchParams({ form: form.elements.form.value, token: form.elements.token.value });
    const answer = await fetch(form.dataset.renew, { method: "POST", body });
    if (answer.ok) {
      show(await answer.text(), "yours");
      kept();
    } else if (answer.status === 409) {
      lost = true;
      clearTimeout(timer);
      show(await answer.text(), "lost");
      document.querySelector("#save").disabled = true;
    } else {
      show(answer.status === 401 ? "you are logged out" : "the server cannot renew it now", "used");
    }
  } catch {
    show("the server does not answer", "used");
  }
}

form.addEventListener("input", () => renew(ttl / 3));
window.addEventListener("focus", () => renew(Math.min(2000, ttl / 3)));
kept();
