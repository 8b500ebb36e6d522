"use strict";
// Draws the page from the data beside it. Texts of files reach the page as text alone, never as HTML.

const report = JSON.parse(document.getElementById("data").textContent);
const runs = report.runs;
const AXES = {step: "steps", images: "images", elapsed_s: "hours"};
const TRAINING = [
  ["loss", "Loss", "Mean over the steps since the row before."],
  ["grad_norm", "Gradient norm", "Mean, before clipping."],
  ["lr", "Learning rate", "Of the last step."],
  ["img_per_sec", "Images per second", "Over all ranks, without drawing, scoring and saving."],
  ["sec_per_step", "Seconds per step", "Without drawing, scoring and saving; the first row includes compilation."],
  ["peak_memory_gib", "Peak memory, GiB", "Of rank 0: allocated on its GPU, or resident in its process on a CPU."],
  ["skipped", "Steps skipped", "Since the beginning, for a gradient that was not finite."],
];
// Told apart by people who see red and green alike; the second of a pair is for a dark page.
const COLORS = [["#0b62ad", "#6cb2f5"], ["#c2500a", "#ff9d5c"], ["#17795a", "#4fc9a0"], ["#8a3aa8", "#d39af0"],
                ["#8a6d00", "#e0c24a"], ["#b3245e", "#ff86b0"], ["#51606f", "#a8b6c4"], ["#2c8f9e", "#5fd3e3"]];
const DASHES = [["solid", []], ["dashed", [7, 4]], ["dotted", [2, 3]], ["dashed", [12, 3, 2, 3]]];
const MOST_POINTS = 3000;      // of a line; a zoom shows more of it
const SIZE = 290;              // height of a plot in pixels

// ---- what the address remembers, so that a reload comes back to the same place --------------------------------------

const state = {tab: "", x: "step", log: "", step: "", left: "0", right: "1", hidden: "", theme: "", study: ""};
for (const [key, value] of new URLSearchParams(location.hash.slice(1))) if (key in state) state[key] = value;

function remember(changes) {
  Object.assign(state, changes);
  const said = Object.entries(state).filter(([, value]) => value !== "");
  history.replaceState(null, "", "#" + new URLSearchParams(said));
}

// ---- small parts ----------------------------------------------------------------------------------------------------

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties))
    key in made && key !== "role" ? made[key] = value : made.setAttribute(key, value);
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e6 || (size && size < 1e-3) ? value.toExponential(digits - 1)
    : value.toLocaleString("en", {maximumSignificantDigits: digits});
}

function table(heads, rows, properties = {}) {
  const cell = (value, kind) => {
    const text = number(value), long = text.length > 40;
    return element(kind, {className: typeof value === "number" ? "number" : long ? "long" : ""},
      text.length > 300 ? `${text.slice(0, 280)}… (${number(text.length)} characters; the data has all)` : text);
  };
  const numeric = heads.map((_, i) => rows.some(row => typeof row.cells[i] === "number"));
  return element("div", {className: `table ${properties.className || ""}`, tabIndex: 0, role: "region",
                         "aria-label": properties.label || "Table"},
    element("table", {},
      element("thead", {}, element("tr", {}, ...heads.map((head, i) =>
        element("th", {scope: "col", className: numeric[i] ? "number" : ""}, head)))),
      element("tbody", {}, ...rows.map(row => {
        const made = element("tr", {className: row.className || ""},
          ...row.cells.map((value, i) => cell(value, i ? "td" : "th")));
        made.firstChild.scope = "row";
        return made;
      }))));
}

const dark = () => document.documentElement.dataset.theme === "dark";
const color = i => COLORS[i % COLORS.length][dark() ? 1 : 0];
const ink = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const hidden = () => new Set(state.hidden.split(",").filter(Boolean));

// ---- downloads ------------------------------------------------------------------------------------------------------

function csv({columns, rows}) {
  const quoted = value => value === null || value === undefined ? ""
    : /[",\n\r]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value);
  return [columns, ...rows].map(row => row.map(quoted).join(",")).join("\n") + "\n";
}

function save(name, text, kind) {
  const link = element("a", {href: URL.createObjectURL(new Blob([text], {type: kind})), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// `rows` is a function that gives {columns, rows}, or a promise of it: what is large is loaded when it is asked for.
function downloads(name, rows, label = "Data: ") {
  const file = name.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
  const button = (ending, write) => element("button", {type: "button", "aria-label": `${name} as ${ending}`,
    onclick: async event => {
      try {
        const kind = ending === "CSV" ? "text/csv" : "application/json";
        save(`${file}.${ending.toLowerCase()}`, write(await rows()), kind);
      } catch (error) {
        event.target.parentElement.append(` ${error.message} is not beside this page: move or send the whole folder.`);
      }
    }}, ending);
  const objects = ({columns, rows}) => JSON.stringify(rows.map(row =>
    Object.fromEntries(columns.map((column, i) => [column, row[i] === undefined ? null : row[i]]))));
  return element("p", {className: "downloads"}, label, button("CSV", csv), " ", button("JSON", objects));
}

// ---- all rows of a run, loaded when a zoom or a download asks ------------------------------------------------------

const loaded = new Map();
let arrived = null;      // called by a file of rows

function allRows(run) {
  if (!run.full) return Promise.resolve(run.columns);
  if (!loaded.has(run)) {
    const before = Promise.allSettled([...loaded.values()]);      // one file at a time calls `arrived`
    loaded.set(run, before.then(() => new Promise((resolve, reject) => {
      arrived = packed => {
        const bytes = Uint8Array.from(atob(packed), letter => letter.charCodeAt(0));
        const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
        new Response(unpacked).json().then(columns => { run.whole = columns; resolve(columns); }, reject);
      };
      document.head.append(element("script", {src: run.full, onerror: () => reject(new Error(run.full))}));
    })));
  }
  return loaded.get(run);
}

async function trainingRows(columns) {
  const rows = [];
  for (const run of runs) {
    const whole = await allRows(run);
    for (let i = 0; i < run.rows; i++)
      rows.push([run.name, ...columns.map(name => whole[name] ? whole[name][i] : null)]);
  }
  return {columns: ["run", ...columns], rows};
}

// ---- plots ----------------------------------------------------------------------------------------------------------

const plots = [];      // {plot, lines: [{renderer, run, color}], view}

function paint(made) {
  const {plot} = made, soft = ink("--soft"), line = ink("--line");
  Object.assign(plot, {background_fill_color: ink("--panel"), border_fill_color: ink("--panel"),
                       outline_line_color: null});
  for (const axis of [...plot.left, ...plot.below])
    Object.assign(axis, {major_label_text_color: soft, axis_label_text_color: soft, axis_line_color: line,
                         major_tick_line_color: line, minor_tick_line_color: null});
  for (const grid of plot.center) if ("grid_line_color" in grid) grid.grid_line_color = ink("--grid");
  for (const {renderer, shade} of made.lines) {
    const glyph = renderer.glyph;
    if ("line_color" in glyph) glyph.line_color = color(shade);
    if ("fill_color" in glyph) glyph.fill_color = color(shade);
  }
}

function show(made) {
  const away = hidden();
  for (const {renderer, run} of made.lines) renderer.visible = run === undefined || !away.has(String(run));
}

// A plot of lines {x, y, shade, dash, run, name, low, high}; returns what `paint` and `show` want.
async function draw(host, {x, y, log, range, lines, label, dots}) {
  const font = getComputedStyle(document.body).fontFamily;
  const plot = new Bokeh.Plotting.figure({
    height: SIZE, sizing_mode: "stretch_width", x_range: range, tools: "box_zoom,xwheel_zoom,xpan,reset,save",
    active_drag: matchMedia("(pointer: coarse)").matches ? null : "box_zoom", active_scroll: null,
    toolbar_location: "above", x_axis_label: x, y_axis_type: log ? "log" : "linear", output_backend: "canvas",
  });
  plot.toolbar.logo = null;
  plot.min_border_right = 12;
  for (const axis of [...plot.left, ...plot.below]) {
    Object.assign(axis, {major_label_text_font: font, axis_label_text_font: font, axis_label_text_font_style: "normal",
                         major_label_text_font_size: "12px", axis_label_text_font_size: "12px"});
  }
  if (!log) plot.left[0].formatter = new Bokeh.BasicTickFormatter({power_limit_low: -5,
    power_limit_high: 7});
  plot.below[0].formatter = new Bokeh.NumeralTickFormatter({format: x === "hours" ? "0,0.[000]" : "0.[0]a"});
  const made = {plot, lines: []};
  for (const {shade, dash, run, name, ...values} of lines) {
    const source = new Bokeh.ColumnDataSource({data: values});
    const add = renderer => { made.lines.push({renderer, shade, run, source, name}); return renderer; };
    if (values.low) add(plot.varea({field: "x"}, {field: "low"}, {field: "high"}, {source, fill_alpha: 0.15}));
    const line = add(plot.line({field: "x"}, {field: "y"}, {source, line_width: 1.8, line_dash: DASHES[dash || 0][1],
                                                           line_join: "round", name}));
    if (dots) add(plot.scatter({field: "x"}, {field: "y"}, {source, size: 7, line_color: null}));
    plot.add_tools(new Bokeh.HoverTool({renderers: [line], mode: "vline", line_policy: "nearest", visible: false,
      tooltips: [[name || y, "@y{0,0.[00000]}"], [x, "@x{0,0.[0000]}"]]}));
  }
  paint(made);
  show(made);
  host.setAttribute("role", "img");
  host.setAttribute("aria-label", label);
  made.view = await Bokeh.Plotting.show(plot, host);
  plots.push(made);
  host.dataset.drawn = "yes";
  return made;
}

const gaps = values => Float64Array.from(values, value => value === null ? NaN : value);

// Takes the part of a line between low and high, thinned to each bin's lowest and highest point where it is long.
function between(xs, ys, low, high) {
  let first = 0, last = xs.length;
  while (first + 1 < last && xs[first + 1] < low) first++;
  while (last - 2 > first && xs[last - 2] > high) last--;
  if (last - first <= MOST_POINTS) return {x: gaps(xs.slice(first, last)), y: gaps(ys.slice(first, last))};
  const x = [], y = [], size = Math.ceil((last - first) / (MOST_POINTS / 2));
  for (let start = first; start < last; start += size) {
    let least = -1, most = -1, gap = -1;
    for (let i = start; i < Math.min(last, start + size); i++) {
      if (ys[i] === null) { gap = i; continue; }
      if (least < 0 || ys[i] < ys[least]) least = i;
      if (most < 0 || ys[i] > ys[most]) most = i;
    }
    const chosen = [...new Set([least, most, gap])].filter(i => i >= 0).sort((a, b) => a - b);
    for (const i of chosen) { x.push(xs[i]); y.push(ys[i]); }
  }
  return {x: gaps(x), y: gaps(y)};
}

function places(columns, axis) {
  const values = columns[axis] || [];
  return axis === "elapsed_s" ? values.map(value => value === null ? null : value / 3600) : values;
}

function span(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list) if (value !== null) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (!(low <= high)) [low, high] = [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.02;
  const [start, end] = [low - room, high + room];
  return new Bokeh.Range1d({start, end, reset_start: start, reset_end: end});
}

function dispose(host) {
  for (const made of plots.splice(0)) {
    if (host.contains(made.host)) made.view?.remove?.();
    else plots.push(made);
  }
}

function card(title, note, host, ...more) {
  return element("figure", {},
    element("figcaption", {}, element("h3", {}, title), note ? element("p", {}, note) : null),
    ...(host ? [host, element("canvas", {className: "print", "aria-hidden": "true"})] : []), ...more);
}

function keyed(entries) {
  return element("ul", {className: "keys"}, ...entries.map(({shade, dash, name, run}) => {
    const swatch = element("span", {className: `swatch ${DASHES[dash || 0][0]}`});
    swatch.dataset.shade = shade;
    swatch.style.color = color(shade);
    return element("li", {}, swatch, " ", name);
  }));
}

// ---- controls that tabs share ---------------------------------------------------------------------------------------

function choice(name, label, options, chosen, onchange) {
  return element("fieldset", {}, element("legend", {}, label), ...Object.entries(options).map(([value, text]) =>
    element("label", {}, element("input", {type: "radio", name, value, checked: value === chosen,
                                           onchange: () => onchange(value)}), text)));
}

function runBoxes() {
  if (runs.length < 2) return null;
  return element("fieldset", {}, element("legend", {}, "Runs"), ...runs.map((run, i) => {
    const swatch = element("span", {className: "swatch"});
    swatch.dataset.shade = i;
    swatch.style.color = color(i);
    return element("label", {}, element("input", {type: "checkbox", checked: !hidden().has(String(i)), value: i,
      onchange: event => {
        const away = hidden();
        event.target.checked ? away.delete(String(i)) : away.add(String(i));
        remember({hidden: [...away].join(",")});
        for (const box of document.querySelectorAll(`fieldset input[type="checkbox"][value="${i}"]`))
          box.checked = event.target.checked;
        plots.forEach(show);
      }}), swatch, " ", run.name);
  }));
}

function axisAndLog(redraw) {
  return element("div", {className: "controls"},
    choice(`x${Math.random()}`, "Over", AXES, state.x, value => { remember({x: value}); redrawAll(); }),
    element("label", {}, element("input", {type: "checkbox", checked: state.log === "1", className: "log",
      onchange: event => { remember({log: event.target.checked ? "1" : ""}); redrawAll(); }}), "logarithmic"),
    runBoxes());
}

const redrawers = [];      // of the tabs that are built

async function redrawAll() {
  for (const box of document.querySelectorAll("input.log")) box.checked = state.log === "1";
  for (const box of document.querySelectorAll('fieldset input[type="radio"]'))
    if (box.value in AXES && box.name.startsWith("x")) box.checked = box.value === state.x;
  for (const redraw of redrawers) await redraw();
}

// ---- the tabs -------------------------------------------------------------------------------------------------------

function overview(panel) {
  const rows = runs.map(run => {
    const scores = run.scores.filter(score => score.step !== null && score.guidance === null
      && (score.in_training || !run.scores.some(other => other.in_training)));
    const last = scores.find(score => score.step === scores.at(-1).step && score.n === scores.at(-1).n);
    return {cells: [run.name,
      run.steps ? `${number(run.last.step ?? 0)} of ${number(run.steps)}` : number(run.last.step), run.last.images,
      run.last.elapsed_s === undefined || run.last.elapsed_s === null ? "–" : duration(run.last.elapsed_s),
      run.last.loss, run.last.img_per_sec,
      last ? `${number(last.value)}, ${last.metric} of ${number(last.n)} images at step ${number(last.step)}`
        : "none"]};
  });
  if (runs.length) panel.append(element("h2", {}, "Runs"), table(["run", "steps", "images", "training time",
    "last loss", "images per second", "last unguided score"], rows, {label: "Runs"}));
  if (runs.some(run => run.routed) && runs.some(run => !run.routed)) panel.append(element("p", {className: "soft"},
    "A routed run's loss is higher than a dense one's, as half of its tokens miss the middle blocks: compare scores, " +
    "not losses."));
  panel.append(element("h2", {}, "Left out"));
  panel.append(report.leftOut.length ? element("ul", {className: "left-out"}, ...report.leftOut.map(([where, why]) =>
    element("li", {}, element("code", {}, where), ": ", why)))
    : element("p", {}, "Nothing: all that was found is shown."));
}

function duration(seconds) {
  const hours = Math.floor(seconds / 3600), minutes = Math.floor(seconds / 60) % 60;
  return hours ? `${number(hours)} h ${minutes} min` : minutes ? `${minutes} min ${Math.floor(seconds % 60)} s`
    : `${Math.floor(seconds)} s`;
}

function training(panel) {
  const shown = TRAINING.filter(([name]) => runs.some(run => run.columns[name]
    && (name !== "skipped" || run.columns[name].some(Boolean))));
  if (!shown.length) return void panel.append(element("p", {}, "No run has rows in metrics.jsonl yet."));
  const grid = element("div", {className: "figures"});
  panel.append(axisAndLog(), grid);
  if (runs.some(run => run.full)) panel.append(element("p", {className: "soft"}, "Long runs are thinned to the " +
    "lowest and the highest row of each stretch. A zoom shows, and the data holds, every row."));
  for (const [name, title, note] of shown) {
    grid.append(card(title, note, element("div", {className: "plot"}),
      downloads(title, () => trainingRows(["step", "images", "elapsed_s", name]))));
  }
  grid.after(downloads("All columns", () => trainingRows([...new Set(runs.flatMap(run => Object.keys(run.columns)))]),
    "All columns, every row: "));
  const redraw = async () => {
    dispose(grid);
    const all = runs.map(run => places(run.columns, state.x));
    const figures = [];
    for (const [i, [name, title]] of shown.entries()) {
      const host = grid.children[i].querySelector(".plot");
      host.replaceChildren();
      const lines = runs.map((run, r) => ({run: r, shade: r, name: run.name, dash: Math.floor(r / COLORS.length) % 4,
        ...line(run.columns, name, -Infinity, Infinity)})).filter(({x}) => x.length);
      const made = await draw(host, {x: AXES[state.x], y: title, log: state.log === "1", range: span(all), lines,
        label: `${title} over ${AXES[state.x]}: ` + runs.map(run => `${run.name} ends at ${number(run.last[name])}`)
          .join(", ")});
      made.host = host;
      figures.push([name, made]);
    }
    let waiting = 0;
    for (const [, {plot: {x_range: moved}}] of figures) moved.change.connect(() => {      // all zoom as one
      for (const [, {plot: {x_range: other}}] of figures)
        if (other.start !== moved.start || other.end !== moved.end) other.setv({start: moved.start, end: moved.end});
      clearTimeout(waiting);
      waiting = setTimeout(() => refill(moved), 120);
    });
    async function refill(range) {
      const zoomed = range.end - range.start < 0.95 * (range.reset_end - range.reset_start);
      for (const [name, {lines}] of figures) for (const part of lines) {
        const run = runs[part.run];
        const columns = zoomed && run.full ? run.whole || await allRows(run) : run.columns;
        part.source.data = line(columns, name, range.start, range.end);
      }
    }
  };
  const line = (columns, name, low, high) => columns[name] && columns[state.x]
    ? between(places(columns, state.x), columns[name], low, high) : {x: [], y: []};
  return redraw;
}

function scores(panel) {
  const all = runs.flatMap(run => run.scores.map(score => ({run: run.name, ...score})));
  if (!all.length) return void panel.append(element("p", {}, "No run has scores yet: evaluate.every of train.py, or " +
    "fid.py, writes them into results.jsonl."));
  panel.append(axisAndLog());
  const grid = element("div", {className: "figures"});
  const curves = report.scores.filter(figure => figure.lines.some(line => line.step.length > 1));
  for (const figure of curves) {
    const count = figure.lines.length;
    figure.lines = figure.lines.filter(line => line.step.length > 1 || line.guided === "unguided");
    const alone = count - figure.lines.length;
    const guided = [...new Set(figure.lines.map(line => line.guided))];
    figure.dashes = Object.fromEntries(guided.map((name, i) => [name, i % DASHES.length]));
    const told = ["features", "reference", "seeds", "sampling steps"].filter(key => key in figure.conditions)
      .map(key => `${key} ${figure.conditions[key]}`).join(" · ");
    grid.append(card(`${figure.label}, ${number(figure.n)} images`,
      `${figure.higher ? "Higher" : "Lower"} is better. ${told}.` +
        (alone ? ` ${number(alone)} guided scores of one step stand in the table below.` : ""),
      element("div", {className: "plot"}),
      keyed(figure.lines.map(line => ({shade: line.run, dash: figure.dashes[line.guided],
        name: `${runs[line.run].name}, ${line.guided}`}))),
      downloads(`${figure.metric} of ${figure.n} images`, () => ({
        columns: ["run", "guidance", "metric", "n", "step", "images", "elapsed_s", "value"],
        rows: figure.lines.flatMap(line => line.step.map((step, i) => [runs[line.run].name, line.guided, figure.metric,
          figure.n, step, line.images[i], line.elapsed_s[i], line.value[i]]))}))));
  }
  if (curves.length) panel.append(grid);
  else panel.append(element("p", {}, "Each score stands alone so far: a curve wants the same score at two steps."));
  panel.append(element("h2", {}, "All scores"),
    element("p", {className: "soft"}, "Scores compare where metric, number of images, features and reference agree."),
    table(["run", "step", "score", "value", "images", "guidance", "features", "reference", "sampling steps", "seeds",
           "scored"],
      all.map(score => ({cells: [score.run, score.step, score.metric, score.value, score.n, score.guided,
        score.conditions.features, score.conditions.reference, score.conditions["sampling steps"],
        score.conditions.seeds, (score.finished || "–").replace("T", " ")]})),
      {label: "All scores", className: "tall"}),
    element("ul", {className: "keys soft"}, ...[...new Map(all.map(score => [score.metric, score.label]))]
      .filter(([metric, label]) => metric !== label)
      .map(([metric, label]) => element("li", {}, `${metric}: ${label}`))),
    downloads("Scores", () => {
      const names = [...new Set(all.flatMap(score => Object.keys(score.conditions)))];
      return {columns: ["run", "step", "metric", "value", "n", "guidance", "in_training", "device", "finished",
                        ...names],
        rows: all.map(score => [score.run, score.step, score.metric, score.value, score.n, score.guided,
          score.in_training, score.device, score.finished, ...names.map(name => score.conditions[name])])};
    }));
  return async () => {
    dispose(grid);
    for (const [i, figure] of curves.entries()) {
      const host = grid.children[i].querySelector(".plot");
      host.replaceChildren();
      const lines = figure.lines.map(line => ({run: line.run, shade: line.run, dash: figure.dashes[line.guided],
        name: `${runs[line.run].name}, ${line.guided}`, x: gaps(places(line, state.x)), y: gaps(line.value)}));
      const made = await draw(host, {x: AXES[state.x], y: figure.metric, log: state.log === "1", lines, dots: true,
        range: span(lines.map(line => [...line.x].filter(Number.isFinite))),
        label: `${figure.label} over ${AXES[state.x]}: ` + figure.lines.map(line =>
          `${runs[line.run].name}, ${line.guided}, ends at ${number(line.value.at(-1))}`).join("; ")});
      made.host = host;
    }
  };
}

function pictures(panel) {
  const drawn = runs.filter(run => run.grids.length), steps = [...new Set(drawn.flatMap(run =>
    run.grids.map(grid => grid.step)))].sort((a, b) => a - b);
  if (steps.length) {
    const pick = side => element("select", {"aria-label": `Run on the ${side}`}, ...(side === "right"
      ? [element("option", {value: ""}, "nothing beside it")] : []), ...drawn.map((run, i) =>
      element("option", {value: i}, run.name)));
    const left = pick("left"), right = drawn.length > 1 ? pick("right") : null;
    left.value = drawn[+state.left] ? state.left : "0";
    if (right) right.value = drawn[+state.right] ? state.right : "";
    const slider = element("input", {type: "range", min: 0, max: steps.length - 1, step: 1, id: "step",
      disabled: steps.length < 2});
    const at = steps.indexOf(+state.step);
    slider.value = state.step !== "" && at >= 0 ? at : steps.length - 1;
    const output = element("output", {htmlFor: "step"}), note = element("p", {className: "seeds"});
    const sides = element("div", {className: "sides"});
    const side = (run, step) => {
      const grid = run.grids.find(grid => grid.step === step);
      return element("figure", {}, element("figcaption", {}, element("h3", {}, run.name)), grid
        ? element("a", {href: grid.file, target: "_blank"}, element("img", {src: grid.file, width: grid.width,
            height: grid.height, alt: `Samples of ${run.name} at step ${number(step)}`}))
        : element("p", {className: "soft"}, `No picture at step ${number(step)}.`));
    };
    const update = () => {
      const step = steps[+slider.value], one = drawn[+left.value];
      const other = right && right.value !== "" ? drawn[+right.value] : null;
      remember({step: String(step), left: left.value, right: right ? right.value : state.right});
      output.value = `step ${number(step)}`;
      slider.setAttribute("aria-valuetext", `step ${number(step)}`);
      sides.replaceChildren(side(one, step), ...(other ? [side(other, step)] : []));
      note.textContent = other ? likeness(one, other)
        : one.drawn["samples.seeds"] ? `Seeds ${one.drawn["samples.seeds"]}.` : "";
      for (const next of [steps[+slider.value - 1], steps[+slider.value + 1]])
        for (const run of [one, other]) {
          const grid = run && run.grids.find(grid => grid.step === next);
          if (grid) new Image().src = grid.file;
        }
    };
    slider.oninput = left.onchange = update;
    if (right) right.onchange = update;
    panel.append(element("div", {className: "controls"},
      element("label", {}, drawn.length > 1 ? "Left" : "Run", left),
      right ? element("label", {}, "Right", right) : null,
      element("label", {className: "slider"}, "Step", slider, output)), note, sides,
      downloads("Pictures", () => ({columns: ["run", "step", "file"], rows: runs.flatMap(run =>
        run.grids.map(grid => [run.name, grid.step, grid.file]))})));
    update();
  } else panel.append(element("p", {}, "No run has drawn samples yet: samples.every of train.py says when it does."));
  const others = runs.flatMap(run => run.pictures.map(picture => [run, picture]));
  if (others.length) panel.append(element("h2", {}, "Other pictures"), element("div", {className: "gallery"},
    ...others.map(([run, picture]) => element("figure", {}, element("figcaption", {}, element("h3", {},
      `${run.name}: ${picture.name}`)), element("a", {href: picture.file, target: "_blank"}, element("img",
      {src: picture.file, width: picture.width, height: picture.height, loading: "lazy",
       alt: `${picture.name} of ${run.name}`}))))));
}

function likeness(one, other) {
  if (one === other) return "The same run on both sides.";
  const names = [...new Set([...Object.keys(one.drawn), ...Object.keys(other.drawn)])].filter(name => name !== "seed");
  if (!names.length || names.some(name => !(name in one.drawn && name in other.drawn)))
    return "A run does not record its seeds: whether the two draw from equal noise is not known.";
  const unlike = names.filter(name => one.drawn[name] !== other.drawn[name]);
  const said = unlike.map(name => `${name} ${one.drawn[name]} on the left and ${other.drawn[name]} on the right`);
  const seeds = one.drawn.seed === other.drawn.seed ? `Both were trained with seed ${one.drawn.seed}.`
    : `They were trained with seeds ${one.drawn.seed} and ${other.drawn.seed}.`;
  if (unlike.length) return `The pictures do not compare one by one: ${said.join("; ")}. ${seeds}`;
  return `Equal seeds, ${one.drawn["samples.seeds"]}: each image begins with the same noise and label on both sides. ` +
    seeds;
}

function guidance(panel) {
  if (!report.landscapes.length) return void panel.append(element("p", {}, "No checkpoint has been scored at two " +
    "guidances or more: scripts/sweep_guidance.py does."));
  for (const land of report.landscapes) {
    const axis = i => [...new Set(land.points.map(point => point[i]))].sort((a, b) => a - b || a.localeCompare(b));
    const [scales, panels, gammas] = [axis(0), axis(1), axis(2).reverse()];
    const values = land.points.map(point => point[3]), low = Math.min(...values), high = Math.max(...values);
    const best = land.higher ? high : low;
    const told = Object.entries(land.rest).filter(([, value]) => !["null", "false"].includes(value))
      .map(([key, value]) => `${key} ${value}`);
    const heat = strong => element("table", {className: "heat"},
      element("caption", {}, `gamma1, strong: ${strong}`),
      element("thead", {}, element("tr", {}, element("th", {scope: "col"}, "gamma2, weak \\ scale"),
        ...scales.map(scale => element("th", {scope: "col"}, scale)))),
      element("tbody", {}, ...gammas.map(gamma => element("tr", {}, element("th", {scope: "row"}, gamma),
        ...scales.map(scale => {
          const point = land.points.find(point => point[0] === scale && point[1] === strong && point[2] === gamma);
          if (!point) return element("td", {}, "–");
          const share = high > low ? (point[3] - low) / (high - low) : 0.5;
          const cell = element("td", {className: point[3] === best ? "best" : ""}, number(point[3]));
          // From blue, low, to sand, high: one scale on a light page and on a dark one, black on it either way.
          cell.style.background = `color-mix(in oklab, #f7e6bd ${(100 * share).toFixed(1)}%, #6fa8dc)`;
          cell.style.color = "#111";
          return cell;
        })))));
    panel.append(element("h2", {}, `${runs[land.run].name}, step ${number(land.step)}`),
      element("p", {}, `${land.label} of ${number(land.n)} images; ${land.higher ? "higher" : "lower"} is better, ` +
        `and the best is framed. Unguided: ${land.unguided === null ? "not scored under the same conditions"
          : number(land.unguided)}.` + (told.length ? ` ${told.join(" · ")}.` : "")),
      element("div", {className: "landscapes table"}, ...panels.map(heat)),
      downloads(`Guidance of ${runs[land.run].name} ${land.metric}`, () => ({
        columns: ["run", "step", "metric", "n", "scale", "gamma1", "gamma2", "value"],
        rows: land.points.map(point => [runs[land.run].name, land.step, land.metric, land.n, ...point])})));
  }
}

function studyTab(panel) {
  const study = report.study, axes = {step: "steps", images: "images", seconds: "seconds of training",
                                      flops: "training FLOPs"};
  const has = axis => study.figures.some(figure => figure.lines.some(line =>
    (line[axis] || []).some(value => value !== null)));
  const offered = Object.fromEntries(Object.entries(axes).filter(([axis]) => has(axis)));
  let axis = state.study in offered ? state.study : "step";
  panel.append(element("h2", {}, study.name));
  if (study.unfinished.length) panel.append(element("p", {}, "Not finished:"), element("ul", {},
    ...study.unfinished.map(text => element("li", {}, text))));
  if (!study.figures.length) return void panel.append(element("p", {}, "No run of the study has a score yet."));
  const variants = [...new Set(study.scores.map(score => score.variant))];
  const grid = element("div", {className: "figures"});
  // Of variants that are compared: a fine-tune counts its own images, not those of what it began with.
  const compared = study.crossings.flatMap(({between}) => between || []);
  const curves = study.figures.map(figure => ({...figure, lines: figure.lines.filter(
    ({variant}) => !compared.length || compared.includes(variant))})).filter(
    ({lines}) => lines.some(line => line.step.length > 1));
  const over = () => choice("study", "Over", offered, axis, value => {
    axis = value;
    remember({study: value});
    redraw();
  });
  if (curves.length) panel.append(element("div", {className: "controls"}, over()), grid);
  for (const figure of curves) grid.append(card(`${figure.metric} of ${number(figure.n)} images, ${figure.guided}`,
    `${figure.label}. Mean over the seeds scored so far; the band is one standard deviation to either side, where there are two or more.`,
    element("div", {className: "plot"}), keyed(figure.lines.map(line => ({shade: variants.indexOf(line.variant),
      dash: Math.floor(variants.indexOf(line.variant) / COLORS.length), name: line.variant}))),
    downloads(`${study.name} ${figure.metric} ${figure.guided} ${figure.n}`, () => {
      const rows = study.scores.filter(score => String(score.metric) === figure.metric && score.num_samples === figure.n
        && String(score.guidance) === figure.guided && figure.lines.some(line => line.variant === score.variant));
      const columns = [...new Set(rows.flatMap(Object.keys))];
      return {columns, rows: rows.map(row => columns.map(column => row[column] ?? null))};
    })));
  for (const figure of study.figures) {
    const steps = [...new Set(figure.lines.flatMap(line => line.step))].sort((a, b) => a - b);
    panel.append(element("h2", {}, `${figure.metric} of ${number(figure.n)} images, ${figure.guided}`),
      table(["variant", ...steps.map(step => `step ${number(step)}`)], figure.lines.map(line => ({cells: [line.variant,
        ...steps.map(step => {
          const i = line.step.indexOf(step);
          return i < 0 ? "" : line.deviation[i] === null ? `${number(line.mean[i])} (n=${line.n[i]})`
            : `${number(line.mean[i])} ± ${number(line.deviation[i], 2)} (n=${line.n[i]})`;
        })]})), {label: `${figure.metric}, ${figure.guided}`}));
  }
  if (study.crossings.length) panel.append(element("h2", {}, "Crossings"), element("ul", {}, ...study.crossings.map(
    ({between: pair, axis: over, at, verdict, n}) => element("li", {},
      `${(pair || ["?", "?"])[1]} and ${(pair || ["?", "?"])[0]} over ${axes[over] || over}: ` +
      (at === null || at === undefined ? "none shown" : `the last at ${number(at)}`) +
      (n === 0 ? "; nothing to compare yet." :
        `; lower at the end: ${verdict || "an older study.json does not say, so write it anew with tasks=[report]"}.`)))));
  panel.append(downloads(`${study.name} all scores`, () => {
    const columns = [...new Set(study.scores.flatMap(Object.keys))];
    return {columns, rows: study.scores.map(row => columns.map(column => row[column] ?? null))};
  }));
  const redraw = async () => {
    dispose(grid);
    for (const [i, figure] of curves.entries()) {
      const host = grid.children[i].querySelector(".plot");
      host.replaceChildren();
      const lines = figure.lines.map(line => {
        const there = line.step.map((_, k) => k).filter(k => (line[axis] || [])[k] !== null);
        const take = values => Float64Array.from(there, k => values[k]);
        const wide = sign => Float64Array.from(there, k => line.mean[k] + sign * (line.deviation[k] || 0));
        const shade = variants.indexOf(line.variant);
        return {shade, dash: Math.floor(shade / COLORS.length) % DASHES.length, name: line.variant,
                x: take(line[axis]), y: take(line.mean), low: wide(-1), high: wide(1)};
      });
      const made = await draw(host, {x: axes[axis], y: figure.metric, lines, dots: true,
        range: span(lines.map(line => [...line.x])), label: `${figure.metric} over ${axes[axis]}: ` +
          figure.lines.map(line => `${line.variant} ends at ${number(line.mean.at(-1))}`).join(", ")});
      made.host = host;
    }
  };
  return curves.length ? redraw : undefined;
}

function sideBySide(panel, part, none) {
  const keys = [...new Set(runs.flatMap(run => Object.keys(run[part])))];
  if (!keys.length) return void panel.append(element("p", {}, none));
  const unlike = key => new Set(runs.map(run => run[part][key])).size > 1;
  const differing = keys.filter(unlike).length;
  const place = element("div");
  const only = element("input", {type: "checkbox"});
  const update = () => place.replaceChildren(table(["", ...runs.map(run => run.name)], keys
    .filter(key => !only.checked || unlike(key)).map(key => ({className: unlike(key) ? "differs" : "",
      cells: [key, ...runs.map(run => run[part][key] === undefined ? "–" : run[part][key])]})), {label: part}));
  only.onchange = update;
  if (runs.length > 1) panel.append(element("p", {}, differing ? `${differing} of ${keys.length} differ.`
    : `All ${keys.length} agree.`), element("div", {className: "controls"},
    element("label", {}, only, "only what differs")));
  update();
  panel.append(place, downloads(part, () => ({columns: ["key", ...runs.map(run => run.name)],
    rows: keys.map(key => [key, ...runs.map(run => run[part][key] ?? null)])})));
}

const settings = panel => sideBySide(panel, "config", "No run has a config.yaml that can be read.");

function environment(panel) {
  sideBySide(panel, "environment", "No run has a checkpoint or a score yet, which record where they were made.");
  if (report.study && Object.keys(report.study.environment).length) panel.append(element("h2", {}, "The study"),
    table(["", report.study.name], Object.entries(report.study.environment).map(cells => ({cells}))));
  panel.append(element("h2", {}, "This page"), table(["", ""], [["built", report.built],
    ["commit of the code that built it", report.commit || "unknown"], ["plots", `Bokeh ${report.bokeh}`],
    ...runs.map(run => [`folder of ${run.name}`, run.path])].map(cells => ({cells}))));
}

const TABS = [["overview", "Overview", overview], ["training", "Training", training], ["scores", "Scores", scores],
  ["pictures", "Pictures", pictures], ["guidance", "Guidance", guidance],
  ...(report.study ? [["study", "Study", studyTab]] : []), ["settings", "Settings", settings],
  ["environment", "Environment", environment]];

// ---- theme, tabs, print, news ---------------------------------------------------------------------------------------

const system = matchMedia("(prefers-color-scheme: dark)");

function applyTheme(printing = false) {
  document.documentElement.dataset.theme = printing ? "light" : state.theme || (system.matches ? "dark" : "light");
  plots.forEach(paint);
  for (const swatch of document.querySelectorAll(".swatch")) swatch.style.color = color(+swatch.dataset.shade);
}

function open(name, focus = false) {
  for (const [key] of TABS) {
    const tab = document.getElementById(`tab-${key}`), chosen = key === name;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    document.getElementById(`panel-${key}`).classList.toggle("hidden", !chosen);
    if (chosen && focus) tab.focus();
    if (chosen) tab.scrollIntoView({block: "nearest", inline: "nearest"});
  }
  remember({tab: name});
}

function build() {
  const tabs = document.getElementById("tabs"), panels = document.getElementById("panels"), drawing = new Map();
  const built = new Date(report.built);
  document.getElementById("built").textContent = `Built ${built.toLocaleString("en-GB", {dateStyle: "long",
    timeStyle: "short"})}${report.live ? "; follows training" : ""}.`;
  for (const [key, title, fill] of TABS) {
    tabs.append(element("button", {type: "button", role: "tab", id: `tab-${key}`, "aria-controls": `panel-${key}`,
      onclick: () => open(key)}, title));
    const panel = element("section", {role: "tabpanel", id: `panel-${key}`, "aria-labelledby": `tab-${key}`,
                                      className: "hidden"}, element("h2", {className: "print"}, title));
    panels.append(panel);
    const redraw = fill(panel);
    if (redraw) drawing.set(key, redraw);
  }
  tabs.onkeydown = event => {
    const names = TABS.map(([key]) => key), i = names.indexOf(state.tab);
    const to = {ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: names.length - 1}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    open(names[(to + names.length) % names.length], true);
  };
  const theme = document.getElementById("theme");
  theme.value = state.theme;
  theme.onchange = () => { remember({theme: theme.value}); applyTheme(); };
  system.addEventListener("change", () => applyTheme());
  applyTheme();
  open(TABS.some(([key]) => key === state.tab) ? state.tab : "overview");
  return drawing;
}

// A print, whatever the tab and the colours, shows every plot as a picture on white.
function beforePrint() {
  applyTheme(true);
  for (const {view, host} of plots) {
    for (const part of view.renderer_views.values()) part.set_visuals?.();      // colours, which are else set later
    const target = host.parentElement.querySelector("canvas.print"), picture = view.export("png", true).canvas;
    Object.assign(target, {width: picture.width, height: picture.height});
    target.getContext("2d").drawImage(picture, 0, 0);
  }
}

function newest(stamp) {      // called by files/stamp.js, which a page that follows training loads again and again
  if (stamp === report.stamp) return;
  const touched = Date.now() - lastTouch < 15_000 || plots.some(({plot}) =>
    plot.x_range.start !== plot.x_range.reset_start || plot.x_range.end !== plot.x_range.reset_end);
  if (!touched) return void location.reload();
  document.getElementById("news").hidden = false;      // who is looking closely decides when
}

let lastTouch = 0;

function follow() {
  document.querySelector("#news button").onclick = () => location.reload();
  for (const kind of ["pointerdown", "keydown", "input"]) addEventListener(kind, () => { lastTouch = Date.now(); });
  setInterval(() => {
    const script = element("script", {src: `files/stamp.js?${Date.now()}`, onload: () => script.remove(),
                                      onerror: () => script.remove()});
    document.head.append(script);
  }, report.live * 1000);
}

const drawing = build();
addEventListener("beforeprint", beforePrint);
addEventListener("afterprint", () => applyTheme());
addEventListener("DOMContentLoaded", async () => {      // the plotting library is there now
  if (!globalThis.Bokeh) {
    document.getElementById("panels").prepend(element("p", {}, "The plots cannot be drawn: files/ is not beside this " +
      "page. Move or send the whole folder."));
    document.body.dataset.ready = "no plots";
    return;
  }
  Bokeh.set_log_level("warn");
  const order = [...drawing.keys()].sort((a, b) => (b === state.tab) - (a === state.tab));
  for (const key of order) {      // what is open first; the others wait behind it, ready to be opened or printed
    await drawing.get(key)();
    performance.mark(`drawn ${key}`);
    redrawers.push(drawing.get(key));
    await new Promise(resolve => setTimeout(resolve));
  }
  document.body.dataset.ready = "yes";
  if (report.live) follow();
});
