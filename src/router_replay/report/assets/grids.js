// A heat map: rows such as layers, columns between edges such as positions, and a value in each cell.
drawings.grid = {
  height: (chart) => Math.max(110, Math.min(460, chart.rows.length * 16 + 78)),

  spec: (chart) => ({
    signals: [{ name: "focus", value: -1 }, { name: "range", value: [0, 1] }],
    data: [{ name: "cells" }],
    scales: [
      { name: "x", type: "linear", domain: [chart.edges[0], chart.edges[chart.edges.length - 1]], range: "width", zero: false, nice: false },
      { name: "y", type: "band", domain: chart.rows.map((_, index) => index), range: "height" },
      { name: "heat", type: "linear", domain: { signal: "range" }, range: { scheme: "viridis" }, zero: false, clamp: true },
      { name: "label", type: "ordinal", domain: chart.rows.map((_, index) => index), range: chart.rows.map(String) },
    ],
    axes: [
      { orient: "bottom", scale: "x", tickCount: 8, tickMinStep: 1, format: ",d", title: chart.across, labelOverlap: true },
      { orient: "left", scale: "y", title: chart.down, labelOverlap: true, encode: { labels: { update: { text: { signal: "scale('label', datum.value)" } } } } },
    ],
    legends: [{ fill: "heat", type: "gradient", direction: "horizontal", orient: "top", gradientLength: 160, gradientThickness: 8, format: TICKS[chart.kind] }],
    marks: [
      {
        type: "rect",
        name: "cell-marks",
        from: { data: "cells" },
        encode: {
          update: {
            x: { scale: "x", field: "x" }, x2: { scale: "x", field: "x2" }, y: { scale: "y", field: "row" }, height: { scale: "y", band: 1 },
            fill: { scale: "heat", field: "value" }, tooltip: { signal: "datum" },
            stroke: { signal: "datum.index === focus ? '#d55e00' : null" }, strokeWidth: { value: 2 }, zindex: { signal: "datum.index === focus ? 1 : 0" },
          },
        },
      },
    ],
  }),

  load(view, chart) {
    const items = [];
    let low = Infinity, high = -Infinity;
    chart.values.forEach((values, row) =>
      values.forEach((value, column) => {
        if (value === null) return;
        (low = Math.min(low, value)), (high = Math.max(high, value));
        items.push({ index: items.length, row, column, x: chart.edges[column], x2: chart.edges[column + 1], value });
      }),
    );
    if (chart.zero) low = 0;
    view.signal("range", low < high ? [low, high] : [Math.min(low, 0), Math.max(high, chart.kind === "share" ? 0.01 : 1)]);
    view.data("cells", items);
    return { items, stride: chart.edges.length - 1 };
  },

  tip(chart, cell) {
    const last = cell.x2 - 1;
    const where = last > cell.x ? `${cell.x.toLocaleString("en")} to ${last.toLocaleString("en")}` : cell.x.toLocaleString("en");
    const counted = chart.counts ? `\n${chart.counts[cell.column].toLocaleString("en")} rows` : "";
    return `${chart.down} ${chart.rows[cell.row]}, ${chart.across} ${where}\n${number(cell.value, chart.kind)}${chart.unit ? ` ${chart.unit}` : ""}${counted}`;
  },
};
