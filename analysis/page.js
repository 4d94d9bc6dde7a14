"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  // Plotly's default set of buttons has one that uploads the data.
  const config = { displaylogo: false, responsive: true, plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] };
  const { font, grid } = data;

  for (const [id, figure] of Object.entries(data.figures)) {
    Plotly.newPlot(id, figure.data, figure.layout, config);
  }

  // ---- one plan: memory over time, and the operations that each stage computes and holds
  const chooser = document.getElementById("plan");
  function step(edges, held) {
    return { x: edges, y: held.concat(held.slice(-1)) };
  }
  function bytesOf(name) {
    return "%{y:.3f} " + data.byteUnit + "<extra>" + name + "</extra>";
  }
  function showPlan() {
    const plan = data.plans[Number(chooser.value)];
    const names = data.names;
    const seen = new Set();
    const text = plan.order.map((k) => {
      const again = seen.has(k) ? " (recomputed)" : "";
      seen.add(k);
      return names[k] + again;
    });
    const end = plan.edges.at(-1);
    const plain = step(data.plain.edges, data.plain.held);
    const mine = step(plan.edges, plan.held);
    const traces = [
      { ...plain, name: "Checkpoint all", mode: "lines", line: { shape: "hv", color: "#666666", dash: "dash", width: 1.3 },
        hovertemplate: bytesOf("Checkpoint all") },
      { ...mine, name: plan.label, mode: "lines", text, fill: "tozeroy", fillcolor: plan.colour + "2b",
        line: { shape: "hv", color: plan.colour, width: 2 },
        hovertemplate: "%{text}<br>" + bytesOf(plan.label) },
      { x: [0, end], y: [plan.budget, plan.budget], name: "Budget", mode: "lines",
        line: { color: "#000", dash: "longdash", width: 1.3 }, hovertemplate: bytesOf("Budget") },
    ];
    if (data.fixed > 0) {
      traces.push({ x: [0, end], y: [data.fixed, data.fixed], name: "Fixed (parameters, …)", mode: "lines",
        fill: "tozeroy", fillcolor: "rgba(120,120,120,0.22)", line: { color: "#999", width: 1 },
        hovertemplate: bytesOf("Fixed") });
    }
    if (plan.again.length) {
      traces.push({ x: plan.again.map((c) => (plan.edges[c] + plan.edges[c + 1]) / 2), y: plan.again.map(() => 0),
        text: plan.again.map((c) => names[plan.order[c]]), name: "Recomputation", mode: "markers",
        marker: { symbol: "line-ns", size: 14, line: { color: "#d55e00", width: 2 } }, cliponaxis: false,
        hovertemplate: "%{text}<extra>Recomputed</extra>" });
    }
    const copying = plan.copies.some((copies) => copies.x.length);
    plan.copies.forEach(({ x, text }, lane) => {
      if (x.length) {
        const name = ["To the host", "From the host"][lane];
        traces.push({ x, text, y: x.map(() => 1 - lane), yaxis: "y2", name, mode: "lines", connectgaps: false,
          line: { color: ["#0077bb", "#228833"][lane], width: 9 }, hovertemplate: "%{text}<extra>" + name + "</extra>" });
      }
    });
    const shapes = [], annotations = [];
    if (plan.backwardAt !== null) {
      shapes.push({ type: "line", x0: plan.backwardAt, x1: plan.backwardAt, y0: 0, y1: 1, yref: "paper",
        line: { color: "#333", width: 1, dash: "dot" } });
      annotations.push({ x: plan.backwardAt, y: 1, yref: "paper", yanchor: "bottom", text: "backward starts",
        showarrow: false, font: { size: 12, color: "#555" } });
    }
    Plotly.react("memory", traces, {
      font, shapes, annotations, height: 430, margin: { l: 70, r: 20, t: 40, b: 50 }, hovermode: "closest",
      xaxis: { ...grid, title: { text: data.timeLabel }, range: [0, Math.max(end, data.plain.edges.at(-1)) * 1.005],
        anchor: copying ? "y2" : "y" },
      yaxis: { ...grid, title: { text: "Memory held (" + data.byteUnit + ")" }, rangemode: "tozero",
        domain: [copying ? 0.2 : 0, 1] },
      yaxis2: { domain: [0, 0.12], range: [-0.6, 1.6], tickvals: [0, 1], ticktext: ["in", "out"], visible: copying },
      legend: { orientation: "h", y: -0.22 },
    }, config);

    const holder = document.getElementById("matrix");
    if (holder && plan.cells) {
      const z = plan.cells.map((line) => Array.from(line, Number));
      const at = z.map((_, i) => i * plan.block);
      const label = plan.block === 1 ? names : at.map((k) => names[k] + " …");
      const colours = data.cellColours, words = data.cellWords;
      const scale = colours.flatMap((c, i) => [[i / colours.length, c], [(i + 1) / colours.length, c]]);
      Plotly.react("matrix", [{ type: "heatmap", z, x: at, y: at, zmin: -0.5, zmax: colours.length - 0.5, colorscale: scale,
        text: z.map(() => label), customdata: z.map((line) => line.map((c) => words[c])),
        hovertemplate: "stage %{y}<br>%{text}: %{customdata}<extra></extra>",
        colorbar: { tickvals: colours.map((_, i) => i), ticktext: words, len: 0.6, thickness: 14 } }], {
        font, height: 560, margin: { l: 70, r: 20, t: 10, b: 50 },
        xaxis: { ...grid, showgrid: false, title: { text: "Operation, in graph order" }, constrain: "domain" },
        yaxis: { ...grid, showgrid: false, title: { text: "Stage" }, autorange: "reversed" },
      }, config);
    }
    document.getElementById("planfacts").textContent = plan.facts;
  }
  if (chooser) {
    chooser.addEventListener("change", showPlan);
    showPlan();
  }

  // ---- the table: a click on a heading sorts; text, strategy and status filter
  const table = document.getElementById("results");
  document.documentElement.dataset.ready = "yes"; // the rest is bound in this same turn
  if (!table) return;
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const heads = Array.from(table.tHead.rows[0].cells);
  function sortBy(column) {
    const head = heads[column];
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of heads) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
    const numeric = head.classList.contains("n");
    rows.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === ""); // missing values stay last
      const order = numeric ? Number(x) - Number(y) : x.localeCompare(y);
      return up ? order : -order;
    });
    body.append(...rows);
  }
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => sortBy(column)));
  const [words, strategy, status] = ["filter", "filter-strategy", "filter-status"].map((id) => document.getElementById(id));
  function filter() {
    const wanted = words.value.trim().toLowerCase();
    let shown = 0;
    for (const row of rows) {
      const fits = (!strategy.value || row.dataset.strategy === strategy.value) &&
        (!status.value || row.dataset.status === status.value) && row.textContent.toLowerCase().includes(wanted);
      row.hidden = !fits;
      shown += fits;
    }
    document.getElementById("shown").textContent = shown + " of " + rows.length + " rows";
  }
  for (const input of [words, strategy, status]) input.addEventListener("input", filter);
  filter();
})();
