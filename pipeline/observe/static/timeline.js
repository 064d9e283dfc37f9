// The timeline shows which stage each worker ran when: a strip of the whole run above, and the part in view below. It
// is drawn on a canvas, because a run has tens of thousands of executions.

const MARK_COLOURS = { alarm: "#cf5359", lost: "#cf5359", failed: "#cf5359", recovered: "#3c9d70", resumed: "#3f74c4" };
const LANES = { left: 150, row: 24, top: 24, strip: 34 };

function timeline(run) {
  const data = run.timeline;
  if (!data) return note("Nothing was run.");
  const whole = [0, Math.max(1, data.duration_ms)];
  const state = { data, whole, window: clamp(data.window_ms, whole), hidden: new Set(), selected: null, byLane: laneIndex(data) };
  state.strip = h("canvas", { class: "strip", height: LANES.strip, "aria-hidden": "true" });
  state.canvas = h("canvas", { class: "lanes", tabindex: "0", role: "img",
    "aria-label": "Timeline. Arrow keys go from execution to execution, plus and minus change the scale, 0 shows all." });
  state.said = h("p", { class: "said", "aria-live": "polite" });
  const legend = h("div", { class: "legend" }, data.stages.map((stage, i) => toggle([swatch(colourOf(stage)), stage], true,
    (on) => { state.hidden[on ? "delete" : "add"](i); draw(state); }, { class: "series" })));
  const button = (label, act) => h("button", { type: "button", onclick: act }, label);
  const controls = h("div", { class: "controls" },
    button("closer", () => zoom(state, 0.5)), button("wider", () => zoom(state, 2)),
    button("earlier", () => pan(state, -0.5)), button("later", () => pan(state, 0.5)),
    button("whole run", () => show(state, whole)));
  const shown = data.begin_ms.length === data.of_executions ? "" : ", the first and the last";
  const gaps = data.gaps_ms ? ` The time between a stop and a resume, ${duration(data.gaps_ms)} in all, is left out.` : "";
  listenTimeline(state);
  new ResizeObserver(() => draw(state)).observe(state.canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(state));
  return h("div", {}, controls, state.strip, state.canvas, legend, state.said,
    note(`${ofAll(data.begin_ms.length, data.of_executions, "executions")}${shown}. Drag to move, Ctrl and wheel to scale.${gaps}`));
}

const colourOf = (stage) => page.stage_colours[stage] || "#9d9d9d";

/** Numbers of the executions of each lane, in order of time. */
function laneIndex(data) {
  const found = data.lanes.map(() => []);
  data.lane.forEach((lane, i) => found[lane].push(i));
  found.forEach((lane) => lane.sort((a, b) => data.begin_ms[a] - data.begin_ms[b]));
  return found;
}

function clamp([from, to], [low, high]) {
  const length = Math.min(Math.max(to - from, 5), high - low);
  const start = Math.max(low, Math.min(from, high - length));
  return [start, start + length];
}

function show(state, range) {
  state.window = clamp(range, state.whole);
  draw(state);
}

function zoom(state, factor, around = 0.5) {
  const [from, to] = state.window;
  const at = from + (to - from) * around;
  show(state, [at - (at - from) * factor, at + (to - at) * factor]);
}

function pan(state, by) {
  const [from, to] = state.window;
  show(state, [from + (to - from) * by, to + (to - from) * by]);
}

function draw(state) {
  const { canvas, data } = state;
  const width = canvas.clientWidth, height = LANES.top + data.lanes.length * LANES.row + 6;
  if (!width) return;
  canvas.style.height = `${height}px`;
  const pen = sharp(canvas, width, height);
  const [from, to] = state.window;
  state.x = (ms) => LANES.left + ((ms - from) / (to - from)) * (width - LANES.left);
  const style = getComputedStyle(canvas);
  const ink = style.getPropertyValue("--ink"), faint = style.getPropertyValue("--line"), dim = style.getPropertyValue("--dim");
  pen.font = "11px system-ui, sans-serif";
  for (const tick of ticks(from / 1000, to / 1000, 8)) {
    const x = state.x(tick * 1000);
    if (x < LANES.left) continue;
    pen.fillStyle = faint;
    pen.fillRect(x, LANES.top - 4, 1, height - LANES.top);
    pen.fillStyle = dim;
    pen.fillText(`${short(tick)} s`, x + 3, 13);
  }
  pen.save();
  pen.beginPath();
  pen.rect(LANES.left, 0, width - LANES.left, height);
  pen.clip();
  state.byLane.forEach((lane, row) => drawLane(pen, state, lane, LANES.top + row * LANES.row));
  for (const mark of data.marks) {
    if (mark.ms < from || mark.ms > to) continue;
    pen.fillStyle = MARK_COLOURS[mark.kind] || dim;
    pen.fillRect(state.x(mark.ms) - 0.5, LANES.top - 6, 1.5, height - LANES.top + 6);
    pen.beginPath();
    pen.arc(state.x(mark.ms), LANES.top - 5, 4, 0, 7);
    pen.fill();
  }
  pen.restore();
  pen.textAlign = "right";
  data.lanes.forEach((lane, row) => {
    const first = row === 0 || data.lanes[row - 1].worker !== lane.worker;
    if (first && row) { pen.fillStyle = faint; pen.fillRect(0, LANES.top + row * LANES.row - 1, width, 1); }
    pen.fillStyle = ink;
    if (first) pen.fillText(lane.worker, LANES.left - 10, LANES.top + row * LANES.row + 15, LANES.left - 14);
  });
  drawStrip(state, width);
}

function drawLane(pen, state, lane, y) {
  const { data, hidden, selected } = state;
  for (const i of lane) {
    if (hidden.has(data.stage[i])) continue;
    const left = state.x(data.begin_ms[i]);
    const right = state.x(data.begin_ms[i] + data.length_ms[i]);
    if (right < LANES.left || left > pen.canvas.clientWidth) continue;
    const wide = Math.max(0.8, right - left);
    pen.fillStyle = colourOf(data.stages[data.stage[i]]);
    pen.fillRect(left, y + 2, wide > 3 ? wide - 0.7 : wide, LANES.row - 5);
    if (wide > 20) {
      pen.fillStyle = "#111c";
      pen.fillText(String(data.step[i]), Math.max(left, LANES.left) + 4, y + 15, wide - 6);
    }
    if (i === selected) {
      pen.strokeStyle = getComputedStyle(state.canvas).getPropertyValue("--ink");
      pen.lineWidth = 2;
      pen.strokeRect(left, y + 1, wide, LANES.row - 3);
    }
  }
}

function drawStrip(state, width) {
  const { data, whole } = state;
  const pen = sharp(state.strip, width, LANES.strip);
  const x = (ms) => LANES.left + (ms / whole[1]) * (width - LANES.left);
  const row = Math.max(1, (LANES.strip - 8) / data.lanes.length);
  data.begin_ms.forEach((begin, i) => {
    if (state.hidden.has(data.stage[i])) return;
    pen.fillStyle = colourOf(data.stages[data.stage[i]]);
    pen.fillRect(x(begin), 4 + data.lane[i] * row, Math.max(0.5, x(begin + data.length_ms[i]) - x(begin)), Math.max(0.8, row - 0.6));
  });
  const [from, to] = state.window.map(x);
  const style = getComputedStyle(state.canvas);
  pen.globalAlpha = 0.78;
  pen.fillStyle = style.getPropertyValue("--page");
  pen.fillRect(LANES.left, 0, from - LANES.left, LANES.strip);
  pen.fillRect(to, 0, width - to, LANES.strip);
  pen.globalAlpha = 1;
  pen.strokeStyle = style.getPropertyValue("--dim");
  pen.strokeRect(from + 0.5, 0.5, Math.max(2, to - from - 1), LANES.strip - 1);
}

/** A drawing context whose unit is a CSS pixel on every screen. */
function sharp(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return pen;
}

function listenTimeline(state) {
  const { canvas, strip } = state;
  let dragged = null;
  const share = (event, node) => {
    const box = node.getBoundingClientRect();
    return (event.clientX - box.left - LANES.left) / (box.width - LANES.left);
  };
  canvas.addEventListener("pointerdown", (event) => { dragged = { at: share(event, canvas), window: state.window }; });
  addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged) {
      const by = (dragged.at - share(event, canvas)) * (dragged.window[1] - dragged.window[0]);
      show(state, [dragged.window[0] + by, dragged.window[1] + by]);
      return tip.hide();
    }
    const found = executionAt(state, event);
    canvas.style.cursor = found ? "default" : "grab";
    if (!found) return tip.hide();
    return tip.show(event.clientX, event.clientY, found.title, found.rows);
  });
  canvas.addEventListener("pointerleave", () => tip.hide());
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(state, event.deltaY > 0 ? 1.25 : 0.8, Math.max(0, share(event, canvas)));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => keyOnTimeline(state, event));
  const jump = (event) => {
    if (!event.buttons) return;
    const at = share(event, strip) * state.whole[1], half = (state.window[1] - state.window[0]) / 2;
    show(state, [at - half, at + half]);
  };
  strip.addEventListener("pointerdown", jump);
  strip.addEventListener("pointermove", jump);
}

function executionAt(state, event) {
  const box = state.canvas.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  const [from, to] = state.window;
  const ms = from + ((x - LANES.left) / (box.width - LANES.left)) * (to - from);
  const slack = ((to - from) / box.width) * 2;
  const mark = state.data.marks.find((one) => y < LANES.top && Math.abs(one.ms - ms) < slack * 3);
  if (mark) return { title: mark.kind, rows: [[mark.text, ""], ["at", duration(mark.ms)]] };
  const lane = state.byLane[Math.floor((y - LANES.top) / LANES.row)];
  if (!lane || x < LANES.left) return null;
  const { begin_ms: begin, length_ms: length, stage } = state.data;
  const i = lane.find((k) => begin[k] - slack <= ms && ms <= begin[k] + length[k] + slack && !state.hidden.has(stage[k]));
  return i === undefined ? null : described(state, i);
}

function described(state, i) {
  const { data } = state;
  const stage = data.stages[data.stage[i]], lane = data.lanes[data.lane[i]];
  const of = stage.startsWith("evaluate") || stage === "publish" || stage === "canary" ? "version" : "step";
  const rows = [["gang", lane.gang], ["worker", lane.worker], ["took", duration(data.length_ms[i])], ["began at", duration(data.begin_ms[i])]];
  if (data.versions[i]) rows.push(["weights", data.versions[i]]);
  return { title: `${stage} · ${of} ${data.step[i]} · shard ${data.shard[i]}`, rows };
}

function keyOnTimeline(state, event) {
  const acts = {
    "+": () => zoom(state, 0.5), "=": () => zoom(state, 0.5), "-": () => zoom(state, 2), 0: () => show(state, state.whole),
    ArrowLeft: () => select(state, 0, -1), ArrowRight: () => select(state, 0, 1),
    ArrowUp: () => select(state, -1, 0), ArrowDown: () => select(state, 1, 0),
  };
  if (!acts[event.key]) return;
  event.preventDefault();
  acts[event.key]();
}

/** The next execution of the lane, or the one at the same time in the next lane. */
function select(state, lanes, along) {
  const { data, byLane } = state;
  const now = state.selected;
  const row = now === null ? 0 : Math.max(0, Math.min(byLane.length - 1, data.lane[now] + lanes));
  const at = now === null ? state.window[0] : data.begin_ms[now];
  const lane = byLane[row];
  const near = lane.findIndex((i) => data.begin_ms[i] >= at);
  const place = now !== null && along ? lane.indexOf(now) + along : near < 0 ? lane.length - 1 : near;
  state.selected = lane[Math.max(0, Math.min(lane.length - 1, place))];
  const begin = data.begin_ms[state.selected], [from, to] = state.window;
  if (begin < from || begin > to) show(state, [begin - (to - from) / 2, begin + (to - from) / 2]);
  else draw(state);
  const found = described(state, state.selected), box = state.canvas.getBoundingClientRect();
  state.said.textContent = `${found.title}: ${found.rows.map((pair) => pair.join(" ")).join(", ")}`;
  tip.show(box.left + state.x(begin), box.top + LANES.top + (row + 0.5) * LANES.row, found.title, found.rows);
}
