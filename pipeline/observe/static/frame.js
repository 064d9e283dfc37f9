// The frame of the page: its head, the bar of sections and, for several runs, the tabs that choose the run to show.

function head(page) {
  const several = page.runs.length > 1;
  const runs = page.runs.map((run, i) => h("article", { class: "run" },
    several ? h("h2", {}, swatch(COLOURS[i]), ...visible(run.name)) : null,
    h("p", { class: `state ${run.state.split(":")[0].replace(" ", "-")}` }, run.state),
    h("dl", {}, run.facts.map((fact) => [h("dt", {}, fact.label), h("dd", {}, ...visible(fact.value))])),
    run.remarks.map((remark) => note(...visible(remark)))));
  const title = several ? [`${page.runs.length} runs`] : visible(page.runs[0].name);
  return h("header", {}, h("p", { class: "brand" }, "Stageline report"), h("h1", {}, ...title), h("div", { class: "runs" }, runs));
}

/** Sections as [id, title, node]; those without a node are left out. */
function sections(found) {
  const there = found.filter(([, , node]) => node);
  const links = there.map(([id, title]) => h("a", { href: `#${id}` }, title));
  const bar = h("nav", { "aria-label": "sections" }, links);
  const bodies = there.map(([id, title, node]) =>
    h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), node));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) mark(entry.target.id);
  }, { rootMargin: "-10% 0px -80% 0px" });
  const mark = (id) => links.forEach((link) => link.classList.toggle("here", link.hash === `#${id}`));
  bodies.forEach((body) => seen.observe(body));
  return [bar, ...bodies];
}

/** Content that is shown for one run at a time, made by `build(run, i)`; with tabs if there are several runs. */
function perRun(page, build) {
  if (page.runs.length === 1) return build(page.runs[0], 0);
  const shown = h("div", {});
  const made = new Map();
  const tabs = page.runs.map((run, i) =>
    h("button", { type: "button", role: "tab", onclick: () => open(i) }, swatch(COLOURS[i]), ...visible(run.name)));
  const open = (i) => {
    tabs.forEach((tab, k) => tab.setAttribute("aria-selected", String(k === i)));
    if (!made.has(i)) made.set(i, build(page.runs[i], i) || note("Nothing of this run."));
    shown.replaceChildren(made.get(i));
  };
  open(0);
  return h("div", {}, h("div", { class: "tabs", role: "tablist" }, tabs), shown);
}

/** A number and its uncertainty on one line. */
const together = (text) => text.replaceAll(" ± ", "\u00a0±\u00a0");

function headlines(page) {
  const first = ["held_out", "gain", "kl", "score", "staleness", "speed", "overlap", "wall"];
  const keys = [...new Set(page.runs.flatMap((run) => run.headlines.map((one) => one.key)))];
  const of = (run, key) => run.headlines.find((one) => one.key === key);
  if (page.runs.length === 1) {
    const run = page.runs[0];
    const card = (one) => h("div", { class: "card" },
      h("p", { class: "label" }, one.label), h("p", { class: "value" }, together(one.value)), h("p", { class: "detail" }, one.detail));
    const line = (one) => [one.label, h("b", {}, one.value), one.detail];
    const rest = keys.filter((key) => !first.includes(key)).map((key) => line(of(run, key)));
    return h("div", {},
      h("div", { class: "cards" }, first.map((key) => of(run, key)).filter(Boolean).map(card)),
      table(["", "", ""], rest, { class: "plain" }));
  }
  const ordered = [...first.filter((key) => keys.includes(key)), ...keys.filter((key) => !first.includes(key))];
  const cell = (one) => (one ? [h("b", {}, together(one.value)), h("div", { class: "detail" }, one.detail)] : "–");
  const label = (key) => page.runs.map((run) => of(run, key)).find(Boolean).label;
  const rows = ordered.map((key) => [label(key), ...page.runs.map((run) => cell(of(run, key)))]);
  return table(["", ...page.runs.map((run, i) => [swatch(COLOURS[i]), ...visible(run.name)])], rows, { class: "plain" });
}
