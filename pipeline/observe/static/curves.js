// Learning curves: small charts with a common x-axis. The pointer (or the arrow keys) selects a step, whose values all
// charts show. Dragging from one step to another zooms in, in all charts.

const PANEL = { width: 440, height: 210, left: 52, right: 10, top: 12, bottom: 26 };
const DASHES = ["", "5 3", "2 2", "8 3 2 3"];

function curves(page) {
  const state = curveState(page), grid = panelGrid(page, state);
  if (!state.panels.length) return note("No step was finished: there is nothing to draw.");
  const other = anyMetric(page, state);
  if (other) grid.append(other);
  const drawn = page.runs.map((run) => ofAll(run.curves.steps.length, run.curves.of_steps, "steps"));
  return h("div", {}, curveControls(page, state), grid, note(`Drawn: ${drawn.join(" · ")}. Bars at held-out points: `
    + "± one standard error. Arrow keys move from step to step; drag to look closer, Escape or double click to see all."));
}

/** The state that the panels of a page share: the steps in view, the step under the pointer, smoothing, hidden runs. */
function curveState(page) {
  const last = Math.max(0, ...page.runs.flatMap((run) =>
    [...run.curves.steps, ...Object.values(run.curves.held_out).flat().map(([version]) => version)]));
  return { range: [0, last], whole: [0, last], smooth: 1, hiddenRuns: new Set(), at: null, panels: [] };
}

function panelGrid(page, state) {
  const grid = h("div", { class: "panels" });
  for (const panel of page.panels) {
    const series = seriesOf(page, panel);
    if (series.length) grid.append(drawPanel(state, panel, series));
  }
  return grid;
}

/** The lines of a panel: one for each of its metrics and each run that has the metric and can be compared by it. */
function seriesOf(page, panel) {
  const found = [];
  for (const [i, run] of page.runs.entries()) {
    for (const [k, [metric, label]] of panel.series.entries()) {
      const points = pointsOf(run, metric);
      if (points.length && !leftOut(page, i, metric)) {
        found.push({ run: i, style: k, label, points, dots: metric in run.curves.held_out });
      }
    }
  }
  const several = page.runs.length > 1;
  const kinds = [...new Set(found.map((one) => one.label))];
  for (const one of found) {
    const kind = kinds.indexOf(one.label);
    one.colour = COLOURS[(several ? one.run : kind) % COLOURS.length];
    one.dash = several && !one.dots ? DASHES[kinds.filter((label) => !label.endsWith("held-out")).indexOf(one.label) % 4] : "";
    one.name = several ? `${page.runs[one.run].name}: ${one.label}` : one.label;
  }
  return found;
}

/** The points of a metric of a run: [step or version, value, standard error]. */
function pointsOf(run, metric) {
  const { steps, metrics, held_out: heldOut } = run.curves;
  const points = heldOut[metric] || (metrics[metric] || []).map((value, i) => [steps[i], value, null]);
  return points.filter(([, value]) => value !== null);
}

/** True if a run's curve cannot be compared with the first run's. A `*` stands for any text. */
function leftOut(page, run, metric) {
  const fits = (pattern) => new RegExp(`^${pattern.replaceAll("*", ".*")}$`).test(metric);
  return Boolean(page.comparison) && page.comparison.left_out.some((one) => one.run === run && one.metrics.some(fits));
}

function drawPanel(state, panel, series) {
  const { width, height } = PANEL;
  const picture = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "curve", role: "img", tabindex: "0",
    "aria-label": `${panel.title}, ${panel.unit}: ${series.map((one) => one.name).join(", ")}` });
  const legend = h("div", { class: "legend" });
  const own = { picture, series, hidden: new Set(), panel, readings: [] };
  own.draw = () => paint(state, own);
  own.point = () => pointAt(state, own);
  for (const [i, one] of series.entries()) {
    const reading = h("output", { class: "reading" });
    own.readings.push(reading);
    const changed = (on) => { own.hidden[on ? "delete" : "add"](i); own.draw(); };
    legend.append(toggle([swatch(one.colour, one.dots ? "round" : one.dash ? "dashed" : null), ...visible(one.name), reading], true, changed, { class: "series" }));
  }
  listen(state, own);
  state.panels.push(own);
  own.draw();
  return h("figure", { class: "panel" },
    h("figcaption", {}, h("b", {}, panel.title), h("span", { class: "unit" }, panel.unit)), picture, legend);
}

function paint(state, own) {
  const { width, height, left, right, top, bottom } = PANEL;
  const [from, to] = state.range;
  const shown = own.series.map((one, i) => ({ ...one, i }))
    .filter((one) => !own.hidden.has(one.i) && !state.hiddenRuns.has(one.run));
  const inside = shown.flatMap((one) => one.points.filter(([step]) => step >= from && step <= to));
  const [low, high] = extent(inside, own.panel.healthy);
  own.x = (step) => left + ((step - from) / Math.max(1e-9, to - from)) * (width - left - right);
  own.y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
  own.shown = shown;
  const nodes = [];
  for (const tick of ticks(low, high, 4)) {
    nodes.push(s("line", { x1: left, x2: width - right, y1: own.y(tick), y2: own.y(tick), class: "grid" }));
    nodes.push(s("text", { x: left - 6, y: own.y(tick) + 3.5, class: "tick end" }, short(tick)));
  }
  for (const tick of ticks(from, to, 6).filter(Number.isInteger)) {
    nodes.push(s("text", { x: own.x(tick), y: height - 8, class: "tick middle" }, count(tick)));
  }
  nodes.push(s("text", { x: left - 12, y: height - 8, class: "tick end" }, "step"));
  const healthy = own.panel.healthy;
  if (healthy !== null && healthy >= low && healthy <= high) {
    nodes.push(s("line", { x1: left, x2: width - right, y1: own.y(healthy), y2: own.y(healthy), class: "healthy" }));
  }
  for (const one of shown) nodes.push(...(one.dots ? dots(own, one, state.range) : line(own, one, state)));
  own.cross = s("line", { y1: top, y2: height - bottom, class: "cross" });
  own.marks = s("g", {});
  own.picture.replaceChildren(...nodes, own.cross, own.marks);
  own.point();
}

function line(own, one, state) {
  const [from, to] = state.range;
  const margin = (to - from) / 50;
  const inside = one.points.filter(([step]) => step >= from - margin && step <= to + margin);
  const path = (points) => points.map(([step, value], i) => `${i ? "L" : "M"}${own.x(step).toFixed(1)} ${own.y(value).toFixed(1)}`).join("");
  const made = (points, kind) => {
    const found = s("path", { d: path(points), class: kind, "stroke-dasharray": one.dash || null });
    found.style.stroke = one.colour;
    return found;
  };
  if (inside.length === 1) return dots(own, { ...one, points: inside }, state.range);
  return state.smooth > 1 ? [made(inside, "line faint"), made(smoothed(inside, state.smooth), "line")] : [made(inside, "line")];
}

function dots(own, one, [from, to]) {
  return one.points.filter(([step]) => step >= from && step <= to).flatMap(([step, value, error]) => {
    const x = own.x(step);
    const dot = s("circle", { cx: x, cy: own.y(value), r: 3.6, class: "dot" });
    dot.style.fill = one.colour;
    if (error === null) return [dot];
    const bar = s("line", { x1: x, x2: x, y1: own.y(value - error), y2: own.y(value + error), class: "error" });
    bar.style.stroke = one.colour;
    return [bar, dot];
  });
}

/** The mean over a window around each point. */
function smoothed(points, window) {
  return points.map(([step], i) => {
    const near = points.slice(Math.max(0, i - Math.floor(window / 2)), i + Math.ceil(window / 2));
    return [step, near.reduce((sum, [, value]) => sum + value, 0) / near.length];
  });
}

function extent(points, healthy) {
  const values = points.flatMap(([, value, error]) => (error ? [value - error, value + error] : [value]));
  if (!values.length) return [0, 1];
  let low = Math.min(...values), high = Math.max(...values);
  if (healthy !== null && low > healthy - 2 && high < healthy + 2) { low = Math.min(low, healthy); high = Math.max(high, healthy); }
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
}

/** Round numbers between two limits. */
function ticks(low, high, about) {
  const raw = (high - low) / about || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k += 1) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function listen(state, own) {
  let pressed = null;
  const stepAt = (event) => {
    const box = own.picture.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * PANEL.width;
    const [from, to] = state.range;
    const at = from + ((x - PANEL.left) / (PANEL.width - PANEL.left - PANEL.right)) * (to - from);
    return Math.round(Math.max(from, Math.min(to, at)));
  };
  own.picture.addEventListener("pointermove", (event) => {
    moveTo(state, stepAt(event));
    tell(state, own, event.clientX, event.clientY);
  });
  own.picture.addEventListener("pointerleave", () => { moveTo(state, null); tip.hide(); });
  own.picture.addEventListener("pointerdown", (event) => { pressed = stepAt(event); });
  own.picture.addEventListener("pointerup", (event) => {
    const [from, to] = [pressed, stepAt(event)].sort((a, b) => a - b);
    if (pressed !== null && to - from >= 2) look(state, [from, to]);
    pressed = null;
  });
  own.picture.addEventListener("dblclick", () => look(state, state.whole));
  own.picture.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") look(state, state.whole);
    if (!by) return;
    event.preventDefault();
    const steps = [...new Set(own.shown.flatMap((one) => one.points.map(([step]) => step)))].sort((a, b) => a - b);
    const at = state.at === null ? (by > 0 ? -1 : steps.length) : steps.findIndex((step) => step >= state.at);
    moveTo(state, steps[Math.max(0, Math.min(steps.length - 1, at + by))]);
    const box = own.picture.getBoundingClientRect();
    tell(state, own, box.left + (own.x(state.at) / PANEL.width) * box.width, box.top + box.height / 3);
  });
}

function look(state, range) {
  state.range = range;
  state.panels.forEach((panel) => panel.draw());
}

function moveTo(state, step) {
  state.at = step;
  state.panels.forEach((panel) => panel.point());
}

/** The point of a series at a step, or null. */
function valueAt(one, step) {
  return one.points.find(([at]) => at === step) || null;
}

function pointAt(state, own) {
  own.marks.replaceChildren();
  own.cross.style.display = state.at === null ? "none" : "";
  own.series.forEach((one, i) => { own.readings[i].textContent = state.at === null ? short(one.points.at(-1)[1]) : ""; });
  if (state.at === null) return;
  own.cross.setAttribute("x1", own.x(state.at));
  own.cross.setAttribute("x2", own.x(state.at));
  for (const one of own.shown) {
    const point = valueAt(one, state.at);
    if (!point) continue;
    own.readings[one.i].textContent = short(point[1]);
    const mark = s("circle", { cx: own.x(point[0]), cy: own.y(point[1]), r: 3.2, class: "dot" });
    mark.style.fill = one.colour;
    own.marks.append(mark);
  }
}

function tell(state, own, x, y) {
  const rows = own.shown.map((one) => [one, valueAt(one, state.at)]).filter(([, point]) => point)
    .map(([one, [, value, error]]) => [one.name, short(value) + (error === null ? "" : ` ± ${short(error)}`), one.colour]);
  if (rows.length) tip.show(x, y, `step ${count(state.at)}`, rows);
  else tip.hide();
}

function curveControls(page, state) {
  const redraw = () => state.panels.forEach((panel) => panel.draw());
  const said = h("output", {}, "off");
  const smooth = h("input", { type: "range", min: 1, max: 15, step: 2, value: 1, id: "smooth", oninput: () => {
    state.smooth = Number(smooth.value);
    said.textContent = state.smooth > 1 ? `${state.smooth} steps` : "off";
    redraw();
  } });
  const runs = page.runs.length > 1 ? page.runs.map((run, i) => toggle([swatch(COLOURS[i]), ...visible(run.name)], true,
    (on) => { state.hiddenRuns[on ? "delete" : "add"](i); redraw(); }, { class: "series" })) : [];
  return h("div", { class: "controls" }, runs, h("label", { for: "smooth" }, "smooth "), smooth, said,
    h("button", { type: "button", onclick: () => look(state, state.whole) }, "all steps"));
}

/** A panel of the metric that the reader chooses. */
function anyMetric(page, state) {
  const names = [...new Set(page.runs.flatMap((run) => Object.keys(run.curves.metrics)))].sort();
  if (!names.length) return null;
  const place = h("div", {});
  const choice = h("select", { "aria-label": "metric", onchange: () => open(choice.value) }, names.map((name) => h("option", {}, name)));
  let own = null;
  const open = (name) => {
    state.panels = state.panels.filter((panel) => panel !== own);
    const panel = { title: name, unit: "", series: [[name, name]], healthy: null };
    const series = seriesOf(page, panel);
    place.replaceChildren(series.length ? drawPanel(state, panel, series) : note("This metric cannot be compared."));
    own = series.length ? state.panels[state.panels.length - 1] : null;
  };
  choice.value = names.includes("policy/loss") ? "policy/loss" : names[0];
  open(choice.value);
  return h("div", { class: "any" }, h("label", {}, "any metric ", choice), place);
}
