"use strict";
// The calculator: which prefix to load, for a model, a machine, a link, a hit rate and a load. All figures are cost.js's.

const CURVE_POINTS = 60, PREFIX_MIN = 16, PREFIX_MAX = 131072;

// A slider whose middle is the geometric mean: 0 to 1000 on the control, low to high in value.
const logarithmic = (low, high, round) => ({
  value: (at) => round(low * (high / low) ** (at / 1000)),
  at: (value) => Math.round((1000 * Math.log(value / low)) / Math.log(high / low)),
});
const linear = (high) => ({ value: (at) => (at / 1000) * high, at: (value) => Math.round((1000 * value) / high) });
const percent = (value) => `${Math.round(100 * value)} %`;
const tokens = (value) => `${digits(value)} tokens`;

const SLIDERS = {
  prefix: { title: "Prefix length", scale: logarithmic(PREFIX_MIN, PREFIX_MAX, Math.round), text: tokens },
  rest: { title: "New tokens after it", scale: logarithmic(1, 32768, Math.round), text: tokens },
  bandwidth: { title: "Bandwidth of the tier", scale: logarithmic(1e8, 1e12, (value) => value), text: rate },
  hits: { title: "Hit rate (share of requests)", scale: linear(1), text: percent },
  load: { title: "Load (GPU busy if all is recomputed)", scale: linear(0.99), text: percent },
  lookup: { title: "Time of a lookup", scale: linear(0.05), text: seconds },
  sharers: { title: "Replicas that share the tier's link", scale: logarithmic(1, 64, Math.round), text: String },
};

const SELECTS = { model: "Model", host: "GPU", gpus: "GPUs per replica", tier: "Tier", block: "Tokens per block" };

const FIGURES = {
  recompute: "TTFT, prefix recomputed (idle)",
  loaded: "TTFT, prefix loaded (idle)",
  overlapped: "TTFT, loaded while computing, by layers (idle)",
  threshold: "Load from (idle)",
  busyThreshold: "Load from, at this hit rate and load",
  minimum: "Bandwidth a short prefix needs to pay at all",
  never: "Mean TTFT at this load, no cache",
  always: "Mean TTFT at this load, always loading",
  gpu: "GPU busy when loading",
  link: "Link busy when loading",
  capacity: "Requests per second, at most, against no cache",
  hitsFloor: "Loading wins from a hit rate of",
  loads: "Loading wins at loads of",
};

function startCalculator(host, data, colours) {
  const controls = element("div", { class: "controls" }), inputs = {};
  const choices = { model: names(data.models), host: names(data.hosts), tier: names(data.tiers), gpus: data.gpus, block: data.blocks };
  for (const [key, title] of Object.entries(SELECTS)) {
    inputs[key] = element("select", { id: `calc-${key}` }, ...choices[key].map((name) => element("option", { value: name }, String(name))));
    inputs[key].value = data.start[key];
    controls.append(element("label", {}, title, inputs[key]));
  }
  const outputs = {};
  for (const [key, slider] of Object.entries(SLIDERS)) {
    outputs[key] = element("output");
    inputs[key] = element("input", { type: "range", min: 0, max: 1000, id: `calc-${key}` });
    inputs[key].value = slider.scale.at(data.start[key]);
    controls.append(element("label", {}, slider.title, outputs[key], inputs[key]));
  }
  const answer = element("p", { class: "answer", id: "calc-answer", "aria-live": "polite" });
  const figures = element("div", { class: "figures" });
  for (const [key, title] of Object.entries(FIGURES)) {
    figures.append(element("div", {}, element("b", { id: `calc-out-${key}` }), element("span", {}, title)));
  }
  const chart = element("div", { class: "chart-live", id: "calc-chart" });
  host.append(controls, answer, figures, chart);

  // A slider has 1,001 places; until it is moved, its start value holds exactly.
  const exact = { ...pick(data.start, SLIDERS) };
  function update() {
    const state = { ...pick(inputs, SELECTS, (input) => input.value), ...exact };
    const shown = solve(data, state);
    for (const [key, slider] of Object.entries(SLIDERS)) outputs[key].textContent = slider.text(exact[key]);
    inputs.sharers.disabled = shown.tier.per_gpu;
    if (shown.tier.per_gpu) outputs.sharers.textContent = "its GPU's own";
    answer.textContent = sentence(shown, state);
    for (const [key, [value, text]] of Object.entries(figuresOf(shown))) {
      const node = document.getElementById(`calc-out-${key}`);
      node.textContent = text;
      node.dataset.value = value === null ? "" : String(value);
    }
    drawChart(chart, curves(shown, state), colours);
  }
  for (const key of Object.keys(SLIDERS)) {
    inputs[key].addEventListener("input", () => { exact[key] = SLIDERS[key].scale.value(Number(inputs[key].value)); update(); });
  }
  for (const key of Object.keys(SELECTS)) inputs[key].addEventListener("input", () => { if (key === "tier" || key === "host") follow(); update(); });
  function follow() {  // another tier brings its own bandwidth
    exact.bandwidth = tierOf(data, inputs.tier.value, inputs.host.value).bytes_per_s;
    inputs.bandwidth.value = SLIDERS.bandwidth.scale.at(exact.bandwidth);
  }
  update();
}

const names = (list) => list.map((entry) => entry.name ?? entry.gpu);
const named = (list, name) => list.find((entry) => (entry.name ?? entry.gpu) === name);
const pick = (from, keys, change = (value) => value) => Object.fromEntries(Object.keys(keys).map((key) => [key, change(from[key])]));

// Host memory has the bandwidth of the GPU's own link.
function tierOf(data, name, gpu) {
  const tier = named(data.tiers, name);
  return tier.link_share ? { ...tier, bytes_per_s: named(data.hosts, gpu).link_Bps * tier.link_share } : tier;
}

function solve(data, state) {
  const model = named(data.models, state.model), gpus = Number(state.gpus), block = Number(state.block);
  const host = { ...named(data.hosts, state.host), gpus };
  const tier = { ...tierOf(data, state.tier, state.host), bytes_per_s: state.bandwidth };
  const prefill = Cost.prefillTerms(model, host), load = Cost.loadTerms(model, tier, block, gpus, state.lookup);
  const requests = { ...state, sharers: tier.per_gpu ? 1 : state.sharers };  // nobody shares a GPU's own link
  const { prefix, rest } = state, at = Cost.stream(prefill, load, requests);
  return {
    model, host, tier, prefill, load, at,
    recompute: host.request_s + prefill.seconds(prefix + rest),
    loaded: host.request_s + load.seconds(prefix) + prefill.seconds(rest, prefix),
    overlapped: host.request_s + Cost.overlapped(load, prefix, prefill.seconds(rest, prefix), Cost.layers(model)),
    threshold: Cost.breakEven(prefill, load, rest, block),
    busyThreshold: Cost.breakEven(prefill, load, rest, block, { gpu: at.gpu, link: at.link }),
    minimum: Cost.marginalBandwidth(model, host),
    hitsFloor: Cost.hitsFloor(prefill, load, requests),
    loads: Cost.loadRange(prefill, load, requests),
  };
}

function figuresOf(shown) {
  const { host, at } = shown;
  const from = (value) => [value, value === null ? "never" : tokens(value)];
  const time = (value) => [value, seconds(value)];
  const waits = (value) => time(value + host.request_s);
  return {
    recompute: time(shown.recompute), loaded: time(shown.loaded), overlapped: time(shown.overlapped),
    threshold: from(shown.threshold), busyThreshold: from(shown.busyThreshold),
    minimum: [shown.minimum, shown.minimum > 0 ? rate(shown.minimum) : "none: its KV does not grow"],
    never: waits(at.never), always: waits(at.always),
    gpu: [at.gpu, percent(at.gpu)], link: [at.link, percent(at.link)], capacity: [at.capacity, `${digits(at.capacity)} x`],
    hitsFloor: [shown.hitsFloor, shown.hitsFloor === null ? "at none" : percent(shown.hitsFloor)],
    loads: [shown.loads && shown.loads[1], shown.loads === null ? "none" : shown.loads.map(percent).join(" to ")],
  };
}

function sentence(shown, state) {
  const where = `${state.model} on ${state.gpus} x ${state.host}, ${state.tier} at ${rate(state.bandwidth)}`;
  const rule = shown.threshold === null ? "do not load" : `load from ${tokens(shown.threshold)} on`;
  const { never, always } = shown.at;
  const better = Math.abs(never - always) <= 0.005 * never ? "makes no difference" : always < never ? "wins" : "loses";
  return `Idle, ${where}: ${rule}. At ${percent(state.load)} load and ${percent(state.hits)} hits of ${tokens(state.prefix)}, ` +
    `always loading ${better}: mean TTFT ${seconds(always + shown.host.request_s)} against ${seconds(never + shown.host.request_s)} without a cache.`;
}

function curves(shown, state) {
  const xs = [], recompute = [], loaded = [];
  for (let point = 0; point <= CURVE_POINTS; point++) {
    const prefix = Math.round(PREFIX_MIN * (PREFIX_MAX / PREFIX_MIN) ** (point / CURVE_POINTS));
    xs.push(prefix);
    recompute.push(1000 * (shown.host.request_s + shown.prefill.seconds(prefix + state.rest)));
    loaded.push(1000 * (shown.host.request_s + shown.load.seconds(prefix) + shown.prefill.seconds(state.rest, prefix)));
  }
  const line = (name, ys) => ({ name, xs, ys, dashed: false, points: false });
  const marks = [{ x: state.prefix, text: "your prefix" }];
  if (shown.threshold !== null) marks.push({ x: shown.threshold, text: "break-even" });
  return { kind: "lines", title: "TTFT by prefix length", x_title: "Prefix length, tokens", y_title: "TTFT on an idle machine, ms",
    x_log: true, y_log: true, marks, series: [line("recompute", recompute), line("load", loaded)] };
}
