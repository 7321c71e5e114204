// The page: what the stream tells, drawn as islands of GPUs and a list of waiting pods.
// Texts reach the document as text alone (textContent, attributes); nothing is ever parsed as HTML.

import { gpuText, gpusOf, isIll, make, nodeCard } from "./islands.js";
import { follow, headers, retry } from "./stream.js";
import { ageText, byId, onToken, place, showState, showTrouble } from "./words.js";

const NODES_PER_PAGE = 24;
const OPEN_MAX = 4; // answers that are kept up to date
const AGES_MILLISECONDS = 10000;

const nodes = new Map();
const cards = new Map();
const natural = new Intl.Collator("en", { numeric: true });
const state = {
  token: "", filter: "", kind: "all", page: 0, names: [], waiting: [], waitingCount: 0,
  chosen: null, // { pod }, { node, ids } of one GPU, or { node, ids, text } of a proposal
};

// ---- what the stream tells

function takeLook(text) {
  const look = JSON.parse(text);
  if (look.whole) nodes.clear();
  for (const name of look.gone) nodes.delete(name);
  for (const node of look.nodes) nodes.set(node.name, node);
  if (look.waiting) {
    state.waiting = look.waiting;
    state.waitingCount = look.waitingCount;
  }
  showSummary(look);
  showModels();
  showNodes();
  if (look.waiting || look.whole) showWaiting();
  refreshAnswers();
}

function showSummary(look) {
  const total = Object.values(look.counts).reduce((sum, count) => sum + count, 0);
  const parts = Object.entries(look.counts).map(([name, count]) => `${count} ${name}`);
  const clock = new Date(look.takenAt).toLocaleTimeString();
  byId("summary").textContent =
    `${total} GPUs on ${nodes.size} nodes: ${parts.join(", ") || "none"}. ` +
    `${podsWait()}. As of ${clock}.`;
}

function podsWait() {
  return state.waitingCount === 1 ? "1 pod waits" : `${state.waitingCount} pods wait`;
}

// ---- GPUs

function matches(node) {
  const gpus = gpusOf(node);
  if (state.kind === "free" && !gpus.some((gpu) => gpu.state === "free")) return false;
  if (state.kind === "ill" && !node.silent && !node.closed && !gpus.some((gpu) => isIll(gpu) || gpu.state === "foreign"))
    return false;
  if (!state.filter) return true;
  const texts = [node.name, node.models, ...gpus.flatMap((gpu) => gpu.holders ?? [])];
  return texts.some((text) => text.toLowerCase().includes(state.filter));
}

function showNodes() {
  state.names = [...nodes.keys()].filter((name) => matches(nodes.get(name))).sort(natural.compare);
  const pages = Math.max(1, Math.ceil(state.names.length / NODES_PER_PAGE));
  state.page = Math.min(state.page, pages - 1);
  const from = state.page * NODES_PER_PAGE;
  const shown = state.names.slice(from, from + NODES_PER_PAGE);
  const range = shown.length
    ? `Nodes ${from + 1} to ${from + shown.length} of ${state.names.length}` : "No node is like that.";
  if (byId("range").textContent !== range) byId("range").textContent = range;
  byId("before").disabled = state.page === 0;
  byId("after").disabled = state.page >= pages - 1;
  for (const name of cards.keys()) if (!shown.includes(name)) cards.delete(name);
  for (const name of shown) cards.set(name, nodeCard(nodes.get(name), cards.get(name), chooseGpu));
  place(byId("nodes"), shown.map((name) => cards.get(name).item));
  showChosen();
}

// ---- the chosen set

function chooseGpu(button) {
  if (!button) return;
  const gpu = JSON.parse(button.dataset.told);
  const pod = gpu.holders?.[0];
  const { node } = button.dataset;
  const before = state.chosen;
  const isSame = pod ? before?.pod === pod : before && !before.text && before.node === node && before.ids?.[0] === gpu.id;
  if (isSame) state.chosen = null;
  else state.chosen = pod ? { pod } : { node, ids: [gpu.id] };
  showChosen();
}

function choosePlace(node, ids, text) {
  state.chosen = { node, ids, text };
  state.filter = byId("filter").value = "";
  state.kind = byId("kind").value = "all";
  showNodes();
  state.page = Math.max(0, Math.floor(state.names.indexOf(node) / NODES_PER_PAGE));
  showNodes();
  cards.get(node)?.buttons.get(ids[0])?.focus();
}

function showChosen() {
  const chosen = state.chosen;
  for (const [name, card] of cards) {
    for (const [id, button] of card.buttons) {
      const gpu = JSON.parse(button.dataset.told);
      const isHeld = Boolean(chosen?.pod && gpu.holders?.includes(chosen.pod));
      const isPlace = Boolean(chosen?.ids && chosen.node === name && chosen.ids.includes(id));
      button.classList.toggle("chosen", isHeld);
      button.classList.toggle("place", isPlace);
      button.setAttribute("aria-pressed", String(isHeld || isPlace));
    }
  }
  const line = byId("chosen");
  const text = chosenText();
  if (line.textContent !== text) line.textContent = text;
}

function chosenText() {
  const chosen = state.chosen;
  if (!chosen) return "Choose a GPU to see the whole set of its pod.";
  if (!chosen.pod) return chosen.text ?? placeText(chosen);
  const found = [];
  for (const node of nodes.values()) {
    const ids = gpusOf(node).filter((gpu) => gpu.holders?.includes(chosen.pod)).map((gpu) => gpu.id);
    if (ids.length) found.push(`${ids.length === 1 ? "GPU" : "GPUs"} ${ids.sort((a, b) => a - b).join(", ")} of ${node.name}`);
  }
  return found.length ? `Pod ${chosen.pod} holds ${found.join("; ")}.` : `Pod ${chosen.pod} holds no GPU any more.`;
}

// As the GPU is now, not as it was when it was chosen.
function placeText({ node, ids }) {
  const gpu = nodes.has(node) ? gpusOf(nodes.get(node)).find((one) => one.id === ids[0]) : null;
  return gpu ? `${node}: ${gpuText(gpu)}; ${gpu.model}.` : `${node}: GPU ${ids[0]} is not there any more.`;
}

function showModels() {
  const totals = new Map();
  for (const node of nodes.values()) {
    for (const gpu of gpusOf(node)) {
      const row = totals.get(gpu.model) ?? { all: 0, free: 0, held: 0 };
      row.all += 1;
      if (gpu.state in row) row[gpu.state] += 1;
      totals.set(gpu.model, row);
    }
  }
  const rows = [...totals].sort(([a], [b]) => natural.compare(a, b)).map(([model, row]) => {
    const cells = [row.all, row.free, row.held, row.all - row.free - row.held];
    return make("tr", {}, make("th", { scope: "row" }, model), ...cells.map((count) => make("td", {}, String(count))));
  });
  byId("models").replaceChildren(...rows);
}

// ---- waiting pods

function showWaiting() {
  const list = byId("waiting-list");
  const left = state.waitingCount - state.waiting.length;
  byId("waiting-count").textContent = state.waitingCount
    ? `${podsWait()}, the longest first${left > 0 ? `; ${left} of them are not shown` : ""}.`
    : "No pod waits for GPUs.";
  const old = new Map([...list.children].map((item) => [item.dataset.pod, item]));
  place(list, state.waiting.map((row) => showRow(old.get(row.pod) ?? makeRow(row.pod), row)));
}

function makeRow(pod) {
  const details = make("details", {}, make("summary"), make("div", { class: "answer", "aria-live": "polite" }));
  details.addEventListener("toggle", () => { if (details.open) ask(pod, details); });
  const item = make("li", {}, details);
  item.dataset.pod = pod;
  return item;
}

function showRow(item, row) {
  const age = row.since ? `, ${ageText(Date.now() / 1000 - row.since)}` : "";
  const asked = row.asked === 1 ? "1 GPU" : `${row.asked} GPUs`;
  const text = `${row.pod}: ${asked}${age}. ${row.reason}`;
  const summary = item.querySelector("summary");
  if (summary.textContent !== text) summary.textContent = text;
  return item;
}

// A row that does not change grows older all the same.
function showAges() {
  const rows = new Map(state.waiting.map((row) => [row.pod, row]));
  for (const item of byId("waiting-list").children) {
    const row = rows.get(item.dataset.pod);
    if (row) showRow(item, row);
  }
}

function refreshAnswers() {
  const open = [...document.querySelectorAll("#waiting-list details[open]")].slice(0, OPEN_MAX);
  for (const details of open) ask(details.parentElement.dataset.pod, details);
}

async function ask(pod, details) {
  const box = details.querySelector(".answer");
  if (details.dataset.asking) return;
  details.dataset.asking = "yes";
  if (!box.hasChildNodes()) box.replaceChildren(make("p", {}, "Asking what would help."));
  try {
    const path = `/page/pods/${pod.split("/").map(encodeURIComponent).join("/")}`;
    const response = await fetch(path, { headers: headers(state.token), cache: "no-store" });
    const text = await response.text();
    if (!response.ok) box.replaceChildren(make("p", {}, text.slice(0, 300)));
    else if (box.dataset.told !== text) {
      box.dataset.told = text;
      box.replaceChildren(...answerParts(JSON.parse(text)));
    }
  } catch {
    box.replaceChildren(make("p", {}, "The controllers do not answer."));
  } finally {
    delete details.dataset.asking;
  }
}

function answerParts(answer) {
  const parts = [make("p", {}, `${answer.subject}: ${answer.headline}`)];
  if (answer.asked) parts.push(make("p", {}, answer.asked));
  if (answer.proposals.length) {
    const rows = answer.proposals.map((one) => {
      const item = make("li", {}, one.text);
      if (one.deviceIds.length && nodes.has(one.node)) {
        const button = make("button", { type: "button" }, "Show these GPUs");
        button.setAttribute("aria-label", `Show these GPUs: ${one.text}`);
        button.addEventListener("click", () => choosePlace(one.node, one.deviceIds, `Proposal: ${one.text}.`));
        item.append(" ", button);
      }
      return item;
    });
    parts.push(make("h4", {}, "What would help, the cheapest first; each was decided again"), make("ol", {}, ...rows));
  }
  if (answer.helpless.length) parts.push(make("p", {}, `What would not: ${answer.helpless.join("; ")}.`));
  if (answer.cut.length) parts.push(make("p", {}, `The search was cut for: ${answer.cut.join(", ")}.`));
  if (answer.groups.length) {
    const rows = answer.groups.map((group) =>
      make("li", {}, group.text, ...(group.nodes.length ? [make("ul", {}, ...group.nodes.map((one) => make("li", {}, one)))] : [])));
    parts.push(make("h4", {}, "Where it stands"), make("ul", {}, ...rows));
    if (answer.groupsLeftOut) parts.push(make("p", {}, `${answer.groupsLeftOut} more groups are not shown.`));
  }
  return parts;
}

// ---- controls

byId("filter").addEventListener("input", (event) => {
  state.filter = event.target.value.trim().toLowerCase();
  state.page = 0;
  showNodes();
});
byId("kind").addEventListener("change", (event) => {
  state.kind = event.target.value;
  state.page = 0;
  showNodes();
});
byId("before").addEventListener("click", () => { state.page -= 1; showNodes(); });
byId("after").addEventListener("click", () => { state.page += 1; showNodes(); });
onToken((token) => { state.token = token; retry(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.chosen) { state.chosen = null; showChosen(); }
});

setInterval(showAges, AGES_MILLISECONDS);

const events = { look: takeLook, trouble: showTrouble };
follow("/page/events", () => state.token, (kind, data) => events[kind]?.(data), showState);
