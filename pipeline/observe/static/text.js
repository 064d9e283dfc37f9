// Text and numbers for people. Text of a run is untrusted: it becomes text nodes. Characters that are invisible, or
// that reorder the text around them, are shown by name.

const INVISIBLE = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/u;
const EVERY_INVISIBLE = /([\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}])/gu;

/** Nodes that show a text as it is: control and format characters by name, line breaks as such. */
function visible(text) {
  if (!INVISIBLE.test(text)) return [document.createTextNode(text)];
  return text.split(EVERY_INVISIBLE).filter((part) => part !== "").map((part) =>
    part.length <= 2 && INVISIBLE.test(part) ? control(part) : document.createTextNode(part));
}

function control(character) {
  const code = character.codePointAt(0);
  const name = "U+" + code.toString(16).toUpperCase().padStart(4, "0");
  const node = document.createElement("span");
  node.className = "control";
  node.title = name;
  if (code === 10) node.textContent = "↵\n";
  else if (code < 32) node.textContent = String.fromCodePoint(0x2400 + code);
  else node.textContent = code === 127 ? "␡" : `⟨${name}⟩`;
  return node;
}

/** A number with as many digits as it needs. */
function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return value.toExponential(2);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size >= 100) return value.toFixed(1);
  if (size >= 10) return value.toFixed(2).replace(/\.?0+$/, "");
  if (size >= 1) return value.toFixed(3).replace(/\.?0+$/, "");
  return size >= 0.001 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

const signed = (value) => (value > 0 ? "+" : "") + short(value);
const count = (number) => number.toLocaleString("en");

/** "512 of 100,000 rows", or "512 rows" if there are no more. */
function ofAll(shown, all, noun) {
  return shown === all ? `${count(all)} ${noun}` : `${count(shown)} of ${count(all)} ${noun}`;
}

/** Milliseconds as a duration. */
function duration(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 120000) return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
  const minutes = Math.floor(ms / 60000);
  return minutes < 120 ? `${minutes} min ${Math.round((ms % 60000) / 1000)} s`
    : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
