// The tokens of trajectories as bands. `all` shows one lane of every trajectory, `one` the three lanes of one of them.
const GIVEN = "#6b7480";
const MISSING = "#b3261e";

// What is in a lane: [from, to, text, colour, tip].
const lanes = {
  turns: (one) => one.turns.map(([from, to, sampled, turn]) => ({ from, to, text: `${turn}`, colour: sampled ? COLOURS[1] : GIVEN, tip: `turn ${turn}, ${sampled ? "sampled" : "given: prompt or answer of the environment"}` })),
  versions: (one) => one.versions.map(([from, to, version]) => ({ from, to, text: `v${version}`, colour: colour(version), tip: `sampled by policy version ${version}` })),
  rows: (one) =>
    one.rows.map(([from, to, captured, version, turn, sampled]) => ({
      from, to, text: captured ? (version === null ? "" : `v${version}`) : "", colour: captured ? colour(version ?? 1) : MISSING,
      tip: (captured ? `row captured${version === null ? "" : `, routed by policy version ${version}`}` : "row missing: routed live") + (turn ? `\n${sampled ? "from the answer" : "from the prompt pass"} of turn ${turn}` : ""),
    })),
};
const LANES = { turns: "turns", versions: "token versions", rows: "rows" };

function bandSpec(domain, rows, title) {
  return {
    signals: [{ name: "focus", value: -1 }, { name: "across", value: [0, 1] }],
    data: [{ name: "bands" }],
    scales: [
      { name: "x", type: "linear", domain: { signal: "across" }, range: "width", zero: false, nice: false },
      { name: "y", type: "band", domain, range: "height", padding: 0.15 },
      { name: "label", type: "ordinal", domain, range: rows },
    ],
    axes: [
      { orient: "bottom", scale: "x", tickCount: 8, tickMinStep: 1, format: ",d", title: "position", labelOverlap: true },
      { orient: "left", scale: "y", title, labelOverlap: true, encode: { labels: { update: { text: { signal: "scale('label', datum.value)" } } } } },
    ],
    marks: [
      {
        type: "rect",
        name: "band-marks",
        from: { data: "bands" },
        encode: { update: { x: { scale: "x", field: "from" }, x2: { scale: "x", field: "to" }, y: { scale: "y", field: "lane" }, height: { scale: "y", band: 1 }, fill: { field: "colour" }, fillOpacity: { signal: "datum.index === focus ? 1 : 0.85" }, tooltip: { signal: "datum" } } },
      },
      {
        type: "text",
        name: "inside",
        from: { data: "bands" },
        encode: { update: { x: { signal: "(scale('x', datum.from) + scale('x', datum.to)) / 2" }, y: { signal: "scale('y', datum.lane) + bandwidth('y') / 2" }, align: { value: "center" }, baseline: { value: "middle" }, fontSize: { value: 10.5 }, text: { signal: "scale('x', datum.to) - scale('x', datum.from) > 9 + 6 * length(datum.text) && bandwidth('y') > 9 ? datum.text : ''" } } },
      },
    ],
  };
}

function show(view, items) {
  items.forEach((band, index) => (band.index = index));
  const least = items.reduce((from, band) => Math.min(from, band.from), Infinity);
  const most = items.reduce((to, band) => Math.max(to, band.to), -Infinity);
  view.signal("across", least < most ? [least, most] : [0, 1]).data("bands", items);
  return { items, stride: 1 };
}

function bandTip(_, band) {
  const last = band.to - 1;
  return `${band.name}, position${last > band.from ? `s ${band.from.toLocaleString("en")} to ${last.toLocaleString("en")}` : ` ${band.from.toLocaleString("en")}`}\n${band.tip}`;
}

drawings.trajectories = {
  height: (chart) => Math.max(120, Math.min(520, chart.trajectories.length * 15 + 50)),
  spec: (chart) => bandSpec(chart.trajectories.map((_, index) => index), chart.trajectories.map((_, index) => String(index)), "trajectory"),
  load(view, chart, state) {
    const lane = Object.keys(LANES)[state.choice ?? 0];
    return show(view, chart.trajectories.flatMap((one, index) => lanes[lane](one).map((band) => ({ ...band, lane: index, name: one.name }))));
  },
  tip: bandTip,
};

drawings.trajectory = {
  height: () => 190,
  spec: () => bandSpec(Object.keys(LANES), Object.values(LANES), null),
  load(view, chart, state) {
    const one = state.page.charts[chart.of].trajectories[state.choice ?? 0];
    return show(view, Object.keys(LANES).flatMap((lane) => lanes[lane](one).map((band) => ({ ...band, lane, name: one.name }))));
  },
  tip: bandTip,
};
