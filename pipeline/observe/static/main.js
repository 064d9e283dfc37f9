// Puts the page together from its contents.

const page = JSON.parse(document.getElementById("contents").textContent);
const browsers = new Map();
const browserOf = (run) => {
  if (!browsers.has(run)) browsers.set(run, samples(run));
  return browsers.get(run);
};

document.body.append(
  h("a", { class: "skip", href: "#curves" }, "to the curves"),
  h("main", {}, head(page), sections([
    ["result", "Result", headlines(page)],
    ["comparison", "Comparison", comparison(page)],
    ["curves", "Learning curves", curves(page)],
    ["timeline", "Timeline", perRun(page, timeline)],
    ["staleness", "Staleness", staleness(page)],
    ["stages", "Seconds by stage", stageSeconds(page)],
    ["samples", "Samples", perRun(page, browserOf)],
    ["held-out", "Held-out responses", perRun(page, heldOut)],
    ["mismatches", "Worst mismatches", perRun(page, (run) => mismatches(run, { open: (step, row) => openIn(run, step, row) }))],
    ["events", "Events", perRun(page, incidents)],
    ["config", "Config", config(page)],
  ])));

/** Opens a row in the sample browser of a run. If another run's tab is open, it changes the tab first. */
function openIn(run, step, row) {
  const tabs = document.querySelectorAll("#samples [role=tab]");
  if (tabs.length) tabs[page.runs.indexOf(run)].click();
  browserOf(run).open(step, row);
}
