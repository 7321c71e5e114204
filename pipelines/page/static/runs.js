// The page of runs: the list, one run with its graph, its time line, and each step with its output and log; and use cases.
// Texts reach the document as text alone (textContent, attributes); nothing is ever parsed as HTML.

import { drawGraph, MARKS, recordsOf, showGraph, shownOf } from "./graph.js";
import { make } from "./islands.js";
import { follow, retry } from "./stream.js";
import { readUsecases, showUsecases } from "./usecases.js";
import { ageText, ask, byId, onToken, place, setText, showState, showTrouble, timeText } from "./words.js";

const LOG_LINES = 200;
const BARS_MAX = 300;
const OUTPUT_LETTERS = 4000;
const CLOCK_MILLISECONDS = 2000;
const ADDRESS = /^([0-9a-f-]{36})\/([0-9a-f-]{36})(?:\/([a-z][a-z0-9_]*(?:\[\d+\])?))?$/;

const state = {
  token: "", look: null, filter: "", kind: "all",
  pipeline: null, run: null, step: null, // ids and name of what is shown
  seen: null, // mark of the run as it was read last
  told: null, // the run
  buttons: new Map(),
  logOf: "",
  skew: 0, // milliseconds by which the service's clock is ahead of this one
};
const clock = () => Date.now() + state.skew;
const address = (...parts) => parts.filter(Boolean).join("/");

// ---- the list

function takeLook(text) {
  if (!state.look) readUsecases();
  state.look = JSON.parse(text);
  state.skew = Date.parse(state.look.now) - Date.now();
  const { active, left_out: left, now } = state.look;
  const count = active.length + left;
  setText(byId("summary"), `${count} ${count === 1 ? "run has" : "runs have"} not ended. As of ${new Date(now).toLocaleTimeString()}.`);
  showList();
  showRun();
}

function showList() {
  if (!state.look) return;
  const { active, ended, left_out: left } = state.look;
  const runs = [...active, ...(state.kind === "active" ? [] : ended)].filter((run) =>
    (state.kind !== "failed" || run.status === "failed") &&
    [run.pipeline, run.tenant, run.cause, run.id].some((text) => text.toLowerCase().includes(state.filter)));
  const more = left ? `; ${left} more have not ended` : "";
  setText(byId("count"), `${runs.length === 1 ? "1 run is" : `${runs.length || "No"} runs are`} like that${more}.`);
  const old = new Map([...byId("runs").children].map((row) => [row.dataset.run, row]));
  place(byId("runs"), runs.map((run) => showRow(old.get(run.id) ?? makeRow(run), run)));
}

function makeRow(run) {
  const link = make("a", { href: `#${run.pipeline_id}/${run.id}` }, `${run.pipeline}/${run.number}`);
  const row = make("tr", {}, make("th", { scope: "row" }, link), ...Array.from({ length: 5 }, () => make("td")));
  row.dataset.run = run.id;
  return row;
}

function showRow(row, run) {
  const age = ageText((clock() - Date.parse(run.created_at)) / 1000);
  [run.status, run.tenant, run.cause, age, run.message].forEach((text, position) => setText(row.children[position + 1], text));
  row.classList.toggle("chosen-row", run.id === state.run);
  return row;
}

// ---- one run

function showRun() {
  if (!state.run || !state.look) return;
  const known = [...state.look.active, ...state.look.ended].find((run) => run.id === state.run);
  const seen = known ? known.mark : "not listed";
  if (seen === state.seen) return;
  state.seen = seen;
  readRun(state.run);
}

async function readRun(id) {
  try {
    const run = JSON.parse(await ask(`/api/pipelines/${state.pipeline}/executions/${id}`, state.token));
    const known = [...state.look.active, ...state.look.ended].find((one) => one.id === id);
    if (state.run !== id) return;
    const isNew = state.told?.execution_id !== id;
    state.told = run;
    setText(byId("run-title"), `Run ${run.number}${known ? ` of ${known.pipeline}` : ""}`);
    setText(byId("run-message"), `${run.status}${run.message ? `: ${run.message}` : ""}`);
    showFacts(byId("run-facts"), factsOf(run));
    if (isNew) state.buttons = drawGraph(byId("graph"), run.graph, openStep);
    showSteps();
  } catch (error) {
    if (state.run !== id) return;
    forgetRun();
    state.seen = null; // the next look tries again
    setText(byId("run-title"), "Run");
    setText(byId("run-message"), error.message);
  }
}

function forgetRun() {
  state.told = null;
  for (const part of ["run-title", "run-message"]) setText(byId(part), "");
  for (const part of ["run-facts", "graph", "times"]) byId(part).replaceChildren();
  byId("step").hidden = true;
}

const factsOf = (run) => [
  ["Begun by", run.cause], ["Created", timeText(run.created_at)],
  ["Ended", run.completed_at ? timeText(run.completed_at) : ""],
  ["Inputs", Object.keys(run.inputs).length ? JSON.stringify(run.inputs).slice(0, OUTPUT_LETTERS) : ""],
  ["Runs again", run.rerun_of ?? ""], ["Notes", run.notes.join("; ")],
];

function showFacts(list, rows) {
  const shown = rows.filter(([, text]) => text);
  list.replaceChildren(...shown.flatMap(([label, text]) => [make("dt", {}, label), make("dd", {}, text)]));
}

function showSteps() {
  if (!state.told) return;
  showGraph(state.buttons, state.told.graph, state.told.steps, state.step?.split("[")[0]);
  showTimes();
  showStep();
}

// Open the step that stands for a declared one.
function openStep(name) {
  location.hash = address(state.pipeline, state.run, shownOf(name, state.told.steps).name);
}

// ---- time line

function showTimes() {
  const begun = state.told.steps.filter((step) => step.started_at);
  begun.sort((a, b) => Date.parse(a.started_at) - Date.parse(b.started_at));
  const latest = Math.max(...begun.map((step) => Date.parse(step.ended_at ?? step.started_at)));
  const end = state.told.completed_at ? Date.parse(state.told.completed_at) : Math.max(clock(), latest);
  const from = begun.length ? Date.parse(begun[0].started_at) : end;
  const span = Math.max(end - from, 1000);
  const left = begun.length - BARS_MAX;
  const more = left > 0 ? `; ${left} later steps are not shown` : "";
  setText(byId("times-text"), begun.length ? `From ${timeText(from)}, ${ageText(span / 1000)}${more}.` : "No step has begun.");
  const old = new Map([...byId("times").children].map((item) => [item.dataset.step, item]));
  const percent = (moment) => (100 * (Math.max(moment, from) - from)) / span;
  place(byId("times"), begun.slice(0, BARS_MAX).map((step) => showBar(old.get(step.name) ?? makeBar(step.name), step, percent, end)));
}

function makeBar(name) {
  const bar = make("button", { type: "button" }, name);
  bar.addEventListener("click", () => { location.hash = address(state.pipeline, state.run, name); });
  const item = make("li", {}, bar);
  item.dataset.step = name;
  return item;
}

function showBar(item, step, percent, now) {
  const bar = item.firstChild;
  const [start, end] = [Date.parse(step.started_at), step.ended_at ? Date.parse(step.ended_at) : now];
  bar.className = `step ${step.status}`;
  bar.style.left = `min(${percent(start)}%, 100% - 1.5rem)`;
  bar.style.width = `${percent(end) - percent(start)}%`;
  bar.title = `${step.name}: ${step.status}, ${step.ended_at ? "took" : "for"} ${ageText((end - start) / 1000)}`;
  bar.setAttribute("aria-label", bar.title);
  return item;
}

// ---- one step

function showStep() {
  byId("step").hidden = !state.step;
  if (!state.step || !state.told) return;
  const declared = state.told.graph.find((one) => one.name === state.step.split("[")[0]);
  const step = state.told.steps.find((one) => one.name === state.step) ?? { name: state.step, status: "pending", output: {} };
  setText(byId("step-title"), `Step ${step.name}`);
  const why = step.error || step.skipped_because || "";
  setText(byId("step-message"), `${MARKS[step.status]} ${step.status}${why ? `: ${why}` : ""}`);
  const output = JSON.stringify(step.output);
  showFacts(byId("step-facts"), [
    ["Type", declared?.step_type ?? ""], ["After", declared?.depends_on.join(", ") ?? ""],
    ["Tries", step.attempt ? String(step.attempt) : ""], ["Started", step.started_at ? timeText(step.started_at) : ""],
    ["Ended", step.ended_at ? timeText(step.ended_at) : ""],
    ["Bodies", declared ? recordsOf(declared.name, state.told.steps).filter((one) => one.name.includes("[")).map((one) => `${one.name} ${one.status}`).slice(0, 50).join(", ") : ""],
    ["Output", output === "{}" ? "" : output.slice(0, OUTPUT_LETTERS)], ["Job", step.job_id ?? ""],
  ]);
  byId("step-log-read").hidden = !step.job_id;
  const key = `${step.name} ${step.job_id ?? ""} ${step.status}`;
  if (state.logOf !== key) readLog(step.job_id, key);
}

async function readLog(job, key) {
  state.logOf = key;
  const show = (text, log) => {
    if (state.logOf !== key) return;
    setText(byId("step-log-text"), text);
    setText(byId("step-log"), log);
  };
  if (!job) { show("Only steps with a job have a log.", ""); return; }
  setText(byId("step-log-text"), "Reading the log.");
  try {
    const text = await ask(`/api/clusters/auto/jobs/${job}/logs?tail=${LOG_LINES}`, state.token);
    show(text ? `The last ${LOG_LINES} lines at most.` : "The log is empty.", text);
  } catch (error) {
    show(error.message, "");
  }
}

// ---- controls

function takeAddress() {
  const [, pipeline, run, step] = ADDRESS.exec(location.hash.slice(1)) ?? [];
  const [hadRun, hadStep] = [state.run, state.step];
  Object.assign(state, { pipeline: pipeline ?? null, run: run ?? null, step: step ?? null });
  if (state.run !== hadRun) {
    forgetRun();
    Object.assign(state, { seen: null, logOf: "" });
    byId("run").hidden = !state.run;
    showList();
    showRun();
    byId(state.run ? "run-title" : "runs-title").focus();
  }
  showSteps();
  if (state.run === hadRun && state.step !== hadStep) {
    if (state.step) byId("step-title").focus();
    else state.buttons.get(hadStep.split("[")[0])?.focus();
  }
}

byId("filter").addEventListener("input", (event) => { state.filter = event.target.value.trim().toLowerCase(); showList(); });
byId("kind").addEventListener("change", (event) => { state.kind = event.target.value; showList(); });
byId("step-log-read").addEventListener("click", () => { state.logOf = ""; showStep(); });
byId("run-close").addEventListener("click", (event) => { event.preventDefault(); location.hash = ""; });
onToken((token) => { Object.assign(state, { token, seen: null }); retry(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.run) location.hash = state.step ? address(state.pipeline, state.run) : "";
});
window.addEventListener("hashchange", takeAddress);
setInterval(() => { showList(); if (state.told && !state.told.completed_at) showTimes(); }, CLOCK_MILLISECONDS);

showUsecases(() => state.token);
follow("/page/runs/events", () => state.token, (kind, data) => ({ look: takeLook, trouble: showTrouble })[kind]?.(data), showState);
takeAddress();
