// The live page: asks for the key, follows what the server does, and shows it.

import { STATES, chart, redraw, remember, update, updateEngines } from "./charts.js";
import { follow, stop } from "./stream.js";
import { models, tenants } from "./tables.js";
import { NONE, make, show, write } from "./words.js";

const KEY = "fairstream-admin-key", THEME = "fairstream-theme";
const GOOD = ["nothing is wrong"], QUIET = ["too little to say", "no demand"];
const TAILS = ["p50", "p95", "p99"];
const $ = (id) => document.getElementById(id);

const TILES = [
  ["output_per_s", "output tokens /s", write.rate],
  ["prompt_per_s", "prompt tokens /s", write.rate],
  ["requests_per_s", "requests /s", write.rate],
  ["running", "running", write.count],
  ["waiting", "waiting", write.count],
  ["refused_per_s", "refused /s", write.rate],
  ["kv_used", "KV used, fullest", write.share],
  ["dollars_per_hour", "spent /h", write.dollars],
];
const tiles = TILES.map(([name, title, form]) => {
  const value = make("b", "", NONE);
  value.dataset.figure = name;
  $("tiles").append(make("div", "tile", value, make("span", "", title)));
  return (whole) => show(value, whole[name], form);
});
const states = STATES.map(([state, title]) => {
  const value = make("b", "", NONE);
  value.dataset.state = state;
  $("states").append(make("li", "", make("i", state), `${title} `, value));
  return (device) => show(value, device[state], write.share);
});
const tails = (name) =>
  TAILS.map((title, index) => ({ name: title, title, of: (whole) => whole[name][index] }));
const line = (colour, title, name) => ({ name: colour, title, of: (whole) => whole[name] });
chart($("charts"), "Time to the first token", tails("first_token_s"), write.seconds);
chart($("charts"), "Between tokens", tails("gap_s"), write.seconds);
const tokens = [line("p50", "output", "output_per_s"), line("p95", "prompt", "prompt_per_s")];
chart($("charts"), "Tokens a second", tokens, write.rate);
const requests = [line("p50", "running", "running"), line("p95", "waiting", "waiting")];
chart($("charts"), "Requests", requests, write.rate);

function take(snapshot) {
  remember(snapshot);
  tiles.forEach((tile) => tile(snapshot.whole));
  states.forEach((state) => state(snapshot.device));
  showVerdict(snapshot.verdict);
  updateEngines($("engines"), snapshot.engines);
  models.update(snapshot.models);
  tenants.update(snapshot.tenants);
  for (const each of ["engines", "models", "tenants"]) {
    $(`no-${each}`).hidden = snapshot[each].length > 0;
  }
  $("more-engines").textContent = more(snapshot.engines_left_out);
  $("more-tenants").textContent = more(snapshot.tenants_left_out);
  const [seconds, recent] = [snapshot.seconds, snapshot.recent_s].map(write.count);
  $("windows").textContent =
    `Rates at the top and devices: of the last ${recent} s; all else of the last ${seconds} s. ` +
    "Fair: who does not wait has what it asks for, and the others share the rest by weight.";
  update();
}

const more = (count) => (count ? `and ${count} more` : "");

function showVerdict({ cause, evidence, advice, worth }) {
  const kind = GOOD.includes(cause) ? "good" : QUIET.includes(cause) ? "quiet" : "bad";
  $("verdict").dataset.kind = kind;
  $("cause").textContent = cause;
  $("evidence").textContent = evidence;
  $("advice").textContent = advice && `Change: ${advice}`;
  $("worth").textContent = worth && `Worth: ${worth}`;
}

function tell(state, words) {
  $("status").dataset.state = state;
  $("status").textContent = words;
}

function connect(key) {
  $("gate").hidden = true;
  $("board").hidden = $("forget").hidden = false;
  tell("quiet", "connecting");
  follow(key, take, tell).catch((refused) => forget(refused.message));
}

function forget(why) {
  stop();
  sessionStorage.removeItem(KEY);
  $("gate").hidden = false;
  $("board").hidden = $("forget").hidden = true;
  $("refusal").textContent = why;
  $("key").value = "";
  tell("quiet", "not connected");
  $("key").focus();
}

$("gate").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    forget("This is no key: keys have letters, digits and signs of ASCII.");
    return;
  }
  $("refusal").textContent = "";
  sessionStorage.setItem(KEY, key);
  connect(key);
});
$("forget").addEventListener("click", () => forget(""));

// Light or dark as the system has it, until somebody chooses.
const dark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  const chosen = localStorage.getItem(THEME) ?? "";
  document.documentElement.dataset.theme = chosen;
  const other = (chosen || (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
  $("theme").value = other;
  $("theme").textContent = other === "dark" ? "Dark" : "Light";
  redraw();
}

$("theme").addEventListener("click", () => {
  localStorage.setItem(THEME, $("theme").value);
  theme();
});
dark.addEventListener("change", theme);
theme();

const kept = sessionStorage.getItem(KEY);
if (kept) connect(kept);
else $("key").focus();
