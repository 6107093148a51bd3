"""Hold the page's style and its one script as text; the page includes both, so that it opens from disk offline.

The colours are distinguishable with any common colour-blindness, on light and on dark backgrounds.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fbfbfa; --card: #ffffff; --ink: #1b1d21; --soft: #62676f; --line: #e4e5e7; --hair: #eeeff0;
  --c0: #d55e00; --c1: #0072b2; --c2: #009e73; --c3: #b0578d; --c4: #a87800; --c5: #59616c; --c6: #3d9fdd;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14161a; --card: #1b1e23; --ink: #e8eaed; --soft: #9aa1ab; --line: #30343b; --hair: #2a2e35;
    --c0: #f58a43; --c1: #4fb0ee; --c2: #35c79c; --c3: #e08fc0; --c4: #e6c04a; --c5: #aab2bd; --c6: #a5dcff;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink); font-size: 15px; line-height: 1.5;
  font-family: Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-font-smoothing: antialiased;
}
main { max-width: 1080px; margin: 0 auto; padding: 48px 32px 64px; }
h1 { margin: 0 0 12px; font-size: 27px; line-height: 1.25; font-weight: 650; letter-spacing: -0.015em; }
h2 { margin: 44px 0 14px; font-size: 17px; font-weight: 650; letter-spacing: -0.005em; }
h3 { margin: 0; font-size: 14.5px; font-weight: 620; }
p { margin: 0; }
.lead { max-width: 76ch; color: var(--soft); }
.scroll { overflow-x: auto; margin-top: 32px; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 7px 0 7px 28px; text-align: right; white-space: nowrap; font-weight: 400; vertical-align: baseline; }
th:first-child { padding-left: 0; text-align: left; }
thead th { padding-bottom: 9px; font-weight: 620; border-bottom: 1.5px solid var(--ink); }
tbody th, tbody td { border-bottom: 1px solid var(--line); }
tbody tr.part + tr > * { padding-top: 20px; }
th small { margin-left: 10px; font-size: 12.5px; color: var(--soft); }
td.ratio { padding-left: 12px; min-width: 56px; color: var(--soft); font-size: 13px; }
td.text { color: var(--soft); font-size: 13.5px; }
.name { display: inline-block; max-width: 16em; overflow: hidden; text-overflow: ellipsis; vertical-align: bottom; }
.swatch { display: inline-block; width: 9px; height: 9px; margin-right: 7px; border-radius: 50%; }
.foot { margin-top: 12px; font-size: 13px; color: var(--soft); }
.notes { max-width: 84ch; margin: 22px 0 0; padding: 0; list-style: none; }
.notes li { margin-top: 6px; padding-left: 14px; border-left: 2px solid var(--line); }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 18px; }
figure { margin: 0; padding: 16px 18px 10px; }
figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.meaning { font-size: 12.5px; color: var(--soft); }
.key { display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 8px 0 4px; font-size: 13px; }
.key .run { display: inline-flex; align-items: center; }
.key b { min-width: 4.6em; margin-left: 8px; font-weight: 600; }
.nothing { padding: 56px 0; text-align: center; font-size: 13px; color: var(--soft); }
svg { display: block; width: 100%; height: auto; overflow: visible; touch-action: pan-y; }
.grid { stroke: var(--hair); }
.tick { fill: var(--soft); font-size: 11.5px; }
.tick.y { text-anchor: end; dominant-baseline: central; }
.tick.x { text-anchor: middle; }
.curve { fill: none; stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round; }
.curve.dashed { stroke-dasharray: 5 4; }
.dot, .band { stroke: none; }
.band { opacity: 0.28; }
.cross { stroke: var(--soft); stroke-dasharray: 2 3; visibility: hidden; }
.pointer { stroke: var(--card); stroke-width: 1.5; visibility: hidden; }
.at { fill: var(--ink); font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 8px; }
@media (max-width: 1000px) {
  th, td { padding-left: 18px; }
  th small { display: block; margin-left: 0; white-space: normal; }
}
@media (max-width: 760px) {
  main { padding: 28px 18px 40px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
}
@media print { figure, tr { break-inside: avoid; } }
"""

COLOUR_RULES = """
.swatch.c{index} {{ background: var(--c{index}); }}
.curve.c{index} {{ stroke: var(--c{index}); }}
.dot.c{index}, .band.c{index}, .pointer.c{index} {{ fill: var(--c{index}); }}
"""

SCRIPT = """
const charts = [...document.querySelectorAll("svg[data-points]")].map((svg) => ({
  svg,
  runs: JSON.parse(svg.dataset.points),
  cross: svg.querySelector(".cross"),
  dots: svg.querySelectorAll(".pointer"),
  at: svg.querySelector(".at"),
  texts: svg.parentElement.querySelectorAll(".key b"),
}));
for (const chart of charts) chart.resting = [...chart.texts].map((text) => text.textContent);

function show(step) {
  for (const { runs, cross, dots, at, texts } of charts) {
    const x = runs.flat().find((point) => point[0] === step)?.[1];
    cross.style.visibility = x === undefined ? "hidden" : "visible";
    at.textContent = x === undefined ? "" : step.toLocaleString("en");
    if (x !== undefined) for (const end of ["x1", "x2"]) cross.setAttribute(end, x);
    if (x !== undefined) at.setAttribute("x", x);
    runs.forEach((points, run) => {
      const point = points.find((point) => point[0] === step);
      const drawn = point && point[2] !== null;
      dots[run].style.visibility = drawn ? "visible" : "hidden";
      if (drawn) dots[run].setAttribute("cx", point[1]), dots[run].setAttribute("cy", point[2]);
      texts[run].textContent = point ? point[3] : "–";
    });
  }
}

function rest() {
  for (const { cross, dots, at, texts, resting } of charts) {
    for (const mark of [cross, ...dots]) mark.style.visibility = "hidden";
    at.textContent = "";
    texts.forEach((text, run) => (text.textContent = resting[run]));
  }
}

for (const { svg, runs } of charts) {
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const near = runs.flat().reduce((a, b) => (Math.abs(b[1] - x) < Math.abs(a[1] - x) ? b : a));
    show(near[0]);
  });
  svg.addEventListener("pointerleave", rest);
}
"""
