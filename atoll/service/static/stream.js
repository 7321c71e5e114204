// Server-sent events over fetch: EventSource can carry no token, and says nothing about why it was refused.
// In: a path, the token or "", a listener per kind of event. Out: calls of the listeners, and of `onState` when
// the connection changes. Ends never: it tries again, slower while nobody answers.

const RETRY_MILLISECONDS = [500, 1000, 2000, 5000, 10000];
const SILENCE_MILLISECONDS_MAX = 40000;
const BUFFER_MAX = 64 * 1024 * 1024;

export async function follow(path, tokenOf, onEvent, onState) {
  let failures = 0;
  for (;;) {
    const outcome = await read(path, tokenOf(), onEvent, onState);
    if (outcome.isRefused) {
      onState({ kind: "token", text: outcome.text });
      await new Promise((resolve) => { tokenWasGiven = resolve; });
      continue;
    }
    failures = outcome.heard ? 0 : failures + 1;
    if (outcome.text) onState({ kind: "lost", text: outcome.text });
    const milliseconds = RETRY_MILLISECONDS[Math.min(failures, RETRY_MILLISECONDS.length - 1)];
    await new Promise((resolve) => setTimeout(resolve, milliseconds));
  }
}

let tokenWasGiven = () => {};

// Tell that there is another token, and that it is worth while to ask again.
export function retry() {
  tokenWasGiven();
}

export function headers(token) {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function read(path, token, onEvent, onState) {
  const abort = new AbortController();
  let watchdog = setTimeout(() => abort.abort(), SILENCE_MILLISECONDS_MAX);
  let heard = false;
  try {
    const response = await fetch(path, { headers: headers(token), signal: abort.signal, cache: "no-store" });
    if (response.status === 401 || response.status === 403) {
      return { text: await shortText(response), isRefused: true };
    }
    if (!response.ok || !response.body) return { text: await shortText(response) };
    onState({ kind: "live", text: "Live." });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return { heard, text: "" };
      heard = true;
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort(), SILENCE_MILLISECONDS_MAX);
      buffer = deliver(buffer + value, onEvent);
      if (buffer.length > BUFFER_MAX) return { text: "The server sent an event without end." };
    }
  } catch {
    return { heard, text: "The server does not answer; trying again." };
  } finally {
    clearTimeout(watchdog);
    abort.abort();
  }
}

function deliver(text, onEvent) {
  const parts = text.split("\n\n");
  const rest = parts.pop();
  for (const part of parts) {
    let kind = "message";
    const data = [];
    for (const line of part.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data.push(line.slice(6));
    }
    if (data.length) onEvent(kind, data.join("\n"));
  }
  return rest;
}

async function shortText(response) {
  const text = (await response.text()).trim().slice(0, 300);
  return text || `The server answered ${response.status}.`;
}
