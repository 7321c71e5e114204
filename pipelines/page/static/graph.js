// The picture of a run's steps: a column for everything that may run at a time, an arrow for what waits for what.
// In: the declared steps, the steps of the run, and a listener. Texts reach the document as text alone.

import { make } from "./islands.js";

export const MARKS = { pending: "…", running: "▶", succeeded: "✓", failed: "✗", skipped: "-" };
const REM = 16;
const [WIDE, HIGH, BOX_WIDE, BOX_HIGH] = [13.5, 4, 11, 3]; // rem: of a column, of a row, of a step
const SVG = "http://www.w3.org/2000/svg";
const CONTAINERS = ["parallel", "loop"];
const FIRST = ["failed", "running", "pending", "succeeded", "skipped"]; // of the bodies of a loop, the first of these is shown

// Return the steps of the run that belong to a declared one: itself, or the bodies of a loop.
export const recordsOf = (name, steps) => steps.filter((step) => step.name === name || step.name.startsWith(`${name}[`));

// Return the step that stands for a declared one: of the bodies of a loop, the one that matters most.
export function shownOf(name, steps) {
  const found = recordsOf(name, steps);
  return FIRST.flatMap((status) => found.filter((step) => step.status === status))[0] ?? { name, status: "pending" };
}

// Return the column of each step: after all that it waits for, and after the branches of these.
function columnsOf(graph) {
  const byName = new Map(graph.map((step) => [step.name, step]));
  const parts = (name) => graph.filter((step) => step.owners.includes(name)).map((step) => step.name);
  const columns = new Map();
  const begin = (name) => {
    if (!columns.has(name)) {
      columns.set(name, 0);
      const { depends_on: before, owners } = byName.get(name);
      columns.set(name, Math.max(0, ...before.map((one) => end(one) + 1), ...owners.map((one) => begin(one) + 1)));
    }
    return columns.get(name);
  };
  const end = (name) => {
    const own = CONTAINERS.includes(byName.get(name).step_type) ? parts(name) : [];
    return Math.max(begin(name), ...own.map(end));
  };
  for (const step of graph) begin(step.name);
  return columns;
}

function placesOf(graph) {
  const columns = columnsOf(graph);
  const rows = new Map();
  return new Map(graph.map(({ name }) => {
    const column = columns.get(name);
    const row = rows.get(column) ?? 0;
    rows.set(column, row + 1);
    return [name, { x: column * WIDE, y: row * HIGH }];
  }));
}

function line(from, to, kind) {
  const [x, y, u, v] = [from.x + BOX_WIDE, from.y + BOX_HIGH / 2, to.x, to.y + BOX_HIGH / 2].map((rem) => rem * REM);
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("class", kind);
  path.setAttribute("d", `M${x} ${y} C${x + 20} ${y} ${u - 20} ${v} ${u} ${v} m-6 -4 l6 4 l-6 4`);
  return path;
}

// Return the buttons by name, in `box`. onChoose: called with a name.
export function drawGraph(box, graph, onChoose) {
  const places = placesOf(graph);
  const all = [...places.values()];
  const [wide, high] = [Math.max(...all.map((one) => one.x)) + BOX_WIDE, Math.max(...all.map((one) => one.y)) + BOX_HIGH];
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of [["aria-hidden", "true"], ["viewBox", `0 0 ${wide * REM} ${high * REM}`]]) svg.setAttribute(key, value);
  const buttons = new Map();
  for (const step of graph) {
    const place = places.get(step.name);
    for (const one of step.depends_on) svg.append(line(places.get(one), place, "after"));
    for (const one of step.owners) svg.append(line(places.get(one), place, "part"));
    const button = make("button", { type: "button", tabindex: buttons.size ? "-1" : "0" }, make("b", {}, step.name), make("span"));
    button.dataset.step = step.name;
    button.style.left = `${place.x}rem`;
    button.style.top = `${place.y}rem`;
    button.addEventListener("click", () => onChoose(step.name));
    buttons.set(step.name, button);
  }
  box.style.width = `${wide}rem`;
  box.style.height = `${high + 0.5}rem`;
  svg.setAttribute("width", `${wide * REM}`);
  svg.setAttribute("height", `${high * REM}`);
  box.replaceChildren(svg, ...buttons.values());
  box.onkeydown = (event) => moveFocus(event, graph, places, buttons);
  return buttons;
}

// Show the states of the steps on their buttons.
export function showGraph(buttons, graph, steps, chosen) {
  for (const { name, step_type: kind, depends_on: before } of graph) {
    const { status } = shownOf(name, steps);
    const found = recordsOf(name, steps);
    const ended = found.filter((step) => step.ended_at).length;
    const count = found.some((step) => step.name !== name) ? `, ${ended} of ${found.length} ended` : "";
    const button = buttons.get(name);
    const text = `${MARKS[status]} ${status}${count}`;
    if (button.lastChild.textContent !== text) button.lastChild.textContent = text;
    button.className = `step ${status}`;
    button.title = `${name}: ${kind}, ${status}${count}${before.length ? `, after ${before.join(", ")}` : ""}`;
    button.setAttribute("aria-label", button.title);
    button.setAttribute("aria-pressed", String(name === chosen));
  }
}

// One stop for the Tab key; up and down move in a column, left and right to the nearest step of the next one.
function moveFocus(event, graph, places, buttons) {
  const name = document.activeElement?.dataset?.step;
  const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  if (!name || !(event.key in steps)) return;
  event.preventDefault();
  const [right, down] = steps[event.key];
  const here = places.get(name);
  const ahead = graph.map((step) => [step.name, places.get(step.name)]).filter(([, one]) =>
    right ? Math.sign(one.x - here.x) === right : one.x === here.x && Math.sign(one.y - here.y) === down);
  const far = ([, one]) => Math.abs(one.x - here.x) * 100 + Math.abs(one.y - here.y);
  const [next] = ahead.sort((a, b) => far(a) - far(b));
  if (!next) return;
  for (const [one, button] of buttons) button.tabIndex = one === next[0] ? 0 : -1;
  buttons.get(next[0]).focus();
}
