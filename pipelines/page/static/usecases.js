// Use cases: those that are deployed, and a form that deploys another one from a template.
// The fields come from the JSON Schema of the template's parameters. Texts reach the document as text alone.

import { make } from "./islands.js";
import { headers } from "./stream.js";
import { ask, byId, problemText, setText } from "./words.js";

const API = "/api/usecases";
const READ_MILLISECONDS = 10000;
const DEPLOYMENTS_MAX = 100;

const state = { tokenOf: () => "", templates: [], isKnown: false };

// Read templates and deployments from now on. tokenOf: returns the token, "" without one.
export function showUsecases(tokenOf) {
  state.tokenOf = tokenOf;
  byId("template").addEventListener("change", showFields);
  byId("deploy-form").addEventListener("submit", (event) => { event.preventDefault(); deploy(); });
  setInterval(readUsecases, READ_MILLISECONDS);
}

export async function readUsecases() {
  try {
    if (!state.isKnown) takeTemplates(JSON.parse(await ask(`${API}/templates`, state.tokenOf())).items);
    showDeployments(JSON.parse(await ask(`${API}/deployments?page_size=${DEPLOYMENTS_MAX}`, state.tokenOf())));
  } catch (error) {
    setText(byId("usecases-text"), error.message);
  }
}

function takeTemplates(templates) {
  Object.assign(state, { templates, isKnown: true });
  byId("template").replaceChildren(...templates.map((one) => make("option", { value: one.id }, one.id)));
  showFields();
}

function showDeployments({ items, total }) {
  const left = total - items.length;
  setText(byId("usecases-text"), total ? `${total} deployed${left ? `, ${left} of them not shown` : ""}.` : "None is deployed.");
  byId("usecases").replaceChildren(...items.map((one) => {
    const parts = one.components.map((part) => `${part.name} ${part.status}`).join(", ");
    const cells = [one.status, one.template_id, one.tenant_id, one.entrypoint ?? "", one.message || parts];
    return make("tr", {}, make("th", { scope: "row" }, one.name), ...cells.map((text) => make("td", {}, text)));
  }));
}

// ---- the form

const chosen = () => state.templates.find((one) => one.id === byId("template").value);

function showFields() {
  const template = chosen();
  setText(byId("template-text"), template ? `${template.description} Components: ${template.components.join(", ")}.` : "");
  const { properties = {}, required = [] } = template?.parameters ?? {};
  const fields = Object.entries(properties).map(([name, schema]) => makeField(name, schema, required.includes(name)));
  byId("parameters").replaceChildren(...fields);
}

function makeField(name, schema, isRequired) {
  const field = fieldOf(schema, isRequired);
  field.name = name;
  field.required = isRequired && field.type !== "checkbox";
  const text = schema.description ? `${name}: ${schema.description}` : name;
  return make("label", {}, `${text}${isRequired ? " (must be given) " : " "}`, field);
}

function fieldOf({ type, default: given, enum: choices, minimum, maximum, pattern, maxLength }, isRequired) {
  if (choices) {
    const values = isRequired ? choices : ["", ...choices];
    const options = values.map((one) => make("option", { value: String(one) }, one === "" ? `default: ${given}` : String(one)));
    return make("select", {}, ...options);
  }
  const field = make("input", { type: { boolean: "checkbox", string: "text" }[type] ?? "number", spellcheck: "false" });
  if (type === "boolean") field.checked = given === true;
  else if (given !== undefined) field.placeholder = String(given);
  const limits = { min: minimum, max: maximum, pattern, maxlength: maxLength, step: { integer: 1, number: "any" }[type] };
  for (const [key, value] of Object.entries(limits)) if (value !== undefined) field.setAttribute(key, value);
  return field;
}

// Return the parameters that were given; the service knows the defaults of the others.
function parametersOf({ properties }) {
  const found = {};
  for (const field of byId("parameters").querySelectorAll("input, select")) {
    const { type } = properties[field.name];
    if (field.type === "checkbox") found[field.name] = field.checked;
    else if (field.value !== "") found[field.name] = type === "string" ? field.value : Number(field.value);
  }
  return found;
}

async function deploy() {
  const template = chosen();
  const tenant = byId("deploy-tenant").value.trim();
  const body = { template_id: template.id, name: byId("deploy-name").value.trim(), parameters: parametersOf(template.parameters),
    ...(tenant ? { tenant_id: tenant } : {}) };
  setText(byId("deploy-text"), "Deploying.");
  try {
    const response = await fetch(`${API}/deploy`, { method: "POST", cache: "no-store", body: JSON.stringify(body),
      headers: { ...headers(state.tokenOf()), "Content-Type": "application/json" } });
    const text = await response.text();
    if (!response.ok) throw new Error(problemText(text, response.status));
    setText(byId("deploy-text"), `${body.name} is ${JSON.parse(text).status}; its run is uc-${body.name}/1.`);
    byId("deploy-name").value = "";
  } catch (error) {
    setText(byId("deploy-text"), error.message);
  }
  readUsecases();
}
