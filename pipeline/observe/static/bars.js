// Bar charts: rows by staleness, and seconds by stage.

/** Rows of bars. `rows`: [label, values by run]. The longest bar fills the width. */
function bars(rows, text) {
  const most = Math.max(...rows.flatMap(([, values]) => values.map((value) => value || 0)), 1e-9);
  return h("div", { class: "bars" }, rows.map(([label, values]) => [
    h("span", { class: "bar-label" }, label),
    h("div", {}, values.map((value, run) => {
      const bar = h("span", { class: "bar" });
      bar.style.width = `${Math.max(0.3, (100 * (value || 0)) / most)}%`;
      bar.style.background = COLOURS[run];
      return h("div", { class: "bar-line" }, h("div", { class: "bar-track" }, bar), h("span", { class: "bar-text" }, value === null ? "–" : text(value, run)));
    })),
  ]));
}

function staleness(page) {
  const ages = [...new Set(page.runs.flatMap((run) => Object.keys(run.staleness)))].map(Number).sort((a, b) => a - b);
  if (!ages.length) return null;
  const totals = page.runs.map((run) => Object.values(run.staleness).reduce((sum, rows) => sum + rows, 0));
  const rows = ages.map((age) => [age === 1 ? "1 version" : `${age} versions`,
    page.runs.map((run, i) => (run.staleness[age] || 0) / (totals[i] || 1))]);
  const text = (share, run) => `${(100 * share).toFixed(1)} %  (${count(Math.round(share * totals[run]))} rows)`;
  return h("div", {}, note("Rows by how many versions older than the trainer's the weights were that sampled them."), bars(rows, text));
}

function stageSeconds(page) {
  const total = (stage) => page.runs.reduce((sum, run) => sum + (run.stage_s[stage] || 0), 0);
  const stages = [...new Set(page.runs.flatMap((run) => Object.keys(run.stage_s)))].sort((a, b) => total(b) - total(a));
  if (!stages.length) return null;
  const sums = page.runs.map((run) => Object.values(run.stage_s).reduce((sum, value) => sum + value, 0));
  const rows = stages.map((stage) => [stage, page.runs.map((run) => run.stage_s[stage] ?? null)]);
  const text = (value, run) => `${short(value)} s  (${((100 * value) / (sums[run] || 1)).toFixed(1)} %)`;
  return h("div", {}, note("Summed over nodes; nodes that ran side by side count each."), bars(rows, text));
}
