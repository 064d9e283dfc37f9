// The tables of the page: held-out responses, mismatches, incidents, configs, and comparisons of runs.

function heldOut(run) {
  const found = run.held_out;
  if (!found) return note("There is no second evaluation to compare the first with.");
  const [first, last] = found.versions;
  const place = h("div", { class: "pairs" });
  let shown = 8, pairs = [...found.pairs];
  const change = (pair) => pair.after_score - pair.before_score;
  const orders = {
    "in order": null, "largest gain": (a, b) => change(b) - change(a), "largest loss": (a, b) => change(a) - change(b),
    "highest after": (a, b) => b.after_score - a.after_score, "lowest after": (a, b) => a.after_score - b.after_score,
  };
  const more = h("button", { type: "button", onclick: () => { shown += 24; fill(); } }, "more");
  const order = h("select", { name: "pairs", onchange: () => {
    pairs = [...found.pairs];
    if (orders[order.value]) pairs.sort(orders[order.value]);
    shown = 8;
    fill();
  } }, Object.keys(orders).map((name) => h("option", {}, name)));
  const one = (label, score, text) => h("div", {}, h("p", { class: "numbers" }, label, " ", h("b", {}, short(score))), h("p", { class: "text" }, ...visible(text)));
  const fill = () => {
    place.replaceChildren(...pairs.slice(0, shown).map((pair) => h("article", { class: "pair" },
      h("p", { class: "prompt" }, ...visible(pair.prompt), h("span", { class: change(pair) >= 0 ? "tag up" : "tag down" }, signed(change(pair)))),
      h("div", { class: "two" }, one(`v${first}`, pair.before_score, pair.before), one(`v${last}`, pair.after_score, pair.after)))));
    more.hidden = pairs.length <= shown;
  };
  fill();
  return h("div", {}, note(`${ofAll(found.pairs.length, found.of_pairs, "prompts")}, by version ${first} and by version ${last} of the policy.`),
    h("div", { class: "controls" }, h("label", {}, "order ", order)), place, more);
}

function mismatches(run, browser) {
  if (!run.mismatches) return note("The trainer's log-probs are not recomputed in this run (ppo.proximal), so that nothing is there to compare.");
  if (!run.mismatches.length) return note("No step that was read has the trainer's log-probs.");
  const open = (one) => h("button", { type: "button", class: "link", onclick: () => browser.open(one.step, one.row) }, `step ${one.step}, row ${one.row}`);
  const inSample = (one) => run.samples.rows.some((row) => row.step === one.step && row.row === one.row);
  const rows = run.mismatches.map((one) => [
    inSample(one) ? open(one) : `step ${one.step}, row ${one.row}`, String(one.position), h("code", {}, ...visible(one.token)),
    short(one.sampler), short(one.policy), h("b", {}, one.policy === null || one.sampler === null ? "–" : signed(one.policy - one.sampler)), String(one.staleness),
  ]);
  return h("div", {},
    note("Sampled tokens on which log π (trainer, at the step's start) and log μ (sampler) differ most, of the steps that were read. "
      + "At staleness 0 both are of the same weights and should agree to rounding; above it the policy has moved in between."),
    table(["row", "token no.", "token", "log μ", "log π", "difference", "staleness"], rows));
}

function incidents(run) {
  const found = run.incidents;
  if (!found.shown.length) return note("None: no alarm, no loss, no failed attempt, no warning.");
  const start = run.timeline ? run.timeline.start : found.shown[0].at;
  const rows = found.shown.map((one) => [
    h("time", { datetime: new Date(one.at * 1000).toISOString() }, one.at < start ? "before" : duration((one.at - start) * 1000)),
    h("span", { class: `tag ${one.kind.replace(" ", "-")}` }, one.kind), one.where, visible(one.text),
  ]);
  return h("div", {}, found.shown.length < found.of_all ? note(`${ofAll(found.shown.length, found.of_all, "events")}, the gravest.`) : null,
    table(["time", "event", "where", "details"], rows, { class: "plain events" }));
}

function config(page) {
  const keys = [...new Set(page.runs.flatMap((run) => run.settings.map(([key]) => key)))];
  const values = page.runs.map((run) => new Map(run.settings));
  const place = h("div", {});
  const wanted = h("input", { type: "search", name: "config", placeholder: "key or value", "aria-label": "find in config", oninput: () => fill() });
  const fill = () => {
    const text = wanted.value.toLowerCase();
    const rows = keys.map((key) => [key, ...values.map((one) => one.get(key) ?? "–")])
      .filter((row) => row.some((cell) => cell.toLowerCase().includes(text)))
      .map(([key, ...cells]) => [h("code", {}, key), ...cells.map((cell) => visible(cell))]);
    place.replaceChildren(table(["key", ...page.runs.map((run) => visible(run.name))], rows, { class: "plain config" }));
  };
  fill();
  return h("details", {}, h("summary", {}, `${count(keys.length)} settings`), wanted, place);
}

function comparison(page) {
  const found = page.comparison;
  if (!found) return null;
  const name = (i) => [swatch(COLOURS[i]), ...visible(page.runs[i].name)];
  const differences = found.config.length
    ? table(["key", ...page.runs.map((run, i) => name(i))],
      found.config.map((one) => [h("code", {}, one.key), ...one.values.map((value) => (value === null ? "–" : visible(value)))]), { class: "plain" })
    : note("None: the runs have the same config.");
  const left = found.left_out.map((one) => h("li", {}, ...name(one.run), h("span", {}, `: ${one.what} are left out, since ${one.why}.`)));
  return h("div", {},
    found.paired.length ? [
      h("h3", {}, "Paired evaluation by prompt"),
      note("Scores of the last evaluated versions on the prompts that both runs were evaluated on; differences are against the first run. t = mean / standard error of the differences."),
      h("div", { class: "panels" }, found.paired.map((one) => paired(page, one)))] : null,
    left.length ? [h("h3", {}, "Not compared"), h("ul", { class: "left-out" }, left)] : null,
    h("h3", {}, "Config keys that differ"), differences);
}

function paired(page, one) {
  const base = page.runs[0], other = page.runs[one.run], { found } = one;
  const even = found.num_prompts - found.better - found.worse;
  const error = one.error === null ? "" : ` ± ${short(one.error)}`;
  return h("figure", { class: "panel paired" },
    h("figcaption", {}, swatch(COLOURS[one.run]), h("b", {}, ...visible(other.name)), h("span", { class: "unit" }, "against "), ...visible(base.name)),
    h("p", { class: "value" }, signed(found.difference), error),
    h("p", { class: "detail" }, `paired t ${found.paired_t === null ? "–" : found.paired_t.toFixed(2)} over ${found.num_prompts} ${found.num_prompts === 1 ? "prompt" : "prompts"}: `
      + `${found.better} better, ${found.worse} worse, ${even} equal · v${one.versions[1]} ${short(found.variant)}, v${one.versions[0]} ${short(found.parent)}`),
    one.remark ? note(one.remark) : null, scatter(page, one));
}

/** A chart with a dot for each prompt: x is the first run's score, y is this run's. */
function scatter(page, one) {
  const size = 300, edge = 38;
  const values = one.pairs.flat();
  const [low, high] = extent(values.map((value) => [0, value, null]), null);
  const at = (value) => edge + ((value - low) / (high - low)) * (size - edge - 24);
  const dots = one.pairs.map(([a, b]) => {
    const dot = s("circle", { cx: at(a), cy: size - at(b), r: 3, class: "dot scattered",
      onpointerenter: (event) => tip.show(event.clientX, event.clientY, "a prompt", [[page.runs[0].name, short(a)], [page.runs[one.run].name, short(b)], ["difference", signed(b - a)]]),
      onpointerleave: () => tip.hide() });
    dot.style.fill = COLOURS[one.run];
    return dot;
  });
  const marks = ticks(low, high, 4).map((tick) => [
    s("text", { x: at(tick), y: size - edge + 18, class: "tick middle" }, short(tick)),
    s("text", { x: edge - 6, y: size - at(tick) + 3, class: "tick end" }, short(tick))]);
  return s("svg", { viewBox: `0 0 ${size} ${size}`, class: "scatter", role: "img", "aria-label": "scores by prompt of both runs" },
    s("line", { x1: at(low), y1: size - at(low), x2: at(high), y2: size - at(high), class: "healthy" }), marks, dots,
    s("text", { x: size - 8, y: size - edge + 32, class: "tick end" }, `score in ${page.runs[0].name.slice(0, 24)}`),
    s("text", { x: 2, y: 10, class: "tick" }, `score in ${page.runs[one.run].name.slice(0, 24)}`));
}
