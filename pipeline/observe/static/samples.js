// The sample browser: rows that pass the filters, with one number of each token as colour under its text.

const PER_TOKEN = [
  ["log_ratio", "log-ratio to the reference", "log π − log π_ref, nats: what the KL is the sum of"],
  ["values", "value", "the critic's value of the state before the token"],
  ["advantages", "advantage", "of the token, as it was trained on"],
  ["mismatch", "trainer - sampler", "log π − log μ, nats: staleness and numerics"],
];
const PAGE = 12;
const FIRST_SORT = "late";

function samples(run) {
  const found = run.samples;
  if (!found.rows.length) return note(found.of_steps ? "No rows could be read." : "No rows are stored.");
  const kinds = PER_TOKEN.filter(([name]) => found.rows.some((row) => row[name]));
  const state = { run, rows: found.rows, kind: kinds.length ? kinds[0][0] : null, shown: PAGE, filters: {}, only: null, sort: FIRST_SORT };
  state.scales = Object.fromEntries(kinds.map(([name]) => [name, scaleOf(found.rows, name)]));
  state.form = filters(state, kinds);
  state.list = h("div", { class: "rows" });
  state.found = h("p", { class: "found", "aria-live": "polite" });
  state.more = h("button", { type: "button", onclick: () => { state.shown += PAGE * 4; list(state); } }, "more");
  state.legend = h("div", { class: "scale" });
  const read = found.read_steps === found.of_steps ? "" : ` Read were ${ofAll(found.read_steps, found.of_steps, "steps")}.`;
  const even = "Even over steps and rows, and beside it the extremes of what was read, marked as such.";
  const node = h("div", { class: "samples" },
    note(`${ofAll(found.rows.length, found.of_rows, "rows")}.${read} ${found.rows.length < found.of_rows ? even : ""}`),
    state.form, state.legend, state.found, state.list, state.more);
  node.open = (step, row) => openRow(state, step, row);
  list(state);
  return node;
}

/** The size from which a token has full colour: 2 % of the tokens have a larger one. */
function scaleOf(rows, name) {
  const sizes = rows.flatMap((row) => row[name] || []).filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  return sizes[Math.floor(sizes.length * 0.98)] || sizes[sizes.length - 1] || 1;
}

function filters(state, kinds) {
  const range = (key, label, of) => {
    const values = state.rows.map(of).filter((value) => value !== null);
    if (!values.length) return null;
    const input = (end, extreme) => h("input", { type: "number", step: "any", placeholder: short(extreme), name: `${key}-${end}`,
      "aria-label": `${label} ${end === "from" ? "at least" : "at most"}`,
      oninput: (event) => {
        const value = event.target.value === "" ? null : Number(event.target.value);
        state.filters[`${key}-${end}`] = value === null ? null : (row) => of(row) !== null && (end === "from" ? of(row) >= value : of(row) <= value);
        again(state);
      } });
    return h("label", { class: "range" }, h("span", {}, label), input("from", Math.min(...values)), "–", input("to", Math.max(...values)));
  };
  const text = h("input", { type: "search", name: "text", placeholder: "in prompt or response", oninput: () => {
    const wanted = text.value.toLowerCase();
    state.filters.text = wanted ? (row) => `${row.prompt}\n${row.tokens.join("")}`.toLowerCase().includes(wanted) : null;
    again(state);
  } });
  const extremes = [...new Set(state.rows.map((row) => row.extreme).filter(Boolean))];
  const only = h("select", { name: "extreme", onchange: () => {
    state.filters.extreme = only.value ? (row) => row.extreme === only.value : null;
    again(state);
  } }, h("option", { value: "" }, "all rows"), extremes.map((name) => h("option", { value: name }, name)));
  const sort = h("select", { name: "sort", onchange: () => { state.sort = sort.value; again(state); } },
    Object.entries(SORTS).map(([key, [label]]) => h("option", { value: key }, label)));
  const colour = h("select", { name: "colour", onchange: () => { state.kind = colour.value; list(state); } },
    kinds.map(([name, label]) => h("option", { value: name }, label)));
  return h("form", { class: "filters", onsubmit: (event) => event.preventDefault(), onreset: () => setTimeout(() => {
    Object.assign(state, { filters: {}, sort: FIRST_SORT, kind: kinds.length ? kinds[0][0] : null });
    again(state);
  }) },
    range("step", "step", (row) => row.step), range("score", "score", (row) => row.score),
    range("kl", "KL", (row) => row.kl), range("length", "length", (row) => row.length),
    h("label", {}, h("span", {}, "text"), text), h("label", {}, h("span", {}, "extremes"), only),
    h("label", {}, h("span", {}, "order"), sort), kinds.length ? h("label", {}, h("span", {}, "colour"), colour) : null,
    h("button", { type: "reset" }, "clear"));
}

const worst = (row) => Math.max(0, ...(row.mismatch || []).map((value) => Math.abs(value || 0)));
const SORTS = {
  late: ["latest first", (a, b) => b.step - a.step || a.row - b.row],
  step: ["earliest first", (a, b) => a.step - b.step || a.row - b.row],
  high: ["highest score", (a, b) => b.score - a.score],
  low: ["lowest score", (a, b) => a.score - b.score],
  kl: ["largest KL", (a, b) => b.kl - a.kl],
  long: ["longest", (a, b) => b.length - a.length],
  mismatch: ["largest mismatch", (a, b) => worst(b) - worst(a)],
};

function again(state) {
  state.only = null;
  state.shown = PAGE;
  list(state);
}

function list(state) {
  const passing = state.only ? [(row) => row.step === state.only.step && row.row === state.only.row] : Object.values(state.filters).filter(Boolean);
  const rows = state.rows.filter((row) => passing.every((passes) => passes(row))).sort(SORTS[state.sort][1]);
  state.found.replaceChildren(...(state.only ? onlyRow(state) : rows.length === state.rows.length ? [] : [`${ofAll(rows.length, state.rows.length, "rows")} pass`]));
  state.list.replaceChildren(...rows.slice(0, state.shown).map((row) => rowCard(state, row)));
  state.more.hidden = rows.length <= state.shown;
  state.legend.replaceChildren(...scaleLegend(state));
}

function scaleLegend(state) {
  if (!state.kind) return [];
  const [, label, meaning] = PER_TOKEN.find(([name]) => name === state.kind);
  const size = state.scales[state.kind];
  return [h("b", {}, label), h("span", { class: "unit" }, meaning), h("span", { class: "ramp-end" }, short(-size)),
    h("span", { class: "ramp", "aria-hidden": "true" }), h("span", { class: "ramp-end" }, signed(size))];
}

function rowCard(state, row) {
  const number = (label, value) => h("span", { class: "number" }, label, " ", h("b", {}, value));
  const parts = Object.entries(row.parts).map(([name, value]) => number(name, short(value)));
  const card = h("article", { class: "sample", "data-step": row.step, "data-row": row.row },
    h("div", { class: "numbers" }, number("step", count(row.step)), number("row", row.row), number("score", short(row.score)), parts,
      number("KL", short(row.kl)), number("tokens", count(row.length) + (row.cut ? ", cut" : "")), number("weights", `v${row.versions}`),
      row.extreme ? h("span", { class: "tag" }, row.extreme) : null),
    h("p", { class: "prompt" }, ...visible(row.prompt)), response(state, row));
  return card;
}

/** The tokens of a row. A tooltip shows the numbers of the token under the pointer, or chosen with the arrow keys. */
function response(state, row) {
  const spans = row.tokens.map((text, i) => {
    const span = h("span", { class: "token" }, ...visible(text));
    paintToken(span, state, row, i);
    span.addEventListener("pointerenter", () => tellToken(span, row, i));
    span.addEventListener("pointerleave", () => tip.hide());
    return span;
  });
  const left = row.length - row.tokens.length;
  const node = h("p", { class: "response", tabindex: "0", "aria-label": "response; arrow keys go from token to token" }, spans,
    left > 0 ? h("span", { class: "left" }, ` … ${count(left)} more tokens`) : null);
  let at = -1;
  node.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    at = Math.max(0, Math.min(spans.length - 1, at + by));
    spans.forEach((span, i) => span.classList.toggle("active", i === at));
    tellToken(spans[at], row, at);
  });
  node.addEventListener("blur", () => { spans.forEach((span) => span.classList.remove("active")); tip.hide(); });
  return node;
}

function paintToken(span, state, row, i) {
  const value = state.kind && row[state.kind] ? row[state.kind][i] : null;
  if (value === null) return;
  const strength = Math.min(1, Math.abs(value) / state.scales[state.kind]);
  const colour = value > 0 ? "224, 122, 47" : "66, 118, 202";
  span.style.backgroundColor = `rgba(${colour}, ${(0.55 * strength).toFixed(3)})`;
  span.style.boxShadow = `0 2px 0 rgba(${colour}, ${strength.toFixed(3)})`;
}

function tellToken(span, row, i) {
  const box = span.getBoundingClientRect();
  const rows = PER_TOKEN.filter(([name]) => row[name]).map(([name, label]) => [label, row[name][i] > 0 ? signed(row[name][i]) : short(row[name][i])]);
  tip.show(box.left, box.bottom - 8, [`token ${i}: `, ...visible(row.tokens[i] || "(part of a character)")], rows);
}

/** Shows a single row until a filter or the order changes. Returns false if the row is not in the sample. */
function openRow(state, step, row) {
  if (!state.rows.some((one) => one.step === step && one.row === row)) return false;
  state.form.reset();
  setTimeout(() => { // after the form's own reset, which shows all rows
    state.only = { step, row };
    list(state);
    state.list.scrollIntoView({ block: "center" });
    state.list.querySelector(".response").focus({ preventScroll: true });
  });
  return true;
}

function onlyRow(state) {
  const { step, row } = state.only;
  return [`row ${row} of step ${step} `, h("button", { type: "button", "aria-label": "all rows", title: "all rows", onclick: () => again(state) }, "✕")];
}
