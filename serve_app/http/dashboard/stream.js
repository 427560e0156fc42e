// Server-sent events of admin/live, read by hand: an EventSource cannot send the key.

const SILENT_MS = 6000;
const LONGEST_WAIT_S = 10;
const DATA = "data: ";

export class Refused extends Error {}

let turn = 0;  // of who reads now; an earlier one stops

export function stop() {
  turn += 1;
}

// Until `stop`, or until the key is refused, which raises Refused. take: what to do with a snapshot;
// tell: a state and words for people.
export async function follow(key, take, tell) {
  const mine = ++turn, goesOn = () => mine === turn;
  for (let failures = 0; goesOn(); failures += 1) {
    let why = "The server has closed the connection.", wait = Math.min(1 + failures, LONGEST_WAIT_S);
    const heard = (hasFigures) => {
      failures = 0;
      if (hasFigures) tell("live", "live");
      else tell("quiet", "waiting for figures");
    };
    try {
      await read(key, take, heard, goesOn);
    } catch (error) {
      if (error instanceof Refused) {
        if (goesOn()) throw error;
        return;
      }
      why = error.wait ? error.message : "The server cannot be reached.";
      wait = error.wait ?? wait;
    }
    if (!goesOn()) return;
    tell("lost", `${why} Trying again.`);
    await new Promise((resolve) => setTimeout(resolve, 1000 * wait));
  }
}

async function read(key, take, heard, goesOn) {
  const abort = new AbortController();
  let last = Date.now();
  const watch = setInterval(() => {
    if (!goesOn() || Date.now() - last > SILENT_MS) abort.abort();
  }, 500);
  try {
    const headers = { Authorization: `Bearer ${key}` };
    const answer = await fetch("admin/live", { headers, cache: "no-store", signal: abort.signal });
    if (!answer.ok) throw await refusal(answer);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; goesOn();) {
      const { value, done } = await reader.read();
      if (done) return;
      last = Date.now();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      const newest = events.findLast((event) => event.startsWith(DATA));
      if (events.length) heard(Boolean(newest));
      if (newest && goesOn()) shown(take, newest);
    }
  } finally {
    clearInterval(watch);
    abort.abort();
  }
}

// What goes wrong there is a fault of the page, and no reason to connect again.
function shown(take, event) {
  try {
    take(JSON.parse(event.slice(DATA.length)));
  } catch (error) {
    reportError(error);
  }
}

async function refusal(answer) {
  if (answer.status === 401) return new Refused("This key opens nothing here.");
  const body = await answer.json().catch(() => ({}));
  const error = new Error(body.error?.message ?? `The server answers ${answer.status}.`);
  return Object.assign(error, { wait: Number(answer.headers.get("Retry-After")) || 3 });
}
