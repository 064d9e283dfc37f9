// Builds elements and the page's only tooltip. Children are nodes or text; nothing here parses markup.

const COLOURS = ["#3f74c4", "#d9772e", "#3c9d70", "#a65aa6", "#c29a1c", "#4aa3ad", "#cf5359", "#808792"];

/** An element: attributes by name, `on...` as listeners, children as nodes or text. */
function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element. Otherwise as `h`. */
function s(tag, attributes, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** A button that stays pressed until it is clicked again. */
function toggle(label, pressed, changed, attributes) {
  const button = h("button", { type: "button", "aria-pressed": String(pressed), ...attributes }, label);
  button.addEventListener("click", () => {
    const now = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(now));
    changed(now);
  });
  return button;
}

/** A patch in the colour of a series, or a "dashed" line or a "round" dot if the series is drawn like that. */
function swatch(colour, shape) {
  const node = h("span", { class: shape ? `swatch ${shape}` : "swatch", "aria-hidden": "true" });
  node.style.setProperty("--colour", colour);
  return node;
}

const tip = {
  node: null,
  /** Shows [label, value] rows below a title, near a point of the window. */
  show(x, y, title, rows) {
    if (!this.node) {
      this.node = h("div", { id: "tip", role: "status" });
      document.body.append(this.node);
    }
    const lines = rows.map(([label, value, colour]) =>
      h("div", { class: "tip-row" }, colour ? swatch(colour) : null, h("span", {}, label), h("b", {}, value)));
    this.node.replaceChildren(h("div", { class: "tip-title" }, title), ...lines);
    this.node.hidden = false;
    const { width, height } = this.node.getBoundingClientRect();
    this.node.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
    this.node.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18}px`;
  },
  hide() {
    if (this.node) this.node.hidden = true;
  },
};
addEventListener("keydown", (event) => event.key === "Escape" && tip.hide());
addEventListener("wheel", () => tip.hide(), { passive: true });

/** A table; numbers are aligned to the right. `rows`: cells as nodes or text. */
function table(headings, rows, attributes) {
  const head = headings.map((heading) => h("th", { scope: "col" }, heading));
  const body = rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell))));
  return h("div", { class: "scroll" }, h("table", attributes, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

const note = (...text) => h("p", { class: "note" }, ...text);
