// The page of a run's graph. Its content is fetched again while somebody looks at it. The curves are drawn anew only if
// they have changed, so that the pointer can stay on them.

const view = document.getElementById("view");
let busy = false, drawnCurves = null, drawn = "";

function scrollGraph(to) {
  const box = view.querySelector(".scroll");
  if (box) box.scrollLeft = to;
}

function showCurves() {
  const place = view.querySelector(".learning");
  if (!place) return;
  if (place.dataset.curves !== drawn) {
    drawn = place.dataset.curves;
    const page = JSON.parse(drawn);
    drawnCurves = panelGrid(page, curveState(page));
  }
  place.replaceChildren(drawnCurves);
}

async function refresh() {
  if (document.hidden || busy) return;
  busy = true;
  try {
    const answer = await fetch(view.dataset.from);
    const box = view.querySelector(".scroll");
    const atEnd = !box || box.scrollLeft + box.clientWidth >= box.scrollWidth - 2;
    const at = atEnd ? 1e6 : box.scrollLeft;
    if (answer.ok) view.innerHTML = await answer.text();
    showCurves();
    scrollGraph(at);
    view.classList.toggle("over", !answer.ok);
  } catch { view.classList.add("over"); }
  busy = false;
}

showCurves();
scrollGraph(1e6);
setInterval(refresh, Number(view.dataset.everyMs));
