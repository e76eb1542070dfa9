"use strict";
// The cost model in the page: the closed forms of reports/cost.py (model.py, prefill.py, tier.py, breakeven.py) and of
// reports/stream.py, under the same names. tests/reports/test_page_cost.py holds the two against each other.
// Seconds, bytes, tokens, rates per second.

const Cost = (() => {
  const TOKENS_MAX = 131072, GRID_STEP = 0.03, TIE = 1e-9, SPARSE = 0.6, STEPS = 100;

  // --- model.py

  const layers = (model) => model.layers_full + model.layers_window + model.layers_recurrent;

  const layerBytesPerToken = (model) => (model.latent_dim || 2 * model.kv_heads * model.head_dim) * model.value_bytes;

  const kvBytesPerToken = (model) => model.layers_full * layerBytesPerToken(model);

  const flopsPerPair = (model) => 2 * model.heads * ((model.qk_dim || model.head_dim) + (model.v_dim || model.head_dim));

  const shardCopies = (model, gpus) => gpus / (model.latent_dim ? 1 : Math.min(gpus, model.kv_heads));

  function kvBytes(model, tokens) {
    if (tokens <= 0) return 0;
    const windows = model.layers_window * Math.min(tokens, model.window_tokens);
    return (model.layers_full * tokens + windows) * layerBytesPerToken(model) + model.state_bytes;
  }

  function attentionPairs(fresh, prefix, window = null) {
    const end = prefix + fresh;
    if (window === null || end <= window) return fresh * prefix + (fresh * fresh) / 2;
    const ramp = Math.max(0, window - prefix);
    return ramp * prefix + (ramp * ramp) / 2 + (fresh - ramp) * window;
  }

  // --- prefill.py: prefill = step + max(linear + attention, memory)

  function weightsTouchedBytes(model, tokens) {
    const share = model.params_active / model.params_total;
    return share < SPARSE ? model.weight_bytes * (1 - (1 - share) ** tokens) : model.weight_bytes;
  }

  function prefillTerms(model, host) {
    const peak = host.flops * host.gpus * host.parallel_efficiency;
    const pair = flopsPerPair(model) / (peak * host.efficiency_attention);
    const token = (2 * model.params_active) / (peak * host.efficiency_linear);
    const memory = host.hbm_Bps * host.gpus * host.efficiency_hbm;
    const copies = shardCopies(model, host.gpus);

    function compute(fresh, prefix) {
      const windows = model.layers_window ? pair * model.layers_window * attentionPairs(fresh, prefix, model.window_tokens) : 0;
      return token * fresh + pair * model.layers_full * attentionPairs(fresh, prefix) + windows;
    }

    return {
      seconds(fresh, prefix = 0) {
        if (fresh <= 0) return 0;
        const reads = (weightsTouchedBytes(model, fresh) + kvBytes(model, prefix) * copies) / memory;
        return host.step_s + Math.max(compute(fresh, prefix), reads);
      },
      marginal(prefix) {
        const windows = pair * model.layers_window * Math.min(prefix, model.window_tokens);
        return token + pair * model.layers_full * prefix + windows;
      },
    };
  }

  // --- tier.py: load = lookup + t0 + copies * per_block + bytes / bandwidth

  function loadTerms(model, tier, blockTokens, gpus, lookup) {
    const copies = shardCopies(model, gpus);
    const share = tier.per_gpu ? copies / gpus : copies;
    const copy = tier.per_block_s * (tier.per_gpu ? 1 : gpus);
    const wait = lookup + tier.t0_s;
    const link = (tokens) =>
      tokens <= 0 ? 0 : Math.ceil(tokens / blockTokens) * copy + kvBytes(model, tokens) * share * (1 / tier.bytes_per_s);
    return { wait, link, seconds: (tokens) => (tokens > 0 ? wait + link(tokens) : 0) };
  }

  // --- breakeven.py

  const inflation = (busy) => (busy < 1 ? 1 / (1 - busy) : Infinity);

  function pays(prefill, load, prefix, rest = 1, busy = { gpu: 0, link: 0 }) {
    const link = load.link(prefix);
    if (busy.link >= 1 && link > 0) return false;
    const saved = prefill.seconds(prefix + rest, 0) - prefill.seconds(rest, prefix);
    if (busy.gpu >= 1) return saved > 0;
    return saved * inflation(busy.gpu) > (load.wait + link * inflation(busy.link)) * (1 + TIE);
  }

  function* grid(last) {
    let block = 1;
    while (block < last) {
      yield block;
      block += Math.max(1, Math.floor(block * GRID_STEP));
    }
    if (last >= 1) yield last;
  }

  function edge(wins, before, after) {
    const wanted = wins(after);
    while (after - before > 1) {
      const middle = Math.floor((before + after) / 2);
      if (wins(middle) === wanted) after = middle;
      else before = middle;
    }
    return after;
  }

  function payingRanges(prefill, load, rest, blockTokens, busy, tokensMax = TOKENS_MAX) {
    const wins = (block) => pays(prefill, load, block * blockTokens, rest, busy);
    const ranges = [];
    let before = 0, first = 0;
    for (const block of grid(Math.floor(tokensMax / blockTokens))) {
      if (wins(block) !== first > 0) {
        const at = edge(wins, before, block);
        if (first) ranges.push([first * blockTokens, (at - 1) * blockTokens]);
        first = first ? 0 : at;
      }
      before = block;
    }
    if (first) ranges.push([first * blockTokens, before * blockTokens]);
    return ranges;
  }

  function breakEven(prefill, load, rest = 1, blockTokens = 1, busy = { gpu: 0, link: 0 }, tokensMax = TOKENS_MAX) {
    const ranges = payingRanges(prefill, load, rest, blockTokens, busy, tokensMax);
    const longest = Math.floor(tokensMax / blockTokens) * blockTokens;
    const last = ranges[ranges.length - 1];
    return last && last[1] === longest ? last[0] : null;
  }

  // Bytes per second that a tier must exceed, all links of a replica together.
  function marginalBandwidth(model, host, prefix = 0) {
    return (kvBytesPerToken(model) * shardCopies(model, host.gpus)) / prefillTerms(model, host).marginal(prefix);
  }

  function overlapped(load, prefix, compute, layerCount) {
    if (prefix <= 0) return compute;
    const link = load.link(prefix) / layerCount, each = compute / layerCount;
    return load.wait + link + (layerCount - 1) * Math.max(link, each) + each;
  }

  // --- stream.py; requests: { prefix, rest, hits, load, lookup, sharers }

  function stream(prefill, load, requests) {
    const { prefix, rest, hits } = requests;
    const full = prefill.seconds(prefix + rest, 0), short = prefill.seconds(rest, prefix);
    const link = load.link(prefix), work = (1 - hits) * full + hits * short;
    const shared = requests.sharers * hits * link;
    const gpu = (requests.load * work) / full, linkBusy = (requests.load * shared) / full;
    const onLink = shared > 0 ? link * inflation(linkBusy) : 0;
    const always = work * inflation(gpu) + hits * (load.wait + onLink) + (1 - hits) * requests.lookup;
    return { never: full * inflation(requests.load), always, gpu, link: linkBusy, capacity: full / Math.max(work, shared) };
  }

  function wins(prefill, load, requests) {
    const at = stream(prefill, load, requests);
    return at.always * (1 + TIE) < at.never;
  }

  function hitsFloor(prefill, load, requests) {
    for (let step = 1; step <= STEPS; step++) {
      if (wins(prefill, load, { ...requests, hits: step / STEPS })) return step / STEPS;
    }
    return null;
  }

  function loadRange(prefill, load, requests) {
    const winning = [];
    for (let step = 0; step < STEPS; step++) {
      if (wins(prefill, load, { ...requests, load: step / STEPS })) winning.push(step / STEPS);
    }
    return winning.length ? [winning[0], winning[winning.length - 1]] : null;
  }

  return { layers, kvBytes, kvBytesPerToken, attentionPairs, weightsTouchedBytes, prefillTerms, loadTerms, inflation, pays,
    payingRanges, breakEven, marginalBandwidth, overlapped, stream, hitsFloor, loadRange };
})();

if (typeof module !== "undefined") module.exports = Cost;
