"use strict";
// Data: a list of models, see _data in heads_page.py. Packed numbers are base64 of bytes, or of two bytes, lower first.
const models = JSON.parse(document.getElementById("data").textContent);
const cells = [...document.querySelectorAll("[data-at]")];
const LOG_RANGE = 16, LEVELS_A_BIT = 2048, REACH = 5;
let chosen = null, query = 0, origin = null;

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const words = (text) => { const b = bytes(text); return Array.from({ length: b.length / 2 }, (_, i) => b[2 * i] + 256 * b[2 * i + 1]); };
const weightOf = (level) => (level === 0 ? 0 : 2 ** (((level - 1) / 254 - 1) * LOG_RANGE));
const percent = (weight) => (weight === 0 ? "0 %" : `${Number((100 * weight).toPrecision(2))} %`);
const shown = (value) => (value === null ? "-" : String(Number(value.toPrecision(4))));
const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const piece = (model, position) => model.pieces[position] ?? String(position);
const visible = (text) => text.trim() || "␣";

function drawing(label, width, height, parts) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label })) svg.setAttribute(name, value);
  for (const [tag, attributes, text] of parts) {
    const part = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) part.setAttribute(name, value);
    if (text !== undefined) part.textContent = text;
    svg.append(part);
  }
  return svg;
}

const path = (points) => `M${points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L")}`;

function entropyChart(model, head) {
  const values = words(head.entropy).map((x) => x / LEVELS_A_BIT), limits = words(head.limit).map((x) => x / LEVELS_A_BIT);
  const top = Math.max(...limits, ...values, 0.1), last = Math.max(values.length - 1, 1);
  const at = (list) => path(list.map((y, i) => [40 + (i / last) * 350, 130 - (y / top) * 120]));
  const [least, most] = [Math.min(...values), Math.max(...values)].map(shown);
  return drawing(`Entropy over positions, from ${least} to ${most} bits; uniform attention has up to ${shown(top)}`, 400, 150, [
    ["path", { class: "axis", d: "M40,130H390" }], ["path", { class: "fit", d: at(limits) }], ["path", { class: "line", d: at(values) }],
    ["text", { x: 36, y: 16, "text-anchor": "end" }, top.toPrecision(3)], ["text", { x: 36, y: 132, "text-anchor": "end" }, "0"],
    ["text", { x: 40, y: 146 }, "token 0"], ["text", { x: 390, y: 146, "text-anchor": "end" }, String(model.tokens - 1)],
  ]);
}

function histogramChart(head, mean, variance, distance) {
  const shares = words(head.histogram).map((x) => x / 65535);
  if (!shares.length) return element("p", {}, "All weights are the same: ln P does not vary.");
  const width = (2 * REACH) / shares.length;
  const normal = Array.from({ length: 101 }, (_, i) => { const z = -REACH + i * 0.1; return [z, (width * Math.exp(-z * z / 2)) / Math.sqrt(2 * Math.PI)]; });
  const top = Math.max(...shares, ...normal.map(([, y]) => y));
  const x = (z) => 10 + ((z + REACH) / (2 * REACH)) * 380, y = (share) => 130 - (share / top) * 120;
  const bars = shares.map((share, i) => ["rect", { class: "bars", x: x(-REACH + i * width), y: y(share), width: 380 / shares.length - 0.5, height: 130 - y(share) }]);
  const ends = [-REACH, 0, REACH].map((z, i) => ["text", { x: x(z), y: 146, "text-anchor": ["start", "middle", "end"][i] }, (mean + z * Math.sqrt(variance)).toFixed(1)]);
  return drawing(`Histogram of ln P with the fitted normal curve; their distance is ${shown(distance)}`, 400, 150, [
    ...bars, ["path", { class: "fit", d: path(normal.map(([z, share]) => [x(z), y(share)])) }], ["path", { class: "axis", d: "M10,130H390" }], ...ends,
  ]);
}

function matrixPicture(model, levels, keys) {
  const canvas = element("canvas", { width: keys, height: model.queries.length, role: "img",
    "aria-label": `Attention of ${model.queries.length} sampled queries (rows) to ${keys} keys (columns); the list below names the largest weights` });
  const context = canvas.getContext("2d"), image = context.createImageData(keys, model.queries.length);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const [low, high] = dark ? [[20, 23, 26], [168, 211, 255]] : [[255, 255, 255], [8, 67, 127]];
  levels.forEach((level, i) => image.data.set([...low.map((from, c) => from + ((high[c] - from) * level) / 255), 255], 4 * i));
  context.putImageData(image, 0, 0);
  return canvas;
}

function attentionParts(number, model, head) {
  const levels = bytes(head.weights), keys = levels.length / model.queries.length;
  const select = element("select", { id: `query-${number}` }, ...model.queries.map((at, i) =>
    element("option", { value: i, ...(i === query ? { selected: "" } : {}) }, `${at}: ${visible(piece(model, at))}`)));
  const list = element("ol"), text = element("div", { class: "text", tabindex: "0", role: "group", "aria-label": "The text, coloured by attention" });
  const show = () => {
    const row = levels.slice(query * keys, (query + 1) * keys), at = model.queries[query];
    const order = [...row.keys()].sort((a, b) => row[b] - row[a] || a - b).filter((key) => row[key]).slice(0, 8);
    list.replaceChildren(...order.map((key) => element("li", {}, element("bdi", {}, visible(piece(model, key))), ` (${key}): ${percent(weightOf(row[key]))}`)));
    text.replaceChildren(...Array.from(row, (level, key) => {
      const share = level / 255;
      const span = element("span", { title: `${key}: ${percent(weightOf(level))}`, style: `--share:${Math.round(100 * share * share)}%` }, piece(model, key));
      if (!model.pieces.length) span.append(" ");
      if (key === at) span.classList.add("query");
      return span;
    }));
  };
  select.addEventListener("change", () => {
    query = Number(select.value);
    for (const other of document.querySelectorAll("#models select")) {
      if (other !== select && other.options.length > query) { other.value = String(query); other.dispatchEvent(new Event("follow")); }
    }
    show();
  });
  select.addEventListener("follow", show);
  if (query >= model.queries.length) query = 0;
  select.value = String(query);
  show();
  return [element("h3", {}, "Attention"), matrixPicture(model, levels, keys),
    element("p", {}, element("label", { for: `query-${number}` }, "Query: "), select, " attends most to (weights to 2 %)"), list, text];
}

function modelPart(number, model, layer, headNumber) {
  const head = model.heads.find((one) => one.at[0] === layer && one.at[1] === headNumber);
  const part = element("article", { "aria-label": model.name, "data-model": number }, element("h3", {}, model.name));
  if (!head) { part.append(element("p", {}, "This model has no such head.")); return part; }
  const numbers = Object.fromEntries(model.titles.map((title, i) => [title, head.numbers[i]]));
  part.append(element("dl", {}, ...model.titles.flatMap((title, i) =>
    head.numbers[i] === null ? [] : [element("dt", {}, title), element("dd", {}, shown(head.numbers[i]))])));
  if (!head.weights) { part.append(element("p", {}, "No details: padding or values that are not finite.")); return part; }
  part.append(element("h3", {}, "Entropy over positions (dashed: uniform attention)"), entropyChart(model, head),
    element("h3", {}, "ln P and the fitted log-normal (dashed)"),
    histogramChart(head, numbers["mean of ln P"], numbers["variance of ln P"], numbers["distance to log-normal"]),
    ...attentionParts(number, model, head));
  return part;
}

function choose(layer, head) {
  chosen = [layer, head];
  document.getElementById("chosen").textContent = `Layer ${layer}, head ${head}`;
  document.getElementById("models").replaceChildren(...models.map((model, i) => modelPart(i, model, layer, head)));
  for (const cell of cells) {
    const is = cell.dataset.at.endsWith(`,${layer},${head}`);
    cell.setAttribute("aria-selected", String(is));
    cell.tabIndex = is ? 0 : -1;
  }
}

const place = (cell) => cell.dataset.at.split(",").map(Number);
const KEYS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

document.getElementById("maps").addEventListener("click", (event) => {
  const cell = event.target.closest("[data-at]");
  if (!cell) return;
  cell.focus({ preventScroll: true });
  choose(...place(cell).slice(1));
  const details = document.getElementById("details").getBoundingClientRect();
  if (details.top > innerHeight - 100) document.getElementById("details").scrollIntoView();
});

document.getElementById("maps").addEventListener("keydown", (event) => {
  const cell = event.target.closest("[data-at]");
  if (!cell || event.ctrlKey || event.altKey || event.metaKey) return;
  const row = cell.parentElement, rows = [...row.parentElement.children];
  let next = null;
  if (event.key in KEYS) {
    const [down, right] = KEYS[event.key];
    next = rows[rows.indexOf(row) + down]?.children[cell.cellIndex + right];
  } else if (event.key === "Home") next = row.children[1];
  else if (event.key === "End") next = row.lastElementChild;
  else if (event.key === "Enter" || event.key === " ") {
    choose(...place(cell).slice(1));
    origin = cell;
    document.getElementById("chosen").focus();
  } else return;
  event.preventDefault();
  if (next?.dataset.at) { choose(...place(next).slice(1)); next.focus(); }
});

document.getElementById("details").addEventListener("keydown", (event) => {
  if (event.key === "Escape" && origin) origin.focus();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => choose(...chosen));
if (cells.length) choose(...place(cells[0]).slice(1));
