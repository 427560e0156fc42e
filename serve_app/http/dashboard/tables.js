// Models and tenants: tables of rows that stay as long as what they are about.

import { NONE, make, show, told, write } from "./words.js";

const HAS_NO_KEY = "-", OTHERS = "other";  // of who has no series of its own

class Rows {
  constructor(table, name, columns) {
    this.table = table;
    this.name = name;
    this.columns = columns;
    this.rows = new Map();
    this.body = make("tbody");
    const heads = columns.map(([title]) => make("th", "", title));
    table.append(make("thead", "", make("tr", "", ...heads)), this.body);
  }

  update(items) {
    const names = items.map(this.name);
    for (const [old, row] of this.rows) {
      if (names.includes(old)) continue;
      row.remove();
      this.rows.delete(old);
    }
    items.forEach((item, index) => {
      const row = this.rows.get(names[index]) ?? this.add(names[index]);
      const there = this.body.children[index] ?? null;
      if (there !== row) this.body.insertBefore(row, there);
      this.columns.forEach(([, fill], column) => {
        const cell = row.children[column];
        fill(cell, item);
        cell.classList.toggle("empty", cell.textContent === NONE);
      });
    });
    this.table.hidden = !items.length;
  }

  add(name) {
    const cells = this.columns.map(([title]) => {
      const cell = make("td");
      cell.dataset.label = title;
      return cell;
    });
    const row = make("tr", "", ...cells);
    this.rows.set(name, row);
    return row;
  }
}

const figure = (name, form) => (cell, item) => show(cell, item[name], form);

function withSmall(cell, x, form, small) {
  show(cell, x, form);
  if (small) cell.append(make("small", "", small));
}

function several(cell, values, words) {
  const parts = Object.entries(values).map(([name, x]) => make("div", "", words(name, x)));
  cell.replaceChildren(...(parts.length ? parts : [NONE]));
}

function tails(name) {
  return (cell, item) => {
    const parts = item[name].map((x) => told(x, write.seconds));
    cell.classList.add("wide");
    cell.textContent = item[name].every((x) => x === null) ? NONE : parts.join(" / ");
  };
}

function service(cell, tenant) {
  if (!tenant.share && !tenant.fair_share) {
    cell.replaceChildren(NONE);
    return;
  }
  if (!cell.firstElementChild) {
    cell.replaceChildren(make("span"), make("small"), make("span", "bar", make("i"), make("u")));
  }
  const [share, fair, bar] = cell.children;
  show(share, tenant.share, write.share);
  fair.textContent = `fair ${write.share(tenant.fair_share)}`;
  bar.children[0].style.width = `${100 * Math.min(tenant.share, 1)}%`;
  bar.children[1].style.left = `${100 * Math.min(tenant.fair_share, 1)}%`;
}

export const models = new Rows(document.getElementById("models"), (each) => each.model, [
  ["model", (cell, one) => { cell.textContent = one.model; }],
  ["replicas", figure("replicas", write.count)],
  ["places", figure("slots", write.count)],
  ["free", figure("free", write.count)],
  ["requests /s", figure("requests_per_s", write.rate)],
  ["output tokens /s", figure("output_per_s", write.rate)],
  ["first token p50 / p95 / p99", tails("first_token_s")],
  ["between tokens p50 / p95 / p99", tails("gap_s")],
]);

const byTenant = new Rows(document.getElementById("tenants"), (each) => each.tenant, [
  ["tenant", (cell, one) => {
    cell.textContent = one.tenant === HAS_NO_KEY ? "no valid key" : one.tenant;
    if (one.weight !== null) cell.append(make("small", "", `weight ${one.weight}`));
  }],
  ["service", service],
  ["running", figure("running", write.count)],
  ["waiting", (cell, one) => {
    const why = one.held_back.map((each) => each.replaceAll("_", " ")).join(", ");
    withSmall(cell, one.waiting, write.count, why && `for ${why}`);
  }],
  ["output tokens /s", figure("output_per_s", write.rate)],
  ["left this minute", (cell, one) => several(cell, one.rates_left, (limit, x) => `${write.count(x)} ${limit}`)],
  ["budget left", (cell, one) => several(cell, one.budgets_left, (period, x) => `${period} ${write.dollars(x)}`)],
  ["refused", (cell, one) => {
    withSmall(cell, one.refused, write.count, one.refused_per_s && `${write.rate(one.refused_per_s)} /s`);
  }],
  ["spent", (cell, one) => {
    const rate = one.dollars_per_hour && `${write.dollars(one.dollars_per_hour)} /h`;
    withSmall(cell, one.dollars, write.dollars, rate);
  }],
]);

// By name, so that nobody jumps about; who is many comes last.
export const tenants = {
  update(items) {
    const place = ({ tenant }) => [HAS_NO_KEY, OTHERS].indexOf(tenant);
    byTenant.update([...items].sort((a, b) => place(a) - place(b) || (a.tenant < b.tenant ? -1 : 1)));
  },
};
