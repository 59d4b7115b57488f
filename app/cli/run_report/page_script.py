"""Style and script of the report's page (`app.cli.run_report.page`).

The script reads the runs from the page's JSON and draws those whose boxes are ticked. The choice is
kept in the address (#runs=NAME,NAME), so that it can be shared.
"""

STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, CanvasText 15%, Canvas);
  --quiet: color-mix(in srgb, CanvasText 65%, Canvas) }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1300px; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem }  h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p { margin: .2rem 0 }  .quiet { color: var(--quiet) }
code { background: var(--line); padding: .1em .3em; overflow-wrap: anywhere }
#choice { margin-top: 1rem; display: flex; flex-wrap: wrap; gap: .2rem 1.5rem }
[hidden] { display: none !important }
table { border-collapse: collapse; width: 100%; margin-top: .5rem; font-size: .9rem }
th { text-align: left; color: var(--quiet); font-weight: normal }
thead tr:last-child th { border-bottom: 1px solid var(--quiet) }
th, td { padding: .3rem .5rem; vertical-align: top }  tbody tr + tr td {
  border-top: 1px solid var(--line) }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
th.group { text-align: center }  th.group:not(:empty) { border-bottom: 1px solid var(--line) }
.label { overflow-wrap: anywhere; min-width: 14.5rem }
.label label { display: flex; align-items: baseline; gap: .5em }
.colour { flex: none; width: .8em; height: .8em; border-radius: 2px }
.failed, .interrupted { color: light-dark(#a11, #f88) }
.skipped, .waiting, .unfinished { color: var(--quiet) }
tr.left td { opacity: .45 }
.wide { overflow-x: auto }  svg { width: 100%; display: block }
svg text { font-size: 13px; fill: var(--quiet) }  svg .grid { stroke: var(--line) }
svg path { fill: none; stroke-width: 1.6; stroke-linejoin: round }
.bars { display: grid; grid-template-columns: minmax(8rem, 2fr) 5fr; gap: .35rem 1rem }
.bars > :nth-child(odd) { overflow-wrap: anywhere; text-align: right; font-size: .9em }
.bar { display: flex; align-items: center; gap: .5em; font-size: .85em; line-height: 1.3;
  font-variant-numeric: tabular-nums }
.bar span { height: .8em; border: 1.5px solid; box-sizing: border-box; min-width: 2px }
"""

SCRIPT = r"""
"use strict";
const at = id => document.getElementById(id);
const runs = JSON.parse(at("data").textContent);
const ticks = [...document.querySelectorAll("tbody input")];
const HEIGHT = 380, LEFT = 64, RIGHT = 24, TOP = 8, BOTTOM = 42;  // pixels of the plot of losses
let plotted = null;  // its curves and scales

const chosen = () => runs.filter((run, n) => ticks[n].checked);

function svg(parent, tag, attributes, text) {
  const made = document.createElementNS(at("losses").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function html(parent, tag, kind, text) {
  const made = document.createElement(tag);
  made.className = kind; made.textContent = text;
  parent.append(made);
  return made;
}

// Round numbers from low to high, about `count`.
function rounded(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(each => each * power >= rough * .999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++)
    found.push(+(n * step).toPrecision(12));
  return found;
}

function scales(those) {
  const ranges = those.map(run => run.range).filter(Boolean);
  let low = Math.min(...ranges.map(each => each[0]));
  let high = Math.max(...ranges.map(each => each[1]));
  if (!ranges.length) [low, high] = [0, 1];
  const margin = (high - low) / 20 || 1;
  [low, high] = [low - margin, high + margin];
  const width = at("losses").clientWidth;
  const last = Math.max(1, ...those.map(run => run.curve.at(-1)[0]));
  return {
    low, high, last, width,
    x: step => LEFT + (width - LEFT - RIGHT) * step / last,
    y: loss => TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low),
  };
}

function drawAxes(plot, {low, high, last, width, x, y}) {
  for (const loss of rounded(low, high, 7)) {
    svg(plot, "line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(loss), y2: y(loss)});
    svg(plot, "text", {x: LEFT - 8, y: y(loss) + 4, "text-anchor": "end"}, loss);
  }
  for (const step of rounded(0, last, width / 120).filter(Number.isInteger))
    svg(plot, "text", {x: x(step), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle"},
      step.toLocaleString("en"));
  svg(plot, "text", {x: (LEFT + width) / 2, y: HEIGHT - 4, "text-anchor": "middle"}, "step");
  svg(plot, "text", {x: 12, y: HEIGHT / 2, "text-anchor": "middle",
    transform: `rotate(-90 12 ${HEIGHT / 2})`}, "loss, nats per token");
  const clip = svg(svg(plot, "defs", {}), "clipPath", {id: "inside"});
  svg(clip, "rect", {x: LEFT, y: TOP, width: width - LEFT, height: HEIGHT - TOP - BOTTOM});
}

function drawLosses(those) {
  const plot = at("losses"), scale = scales(those), {x, y} = scale;
  plot.replaceChildren();
  plot.setAttribute("viewBox", `0 0 ${scale.width} ${HEIGHT}`);
  plotted = {those, scale};
  drawAxes(plot, scale);
  const inside = svg(plot, "g", {"clip-path": "url(#inside)"});
  for (const run of [...those].reverse()) {  // the best is drawn last, on top
    let line = "", pen = "M";
    for (const [step, loss] of run.curve) {
      if (loss === null) { pen = "M"; continue; }
      line += `${pen}${x(step).toFixed(1)} ${y(loss).toFixed(1)}`;
      pen = "L";
    }
    svg(inside, "path", {d: line, stroke: run.colour, "data-run": run.name});
    for (const [step, loss] of run.validations)
      if (loss !== null)
        svg(inside, "circle", {cx: x(step), cy: y(loss), r: 3, fill: run.colour});
  }
}

// Tell the point of a curve that is nearest to the pointer.
function tellNearest(event) {
  const box = at("losses").getBoundingClientRect(), {those, scale: {x, y}} = plotted;
  const px = event.clientX - box.left, py = event.clientY - box.top;
  let nearest = null, least = Infinity;
  for (const run of those)
    for (const [step, loss] of run.curve) {
      const far = loss === null ? Infinity : Math.hypot(x(step) - px, y(loss) - py);
      if (far < least) [nearest, least] = [[run, step, loss], far];
    }
  if (nearest)
    at("near").textContent =
      `${nearest[0].label}: step ${nearest[1]}, loss ${nearest[2].toFixed(4)}`;
}

function drawBars(place, those, key) {
  if (!place) return;
  place.replaceChildren();
  const found = those.filter(run => run[key].some(Boolean));
  const most = Math.max(...found.flatMap(run => run[key].map(each => each ? each[0] : 0)));
  for (const run of found) {
    html(place, "div", "", run.label);
    const cell = html(place, "div", "", "");
    run[key].forEach((value, planned) => {
      if (!value) return;
      const line = html(cell, "div", planned ? "bar planned" : "bar measured", "");
      const bar = html(line, "span", "", "");
      bar.style.width = `${most ? 80 * value[0] / most : 0}%`;
      bar.style.borderColor = run.colour;
      if (!planned) bar.style.background = run.colour;
      line.append(value[1]);
    });
  }
}

function drawTable(those) {
  const best = Math.min(...those.map(run => run.loss).filter(loss => loss !== null));
  runs.forEach((run, n) => {
    const row = ticks[n].closest("tr"), left = !ticks[n].checked;
    row.classList.toggle("left", left);
    row.querySelector(".above").textContent =
      left || run.loss === null ? ""
        : run.loss === best ? "best" : `+${(run.loss - best).toFixed(4)}`;
  });
  for (const row of document.querySelectorAll("tbody tr")) {
    const tick = row.querySelector("input");
    row.hidden = at("only").checked && !(tick && tick.checked);
  }
  at("all").checked = those.length === runs.length;
  at("all").indeterminate = those.length > 0 && those.length < runs.length;
}

function draw() {
  const those = chosen();
  drawTable(those);
  drawLosses(those);
  drawBars(at("rates"), those, "rates");
  drawBars(at("memory"), those, "memory");
}

function keep() {
  const names = chosen().map(run => encodeURIComponent(run.name));
  const whole = names.length === runs.length;
  try {
    history.replaceState(null, "", whole ? "#" : `#runs=${names.join(",")}`);
  } catch (error) {
    if (error.name !== "SecurityError") throw error;  // a page within a page has no address
  }
}

function takeFromAddress() {
  const asked = /^#runs=(.*)$/.exec(location.hash);
  if (!asked) return;
  const names = asked[1].split(",");
  ticks.forEach((tick, n) => { tick.checked = names.includes(encodeURIComponent(runs[n].name)); });
}

at("choice").hidden = false;
for (const tick of ticks) {
  tick.hidden = false;
  tick.onchange = () => { keep(); draw(); };
}
at("all").onchange = event => {
  for (const tick of ticks) tick.checked = event.target.checked;
  keep(); draw();
};
at("only").onchange = draw;
at("losses").onpointermove = tellNearest;
at("losses").onpointerleave = () => { at("near").textContent = "\u00a0"; };
onresize = draw;
onhashchange = () => { takeFromAddress(); draw(); };
takeFromAddress();
draw();
"""
