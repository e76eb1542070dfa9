"use strict";
// The prefix rule of kvcore/groups.py as a picture: click the cells of the matrix and see which prefix is servable.
// Sets of chunks are arrays of truth values. tests/reports/pages/test_page_prefix.py holds rule and texts against Python.

const Prefix = (() => {
  const SHOWN_MAX = 8;

  // What of one row serving `length` chunks uses; null: a row of this kind cannot serve it.
  function needed(group, chunkTokens, length, fullHit) {
    const cells = (from, to) => Array.from({ length }, (_, chunk) => chunk >= Math.max(0, from) && chunk < to);
    if (group.kind === "full" || length === 0) return cells(0, length);
    if (group.kind === "recurrent") return fullHit ? null : cells(length - 1, length);
    const window = group.window_tokens;
    if (window === 1) return cells(length, length);
    // On a full hit the last token is computed again: the window begins and may end one token earlier.
    if (fullHit) return cells(length - Math.ceil(window / chunkTokens), chunkTokens === 1 ? length - 1 : length);
    return cells(length - Math.ceil((window - 1) / chunkTokens), length);
  }

  const isFullHit = (layout, length, prompt) => length > 0 && length * layout.chunk_tokens === prompt;

  // Per row, in the layout's order (rank, then group), what is needed and what of it is missing, at one length.
  function rowsAt(layout, present, prompt, length, skip) {
    return present.map((row, index) => {
      const group = index % layout.groups.length, rank = Math.floor(index / layout.groups.length);
      const wanted = needed(layout.groups[group], layout.chunk_tokens, length, isFullHit(layout, length, prompt));
      const needs = [], lacks = [];
      (wanted ?? []).forEach((there, chunk) => {
        if (there && chunk >= skip) (needs.push(chunk), row[chunk] || lacks.push(chunk));
      });
      return { index, rank, group, impossible: wanted === null, needs, lacks };
    });
  }

  const serves = (rows) => rows.every((row) => !row.impossible && row.lacks.length === 0);

  // All lengths that every row serves; 0 is always one of them.
  function lengths(layout, present, chunks, prompt, skip = 0) {
    const found = [];
    for (let length = 0; length <= chunks; length++) if (serves(rowsAt(layout, present, prompt, length, skip))) found.push(length);
    return found;
  }

  function listed(members) {
    const ranges = [];
    for (const member of members) {
      const last = ranges[ranges.length - 1];
      if (last && last[1] === member - 1) last[1] = member;
      else ranges.push([member, member]);
    }
    const shown = ranges.slice(0, SHOWN_MAX).map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`));
    const hidden = ranges.slice(SHOWN_MAX).reduce((sum, [first, last]) => sum + last - first + 1, 0);
    return shown.join(", ") + (hidden ? ` and ${hidden} more` : "");
  }

  const described = (group) => (group.kind === "window" ? `window ${group.window_tokens}` : group.kind);

  // As CacheLayout.explain.
  function explain(layout, present, chunks, prompt, length, skip = 0) {
    const head = `length ${length} of ${chunks} chunks (${layout.chunk_tokens} tokens each, prompt ${prompt})`;
    const reasons = rowsAt(layout, present, prompt, length, skip).flatMap((row) => {
      const name = `row ${row.index} (rank ${row.rank}, group ${row.group}: ${described(layout.groups[row.group])})`;
      if (row.impossible) return [`${name} cannot serve the whole prompt: its state already contains the last token`];
      return row.lacks.length ? [`${name} needs chunks ${listed(row.needs)} and lacks ${listed(row.lacks)}`] : [];
    });
    return reasons.length ? `${head}: not servable\n  ${reasons.join("\n  ")}` : `${head}: servable`;
  }

  return { needed, rowsAt, lengths, explain, described, isFullHit };
})();

function startPrefix(host, data) {
  const pattern = element("select", { id: "prefix-pattern" }, ...data.patterns.map((one, index) => element("option", { value: index }, one.name)));
  const whole = element("input", { type: "checkbox", id: "prefix-whole" });
  const skip = element("input", { type: "range", min: 0, max: data.chunks, value: 0, id: "prefix-skip" });
  const skipText = element("output");
  const controls = element("div", { class: "controls" },
    element("label", {}, "Start from", pattern),
    element("label", {}, "Chunks the engine has itself", skipText, skip),
    element("label", {}, whole, " the prompt ends with the last chunk (the last token must be computed again)"));
  const cells = element("div", { class: "cells", style: `grid-template-columns: max-content repeat(${data.chunks + 1}, 34px)` });
  const text = element("pre", { id: "prefix-text", "aria-live": "polite" });
  host.append(controls, cells, text);
  let present = [], chosen = null;

  function reset() {
    present = data.patterns[Number(pattern.value)].rows.map((row) => [...row].map((cell) => cell === "1"));
    chosen = null;
    update();
  }

  function update() {
    const prompt = data.chunks * data.layout.chunk_tokens + (whole.checked ? 0 : 1), skipped = Number(skip.value);
    const good = Prefix.lengths(data.layout, present, data.chunks, prompt, skipped), best = good[good.length - 1];
    const length = chosen ?? best;
    skipText.textContent = String(skipped);
    cells.replaceChildren(...lengthRow(good, best, length), ...matrix(Prefix.rowsAt(data.layout, present, prompt, length, skipped), skipped));
    cells.dataset.lengths = good.join(",");
    text.textContent = `Servable lengths: ${good.join(", ")} chunks; the longest is ${best}.\n` +
      Prefix.explain(data.layout, present, data.chunks, prompt, length, skipped);
  }

  function lengthRow(good, best, length) {
    const buttons = [element("span", { class: "name" }, "serve this many chunks?")];
    for (let each = 0; each <= data.chunks; each++) {
      const yes = good.includes(each);
      const classes = ["length", yes ? "yes" : "no", each === best ? "best" : "", each === length ? "chosen" : ""].join(" ");
      const label = `${each} chunks: ${yes ? "servable" : "not servable"}`;
      buttons.push(button(String(each), classes, label, () => { chosen = each; update(); }));
    }
    return buttons;
  }

  function matrix(rows, skipped) {
    return rows.flatMap((row) => {
      const name = `rank ${row.rank}, ${Prefix.described(data.layout.groups[row.group])}`;
      const buttons = present[row.index].map((there, chunk) => {
        const state = row.lacks.includes(chunk) ? "lacking" : row.needs.includes(chunk) ? "needed" : "";
        const cell = button(chunk < skipped ? "own" : String(chunk), state, `${name}, chunk ${chunk}: ${there ? "there" : "not there"}`, () => {
          present[row.index][chunk] = !there;
          update();
        });
        cell.setAttribute("aria-pressed", String(there));
        cell.dataset.cell = `${row.index},${chunk}`;
        return cell;
      });
      return [element("span", { class: "name" }, name), ...buttons, element("span")];
    });
  }

  function button(label, classes, title, press) {
    const node = element("button", { type: "button", class: classes, title }, label);
    node.addEventListener("click", press);
    return node;
  }

  pattern.addEventListener("input", reset);
  whole.addEventListener("input", update);
  skip.addEventListener("input", () => { chosen = null; update(); });
  reset();
}

if (typeof module !== "undefined") module.exports = Prefix;
