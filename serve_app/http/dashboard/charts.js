// Charts over the last minutes, as far as this page has seen them. uPlot draws on a canvas, so each is
// made anew when colours change.

import { NONE, colour, make, told, write } from "./words.js";

const KEPT_S = 300;
const LEAST_S = 60;
const GAP_S = 5;

// Shares of a device's time, as they lie one above the other.
export const STATES = [
  ["requests", "busy"],
  ["surplus", "surplus"],
  ["bubble", "bubble"],
  ["starved", "starved"],
  ["spare", "spare"],
  ["starting", "starting"],
];

const history = [];  // {t, whole, device, engines}; with t alone where nothing was heard
const plots = new Set();
const now = () => Date.now() / 1000;
const spanS = () => Math.min(Math.max(now() - (history[0]?.t ?? now()), LEAST_S), KEPT_S);

export const engineName = (each) => `${each.model} ${each.replica}`;

export function remember(snapshot) {
  const t = now(), last = history.at(-1);
  if (last && t - last.t > GAP_S) history.push({ t: last.t + 1 });
  const engines = new Map(snapshot.engines.map((each) => [engineName(each), each]));
  history.push({ t, whole: snapshot.whole, device: snapshot.device, engines });
  while (history[0].t < t - KEPT_S) history.shift();
}

export function update() {
  for (const plot of plots) plot.update();
}

export function redraw() {
  for (const plot of plots) plot.draw();
}

class Plot {
  constructor(holder, series, options, data, hover = () => {}) {
    Object.assign(this, { holder, series, options, data, hover });
    this.draw();
    plots.add(this);
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(holder);
  }

  draw() {
    this.drawn?.destroy();
    const { axes, y, height, padding } = this.options;
    const look = {
      stroke: getComputedStyle(document.getElementById("status")).color,
      grid: { stroke: colour("spare"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    const made = {
      width: Math.max(this.holder.clientWidth, 100),
      height,
      padding,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, sync: { key: "time" }, points: { show: false } },
      scales: { x: { range: () => [now() - spanS(), now()] }, y: { range: y } },
      axes: axes.map((axis) => ({ ...look, ...axis })),
      series: [{}, ...this.series.map((one) => ({ points: { show: false }, ...paint(one) }))],
      hooks: { setCursor: [(plot) => this.hover(plot.cursor.idx)] },
    };
    this.drawn = new uPlot(made, this.data(), this.holder);
  }

  fit() {
    const width = this.holder.clientWidth;
    if (width && width !== this.drawn.width) this.drawn.setSize({ width, height: this.drawn.height });
  }

  update() {
    this.drawn.setData(this.data());
    if (this.drawn.cursor.left < 0) this.hover(null);
  }

  remove() {
    this.observer.disconnect();
    this.drawn.destroy();
    plots.delete(this);
  }
}

function paint({ name, fills }) {
  return fills ? { fill: colour(name), width: 0 } : { stroke: colour(name), width: 1.5 };
}

const times = () => history.map((each) => each.t);

function marks() {
  const span = spanS(), step = span > 150 ? 60 : span > 75 ? 30 : 15;
  const count = Math.ceil((0.95 * span) / step);  // one at the very edge would run into the other axis
  return Array.from({ length: count }, (_, index) => now() - step * (count - 1 - index));
}

function ago(_, at) {
  return at.map((t) => {
    const seconds = Math.round(now() - t);
    return !seconds ? "now" : seconds % 60 ? `−${seconds} s` : `−${seconds / 60} min`;
  });
}

// Lines, each with what it stands at behind its name: now, or where the pointer is.
export function chart(parent, title, series, form) {
  const legend = make("ul", "legend"), holder = make("div", "plot");
  const values = series.map(({ name, title: words }) => {
    const value = make("b", "", NONE);
    legend.append(make("li", "", make("i", name), `${words} `, value));
    return value;
  });
  parent.append(make("figure", "", make("h2", "", title), legend, holder));
  const hover = (index) => values.forEach((value, one) => {
    const entry = history.at(index ?? -1);
    value.textContent = told(entry?.whole && series[one].of(entry.whole), form);
  });
  const axes = [
    { values: ago, splits: marks, size: 26 },
    { values: (_, at) => at.map((x) => told(x, form)), size: 58, space: 34 },
  ];
  const y = (_, low, high) => [0, high > 0 ? 1.08 * high : 1];
  const data = () => [times(), ...series.map(({ of }) => history.map(({ whole }) => (whole ? of(whole) : null)))];
  return new Plot(holder, series, { axes, y, height: 160, padding: [8, 28, 0, 0] }, data, hover);
}

// Each state is drawn from the top of its stack down to the bottom, the highest first.
function strip(holder, shares) {
  const top = (device, states) => states.reduce((sum, [state]) => sum + device[state], 0);
  const stacks = STATES.map((_, index) => STATES.slice(0, index + 1)).reverse();
  const data = () => [times(), ...stacks.map((stack) => history.map((entry) => {
    const device = entry.whole && shares(entry);
    return device && Object.keys(device).length ? top(device, stack) : null;
  }))];
  const series = stacks.map((stack) => ({ name: stack.at(-1)[0], fills: true }));
  const axes = [{ show: false }, { show: false }];
  return new Plot(holder, series, { axes, y: () => [0, 1], height: 40, padding: [4, 0, 4, 0] }, data);
}

const ALL = "";  // the first strip, of all engines together
const rows = new Map();  // by name of the engine

function addRow(parent, name) {
  const holder = make("div", "plot"), text = make("p"), row = make("div", "engine", text, holder);
  row.dataset.engine = name;
  parent.append(row);
  const shares = name === ALL ? (entry) => entry.device : (entry) => entry.engines.get(name)?.device;
  rows.set(name, { row, text, plot: strip(holder, shares) });
}

export function updateEngines(parent, engines) {
  const found = engines.map((each) => [engineName(each), each]);
  if (found.length > 1) found.unshift([ALL, null]);
  const names = found.map(([name]) => name);
  for (const [name, { row, plot }] of rows) {
    if (names.includes(name)) continue;
    plot.remove();
    row.remove();
    rows.delete(name);
  }
  found.forEach(([name, engine], index) => {
    if (!rows.has(name)) addRow(parent, name);
    const { row, text } = rows.get(name);
    if (parent.children[index] !== row) parent.insertBefore(row, parent.children[index]);
    text.replaceChildren(...(engine ? describe(engine) : [make("strong", "", "all together")]));
  });
}

function describe(engine) {
  const part = (name, x, form, words) => {
    const value = make("span", "", words(form(x)));
    value.dataset.figure = name;
    value.title = String(x);
    return value;
  };
  const seen = (x) => x >= 0.005;
  const name = make("strong", "", `${engine.model} · ${engine.replica}`);
  name.title = name.textContent;
  const states = STATES.filter(([state]) => seen(engine.device[state]))
    .map(([state, title]) => part(state, engine.device[state], write.share, (x) => `${title} ${x}`));
  const holes = part("kv_fragmented", engine.kv_fragmented, write.share, (x) => `${x} fragmented`);
  return [
    name,
    ...states,
    part("kv_used", engine.kv_used, write.share, (x) => `KV ${x} used`),
    ...(seen(engine.kv_fragmented) ? [holes] : []),
    part("running", engine.running, write.count, (x) => `${x} running`),
    part("waiting", engine.waiting, write.count, (x) => `${x} queued`),
    part("output_per_s", engine.output_per_s, write.rate, (x) => `${x} tokens/s`),
  ];
}
