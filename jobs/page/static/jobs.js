// The page of jobs: the queue, the time line, and one job with its GPUs, history, log and cost.
// Texts reach the document as text alone (textContent, attributes); nothing is ever parsed as HTML.

import { gpuText, gpusOf, make, nodeCard } from "./islands.js";
import { follow, retry } from "./stream.js";
import { ageText, ask, byId, onToken, place, setText, showState, showTrouble, timeText } from "./words.js";

const ROWS_PER_PAGE = 50;
const BARS_MAX = 60; // per type of GPU
const LOG_LINES = 200;
const EVENTS_MAX = 200;
const HOUR = 3600000;
const TICKS = 4;
const CLOCK_MILLISECONDS = 10000;
const READ_MILLISECONDS = 14000; // without a change, the shown job is read again after this
const WAITS = ["pending", "queued", "preempted"];

const state = {
  token: "", look: null, filter: "", kind: "active", page: 0, hours: 6,
  job: null, // id of the job that is shown
  seen: "", readAt: 0, // what of it was read last, and when
  logOf: null,
  skew: 0, // milliseconds by which the service's clock is ahead of this one
  cards: new Map(),
};
const clock = () => Date.now() + state.skew;
const natural = new Intl.Collator("en", { numeric: true });

const gpusText = (job) => (job.gpu_count ? `${job.gpu_count} ${job.gpu_type || "of any type"}` : "none");
const allJobs = () => [...state.look.active, ...state.look.ended];

// ---- what the stream tells

function takeLook(text) {
  state.look = JSON.parse(text);
  state.skew = Date.parse(state.look.now) - Date.now();
  showAll();
}

function showAll() {
  if (!state.look) return;
  showSummary();
  showQueue();
  showLines();
  showJob();
}

function showSummary() {
  const { active, left_out: left, now } = state.look;
  const running = active.filter((job) => job.status === "running").length;
  const waiting = active.filter((job) => WAITS.includes(job.status)).length;
  const more = left ? `; ${left} more are not shown` : "";
  setText(byId("summary"),
    `${active.length} jobs have not ended: ${running} run, ${waiting} wait${more}. As of ${new Date(now).toLocaleTimeString()}.`);
}

// ---- queue

function shownJobs() {
  const { active, ended } = state.look;
  const jobs = state.kind === "ended" ? ended
    : active.filter((job) => state.kind === "active" || (state.kind === "running" ? job.status === "running" : WAITS.includes(job.status)));
  if (!state.filter) return jobs;
  return jobs.filter((job) =>
    [job.name, job.tenant, job.cluster, job.gpu_type, job.queue, job.id].some((text) => text.toLowerCase().includes(state.filter)));
}

function showQueue() {
  const jobs = shownJobs();
  const pages = Math.max(1, Math.ceil(jobs.length / ROWS_PER_PAGE));
  state.page = Math.min(state.page, pages - 1);
  const from = state.page * ROWS_PER_PAGE;
  const shown = jobs.slice(from, from + ROWS_PER_PAGE);
  setText(byId("count"), jobs.length === 1 ? "1 job is like that." : `${jobs.length || "No"} jobs are like that.`);
  setText(byId("range"), shown.length ? `Jobs ${from + 1} to ${from + shown.length} of ${jobs.length}` : "");
  byId("before").disabled = state.page === 0;
  byId("after").disabled = state.page >= pages - 1;
  const body = byId("jobs");
  const old = new Map([...body.children].map((row) => [row.dataset.job, row]));
  place(body, shown.map((job) => showRow(old.get(job.id) ?? makeRow(job), job)));
}

function makeRow(job) {
  const link = make("a", { href: `#${job.id}` }, job.name);
  const row = make("tr", {}, make("th", { scope: "row" }, link), ...Array.from({ length: 6 }, () => make("td")));
  row.dataset.job = job.id;
  return row;
}

function showRow(row, job) {
  const age = ageText((clock() - Date.parse(job.created_at)) / 1000);
  const texts = [job.status, gpusText(job), job.cluster, job.tenant, age, job.message];
  texts.forEach((text, position) => setText(row.children[position + 1], text));
  row.classList.toggle("chosen-row", job.id === state.job);
  return row;
}

// ---- time line

// Where a job lies on the time line: parts with a class, a start and an end, in milliseconds.
function partsOf(job, now) {
  const expected = job.seconds ? job.seconds * 1000 : HOUR / 4;
  if (job.ended_at) {
    const end = Date.parse(job.ended_at);
    return job.started_at ? [["done", Date.parse(job.started_at), end]] : [];
  }
  if (job.started_at) {
    const start = Date.parse(job.started_at);
    const end = job.seconds ? start + expected : 0;
    return [["run", start, now], ...(end > now ? [["rest", now, end]] : [])];
  }
  const begin = Math.max(now, job.not_before ? Date.parse(job.not_before) : 0);
  return [["wait", begin, begin + expected]];
}

function barText(job) {
  if (job.ended_at) return `${job.name}: ${job.status}, ${gpusText(job)}, from ${timeText(job.started_at)} to ${timeText(job.ended_at)}`;
  const length = job.seconds ? `, expected to take ${ageText(job.seconds)}` : ", for an unknown time";
  const since = job.started_at ? `runs since ${timeText(job.started_at)}` : job.not_before ? `starts after ${timeText(job.not_before)}` : "waits";
  return `${job.name}: ${job.status}, ${gpusText(job)}, ${since}${length}`;
}

function showLines() {
  const now = clock();
  const span = { from: now - (state.hours * HOUR) / 2, to: now + (state.hours * HOUR) / 2 };
  const groups = new Map();
  for (const job of allJobs()) {
    if (!job.gpu_count) continue;
    const parts = partsOf(job, now).filter(([, start, end]) => end > span.from && start < span.to);
    if (!parts.length) continue;
    const name = job.gpu_type || "any type";
    groups.set(name, [...(groups.get(name) ?? []), { job, parts }]);
  }
  const focused = document.activeElement?.dataset?.bar;
  const names = [...groups.keys()].sort(natural.compare);
  byId("lines").replaceChildren(...names.map((name) => makeLine(name, groups.get(name), span, now)));
  setText(byId("line-text"), names.length ? "" : "No job with GPUs is in this time.");
  if (focused) document.querySelector(`.bar[data-bar="${CSS.escape(focused)}"]`)?.focus();
}

function makeLine(name, entries, span, now) {
  const place = (moment) => (100 * (Math.min(Math.max(moment, span.from), span.to) - span.from)) / (span.to - span.from);
  const axis = make("div", { class: "axis", "aria-hidden": "true" });
  for (let tick = 0; tick < TICKS; tick += 1) {
    const moment = span.from + (tick * (span.to - span.from)) / TICKS;
    const mark = make("span", {}, new Date(moment).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }));
    mark.style.left = `${place(moment)}%`;
    axis.append(mark);
  }
  const order = (entry) => entry.parts[0][1];
  const shown = [...entries].sort((a, b) => order(a) - order(b)).slice(-BARS_MAX);
  const rows = shown.map(({ job, parts }) => make("li", {}, ...parts.map((part) => makeBar(job, part, place))));
  const line = make("div", { class: "now", "aria-hidden": "true" });
  line.style.left = `${place(now)}%`;
  const left = entries.length - shown.length;
  return make("section", { class: "line" }, make("h3", {}, name), make("p", {}, useText(name, left)), axis,
    make("ul", { class: "bars", "aria-label": `Jobs with ${name} by time` }, ...rows, line));
}

function makeBar(job, [kind, start, end], place) {
  const isOpen = kind !== "rest";
  const bar = make(isOpen ? "button" : "span", { class: `bar ${kind}`, title: barText(job) }, isOpen ? job.name : "");
  bar.style.left = `${place(start)}%`;
  bar.style.width = `${place(end) - place(start)}%`;
  if (isOpen) {
    bar.type = "button";
    bar.dataset.bar = job.id;
    bar.setAttribute("aria-label", barText(job));
    bar.addEventListener("click", () => { location.hash = job.id; });
  }
  return bar;
}

function useText(name, left) {
  const told = Object.entries(state.look.clusters).filter(([, types]) => types[name]).map(([cluster, types]) => {
    const { total, used, queued } = types[name];
    return `${cluster}: ${Math.round(used * 100) / 100} of ${Math.round(total * 100) / 100} held, ${queued} asked for by jobs that wait`;
  });
  return [...told, ...(left ? [`${left} earlier jobs are not shown`] : [])].join("; ");
}

// ---- one job

function showJob() {
  byId("job").hidden = !state.job;
  if (!state.job) return;
  const known = allJobs().find((job) => job.id === state.job);
  const seen = known ? `${known.updated_at} ${known.status}` : "";
  if (seen === state.seen && Date.now() - state.readAt < READ_MILLISECONDS) return;
  state.seen = seen;
  state.readAt = Date.now();
  readJob(state.job);
}

const askJob = (path, hear) => ask(`/api/clusters/auto/jobs/${path}`, state.token, hear);

async function readJob(id) {
  try {
    const job = JSON.parse(await askJob(id));
    if (state.job !== id) return;
    setText(byId("job-title"), `Job ${job.name}`);
    setText(byId("job-message"), `${job.status}${job.message ? `: ${job.message}` : ""}`);
    const [cost, events] = [JSON.parse(await askJob(`${id}/cost`)), JSON.parse(await askJob(`${id}/events?page_size=${EVENTS_MAX}`))];
    if (state.job !== id) return;
    showFacts(job, cost);
    showEvents(events.items);
  } catch (error) {
    if (state.job === id) forgetJob(error.message);
    return;
  }
  readGpus(id);
  if (state.logOf !== id) readLog(id);
}

function forgetJob(text) {
  setText(byId("job-title"), "Job");
  setText(byId("job-message"), text);
  for (const part of ["job-facts", "job-events", "job-nodes", "job-log"]) byId(part).replaceChildren();
  for (const part of ["job-gpus-text", "job-log-text"]) setText(byId(part), "");
  state.cards.clear();
}

const usd = (amount) => (amount === null || amount === undefined ? "unknown" : `${amount.toFixed(2)} USD`);

function showFacts(job, cost) {
  const hours = cost.gpu_hours;
  const rows = [
    ["Type", job.job_type], ["Cluster", job.cluster_id], ["Tenant", [job.tenant_id, job.project_id].filter(Boolean).join(", project ")],
    ["Queue", job.queue_name ?? ""], ["Created", `${timeText(job.created_at)} by ${job.created_by}`],
    ["Started", job.started_at ? timeText(job.started_at) : ""], ["Ended", job.ended_at ? timeText(job.ended_at) : ""],
    ["Attempt", `${job.attempt}; ${job.retry_count} retries, ${job.preemption_count} preemptions`],
    ["Checkpoint", job.last_checkpoint ? `step ${job.last_checkpoint.step}, saved ${timeText(job.last_checkpoint.created_at)}` : ""],
    ["Estimate", [usd(job.estimate?.usd), ...(job.estimate?.reasons ?? [])].join("; ")],
    ["Cost", `${usd(cost.cost_usd)}${cost.is_final ? "" : " so far"}, for ${hours.total.toFixed(2)} GPU-hours (${hours.idle.toFixed(2)} idle)`],
    ["Advice", cost.advice],
  ].filter(([, text]) => text);
  byId("job-facts").replaceChildren(...rows.flatMap(([label, text]) => [make("dt", {}, label), make("dd", {}, text)]));
}

function showEvents(events) {
  const rows = events.map((one) => {
    const cells = [one.what, one.status, one.actor, one.message].map((text) => make("td", {}, text));
    return make("tr", {}, make("th", { scope: "row" }, timeText(one.at)), ...cells);
  });
  byId("job-events").replaceChildren(...rows);
}

async function readGpus(id) {
  let found = { nodes: [], total: 0 };
  let text = "";
  try {
    found = JSON.parse(await askJob(`${id}/gpus`));
  } catch (error) {
    text = error.message;
  }
  if (state.job !== id) return;
  const old = state.cards;
  state.cards = new Map(found.nodes.map((node) => [node.name, nodeCard(node, old.get(node.name), sayGpu)]));
  byId("job-nodes").replaceChildren(...[...state.cards.values()].map((card) => card.item));
  const held = [];
  for (const node of found.nodes) {
    const mine = gpusOf(node).filter((gpu) => gpu.holders.length);
    for (const gpu of mine) state.cards.get(node.name).buttons.get(gpu.id).classList.add("chosen");
    held.push(`${mine.length === 1 ? "GPU" : "GPUs"} ${mine.map((gpu) => gpu.id).sort((a, b) => a - b).join(", ")} of ${node.name}`);
  }
  const more = found.total > found.nodes.length ? `; ${found.total - found.nodes.length} more machines` : "";
  setText(byId("job-gpus-text"), text || (held.length ? `It holds ${held.join("; ")}${more}.` : "It holds no GPU now."));
}

function sayGpu(button) {
  if (button) setText(byId("job-gpus-text"), `${button.dataset.node}: ${gpuText(JSON.parse(button.dataset.told))}.`);
}

async function readLog(id) {
  state.logOf = id;
  setText(byId("job-log-text"), "Reading the log.");
  try {
    let from = "";
    const text = await askJob(`${id}/logs?tail=${LOG_LINES}`, (headers) => {
      from = headers.get("Atoll-Log-Archive") ? " From the archive: the pod is gone." : "";
    });
    if (state.job !== id) return;
    setText(byId("job-log"), text);
    setText(byId("job-log-text"), (text ? `The last ${LOG_LINES} lines at most.` : "The log is empty.") + from);
  } catch (error) {
    if (state.job === id) setText(byId("job-log-text"), error.message);
  }
}

// ---- controls

function takeAddress() {
  const id = location.hash.slice(1);
  if (id === (state.job ?? "")) return;
  forgetJob("");
  state.logOf = null;
  state.readAt = 0;
  state.job = /^[0-9a-f-]{36}$/.test(id) ? id : null;
  state.seen = "";
  byId("job").hidden = !state.job;
  showAll();
  byId(state.job ? "job-title" : "queue-title").focus();
}

byId("filter").addEventListener("input", (event) => {
  state.filter = event.target.value.trim().toLowerCase();
  state.page = 0;
  showAll();
});
byId("kind").addEventListener("change", (event) => { state.kind = event.target.value; state.page = 0; showAll(); });
byId("hours").addEventListener("change", (event) => { state.hours = Number(event.target.value); showAll(); });
byId("before").addEventListener("click", () => { state.page -= 1; showAll(); });
byId("after").addEventListener("click", () => { state.page += 1; showAll(); });
byId("job-log-read").addEventListener("click", () => { if (state.job) readLog(state.job); });
byId("job-close").addEventListener("click", (event) => { event.preventDefault(); location.hash = ""; });
onToken((token) => { state.token = token; state.readAt = 0; retry(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.job) location.hash = "";
});
window.addEventListener("hashchange", takeAddress);
setInterval(() => { if (state.look) { showQueue(); showLines(); } }, CLOCK_MILLISECONDS);

const events = { look: takeLook, trouble: showTrouble };
follow("/page/events", () => state.token, (kind, data) => events[kind]?.(data), showState);
if (location.hash) takeAddress();
