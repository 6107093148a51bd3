// What verify saw of the tokens: the scatter of log-probs, the histogram of ratios, and a bar per layer.
drawings.scatter = {
  height: () => 320,

  spec: (chart) => ({
    signals: [{ name: "focus", value: -1 }],
    data: [{ name: "points" }],
    scales: [
      { name: "x", type: "linear", domain: chart.domain, range: "width", zero: false, nice: true },
      { name: "y", type: "linear", domain: chart.domain, range: "height", zero: false, nice: true },
    ],
    axes: [
      { orient: "bottom", scale: "x", tickCount: 6, title: "log-prob of the engine", labelOverlap: true },
      { orient: "left", scale: "y", grid: true, tickCount: 6, title: "of the trainer", labelOverlap: true },
    ],
    marks: [
      { type: "rule", name: "guide", encode: { update: { x: { signal: `scale('x', ${chart.domain[0]})` }, x2: { signal: `scale('x', ${chart.domain[1]})` }, y: { signal: `scale('y', ${chart.domain[0]})` }, y2: { signal: `scale('y', ${chart.domain[1]})` } } } },
      {
        type: "symbol",
        name: "point-marks",
        from: { data: "points" },
        encode: { update: { x: { scale: "x", field: "x" }, y: { scale: "y", field: "y" }, size: { signal: "datum.index === focus ? 90 : datum.size" }, fill: { field: "colour" }, fillOpacity: { signal: "datum.index === focus ? 1 : 0.5" }, tooltip: { signal: "datum" } } },
      },
    ],
  }),

  load(view, chart, state) {
    const items = [];
    chart.groups.forEach((group, series) => {
      if (state.hidden.has(series)) return;
      group.x.forEach((x, at) => {
        const tokens = group.n?.[at] ?? 1;
        items.push({ index: items.length, x, y: group.y[at], series, at, tokens, size: Math.min(160, 14 + 10 * Math.log2(tokens)), colour: colour(series) });
      });
    });
    view.data("points", items);
    return { items, stride: 10 };
  },

  tip(chart, point) {
    const group = chart.groups[point.series];
    const place = group.sequence && group.sequence[point.at] !== null ? `\nsequence ${group.sequence[point.at]}, position ${group.position[point.at]}` : "";
    const many = point.tokens > 1 ? `\n${point.tokens.toLocaleString("en")} tokens` : "";
    return `${chart.series[point.series]}: engine ${point.x.toFixed(3)}, trainer ${point.y.toFixed(3)}\nratio ${number(Math.exp(point.y - point.x), "ratio")}${many}${place}`;
  },
};

drawings.histogram = {
  height: () => 320,

  spec(chart) {
    const ends = [Math.exp(chart.edges[0]), Math.exp(chart.edges[chart.edges.length - 1])];
    const ticks = [];
    for (let power = Math.ceil(Math.log2(ends[0])); power <= Math.log2(ends[1]); power += Math.max(1, Math.round(Math.log2(ends[1]) / 5))) ticks.push(2 ** power);
    return {
      signals: [{ name: "focus", value: -1 }, { name: "up", value: [0.5, 1] }, { name: "ticks", value: [] }],
      data: [{ name: "bars" }, { name: "marks", values: chart.taus.flatMap((tau) => [{ at: tau, text: `τ = ${tau}` }, { at: 1 / tau, text: `1/${tau}` }]) }],
      scales: [
        { name: "x", type: "log", base: 2, domain: ends, range: "width", zero: false, nice: false, clamp: true },
        { name: "y", type: "log", domain: { signal: "up" }, range: "height", zero: false, nice: false, clamp: true },
      ],
      axes: [
        { orient: "bottom", scale: "x", values: ends[1] > 1.9 ? ticks : undefined, tickCount: 5, format: "~g", title: "probability of the trainer over that of the engine", labelOverlap: true },
        { orient: "left", scale: "y", grid: true, values: { signal: "ticks" }, format: "~s", title: "tokens, log scale", labelOverlap: true },
      ],
      marks: [
        {
          type: "rect",
          name: "bar-marks",
          from: { data: "bars" },
          encode: { update: { x: { scale: "x", field: "x" }, x2: { scale: "x", field: "x2" }, y: { scale: "y", field: "count" }, y2: { signal: "height" }, fill: { field: "colour" }, fillOpacity: { signal: "datum.index === focus ? 0.9 : 0.5" }, tooltip: { signal: "datum" } } },
        },
        { type: "rule", name: "guide", from: { data: "marks" }, encode: { update: { x: { scale: "x", field: "at" }, y: { value: 0 }, y2: { signal: "height" }, strokeDash: { value: [4, 3] }, opacity: { signal: `datum.at < ${ends[0]} || datum.at > ${ends[1]} ? 0 : 1` } } } },
        { type: "text", name: "strong", from: { data: "marks" }, encode: { update: { x: { scale: "x", field: "at" }, y: { value: -3 }, align: { value: "center" }, baseline: { value: "bottom" }, text: { field: "text" }, fontSize: { value: 11 }, opacity: { signal: `datum.at < ${ends[0]} || datum.at > ${ends[1]} ? 0 : 1` } } } },
      ],
    };
  },

  load(view, chart, state) {
    const items = [];
    chart.counts.forEach((counts, series) => {
      if (state.hidden.has(series)) return;
      counts.forEach((count, bin) => {
        if (count) items.push({ index: items.length, series, bin, count, x: Math.exp(chart.edges[bin]), x2: Math.exp(chart.edges[bin + 1]), colour: colour(series) });
      });
    });
    const most = items.reduce((largest, item) => Math.max(largest, item.count), 1);
    view.signal("up", [0.5, Math.max(2, 1.3 * most)]).signal("ticks", decades(1, Math.max(2, 1.3 * most)));
    view.data("bars", items);
    return { items, stride: 10 };
  },

  tip: (chart, bar) => `${chart.series[bar.series]}: ratio ${number(bar.x, "ratio")} to ${number(bar.x2, "ratio")}\n${bar.count.toLocaleString("en")} tokens`,
};

drawings.bars = {
  height: () => 220,

  spec: (chart) => ({
    signals: [{ name: "focus", value: -1 }],
    data: [{ name: "bars" }],
    scales: [
      { name: "x", type: "band", domain: chart.rows, range: "width", padding: 0.15 },
      { name: "y", type: "linear", domain: [0, Math.max(chart.expected ?? 0, ...chart.values, 1e-6) * 1.1], range: "height", nice: true },
    ],
    axes: [
      { orient: "bottom", scale: "x", title: "layer", labelOverlap: true },
      { orient: "left", scale: "y", grid: true, tickCount: 4, format: TICKS[chart.kind], labelOverlap: true },
    ],
    marks: [
      { type: "rect", name: "bar-marks", from: { data: "bars" }, encode: { update: { x: { scale: "x", field: "layer" }, width: { scale: "x", band: 1 }, y: { scale: "y", field: "value" }, y2: { scale: "y", value: 0 }, fill: { value: COLOURS[0] }, fillOpacity: { signal: "datum.index === focus ? 1 : 0.75" }, tooltip: { signal: "datum" } } } },
      { type: "rule", name: "guide", encode: { update: { x: { value: 0 }, x2: { signal: "width" }, y: { scale: "y", value: chart.expected ?? 0 }, strokeDash: { value: [4, 3] } } } },
    ],
  }),

  load(view, chart) {
    const items = chart.rows.map((layer, index) => ({ index, layer, value: chart.values[index] }));
    view.data("bars", items);
    return { items, stride: 1 };
  },

  tip: (chart, bar) => `layer ${bar.layer}\n${number(bar.value, chart.kind)}`,
};
