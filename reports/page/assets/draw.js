"use strict";
// Charts of the page: lines, bars and matrices as SVG, with a tip under the pointer; and tables that sort.
// Every chart is a value from the JSON in the page (reports/page/document.py). Nothing here computes a figure.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function shape(parent, name, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  parent.append(node);
  return node;
}

// Three digits, as reports/page/words.py.
function digits(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100) return Math.round(value).toLocaleString("en-US");
  return size >= 0.001 ? String(Number(value.toPrecision(3))) : value.toExponential(2);
}

function seconds(value) {
  if (!Number.isFinite(value)) return "never ends";
  if (Math.abs(value) * 1e6 < 1000) return `${digits(value * 1e6)} us`;
  return Math.abs(value) * 1e3 < 1000 ? `${digits(value * 1e3)} ms` : `${digits(value)} s`;
}

function rate(value) {
  for (const [factor, unit] of [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"]]) {
    if (value >= factor) return `${digits(value / factor)} ${unit}`;
  }
  return `${digits(value)} B/s`;
}

const tip = {
  show(event, text) {
    const node = document.getElementById("tip");
    node.textContent = text;
    node.hidden = false;
    const left = Math.min(event.clientX + 14, window.innerWidth - node.offsetWidth - 8);
    const top = Math.min(event.clientY + 14, window.innerHeight - node.offsetHeight - 8);
    node.style.left = `${Math.max(0, left)}px`;
    node.style.top = `${Math.max(0, top)}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
};

// A scale maps [low, high] to [from, to]; its ticks are round numbers.
function scale(low, high, log, from, to) {
  if (log) {
    low = Math.max(low, 1e-12);
    high = Math.max(high, low * 1.001);
  } else if (high <= low) {
    high = low + 1;
  }
  const bent = log ? Math.log10 : (value) => value;
  const first = bent(low), span = bent(high) - bent(low);
  return {
    at: (value) => from + ((bent(Math.max(value, log ? low : value)) - first) / span) * (to - from),
    ticks: log ? logTicks(low, high) : linearTicks(low, high),
  };
}

function linearTicks(low, high) {
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [], wide = Math.log10(high / low) > 4;
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of wide ? [1] : [1, 2, 5]) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks.length >= 3 ? ticks : linearTicks(low, high).filter((tick) => tick > 0);
}

const WIDTH = 860, HEIGHT = 330, LEFT = 66, RIGHT = 18, TOP = 14, BOTTOM = 42;

function extent(values) {
  const there = values.filter((value) => value !== null && Number.isFinite(value));
  return there.length ? [Math.min(...there), Math.max(...there)] : [0, 1];
}

function drawLines(host, chart, colours) {
  const svg = shape(host, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.title });
  const [xLow, xHigh] = extent(chart.series.flatMap((series) => series.xs));
  const [yLow, yHigh] = extent(chart.series.flatMap((series) => series.ys));
  const x = scale(xLow, xHigh, chart.x_log, LEFT, WIDTH - RIGHT);
  const y = scale(chart.y_log ? yLow : Math.min(0, yLow), yHigh * 1.04, chart.y_log, HEIGHT - BOTTOM, TOP);
  axes(svg, x, y, chart);
  for (const mark of chart.marks.filter((mark) => mark.x >= xLow && mark.x <= xHigh)) {
    shape(svg, "line", { x1: x.at(mark.x), x2: x.at(mark.x), y1: TOP, y2: HEIGHT - BOTTOM, class: "hair" });
    shape(svg, "text", { x: x.at(mark.x) + 4, y: TOP + 10, class: "soft" }, mark.text);
  }
  const legend = element("div", { class: "legend" });
  chart.series.forEach((series, number) => {
    const colour = colours[number % colours.length];
    curve(svg, series, x, y, colour);
    const line = element("i", { class: series.dashed ? "dashed" : "", style: `border-color:${colour}` });
    legend.append(element("span", {}, line, series.name));
  });
  host.append(legend);
  hoverLines(svg, chart, x);
}

function axes(svg, x, y, chart) {
  for (const tick of y.ticks) {
    shape(svg, "line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y.at(tick), y2: y.at(tick), class: "grid" });
    shape(svg, "text", { x: LEFT - 8, y: y.at(tick) + 4, "text-anchor": "end", class: "soft" }, digits(tick));
  }
  for (const tick of x.ticks) {
    shape(svg, "line", { x1: x.at(tick), x2: x.at(tick), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 5, class: "grid" });
    shape(svg, "text", { x: x.at(tick), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle", class: "soft" }, digits(tick));
  }
  shape(svg, "text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, chart.x_title);
  const middle = (TOP + HEIGHT - BOTTOM) / 2;
  shape(svg, "text", { x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})` }, chart.y_title);
}

function curve(svg, series, x, y, colour) {
  let path = "", pen = "M";
  series.xs.forEach((place, index) => {
    const value = series.ys[index];
    if (value === null || !Number.isFinite(value)) { pen = "M"; return; }
    path += `${pen}${x.at(place).toFixed(1)},${y.at(value).toFixed(1)}`;
    pen = "L";
    if (series.points) shape(svg, "circle", { cx: x.at(place), cy: y.at(value), r: 3.5, fill: colour });
  });
  const dashes = series.dashed ? { "stroke-dasharray": "6 4" } : {};
  shape(svg, "path", { d: path, fill: "none", stroke: colour, "stroke-width": 2, ...dashes });
}

function hoverLines(svg, chart, x) {
  const hair = shape(svg, "line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "hair", visibility: "hidden" });
  const places = [...new Set(chart.series.flatMap((series) => series.xs))].sort((a, b) => a - b);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), pointer = ((event.clientX - box.left) / box.width) * WIDTH;
    let nearest = places[0];
    for (const place of places) if (Math.abs(x.at(place) - pointer) < Math.abs(x.at(nearest) - pointer)) nearest = place;
    hair.setAttribute("visibility", "visible");
    hair.setAttribute("x1", x.at(nearest));
    hair.setAttribute("x2", x.at(nearest));
    const rows = chart.series.map((series) => [series.name, series.ys[series.xs.indexOf(nearest)]]);
    const texts = rows.filter((row) => row[1] !== undefined && row[1] !== null).map(([name, value]) => `${name}: ${digits(value)}`);
    tip.show(event, [`${chart.x_title} ${digits(nearest)}`, ...texts].join("\n"));
  });
  svg.addEventListener("pointerleave", () => { hair.setAttribute("visibility", "hidden"); tip.hide(); });
}

// Room for the labels at the left of a picture, 250 to half of its width; what is longer ends with dots, the tip has it all.
const LETTER = 6.8, LABEL_MAX = 64;
const shortened = (label) => (label.length > LABEL_MAX ? `${label.slice(0, LABEL_MAX - 1)}…` : label);
const roomFor = (labels) => Math.max(250, 16 + LETTER * Math.max(...labels.map((label) => shortened(label).length)));

function drawBars(host, chart, colours) {
  const wide = roomFor(chart.labels), line = 18, height = chart.labels.length * line + 40;
  const svg = shape(host, "svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": chart.title });
  const [, high] = extent([...chart.values, ...chart.behind]);
  const low = chart.x_log ? 0.5 : 0;
  const x = scale(low, Math.max(high, low + 1), chart.x_log, wide, WIDTH - 60);
  chart.labels.forEach((label, row) => {
    const top = row * line + 2, behind = chart.behind[row], value = chart.values[row];
    const group = shape(svg, "g");
    shape(group, "rect", { x: 0, y: top, width: WIDTH, height: line, fill: "transparent" });
    shape(group, "text", { x: wide - 8, y: top + 13, "text-anchor": "end" }, shortened(label));
    for (const [size, colour, opacity] of [[behind, colours[0], 0.22], [value, colours[0], 1]]) {
      if (size > low) shape(group, "rect", { x: wide, y: top + 2, width: x.at(size) - wide, height: line - 5, fill: colour, opacity });
    }
    const text = behind === undefined ? digits(value) : `${digits(value)} of ${digits(behind)}`;
    shape(group, "text", { x: x.at(Math.max(value, behind ?? 0, low)) + 5, y: top + 13, class: "soft" }, text);
    group.addEventListener("pointermove", (event) => tip.show(event, `${label}\n${chart.x_title}: ${text}`));
    group.addEventListener("pointerleave", tip.hide);
  });
  shape(svg, "text", { x: (wide + WIDTH) / 2, y: height - 10, "text-anchor": "middle" }, chart.x_title);
}

function drawMatrix(host, chart, colours) {
  const wide = roomFor(chart.rows), line = 18, top = 70, step = Math.min(60, (WIDTH - wide - 10) / chart.columns.length);
  const height = top + chart.rows.length * line + 6;
  const svg = shape(host, "svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": chart.title });
  const [, high] = extent(chart.values.flat());
  const marked = new Set(chart.marked.map(([row, column]) => `${row},${column}`));
  chart.columns.forEach((name, column) => {
    const left = wide + column * step + step / 2;
    shape(svg, "text", { x: left, y: top - 8, transform: `rotate(-40 ${left} ${top - 8})` }, name);
  });
  chart.rows.forEach((name, row) => {
    shape(svg, "text", { x: wide - 8, y: top + row * line + 13, "text-anchor": "end" }, name);
    chart.values[row].forEach((value, column) => {
      const frame = marked.has(`${row},${column}`);
      if (value === null && !frame) return;
      const group = shape(svg, "g"), left = wide + column * step;
      const box = { x: left + 1, y: top + row * line + 1, width: step - 2, height: line - 2 };
      shape(group, "rect", { ...box, fill: value ? colours[0] : "transparent", opacity: value ? 0.25 + 0.75 * (value / high) : 1 });
      if (frame) shape(group, "rect", { ...box, fill: "none", stroke: colours[2], "stroke-width": 2 });
      const text = value === null ? "expected here, not seen" : `${digits(value)}${frame ? ", expected here" : ", not expected here"}`;
      group.addEventListener("pointermove", (event) => tip.show(event, `${name}\n${chart.columns[column]}: ${text}`));
      group.addEventListener("pointerleave", tip.hide);
    });
  });
}

function drawChart(host, chart, colours) {
  host.replaceChildren();
  ({ lines: drawLines, bars: drawBars, matrix: drawMatrix })[chart.kind](host, chart, colours);
}

// Numbers sort as numbers; cells without a value stay at the end.
function sortable(table) {
  table.querySelectorAll("th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.sort;
      const rows = [...table.tBodies[0].rows].sort((a, b) => compare(key(a), key(b), down));
      table.tBodies[0].append(...rows);
    });
  });
}

function compare(a, b, down) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const order = a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b);
  return down ? -order : order;
}

if (typeof document !== "undefined") {
  document.addEventListener("DOMContentLoaded", () => {
    const data = JSON.parse(document.getElementById("data").textContent);
    document.querySelectorAll("table").forEach(sortable);
    document.querySelectorAll(".chart").forEach((host) => drawChart(host, data.charts[host.dataset.chart], data.colours));
    const kinds = { calculator: startCalculator, prefix: startPrefix };
    document.querySelectorAll(".widget").forEach((host, number) => {
      kinds[data.widgets[number].kind](host, data.widgets[number].data, data.colours);
    });
    document.body.dataset.ready = "yes";
  });
}
