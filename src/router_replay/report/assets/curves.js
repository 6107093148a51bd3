// A metric over the steps of the runs: a line per run, with a band where a point stands for several steps.
const TINY = 1e-290;
const MOST_DOTS = 40;

function xOf(chart, series, page) {
  return chart.curves[series].x ?? page.runs[series].x;
}

drawings.curves = {
  height: () => 196,
  linked: true,

  spec: (chart) => ({
    signals: [
      { name: "across", value: [0, 1] },
      { name: "up", value: chart.log ? [1, 10] : [0, 1] },
      { name: "ticks", value: [] },
      { name: "held_step", value: null },
    ],
    data: [{ name: "points" }, { name: "dots" }, { name: "bad" }, { name: "at" }],
    scales: [
      { name: "x", type: "linear", domain: { signal: "across" }, range: "width", zero: false, nice: false },
      { name: "y", type: chart.log ? "log" : "linear", domain: { signal: "up" }, range: "height", zero: false, nice: !chart.log, clamp: true },
    ],
    axes: [
      { orient: "bottom", scale: "x", tickCount: 5, tickMinStep: 1, format: ",d", labelOverlap: true },
      { orient: "left", scale: "y", grid: true, tickCount: 4, format: TICKS[chart.kind], labelOverlap: true, ...(chart.log ? { values: { signal: "ticks" } } : {}) },
    ],
    marks: [
      {
        type: "group",
        from: { facet: { name: "one", data: "points", groupby: "run" } },
        marks: [
          {
            type: "area",
            from: { data: "one" },
            encode: { update: { x: { scale: "x", field: "x" }, y: { scale: "y", field: "lo" }, y2: { scale: "y", field: "hi" }, fill: { field: "colour" }, fillOpacity: { value: 0.28 }, defined: { signal: "isValid(datum.m)" } } },
          },
          {
            type: "line",
            name: "curve",
            from: { data: "one" },
            encode: { update: { x: { scale: "x", field: "x" }, y: { scale: "y", field: "m" }, stroke: { field: "colour" }, strokeWidth: { value: 1.75 }, strokeDash: { field: "dash" }, strokeJoin: { value: "round" }, defined: { signal: "isValid(datum.m)" } } },
          },
        ],
      },
      { type: "symbol", from: { data: "dots" }, encode: { update: { x: { scale: "x", field: "x" }, y: { scale: "y", field: "m" }, size: { value: 14 }, fill: { field: "colour" } } } },
      { type: "path", name: "crosses", from: { data: "bad" }, encode: { update: { x: { scale: "x", field: "x" }, y: { value: 0 }, path: { value: "M-3,-7L3,-1M3,-7L-3,-1" }, stroke: { field: "colour" }, strokeWidth: { value: 1.75 } } } },
      { type: "rule", name: "cursor-line", encode: { update: { x: { signal: "held_step === null ? 0 : scale('x', held_step)" }, y: { value: 0 }, y2: { signal: "height" }, strokeDash: { value: [2, 3] }, opacity: { signal: "held_step === null ? 0 : 1" } } } },
      { type: "symbol", name: "held", from: { data: "at" }, encode: { update: { x: { scale: "x", field: "x" }, y: { scale: "y", field: "m" }, size: { value: 44 }, fill: { field: "colour" } } } },
    ],
  }),

  load(view, chart, state) {
    const points = [], dots = [], bad = [];
    const floor = chart.log ? lowest(chart) : -Infinity;
    let left = Infinity, right = -Infinity, low = Infinity, high = -Infinity;
    chart.curves.forEach((curve, series) => {
      const x = xOf(chart, series, state.page);
      for (const step of x) (left = Math.min(left, step)), (right = Math.max(right, step));
      if (state.hidden.has(series)) return;
      const style = { run: series, colour: colour(series), dash: series >= COLOURS.length ? [5, 4] : [] };
      curve.m.forEach((m, index) => {
        const place = (value) => (value === null ? null : Math.max(value, floor));
        const point = { ...style, x: x[index], m: place(m), lo: place(curve.lo ? curve.lo[index] : m), hi: place(curve.hi ? curve.hi[index] : m) };
        points.push(point);
        if (curve.bad?.[index] || m === null) bad.push(point);
        if (m === null) return;
        (low = Math.min(low, point.lo)), (high = Math.max(high, point.hi));
        const alone = (curve.m[index - 1] ?? null) === null && (curve.m[index + 1] ?? null) === null;
        if (alone || curve.m.length <= MOST_DOTS) dots.push(point);
      });
    });
    view.signal("across", left < right ? [left, right] : left === right ? [left - 1, left + 1] : [0, 1]);
    const up = upright(low, high, chart);
    view.signal("up", up).signal("ticks", chart.log ? decades(...up) : []);
    view.data("points", points).data("dots", dots).data("bad", bad).data("at", []);
    return { items: [], stride: 1 };
  },

  rest: (chart, series) => number(chart.curves[series].last, chart.kind),

  // The point of each run at a step, for the dots of the cursor and for the numbers beside the names.
  at(chart, step, state) {
    return chart.curves.map((curve, series) => {
      const index = xOf(chart, series, state.page).indexOf(step);
      if (index < 0 || state.hidden.has(series)) return { text: ABSENT };
      const m = curve.m[index];
      if (m === null) return { text: "not finite" };
      const range = curve.lo && curve.lo[index] !== curve.hi[index] ? ` (${number(curve.lo[index], chart.kind)} to ${number(curve.hi[index], chart.kind)})` : "";
      return { text: number(m, chart.kind) + range, x: step, m: chart.log ? Math.max(m, lowest(chart)) : m, colour: colour(series) };
    });
  },

  steps: (chart, state) => [...new Set(chart.curves.flatMap((_, series) => (state.hidden.has(series) ? [] : xOf(chart, series, state.page))))].sort((a, b) => a - b),
};

// A logarithmic axis has no 0: smaller values than its lower edge are drawn on it.
function lowest(chart) {
  let least = Infinity;
  for (const curve of chart.curves) for (const value of curve.lo ?? curve.m) if (value !== null && value > TINY) least = Math.min(least, value);
  return least === Infinity ? 1 : least / 1.5;
}

function upright(low, high, chart) {
  if (low > high) return chart.log ? [1, 10] : [0, 1];
  if (chart.log) return [Math.min(low, lowest(chart)), Math.max(high * 1.2, low * 2)];
  if (chart.zero) (low = Math.min(low, 0)), (high = Math.max(high, 0));
  const size = Math.max(-low, high);
  if (high - low > Math.max(1e-9 * size, TINY)) return [low, high];
  const air = size > TINY ? 0.1 * size : chart.kind === "share" ? 0.01 : 1;
  return [chart.zero ? low : low - air, high + air];
}
