"use strict";
(() => {
  const { problems, entrants, columns, solves, worst, leastShared, tolerance, font, grid } = JSON.parse(
    document.getElementById("data").textContent);
  const config = { displaylogo: false, responsive: true, plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
  const SIZES = { "": [0, Infinity], "up to 300": [0, 300], "301 to 1,000": [301, 1000], "more than 1,000": [1001, Infinity] };
  const OPTIMAL = 1 + tolerance; // a cost counts as the best one up to this ratio
  const rows = solves.map((values) => Object.fromEntries(columns.map((name, i) => [name, values[i]])));
  const $ = (id) => document.getElementById(id);
  const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));
  const percent = (share, digits = 2) => (100 * share).toFixed(digits) + " %";
  const seconds = (s) => (s < 10 ? s.toPrecision(2) : s.toFixed(0)) + " s";
  const number = (x) => x.toLocaleString("en-US");
  const median = (values) => {
    const sorted = [...values].sort((a, b) => a - b), n = sorted.length;
    return n ? (sorted[(n - 1) >> 1] + sorted[n >> 1]) / 2 : null;
  };

  // ---- which solves are looked at
  function fill(id, values, label = (v) => v) {
    $(id).innerHTML = values.map((v) => `<option value="${escape(v)}">${escape(label(v))}</option>`).join("");
  }
  const distinct = (values) => [...new Set(values)];
  const most = (values) => {
    const count = new Map();
    for (const v of values) count.set(v, (count.get(v) || 0) + 1);
    return [...count].sort((a, b) => b[1] - a[1]).map(([v]) => v);
  };
  fill("board", most(problems.map((p) => p.board)));
  fill("limit", distinct(rows.filter((r) => !entrants[r.entrant].family).map((r) => r.limit)).sort((a, b) => a - b), (v) => v + " s");
  fill("family", ["", ...distinct(problems.map((p) => p.family)).filter(Boolean).sort()], (v) => v || "all");
  fill("size", Object.keys(SIZES), (v) => v || "all");

  let chosen = [], shown = [], ranked = [], common = [], byProblem = new Map();
  function select() {
    const limit = Number($("limit").value), [low, high] = SIZES[$("size").value];
    const fits = problems.map((p) => p.board === $("board").value && (!$("family").value || p.family === $("family").value)
      && p.operations >= low && p.operations <= high);
    chosen = rows.filter((r) => fits[r.problem] && (entrants[r.entrant].family || r.limit === limit || !$("limit").value));
    const solved = new Set(chosen.filter((r) => !entrants[r.entrant].family).map((r) => r.problem));
    if (solved.size) chosen = chosen.filter((r) => solved.has(r.problem)); // at this limit, families alone compare nothing
    byProblem = new Map();
    for (const r of chosen) {
      if (!byProblem.has(r.problem)) byProblem.set(r.problem, new Map());
      const mine = byProblem.get(r.problem);
      mine.set(r.entrant, [...(mine.get(r.entrant) || []), r]);
    }
    for (const mine of byProblem.values()) { // of several seeds the median, the more expensive of two
      for (const [e, runs] of mine) {
        const cost = (r) => r.cost ?? Infinity;
        mine.set(e, runs.sort((a, b) => cost(a) - cost(b) || 0)[runs.length >> 1]);
      }
    }
    shown = distinct(chosen.map((r) => r.entrant)).sort((a, b) => a - b);
    rank();
  }
  const known = (p) => problems[p].best !== null;
  // cost / best; Infinity without a plan; NaN if the strategy does not apply or did not run
  function ratio(p, e) {
    const r = byProblem.get(p)?.get(e);
    if (!r || r.status === "SKIPPED") return NaN;
    if (r.cost === null) return Infinity;
    return problems[p].best ? r.cost / problems[p].best : r.cost === 0 ? 1 : Infinity;
  }
  // to a proven bound; null where the bound is that every operation runs once, unless this closes it
  function gapOf(r) {
    const gap = r.bound === null ? null : r.cost ? (r.cost - r.bound) / r.cost : 0;
    return gap !== null && r.bound <= problems[r.problem].total && gap > tolerance ? null : gap;
  }
  function geometric(ratios) {
    return Math.exp(ratios.reduce((sum, x) => sum + Math.log(Math.min(x, worst)), 0) / ratios.length);
  }
  // As in the terminal: strategies that attempted least are left out until the others share enough problems.
  function rank() {
    const all = [...byProblem.keys()].filter(known);
    const attempted = (e) => all.filter((p) => !Number.isNaN(ratio(p, e)));
    const byName = (a, b) => (entrants[a].name < entrants[b].name ? -1 : 1);
    ranked = shown.filter((e) => attempted(e).length).sort((a, b) => attempted(b).length - attempted(a).length || byName(a, b));
    const share = () => all.filter((p) => ranked.every((e) => !Number.isNaN(ratio(p, e))));
    common = share();
    while (ranked.length && common.length < leastShared * all.length) { ranked.pop(); common = share(); }
    const score = new Map(ranked.map((e) => [e, geometric(common.map((p) => ratio(p, e)))]));
    const best = new Map(ranked.map((e) => [e, common.filter((p) => ratio(p, e) <= OPTIMAL).length]));
    ranked.sort((a, b) => score.get(a) - score.get(b) || best.get(b) - best.get(a) || byName(a, b));
  }

  // ---- tables and plots
  const swatch = (e) => `<span class="swatch" style="background:${entrants[e].colour}"></span>${escape(entrants[e].label)}`;
  function table(id, heads, lines) {
    const cell = (tag, text, i) => `<${tag}${i === 1 && id === "ranking" || i === 0 && id !== "ranking" ? "" : ' class="n"'}>${text}</${tag}>`;
    $(id).innerHTML = `<thead><tr>${heads.map((h, i) => cell("th", h, i)).join("")}</tr></thead><tbody>` +
      lines.map((line) => `<tr>${line.map((t, i) => cell("td", t, i)).join("")}</tr>`).join("") + "</tbody>";
  }
  function drawRanking() {
    const order = [...ranked, ...shown.filter((e) => !ranked.includes(e))];
    table("ranking", ["", "strategy", "mean cost / best", "with a plan", "best", "closed gap", "median gap (known)", "median time", "does not apply"],
      order.map((e, i) => {
        const isRanked = ranked.includes(e);
        const counted = (isRanked ? common : [...byProblem.keys()].filter(known)).filter((p) => !Number.isNaN(ratio(p, e)));
        const ratios = counted.map((p) => ratio(p, e)), of = "/" + counted.length;
        const mine = counted.map((p) => byProblem.get(p).get(e));
        const gaps = mine.map((r) => (r.cost === null ? null : gapOf(r))), given = gaps.filter((g) => g !== null).length;
        const middle = median(gaps.map((g) => g ?? Infinity)), times = mine.filter((r) => r.cost !== null).map((r) => r.wall);
        const skipped = chosen.filter((r) => r.entrant === e && r.status === "SKIPPED").length;
        return [isRanked ? i + 1 : "–", swatch(e), isRanked ? geometric(ratios).toFixed(4) : "–",
          ratios.filter(Number.isFinite).length + of, ratios.filter((x) => x <= OPTIMAL).length + of,
          gaps.filter((g) => g !== null && g <= tolerance).length + of, `${Number.isFinite(middle ?? Infinity) ? percent(middle) : "–"} (${given + of})`,
          times.length ? seconds(median(times)) : "–", skipped || ""];
      }));
    const all = [...byProblem.keys()];
    $("ranked").textContent = `${number(chosen.length)} solves of ${all.length} problems, ${all.filter(known).length} with a known plan; ` +
      `ranked over the ${common.length} that all ranked strategies attempted. The mean is geometric; a problem without a plan counts as ${worst}. ` +
      `Best: within ${percent(tolerance)} of the cheapest plan known, of any strategy and any time limit.`;
  }
  const line = (e) => ({ color: entrants[e].colour, dash: entrants[e].dash, width: 2 });
  function plot(id, traces, layout) {
    Plotly.react(id, traces, { font, hovermode: "closest", margin: { l: 62, r: 16, t: 16, b: 52 }, height: 420,
      legend: { font: { size: 12 } }, ...layout, xaxis: { ...grid, ...layout.xaxis }, yaxis: { ...grid, ...layout.yaxis } }, config);
  }
  function drawProfiles() {
    const far = 30;
    plot("profiles", ranked.map((e) => {
      const finite = common.map((p) => ratio(p, e)).filter(Number.isFinite).map((x) => 100 * (x - 1)).sort((a, b) => a - b);
      const x = [0.001], y = [finite.filter((v) => v <= 100 * tolerance).length];
      finite.forEach((v, i) => { if (v > 100 * tolerance) { x.push(v); y.push(i + 1); } });
      x.push(Math.max(far, x.at(-1))); y.push(y.at(-1));
      return { x: x.map((v) => Math.max(v, 0.01)), y: y.map((v) => 100 * v / common.length), mode: "lines", name: entrants[e].label,
        line: { ...line(e), shape: "hv" }, hovertemplate: "%{y:.0f} % of the problems within %{x:.2f} %<extra>" + escape(entrants[e].label) + "</extra>" };
    }), { xaxis: { type: "log", title: { text: "Cost above the best known plan, at most (%)" }, range: [-2, Math.log10(far)] },
      yaxis: { title: { text: "Problems (%)" }, range: [-2, 102] } });
  }
  // Over all problems of a family that a strategy attempted; with their number if these are some only.
  function drawFamilies() {
    const all = [...byProblem.keys()].filter(known), families = distinct(all.map((p) => problems[p].family)).sort();
    const of = new Map(families.map((family) => [family, all.filter((p) => problems[p].family === family)]));
    const order = [...ranked, ...shown.filter((e) => !ranked.includes(e))];
    const lines = order.map((e) => families.map((family) => {
      const ratios = of.get(family).map((p) => ratio(p, e)).filter((x) => !Number.isNaN(x));
      const some = ratios.length < of.get(family).length ? ` (${ratios.length})` : "";
      return ratios.length ? geometric(ratios).toFixed(4) + some : "–";
    }));
    table("families", ["mean cost / best", ...families.map((f) => escape(f || "all") + ` (${of.get(f).length})`)],
      lines.map((cells, i) => [swatch(order[i]), ...cells]).filter((_, i) => lines[i].some((text) => text !== "–")));
  }
  function drawAnytime() {
    const within = 1 + Number($("within").value) / 100;
    const all = [...byProblem.keys()].filter(known);
    const reached = (e, factor) => all.map((p) => {
      const r = byProblem.get(p).get(e);
      return r?.steps.find((s) => s[1] <= factor * problems[p].best)?.[0] ?? Infinity;
    });
    const solvers = shown.filter((e) => !entrants[e].family);
    plot("anytime", solvers.map((e) => {
      const at = reached(e, within).filter(Number.isFinite).sort((a, b) => a - b).map((s) => Math.max(s, 0.01));
      const end = Number($("limit").value) || Math.max(1, ...at);
      return { x: [0.01, ...at, end], y: [0, ...at.map((_, i) => 100 * (i + 1) / all.length), 100 * at.length / all.length], mode: "lines",
        name: entrants[e].label, line: { ...line(e), shape: "hv" },
        hovertemplate: "%{y:.0f} % of the problems after %{x:.2f} s<extra>" + escape(entrants[e].label) + "</extra>" };
    }), { xaxis: { type: "log", title: { text: "Seconds after the process is ready" } },
      yaxis: { title: { text: `Problems within ${$("within").value} % of the best (%)` }, range: [-2, 102] } });
    table("times", ["median seconds to", "5 %", "1 %", "0.1 %", "share that reaches 5 %", "1 %", "0.1 %"], solvers.map((e) => {
      const each = [1.05, 1.01, 1.001].map((factor) => reached(e, factor));
      return [swatch(e), ...each.map((at) => { const m = median(at); return m !== null && Number.isFinite(m) ? seconds(m) : "–"; }),
        ...each.map((at) => percent(at.filter(Number.isFinite).length / Math.max(1, at.length), 0))];
    }));
  }
  function drawBounds() {
    const name = $("instance").value, mine = [...byProblem.keys()].filter((p) => problems[p].name === name)
      .sort((a, b) => problems[a].budget - problems[b].budget);
    if (!mine.length) return Plotly.purge("bounds");
    const x = mine.map((p) => problems[p].budget / problems[p].plain);
    const over = (cost, p) => (cost === null || cost === undefined ? null : 100 * (cost / problems[p].total - 1));
    const best = Math.max(1, ...mine.map((p) => over(problems[p].best, p) || 0));
    const traces = [{ x, y: mine.map((p) => over(problems[p].bound, p)), name: "proven bound", mode: "lines", fill: "tozeroy",
      fillcolor: "rgba(0,0,0,0.06)", line: { color: "#666", dash: "dot" }, hovertemplate: "at least %{y:.3f} %<extra>bound</extra>" }];
    for (const e of shown) {
      const y = mine.map((p) => over(byProblem.get(p).get(e)?.cost, p));
      if (y.some((v) => v !== null)) traces.push({ x, y, name: entrants[e].label, mode: "lines+markers", line: line(e), marker: { size: 5 },
        hovertemplate: "%{y:.3f} %<extra>" + escape(entrants[e].label) + "</extra>" });
    }
    plot("bounds", traces, { height: 460, xaxis: { title: { text: "Budget, as a share of the plain peak" } },
      yaxis: { title: { text: "Overhead (%)" }, range: [-0.03 * best, 3 * best] } });
  }
  function drawCells() {
    const order = [...ranked, ...shown.filter((e) => !ranked.includes(e))];
    const all = [...byProblem.keys()].sort((a, b) => problems[a].name.localeCompare(problems[b].name) || problems[a].budget - problems[b].budget);
    const shade = (x) => (x <= OPTIMAL ? "#d7efe3" : x <= 1.01 ? "#eef6d8" : x <= 1.1 ? "#fdf3d0" : "#fbe0d3");
    const cell = (p, e) => {
      const r = byProblem.get(p).get(e);
      if (!r) return "<td></td>";
      const text = r.cost === null ? r.status.toLowerCase().replace("_", " ") : percent(r.cost / problems[p].total - 1);
      const style = r.cost === null ? "" : ` style="background:${shade(ratio(p, e))}"`;
      return `<td class="n"${style}><button data-row="${rows.indexOf(r)}">${text}</button></td>`;
    };
    $("cells").innerHTML = `<thead><tr><th>graph</th><th class="n">budget</th><th class="n">best known</th><th class="n">bound</th>` +
      order.map((e) => `<th class="n">${escape(entrants[e].label)}</th>`).join("") + "</tr></thead><tbody>" +
      all.map((p) => {
        const { name, text, best, bound, total } = problems[p];
        const over = (cost) => (cost === null ? "–" : percent(cost / total - 1));
        return `<tr><td class="name">${escape(name)}</td><td class="n">${escape(text)}</td><td class="n">${over(best)}</td>` +
          `<td class="n">${over(bound)}</td>${order.map((e) => cell(p, e)).join("")}</tr>`;
      }).join("") + "</tbody>";
  }
  function bytesOf(memory) {
    return Array.from(atob(memory), (c) => c.charCodeAt(0) / 255);
  }
  function showSolve(r) {
    const p = problems[r.problem], e = entrants[r.entrant];
    const facts = [["graph", `${p.name}, ${number(p.operations)} operations`], ["budget", p.text], ["strategy", e.label], ["status", r.status],
      ["overhead", r.cost === null ? "" : percent(r.cost / p.total - 1, 3)],
      ["above the best known plan", r.cost === null || !p.best ? "" : percent(r.cost / p.best - 1, 3)],
      ["its own gap", r.cost && gapOf(r) !== null ? percent(gapOf(r), 3) : ""],
      ["time", seconds(r.wall) + (e.family ? "" : ` of ${r.limit} s`)], ["made by", r.made], ["message", r.message]];
    $("facts").innerHTML = facts.filter(([, text]) => text).map(([term, text]) => `<dt>${escape(term)}</dt><dd>${escape(text)}</dd>`).join("");
    $("solve").hidden = false;
    if (!r.memory) return Plotly.purge("memory");
    const unit = p.plain >= 1e9 ? [1e9, "GB"] : p.plain >= 1e6 ? [1e6, "MB"] : p.plain >= 1e3 ? [1e3, "kB"] : [1, "B"];
    const trace = (solve, name, colour, more) => {
      const held = bytesOf(solve.memory).map((share) => share * p.plain / unit[0]), end = solve.cost / p.total;
      const x = held.map((_, i) => end * i / held.length).concat(end);
      return { x, y: held.concat(held.at(-1)), name, mode: "lines", line: { color: colour, shape: "hv", ...more },
        hovertemplate: `%{y:.3f} ${unit[1]}<extra>${escape(name)}</extra>` };
    };
    const cheapest = [...byProblem.get(r.problem)?.values() ?? []].filter((s) => s.memory).sort((a, b) => a.cost - b.cost)[0];
    const traces = [{ ...trace(r, e.label, e.colour, { width: 2 }), fill: "tozeroy", fillcolor: e.colour + "2b" }];
    if (cheapest && cheapest !== r) traces.push(trace(cheapest, `${entrants[cheapest.entrant].label} (cheapest)`, "#666666", { dash: "dash", width: 1.3 }));
    const last = Math.max(...traces.map((t) => t.x.at(-1)));
    traces.push({ x: [0, last], y: [p.budget / unit[0], p.budget / unit[0]], name: "budget", mode: "lines", line: { color: "#000", dash: "longdash", width: 1.3 } });
    plot("memory", traces, { height: 380, xaxis: { title: { text: "Time, 1 = every operation once" } },
      yaxis: { title: { text: `Memory held (${unit[1]})` }, rangemode: "tozero" }, legend: { orientation: "h", y: -0.25 } });
  }
  function draw() {
    select();
    const isRandom = (p) => ["chain", "layered"].includes(problems[p].family); // networks come first
    const names = distinct([...byProblem.keys()].sort((a, b) => isRandom(a) - isRandom(b) ||
      problems[a].name.localeCompare(problems[b].name)).map((p) => problems[p].name));
    const before = $("instance").value;
    fill("instance", names);
    if (names.includes(before)) $("instance").value = before;
    for (const part of [drawRanking, drawProfiles, drawFamilies, drawAnytime, drawBounds, drawCells]) part();
  }

  // ---- downloads
  function save(name, type, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    URL.revokeObjectURL(link.href);
  }
  const records = () => chosen.map((r) => ({ graph: problems[r.problem].name, family: problems[r.problem].family, scope: problems[r.problem].board,
    budget_bytes: problems[r.problem].budget, total_cost: problems[r.problem].total, best_cost: problems[r.problem].best,
    best_bound: problems[r.problem].bound, strategy: entrants[r.entrant].name, time_limit_s: r.limit, status: r.status, cost: r.cost, bound: r.bound,
    peak_bytes: r.peak, wall_s: r.wall, made: r.made, message: r.message }));
  $("csv").addEventListener("click", () => {
    const list = records(), heads = Object.keys(list[0] || {});
    const quoted = (v) => (v === null ? "" : /[",\n]/.test(v) ? `"${String(v).replaceAll('"', '""')}"` : v);
    save("leaderboard.csv", "text/csv", [heads.join(","), ...list.map((r) => heads.map((h) => quoted(r[h])).join(","))].join("\n") + "\n");
  });
  $("json").addEventListener("click", () => save("leaderboard.json", "application/json", JSON.stringify(records(), null, 1)));
  $("cells").addEventListener("click", (event) => {
    const place = event.target.dataset?.row;
    if (place !== undefined) { showSolve(rows[Number(place)]); $("solve").scrollIntoView({ behavior: "smooth" }); }
  });
  for (const id of ["board", "limit", "family", "size"]) $(id).addEventListener("change", draw);
  $("within").addEventListener("change", drawAnytime);
  $("instance").addEventListener("change", drawBounds);
  draw();
  document.documentElement.dataset.ready = "yes";
})();
