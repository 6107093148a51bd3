// Draw the charts when they come into view; hover, keys, toggles, menus, print, and the updates of a live page.
const page = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const hidden = new Set();
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";
const CONFIG = {
  axis: { labelFont: FONT, labelFontSize: 11, titleFont: FONT, titleFontSize: 11, titleFontWeight: "normal", labelPadding: 6, domain: false, ticks: false },
  legend: { labelFont: FONT, labelFontSize: 11 },
  text: { font: FONT },
};

const all = [...document.querySelectorAll("figure[data-chart]")].map((figure) => ({
  figure,
  plot: figure.querySelector(".plot"),
  menu: figure.querySelector("select"),
  keys: [...figure.querySelectorAll(".key .run")],
  place: Number(figure.dataset.chart),
  drawn: null, // the promise of the chart
  view: null,
  visible: false,
  items: [],
  focus: -1,
}));
const byPlot = new Map(all.map((one) => [one.plot, one]));
// A chart with a grid for each run has that of the run in its menu.
const chartOf = (one) => {
  const chart = page.charts[one.place];
  return chart.grids ? { ...chart, ...chart.grids[Number(one.menu.value)] } : chart;
};
const drawingOf = (one) => drawings[chartOf(one).drawing];
const stateOf = (one) => ({ page, hidden, choice: one.menu ? Number(one.menu.value) : 0 });
const widthOf = (one) => Math.max(200, one.plot.clientWidth || one.figure.clientWidth - 36 || 400);

async function draw(one) {
  if (one.drawn) return one.drawn;
  const chart = chartOf(one);
  const spec = { ...drawingOf(one).spec(chart), width: widthOf(one), height: drawingOf(one).height(chart), padding: { left: 0, right: 10, top: 16, bottom: 2 }, autosize: { type: "fit", contains: "padding" } };
  const tooltip = (_, event, item, value) => (value ? say(drawingOf(one).tip(chartOf(one), value), event.clientX, event.clientY) : quiet());
  // With `ast`, Vega interprets the expressions of a chart: the page's policy forbids to compile them.
  const made = vegaEmbed(one.plot, spec, { mode: "vega", ast: true, renderer: "svg", actions: false, hover: false, defaultStyle: false, config: CONFIG, tooltip });
  one.drawn = made.then(({ view }) => ((one.view = view), fill(one)));
  return one.drawn;
}

function fill(one) {
  const loaded = drawingOf(one).load(one.view, chartOf(one), stateOf(one));
  Object.assign(one, loaded, { focus: -1 });
  one.view.resize().run(); // the room for the labels follows the new data
  rest(one);
}

function rest(one) {
  one.keys.forEach((key, series) => {
    key.classList.toggle("hidden", hidden.has(series));
    const text = drawingOf(one).rest?.(chartOf(one), series);
    if (text !== undefined) key.querySelector("b").textContent = text;
  });
}

// -- the tip ----------------------------------------------------------------------------------------

function say(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const left = Math.min(x + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const top = y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 12 : y + 18;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function quiet() {
  tip.hidden = true;
}

function sayBeside(one, text) {
  const box = one.plot.getBoundingClientRect();
  say(text, box.left + 40, box.top - 6);
}

// -- the step under the pointer, in every chart of curves --------------------------------------------

let wanted, asked = false;

function point(step) {
  wanted = step;
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    for (const one of all) if (one.view && one.visible && drawingOf(one).linked) mark(one, wanted);
  });
}

function mark(one, step) {
  const chart = chartOf(one);
  if (step === null) {
    one.view.signal("held_step", null).data("at", []).run();
    return rest(one);
  }
  const found = drawingOf(one).at(chart, step, stateOf(one));
  one.view.signal("held_step", step).data("at", found.filter((value) => value.x !== undefined)).run();
  found.forEach((value, series) => (one.keys[series].querySelector("b").textContent = value.text));
}

function nearest(one, event) {
  const box = one.plot.querySelector("svg").getBoundingClientRect();
  const scale = box.width / Number(one.plot.querySelector("svg").getAttribute("width"));
  const step = one.view.scale("x").invert((event.clientX - box.left) / scale - one.view.origin()[0]);
  const steps = drawingOf(one).steps(chartOf(one), stateOf(one));
  return steps.length ? steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a)) : null;
}

for (const one of all) {
  if (drawingOf(one).linked) {
    one.plot.addEventListener("pointermove", (event) => one.view && point(nearest(one, event)));
    one.plot.addEventListener("pointerleave", () => point(null));
  }
  one.plot.addEventListener("blur", () => (quiet(), unfocus(one)));
  one.plot.addEventListener("keydown", (event) => key(one, event));
  one.menu?.addEventListener("change", () => one.view && (chartOf(one).grids ? renew(one) : fill(one)));
}

// -- keys -------------------------------------------------------------------------------------------

const MOVES = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: "up", ArrowDown: "down", Home: -Infinity, End: Infinity };

async function key(one, event) {
  if (event.key === "Escape") return quiet(), unfocus(one);
  const move = MOVES[event.key];
  const linked = drawingOf(one).linked;
  if (move === undefined || (linked && typeof move === "string")) return; // up and down scroll a page of curves
  event.preventDefault();
  await draw(one); // it may be being drawn anew
  const places = linked ? drawingOf(one).steps(chartOf(one), stateOf(one)) : one.items;
  if (!places.length) return;
  const by = move === "up" ? -one.stride : move === "down" ? one.stride : move;
  const from = one.focus < 0 ? (by > 0 ? -1 : 0) : one.focus;
  one.focus = Math.max(0, Math.min(places.length - 1, from + by));
  if (!linked) {
    one.view.signal("focus", one.focus).run();
    return sayBeside(one, drawingOf(one).tip(chartOf(one), places[one.focus]));
  }
  const step = places[one.focus];
  point(step);
  const texts = drawingOf(one).at(chartOf(one), step, stateOf(one)).map((value, series) => `${chartOf(one).series[series]}: ${value.text}`);
  sayBeside(one, [`step ${step.toLocaleString("en")}`, ...texts].join("\n"));
}

function unfocus(one) {
  one.focus = -1;
  if (!one.view) return;
  if (drawingOf(one).linked) point(null);
  else one.view.signal("focus", -1).run();
}

// -- toggles, the filter of metrics, sizes, and paper -----------------------------------------------

for (const box of document.querySelectorAll("input[data-toggle]")) {
  box.addEventListener("change", () => {
    hidden[box.checked ? "delete" : "add"](Number(box.dataset.toggle));
    for (const one of all) if (one.view) fill(one);
    remember();
  });
}

const filter = document.getElementById("filter");
filter?.addEventListener("input", () => {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const one of all) {
    const name = `${chartOf(one).title} ${chartOf(one).metric ?? ""}`.toLowerCase();
    one.figure.hidden = !words.every((word) => name.includes(word));
  }
});

const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const one = byPlot.get(entry.target);
      one.visible = entry.isIntersecting;
      if (entry.isIntersecting) draw(one);
    }
  },
  { rootMargin: "300px" },
);
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const one = byPlot.get(target);
    if (one.view && target.clientWidth && Math.abs(one.view.width() - widthOf(one)) > 1) one.view.width(widthOf(one)).runAsync();
  }
});
for (const one of all) watcher.observe(one.plot), sizes.observe(one.plot);

// Paper shows all charts, so those out of view are drawn too, when there is nothing else to do.
const idle = window.requestIdleCallback ?? ((call) => setTimeout(call, 50));
async function drawRest() {
  const next = all.find((one) => !one.drawn);
  if (!next) return (document.documentElement.dataset.drawn = "all");
  await draw(next);
  idle(drawRest);
}
addEventListener("beforeprint", () => all.forEach(draw));
idle(drawRest);

// -- a page that updates itself ---------------------------------------------------------------------

function remember() {
  if (page.live) sessionStorage.setItem("hidden", JSON.stringify([...hidden]));
}

function recall() {
  for (const series of JSON.parse(sessionStorage.getItem("hidden") ?? "[]")) {
    const box = document.querySelector(`input[data-toggle="${series}"]`);
    if (box) (box.checked = false), hidden.add(series);
  }
}

const shape = (charts) => JSON.stringify(charts.map((chart) => [chart.title, chart.drawing]));

async function follow() {
  const line = document.getElementById("live");
  for (let have = page.have; ; ) {
    await new Promise((done) => setTimeout(done, 1000));
    try {
      const news = await (await fetch(`state?have=${have}`, { cache: "no-store" })).json();
      line.textContent = news.message;
      if (news.have === have) continue;
      have = news.have;
      if (shape(news.data.charts) !== shape(page.charts)) return location.reload();
      document.getElementById("summary").innerHTML = news.summary; // made by the same Python as the page, escaped there
      Object.assign(page, news.data);
      for (const one of all) if (one.view) renew(one);
    } catch {
      line.textContent = "The command that serves this page has ended; the page shows what it had.";
    }
  }
}

// Charts whose axes follow the data take new data; a heat map over steps has new edges and is drawn anew.
function renew(one) {
  if (drawingOf(one).linked) return fill(one);
  one.view.finalize();
  one.view = one.drawn = null;
  if (one.visible) draw(one);
}

if (page.live) recall(), follow();
document.documentElement.dataset.ready = "yes";
