// Words and questions that the pages of Atoll share.
// Texts reach the document as text alone (textContent, attributes); nothing is ever parsed as HTML.

import { headers } from "./stream.js";

export const byId = (id) => document.getElementById(id);
export const timeText = (moment) => new Date(moment).toLocaleString();

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Make these elements the children of a list, in this order. What is in its place stays untouched, and keeps the focus.
export function place(list, items) {
  for (const item of [...list.children]) if (!items.includes(item)) item.remove();
  items.forEach((item, position) => {
    if (list.children[position] !== item) list.insertBefore(item, list.children[position] ?? null);
  });
}

export function ageText(seconds) {
  for (const [size, unit] of [[86400, "days"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * size) return `${Math.floor(seconds / size)} ${unit}`;
  }
  return `${Math.max(0, Math.floor(seconds))} s`;
}

// Return what the API answers to a GET; an Error has the detail of its problem as message.
export async function ask(path, token, hear = () => {}) {
  const response = await fetch(path, { headers: headers(token), cache: "no-store" });
  hear(response.headers);
  const text = await response.text();
  if (response.ok) return text;
  throw new Error(problemText(text, response.status));
}

// Return what an answer tells that is no success: the detail of its problem.
export function problemText(text, status) {
  let told = text.slice(0, 300);
  try { told = JSON.parse(text).detail ?? told; } catch { /* no problem details */ }
  return told || `The server answered ${status}.`;
}

// Show the state of the stream: live, lost, or that it needs a token.
export function showState({ kind, text }) {
  setText(byId("connection"), text);
  byId("connection").classList.toggle("trouble", kind !== "live");
  byId("token-form").hidden = kind !== "token";
}

export const showTrouble = (text) => showState(text ? { kind: "lost", text } : { kind: "live", text: "Live." });

// Give the token that was typed to `take`; it stays in no field.
export function onToken(take) {
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const token = byId("token").value.trim();
    byId("token").value = "";
    take(token);
  });
}
