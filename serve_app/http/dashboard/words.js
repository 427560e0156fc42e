// Figures as people read them, three digits or so, and elements that show them. What comes from the
// server is put into the page as text only.

export const NONE = "–";
const number = (digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits });
const whole = number(0), tenths = number(1);
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const write = {
  count: (x) => (x >= 100000 ? compact : whole).format(x),
  rate: (x) => (x >= 100000 ? compact : x >= 10 ? whole : tenths).format(x),
  share: (x) => (x > 0 && x < 0.005 ? "<1%" : `${whole.format(100 * x)}%`),
  seconds: (x) =>
    x >= 100 ? `${whole.format(x)} s` : x >= 1 ? `${Number(x.toPrecision(3))} s` :
    x >= 0.01 ? `${whole.format(1000 * x)} ms` : `${tenths.format(1000 * x)} ms`,
  dollars: (x) =>
    x >= 100000 ? `$${compact.format(x)}` : x >= 0.01 || x <= 0 ? `$${x.toFixed(2)}` :
    x < 0.00005 ? "<$0.0001" : `$${x.toFixed(4)}`,
};

export function told(x, form) {
  return x === null || x === undefined ? NONE : form(x);
}

export function make(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// The exact figure is there for who points at it.
export function show(element, x, form) {
  element.textContent = told(x, form);
  element.title = x === null || x === undefined ? "" : String(x);
}

// As the style sheet has it now, for what is drawn on a canvas.
export function colour(name) {
  const probe = make("i", name);
  document.body.append(probe);
  const found = getComputedStyle(probe).backgroundColor;
  probe.remove();
  return found;
}
