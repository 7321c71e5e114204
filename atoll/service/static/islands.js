// The picture of a machine: its islands, and a button for each GPU. Shared by the pages of Atoll.
// Texts reach the document as text alone (textContent, attributes); nothing is ever parsed as HTML.

const MARKS = { free: "", held: "#", foreign: "?" };
const CLASSES = { free: "free", held: "held", foreign: "foreign" };

export const isIll = (gpu) => !(gpu.state in CLASSES);
export const gpusOf = (node) => node.islands.flatMap((island) => island.gpus);

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Return the card of a node, made anew only if its GPUs or islands are others than those of `card`.
export function nodeCard(node, card, onChoose) {
  const shape = JSON.stringify(node.islands.map((island) => [island.name, island.gpus.map((gpu) => gpu.id)]));
  if (!card || card.shape !== shape) {
    const fresh = makeCard(node, shape, onChoose);
    card?.item.replaceWith(fresh.item);
    card = fresh;
  }
  const free = gpusOf(node).filter((gpu) => gpu.state === "free").length;
  card.facts.textContent = `${node.models || "no known GPUs"}; ${free} of ${gpusOf(node).length} free`;
  const warnings = [node.closed, node.silent ? `silent: ${node.silent}` : ""].filter(Boolean);
  card.warning.textContent = warnings.join(", ");
  card.warning.hidden = warnings.length === 0;
  for (const gpu of gpusOf(node)) showGpu(card.buttons.get(gpu.id), gpu);
  return card;
}

function makeCard(node, shape, onChoose) {
  const title = make("h3", {}, node.name);
  const facts = make("p");
  const warning = make("p", { class: "warning" });
  const islands = make("div", { class: "islands" });
  const buttons = new Map();
  for (const island of node.islands) {
    const legend = make("legend", {}, `${island.name} (${island.gpus.length})`);
    const group = make("fieldset", { class: "island" }, legend);
    for (const gpu of island.gpus) {
      const button = make("button", { type: "button", tabindex: buttons.size ? "-1" : "0" });
      button.dataset.node = node.name;
      button.dataset.gpu = gpu.id;
      buttons.set(gpu.id, button);
      group.append(button);
    }
    islands.append(group);
  }
  islands.addEventListener("keydown", (event) => moveFocus(event, [...buttons.values()]));
  islands.addEventListener("click", (event) => onChoose(event.target.closest("button.gpu")));
  return { shape, facts, warning, buttons, item: make("li", { class: "node" }, title, facts, warning, islands) };
}

function showGpu(button, gpu) {
  const told = JSON.stringify(gpu);
  if (button.dataset.told === told) return;
  const isFirst = button.dataset.told === undefined;
  button.dataset.told = told;
  button.textContent = `${gpu.id}${MARKS[gpu.state] ?? "!"}`;
  button.className = `gpu ${CLASSES[gpu.state] ?? "ill"}${isFirst ? "" : " fresh"}`;
  button.setAttribute("aria-label", gpuText(gpu));
  button.title = gpuText(gpu);
}

export function gpuText(gpu) {
  const held = gpu.holders?.length ? ` by ${gpu.holders.join(", ")}` : "";
  return `GPU ${gpu.id}, ${gpu.state}${held}${gpu.reason ? `: ${gpu.reason}` : ""}`;
}

// One stop for the Tab key per node; arrows, Home and End move inside.
function moveFocus(event, buttons) {
  const at = buttons.indexOf(document.activeElement);
  const steps = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: buttons.length - 1 };
  if (at < 0 || !(event.key in steps)) return;
  event.preventDefault();
  const to = buttons[Math.min(buttons.length - 1, Math.max(0, steps[event.key]))];
  for (const button of buttons) button.tabIndex = button === to ? 0 : -1;
  to.focus();
}
