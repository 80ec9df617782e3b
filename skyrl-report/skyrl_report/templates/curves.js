"use strict";
// Draws the charts of a page with uPlot: values at the cursor, zoom by dragging, smoothing, three horizontal axes.
(() => {
  const tools = document.getElementById("curves");
  if (!tools) return;
  const MAX_FOUND = 24;
  const ranges = new Map();  // title of a chart → the zoomed range
  const cursors = uPlot.sync("curves");
  let data = null, charts = [];

  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const option = name => tools.querySelector(`[name=${name}]`);

  function hue(className, parent = document.body) {
    const probe = document.createElement("i");
    probe.className = className;
    parent.append(probe);
    const color = getComputedStyle(probe).getPropertyValue("--hue").trim() || style("--eval");
    probe.remove();
    return color;
  }

  function read() {
    data = JSON.parse(document.getElementById("curve-data").textContent);
    const names = new Set(data.runs.flatMap(run => Object.keys(run.series)));
    document.getElementById("metric-names").replaceChildren(...[...names].sort().map(name => Object.assign(document.createElement("option"), { value: name })));
  }

  // -- numbers

  function axisValues(run, number) {
    const axis = option("axis").value, steps = run.x[number];
    if (axis === "step") return steps;
    const to = run[axis];
    let k = 0;
    return steps.map(step => {  // linear between the recorded steps
      while (k < run.steps.length - 1 && run.steps[k + 1] <= step) k++;
      const [a, b] = [run.steps[k], run.steps[k + 1]];
      return b === undefined || step <= a ? to[k] : to[k] + (to[k + 1] - to[k]) * (step - a) / (b - a);
    });
  }

  function smooth(values, share) {
    const half = Math.round(values.length * share / 2);
    if (!half) return values;
    const sums = [0], counts = [0];
    values.forEach((value, i) => { sums.push(sums[i] + (value ?? 0)); counts.push(counts[i] + (value === null ? 0 : 1)); });
    return values.map((value, i) => {
      const start = Math.max(0, i - half), end = Math.min(values.length, i + half + 1);
      return value === null ? null : (sums[end] - sums[start]) / (counts[end] - counts[start]);
    });
  }

  function format(value, isShare) {
    if (value === null || value === undefined) return "–";
    if (isShare) return `${(100 * value).toFixed(1)}%`;
    const size = Math.abs(value);
    if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    return size && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  }

  function formatX(value) {
    const axis = option("axis").value;
    if (value === null || value === undefined) return "";
    if (axis === "step") return `step ${value}`;
    if (axis === "tokens") return `${short(value)} tokens`;
    return duration(value);
  }

  function short(value) {
    return value >= 1e9 ? `${+(value / 1e9).toPrecision(3)}G` : value >= 1e6 ? `${+(value / 1e6).toPrecision(3)}M` : value >= 1e3 ? `${+(value / 1e3).toPrecision(3)}k` : String(Math.round(value));
  }

  function duration(seconds) {
    return seconds >= 3600 ? `${+(seconds / 3600).toPrecision(3)} h` : seconds >= 60 ? `${+(seconds / 60).toPrecision(3)} min` : `${+seconds.toPrecision(3)} s`;
  }

  // -- the lines of a chart: {label, x, y, stroke, width, points} and bands of groups

  function linesOf(spec, card) {
    const share = Number(option("smoothing").value) / 100, lines = [];
    const isComparison = data.runs.length > 1, hasBands = option("bands")?.checked;
    for (const { metric, label, style: name, smoothed } of spec.lines) {
      const runs = data.runs.filter(run => run.series[metric]);
      const groups = new Map();
      for (const run of runs) groups.set(run.group, [...(groups.get(run.group) ?? []), run]);
      for (const [group, members] of groups) {
        if (isComparison && hasBands && members.length > 1) lines.push(band(group, members, metric, share));
        else for (const run of members) {
          const [number, values, isShare] = run.series[metric], x = axisValues(run, number);
          const color = hue(isComparison ? run.style : name, card), wanted = smoothed ? share : 0;
          if (wanted && !isComparison) lines.push({ label: "", x, y: values, stroke: hue("raw"), width: 1, isShare });
          lines.push({ label: isComparison ? run.name : label || "value", x, y: smooth(values, wanted), stroke: color, width: 2, isShare, points: !smoothed && values.length <= 60 });
        }
      }
    }
    return lines;
  }

  function band(group, members, metric, share) {
    const points = new Map();  // step → values and positions of the members
    for (const run of members) {
      const [number, values] = run.series[metric], x = axisValues(run, number), y = smooth(values, share);
      run.x[number].forEach((step, i) => {
        if (y[i] === null) return;
        const point = points.get(step) ?? { x: [], y: [] };
        point.x.push(x[i]); point.y.push(y[i]);
        points.set(step, point);
      });
    }
    const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
    const all = [...points].sort((a, b) => a[0] - b[0]).map(([, point]) => point);
    return {
      label: `${group}: mean of ${members.length}`, x: all.map(point => mean(point.x)), y: all.map(point => mean(point.y)),
      low: all.map(point => Math.min(...point.y)), high: all.map(point => Math.max(...point.y)),
      stroke: hue(members[0].style), width: 2, isShare: members[0].series[metric][2],
    };
  }

  // -- one chart

  function draw(card, spec) {
    const lines = linesOf(spec, card);
    if (!lines.length) return;
    const isShare = lines.some(line => line.isShare);
    const tables = [], series = [{}], bands = [], labels = [null];
    const add = (x, y, options) => { tables.push([x, y]); labels.push(options.label); series.push({ spanGaps: false, ...options }); };
    for (const line of lines) {
      if (line.low) {
        add(line.x, line.high, { label: "", stroke: "transparent", points: { show: false } });
        add(line.x, line.low, { label: "", stroke: "transparent", points: { show: false } });
        bands.push({ series: [series.length - 2, series.length - 1], fill: `color-mix(in srgb, ${line.stroke} 18%, transparent)` });
      }
      add(line.x, line.y, { label: line.label, stroke: line.stroke, width: line.width, points: { show: line.points ?? false, size: 6, fill: line.stroke } });
    }
    for (const [label, value] of Object.entries(spec.baselines ?? {})) {
      const x = lines.flatMap(line => [line.x[0], line.x.at(-1)]);
      add([Math.min(...x), Math.max(...x)], [value, value], { label, stroke: style("--quiet"), width: 1, dash: [5, 4], points: { show: false } });
    }
    const joined = uPlot.join(tables);
    const box = document.createElement("div");
    box.className = "plot";
    const readout = document.createElement("p");
    readout.className = "legend";
    card.querySelectorAll("svg, .plot, .legend").forEach(element => element.remove());
    card.append(readout, box);
    const axis = { stroke: style("--quiet"), grid: { stroke: style("--rule"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const chart = new uPlot({
      width: Math.max(200, box.clientWidth), height: spec.height ?? 190, series, bands,
      cursor: { sync: { key: cursors.key, setSeries: false }, drag: { x: true, y: false } },
      legend: { show: false },
      scales: { x: { time: false }, y: isShare ? { range: (u, min, max) => [Math.min(0, min), Math.max(1, max)] } : {} },
      axes: [
        { ...axis, size: 26, space: 60, values: (u, ticks) => ticks.map(tick => option("axis").value === "step" ? tick : option("axis").value === "tokens" ? short(tick) : duration(tick)) },
        { ...axis, size: 58, values: (u, ticks) => ticks.map(tick => format(tick, isShare)) },
      ],
      hooks: { setCursor: [u => readOut(u, readout, labels, isShare)], setSelect: [u => { if (u.select.width > 0) ranges.set(spec.title, [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]); }] },
    }, joined, box);
    box.addEventListener("dblclick", () => ranges.delete(spec.title));
    const range = ranges.get(spec.title);
    if (range) chart.setScale("x", { min: range[0], max: range[1] });
    charts.push({ chart, box });
  }

  function readOut(chart, readout, labels, isShare) {  // the values at the cursor, or the last ones
    const end = chart.cursor.idx ?? chart.data[0].length - 1;
    const parts = chart.series.map((series, i) => {
      if (!labels[i]) return null;
      let k = end;
      while (k >= 0 && chart.data[i][k] === undefined) k--;  // a point of another line
      const part = document.createElement("span"), mark = document.createElement("i");
      mark.style.background = series._stroke ?? series.stroke(chart, i);
      part.append(mark, `${labels[i]} `, Object.assign(document.createElement("b"), { textContent: format(chart.data[i][k], isShare) }));
      return part;
    });
    const at = document.createElement("span");
    at.textContent = formatX(chart.data[0][end]);
    readout.replaceChildren(...parts.filter(Boolean), at);
  }

  function drawAll() {
    charts.forEach(({ chart }) => chart.destroy());
    charts = [];
    for (const card of document.querySelectorAll("[data-chart]")) draw(card, JSON.parse(card.dataset.chart));
    find();
  }

  function find() {
    const text = option("metric").value.trim().toLowerCase(), found = document.getElementById("found");
    const words = text.split(/\s+/);
    const names = text ? [...document.getElementById("metric-names").children].map(element => element.value).filter(name => words.every(word => name.toLowerCase().includes(word))) : [];
    charts = charts.filter(({ chart, box }) => !found.contains(box) || chart.destroy());
    found.replaceChildren(...names.slice(0, MAX_FOUND).map(name => {
      const card = document.createElement("article");
      card.className = "card plain";
      card.append(Object.assign(document.createElement("h3"), { textContent: name }));
      return card;
    }));
    document.getElementById("found-count").textContent = text ? `${names.length} ${names.length === 1 ? "metric" : "metrics"}${names.length > MAX_FOUND ? `, the first ${MAX_FOUND} are shown` : ""}` : "";
    names.slice(0, MAX_FOUND).forEach((name, i) => draw(found.children[i], { title: name, lines: [{ metric: name, label: "", style: "eval", smoothed: !/^(eval|val)\//.test(name) }] }));
  }

  let pending = null;
  function later(action) { clearTimeout(pending); pending = setTimeout(action, 60); }

  tools.querySelector("form").addEventListener("submit", event => event.preventDefault());
  tools.addEventListener("input", event => {
    if (event.target.name === "axis") ranges.clear();
    later(event.target.name === "metric" ? find : drawAll);
  });
  document.addEventListener("refreshed", () => { read(); drawAll(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("resize", () => later(() => charts.forEach(({ chart, box }) => chart.setSize({ width: Math.max(200, box.clientWidth), height: chart.height }))));
  tools.hidden = false;
  read();
  drawAll();
})();
