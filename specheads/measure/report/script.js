// Stepping through a text: a token is chosen by click or by keys, and the tree of its step is
// drawn. Without this the page has everything but the trees. Texts are only ever set as text.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 27, HIGH = 21, PAD = 6, GAP = 26, LONGEST = 18, DEEPEST = 6;
const pen = document.createElement("canvas").getContext("2d");
pen.font = '12px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "path", "text", "title"].includes(tag);
  const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function short(label) {
  const letters = Array.from(label);
  return letters.length > LONGEST ? letters.slice(0, LONGEST - 1).join("") + "…" : label;
}

// Nodes with the place of each: as deep as its ancestors, its best child on its own row.
function plan(step) {
  const kept = new Set(step.path), firstCopied = step.tokens.length - step.num_copied;
  const nodes = step.tokens.map((label, number) => {
    const parent = step.parents[number];
    const sign = number && kept.has(number) ? "✓ " : "";
    return {label, parent, children: [], kept: kept.has(number), text: sign + short(label),
            copied: number >= firstCopied, here: parent >= 0 || number === 0};
  });
  nodes.push({label: step.bonus, parent: step.path.at(-1), children: [], bonus: true, kept: true,
              text: "+ " + short(step.bonus), here: true});
  const shown = nodes.filter((node) => node.here);
  for (const node of shown) {
    const above = nodes[node.parent];
    node.depth = above ? above.depth + 1 : 0;
    node.wide = pen.measureText(node.text).width + 2 * PAD;
    if (above) above.children.push(node);
  }
  const widths = [];
  for (const node of shown) widths[node.depth] = Math.max(widths[node.depth] || 0, node.wide);
  let rows = 0;
  (function place(node) {
    node.x = widths.slice(0, node.depth).reduce((sum, width) => sum + width + GAP, 1);
    if (!node.children.length) node.y = rows++ * ROW + 2;
    node.children.forEach(place);
    if (node.children.length) node.y = node.children[0].y;
  })(nodes[0]);
  return {nodes, shown, height: rows * ROW + 4,
          width: widths.reduce((sum, width) => sum + width + GAP, 2 - GAP)};
}

function origin(node) {
  if (node.bonus) return "bonus";
  if (!node.depth) return "root";
  return node.copied ? "c" : "d" + Math.min(node.depth, DEEPEST);
}

function words(node) {
  if (node.bonus) return "the base's own";
  if (!node.depth) return "the last token before this step";
  return (node.copied ? "copied" : "drafted") + " at depth " + node.depth
    + (node.kept ? ", accepted" : ", refused");
}

function draw(step, told) {
  const {nodes, shown, width, height} = plan(step);
  const size = {width, height, viewBox: `0 0 ${width} ${height}`};
  const picture = make("svg", {...size, role: "img", "aria-label": told});
  const edges = shown.filter((node) => node.depth).sort((a, b) => (a.kept || 0) - (b.kept || 0));
  for (const node of edges) {
    const from = nodes[node.parent], start = from.x + from.wide, half = HIGH / 2;
    const middle = (start + node.x) / 2, y1 = from.y + half, y2 = node.y + half;
    const curve = `M${start} ${y1}C${middle} ${y1} ${middle} ${y2} ${node.x} ${y2}`;
    picture.append(make("path", {d: curve, class: node.kept ? "kept" : ""}));
  }
  for (const node of shown) {
    picture.append(make("g", {class: origin(node) + (node.kept ? " kept" : "")},
      make("title", {}, `${node.label}: ${words(node)}`),
      make("rect", {x: node.x, y: node.y, width: node.wide, height: HIGH, rx: 4}),
      make("text", {x: node.x + PAD, y: node.y + 15}, node.text)));
  }
  return picture;
}

function tell(step) {
  const accepted = step.path.slice(1).map((node) => `“${step.tokens[node]}”`);
  const there = step.parents.map((parent) => parent >= 0), firstCopied = there.length - step.num_copied;
  const drafted = there.slice(0, firstCopied).filter(Boolean).length;
  const copied = there.slice(firstCopied).filter(Boolean).length;
  const kept = accepted.length ? `${accepted.length} accepted (${accepted.join(", ")})` : "none accepted";
  return `${drafted} drafted, ${copied ? copied + " copied, " : ""}${kept}; the base added “${step.bonus}”: `
    + `${step.path.length} ${step.path.length > 1 ? "tokens" : "token"} for one forward.`;
}

function prepare(text, steps, number) {
  const box = text.querySelector(".tokens"), tokens = [...box.querySelectorAll(".t")];
  const heading = make("strong"), told = make("p", {"aria-live": "polite"}), room = make("div", {tabindex: 0, role: "region", "aria-label": `tree of a step of text ${number}`});
  const back = make("button", {type: "button", "aria-label": "previous step"}, "‹");
  const on = make("button", {type: "button", "aria-label": "next step"}, "›");
  const panel = make("section", {class: "tree", "aria-label": `steps of text ${number}`}, make("header", {}, heading, back, on), told, room);
  text.append(panel);
  box.classList.add("live");
  let chosen = tokens[0];

  function choose(token) {
    const place = Number(token.dataset.step), step = steps[place - 1];
    chosen.tabIndex = -1;
    chosen = token;
    chosen.tabIndex = 0;
    for (const one of tokens) one.classList.toggle("on", one.dataset.step === token.dataset.step);
    heading.textContent = step ? `Step ${place} of ${steps.length}` : "Before the first step";
    told.textContent = step ? tell(step) : "The base gave this token while it read the prompt.";
    room.replaceChildren(...(step ? [draw(step, told.textContent)] : []));
    back.disabled = place === 0;
    on.disabled = place === steps.length;
  }
  function visit(token) {
    if (!token) return;
    panel.classList.add("live");
    choose(token);
    token.focus({preventScroll: true});
    token.scrollIntoView({block: "nearest"});
  }
  function turn(by) {
    const wanted = Number(chosen.dataset.step) + by;
    const token = tokens.find((one) => Number(one.dataset.step) === wanted);
    if (!token) return;
    panel.classList.add("live");
    choose(token);
    token.scrollIntoView({block: "nearest"});
  }
  box.addEventListener("click", (event) => visit(event.target.closest(".t")));
  back.addEventListener("click", () => turn(-1));
  on.addEventListener("click", () => turn(1));
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") panel.classList.remove("live");
    if (!event.target.closest(".tokens") || event.ctrlKey || event.metaKey || event.altKey) return;
    const place = tokens.indexOf(chosen), last = tokens.length - 1;
    const next = {ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: last}[event.key];
    if (next === undefined) return;
    event.preventDefault();
    visit(tokens[next]);
  });
  // to begin with, the step that was accepted most; of a text that ended early it may be cut off
  const here = new Set(tokens.map((one) => Number(one.dataset.step)));
  const gains = steps.map((step, place) => here.has(place + 1) ? step.path.length : 0);
  const best = gains.indexOf(Math.max(...gains)) + 1;
  choose(tokens.find((one) => Number(one.dataset.step) === best) || tokens[0]);
}

const data = document.getElementById("steps");
if (data) {
  const all = JSON.parse(data.textContent);
  document.querySelectorAll(".text").forEach((text, place) => prepare(text, all[place], place + 1));
  document.querySelectorAll(".hint").forEach((hint) => { hint.hidden = false; });
}
