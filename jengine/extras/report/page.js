const COLORS = ["#4c78d8", "#e4682e", "#2ca58d", "#b565d9", "#c9901a", "#d94f87", "#17a2c4", "#7a8b3d", "#a0705a", "#8a84f0"];
const PHASES = ["#4c78d8", "#e4a12e", "#2ca58d", "#b565d9", "#d94f87", "#17a2c4", "#7a8b3d", "#a0705a", "#98a2b3"];
const TOUCH = matchMedia("(pointer: coarse)").matches;
const DARK = matchMedia("(prefers-color-scheme: dark)");
const OPEN = new Set(["Losses", "Metrics", "Training", "Learning rates"]);

let data = JSON.parse(document.getElementById("data").textContent);
const state = Object.assign({ smooth: 0, axis: "iter", log: false, theme: "system", group: false, sort: "", reverse: false }, load());
const hidden = new Set();  // names of runs
const panels = new Map();  // name -> the elements and settings of a panel
const drawn = {};  // the contents of each section as text, to leave unchanged ones as they are
let filter = "", search = "", range = null, syncing = false;

function load() {
  try { return JSON.parse(localStorage.getItem("jengine-report") || "{}"); } catch { return {}; }
}
function save() {
  try { localStorage.setItem("jengine-report", JSON.stringify(state)); } catch { /* a page without storage keeps nothing */ }
}
function $(id) { return document.getElementById(id); }
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(child => child !== null));
  return node;
}
function format(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? Number(value.toPrecision(4)).toExponential() : String(Number(value.toPrecision(5)));
}
function duration(seconds) {
  const whole = Math.round(seconds), h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60;
  return h ? `${h} h ${m} min` : m ? `${m} min ${whole % 60} s` : `${format(Number(seconds.toPrecision(3)))} s`;
}
function count(number, noun) { return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`; }
function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function runName(run) {
  return el("span", { class: "name" }, el("span", { class: "swatch", "--color": color(run) }), run.name);
}

// --- Plotly is stored compressed, which halves the page. ---

async function startPlotly() {
  const bytes = Uint8Array.from(atob($("plotly").textContent), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = el("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

// --- Curves. ---

function smoothed(values, weight) {
  // An average with exponential weights, corrected for its start at 0. Missing values keep their place.
  let mean = 0, correction = 1;
  return values.map(value => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    correction *= weight;
    return mean / (1 - correction);
  });
}

function positions(run, series) {
  return state.axis === "epoch" && run.epoch_length ? series.x.map(x => x / run.epoch_length) : series.x;
}

function findCurves(entry, panel) {
  // Its curves by mode: that of a run, or the mean of several.
  return ["train", "val"].map(mode => {
    const found = entry.runs.flatMap(run => run.series.filter(item => item.name === panel.name && (item.mode === "val") === (mode === "val")).map(series => ({ x: positions(run, series), y: series.y })));
    return found.length ? { mode, ...(found.length > 1 ? average(found) : found[0]) } : null;
  }).filter(Boolean);
}

function traces(panel) {
  const result = [], shown = entries(), alone = shown.length > MANY / 2, width = shown.length > MANY ? 1.3 : 2;
  for (const entry of shown) {
    for (const curve of findCurves(entry, panel)) {
      const validation = curve.mode === "val", label = validation ? `${entry.name} (validation)` : entry.name;
      const smooth = !validation && panel.group !== "Learning rates" && state.smooth > 0 && curve.y.length > 2;
      const y = smooth ? smoothed(curve.y, state.smooth) : curve.y, spread = smooth && curve.spread ? smoothed(curve.spread, state.smooth) : curve.spread;
      const base = { x: curve.x, type: "scatter", line: { color: entry.color, width }, legendgroup: entry.name };
      const quiet = { ...base, mode: "lines", hoverinfo: "skip", showlegend: false };
      if (smooth && !spread) result.push({ ...quiet, y: curve.y, opacity: 0.28, line: { color: entry.color, width: 1 } });
      if (spread) {
        const edge = sign => y.map((value, i) => value === null ? null : value + sign * spread[i]), line = { width: 0 };
        result.push({ ...quiet, y: edge(-1), line }, { ...quiet, y: edge(1), line, fill: "tonexty", fillcolor: translucent(entry.color, 0.16) });
      }
      const text = `<b>${escapeHtml(label)}</b><br>${escapeHtml(entry.text)}<br>%{y:.5g}${spread ? " ± %{customdata:.2g}" : ""} at %{x}<extra></extra>`;
      result.push({
        ...base, name: label, y, mode: validation || curve.y.length < 3 ? "lines+markers" : "lines", customdata: spread,
        line: { color: entry.color, width: validation ? 0.75 * width : width, dash: validation ? "dot" : "solid" },
        marker: { color: entry.color, size: 3.5 * width, symbol: validation ? "circle-open" : "circle", line: { width } },
        hovertemplate: alone ? text.replace("<br><br>", "<br>") : "%{y:.5g}<extra>%{fullData.name}</extra>",
      });
    }
  }
  return result;
}

function layout(panel) {
  const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, automargin: true, tickfont: { size: 11 } };
  const full = panel.node.classList.contains("full");
  return {
    autosize: true, margin: { l: 44, r: 10, t: 8, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", color: css("--muted"), size: 12 },
    xaxis: { ...axis, title: { text: state.axis === "epoch" ? "epoch" : "iteration", font: { size: 11 }, standoff: 4 }, ...(range ? { range: [...range] } : { autorange: true }) },
    yaxis: { ...axis, type: panel.log ? "log" : "linear", exponentformat: "power", nticks: 7 },
    hovermode: entries().length > MANY / 2 ? "closest" : "x unified", hoverlabel: hoverLabel(),
    showlegend: full && entries().length <= 3 * MANY, legend: { orientation: "h", y: -0.12 }, dragmode: TOUCH && !full ? false : "zoom",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--muted"), activecolor: css("--accent") }, uirevision: `${state.axis}${panel.log}`,
  };
}

function draw(panel) {
  panel.dirty = false;
  const settings = {
    responsive: true, displaylogo: false, displayModeBar: panel.node.classList.contains("full") ? true : TOUCH ? false : "hover",
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],  // none that would send the chart to a server
  };
  const curves = traces(panel);
  Plotly.react(panel.plot, curves, layout(panel), settings);
  describeSvg(panel.plot, describeCurves(panel, curves));
  if (!panel.listening) {
    panel.listening = true;
    panel.plot.on("plotly_relayout", event => follow(panel, event));
    followPointer(panel.plot);
  }
}

function describeSvg(plot, text) {
  // Plotly lays several drawings over each other, which are one picture.
  const [first, ...others] = plot.querySelectorAll(".main-svg");
  first.setAttribute("role", "img");
  first.setAttribute("aria-label", text);
  others.forEach(svg => svg.setAttribute("aria-hidden", "true"));
}

function describeCurves(panel, curves) {
  // What a screen reader says in the place of the plot: each curve with its last value, of many their number.
  const named = curves.filter(curve => curve.name), last = curve => format(curve.y.findLast(value => value !== null));
  if (!named.length) return `${panel.name}: all runs are hidden`;
  const values = named.slice(0, MANY).map(curve => `${curve.name} ends at ${last(curve)}`).join("; ");
  return `${panel.name}, ${count(named.length, "curve")}. ${values}${named.length > MANY ? "; the table has the others" : ""}`;
}

function follow(source, event) {
  // A zoom along the x axis is that of all panels.
  if (syncing) return;
  if ("xaxis.range[0]" in event) range = [event["xaxis.range[0]"], event["xaxis.range[1]"]];
  else if ("xaxis.autorange" in event) range = null;
  else return;
  applyRange(source);
}

function applyRange(source) {
  syncing = true;  // each change below is reported as well
  const others = [...panels.values()].filter(panel => panel !== source && panel.listening);
  const change = () => range ? { "xaxis.range": [...range], "yaxis.autorange": true } : { "xaxis.autorange": true, "yaxis.autorange": true };
  return Promise.all(others.map(panel => Plotly.relayout(panel.plot, change()))).then(() => { syncing = false; });
}

const watcher = new IntersectionObserver(entries => {
  for (const entry of entries) {
    const panel = panels.get(entry.target.dataset.name);
    if (!panel) continue;
    panel.visible = entry.isIntersecting;
    if (panel.visible && panel.dirty) draw(panel);
  }
}, { rootMargin: "400px" });

function redraw() {
  for (const panel of panels.values()) {
    panel.dirty = true;
    if (panel.visible) draw(panel);
  }
}

function icon() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  for (const [name, value] of [["viewBox", "0 0 12 12"], ["width", "11"], ["height", "11"], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
  path.setAttribute("d", "M7.5 1H11v3.5M4.5 11H1V7.5M11 1 7 5M1 11l4-4");
  path.setAttribute("style", "fill:none;stroke:currentColor;stroke-width:1.4");
  svg.append(path);
  return svg;
}

function makePanel(name, group) {
  const panel = { name, group, log: state.log, dirty: true, visible: false, listening: false };
  panel.logButton = el("button", { type: "button", title: "Logarithmic scale", "aria-label": `log scale of ${name}`, onclick: () => { panel.log = !panel.log; mark(); draw(panel); } }, "log");
  panel.expand = el("button", { type: "button", title: "Enlarge", "aria-label": `enlarge ${name}`, "aria-pressed": "false", onclick: () => enlarge(panel) }, icon());
  panel.plot = el("div", { class: "plot" });
  panel.warn = el("div", { class: "warn" });
  panel.key = el("small", { class: "key" });
  panel.node = el("div", { class: "panel", "data-name": name }, el("h3", {}, el("span", { title: name }, name), panel.key, panel.logButton, panel.expand), panel.warn, panel.plot);
  function mark() { panel.logButton.setAttribute("aria-pressed", panel.log); }
  panel.mark = mark;
  mark();
  watcher.observe(panel.node);
  return panel;
}

function enlarge(panel) {
  const full = panel.node.classList.toggle("full");
  document.body.classList.toggle("has-full", full);
  panel.expand.setAttribute("aria-pressed", full);
  draw(panel);
  Plotly.Plots.resize(panel.plot);
}

function describe(panel) {
  const series = data.runs.flatMap(run => run.series.filter(item => item.name === panel.name).map(item => ({ run, ...item })));
  const modes = new Set(series.map(item => item.mode));
  const thinned = series.find(item => item.total > item.y.length);  // to the lowest and the highest of each part
  panel.key.textContent = [
    modes.size > 1 ? "— train  ○ validation" : modes.has("val") ? "○ validation" : "",
    thinned ? `${thinned.y.length.toLocaleString("en")} of ${thinned.total.toLocaleString("en")} points` : "",
  ].filter(Boolean).join(" · ");
  const bad = series.filter(item => item.not_finite);
  const lost = ({ count, first }) => count === 1 ? `1 value is not finite, at iteration ${first}` : `${count} values are not finite, the first at iteration ${first}`;
  panel.warn.textContent = [
    visibleRuns().length ? "" : "All runs are hidden.", bad.map(item => `${item.run.name}: ${lost(item.not_finite)}`).join("; "),
  ].filter(Boolean).join(" ");
}

function renderCurves() {
  const root = $("curves");
  let pattern;
  try { pattern = new RegExp(filter, "i"); } catch { pattern = { test: name => name.includes(filter) }; }
  const shown = data.panels.filter(panel => pattern.test(panel.name));
  const signature = JSON.stringify([shown, filter]);
  if (root.dataset.signature !== signature) {
    root.dataset.signature = signature;
    const open = new Map([...root.querySelectorAll("details")].map(node => [node.dataset.group, node.open]));
    root.replaceChildren();
    for (const group of new Set(shown.map(panel => panel.group))) {
      const grid = el("div", { class: "panels" }), members = shown.filter(panel => panel.group === group);
      for (const { name } of members) {
        if (!panels.has(name)) panels.set(name, makePanel(name, group));
        grid.append(panels.get(name).node);
      }
      const isOpen = open.has(group) ? open.get(group) : OPEN.has(group) || filter !== "";
      root.append(el("details", { open: isOpen, "data-group": group, "--columns": String(members.length) }, el("summary", {}, group, " ", el("small", {}, String(members.length))), grid));
    }
    if (!shown.length) root.append(el("p", { class: "empty" }, data.panels.length ? `No curve has a name with ${filter}.` : "There are no curves yet: a run draws them from its first log line on."));
  }
  panels.forEach(describe);
}

// --- Tables. ---

function table(headings, rows, numbers = []) {
  const cell = (tag, value, index) => {
    const attributes = { class: numbers.includes(index) ? "number" : null, scope: tag === "th" ? "col" : null };
    if (value && value.tagName === "TD") return value;
    return el(tag, attributes, value instanceof Node ? value : String(value ?? ""));
  };
  return el("div", { class: "scroll", tabindex: "0" }, el("table", {},
    el("thead", {}, el("tr", {}, ...headings.map((value, i) => cell("th", value, i)))),
    el("tbody", {}, ...rows.map(row => el("tr", {}, ...row.map((value, i) => cell("td", value, i)))))));
}

function section(id, title, ...content) {
  $(id).replaceChildren(...(content.length ? [el("h2", {}, title), ...content] : []));
}

function update(id, facts, draw) {
  const text = JSON.stringify([data.runs.map(run => run.name), isGrouped(), document.documentElement.dataset.theme, facts]);
  if (drawn[id] === text) return;
  drawn[id] = text;
  draw();
}

function renderSections() {
  const links = [...document.querySelectorAll("main > section")].map(node => [node.id, node.querySelector("h2")]).filter(([, title]) => title);
  // Not the browser's own jump: in the frame of a notebook it would load the notebook.
  const jump = id => event => { event.preventDefault(); $(id).scrollIntoView(); };
  const link = (id, text) => el("a", { href: `#${id}`, onclick: jump(id) }, text);
  const all = links.map(([id, title]) => link(id, title.textContent));
  $("sections").replaceChildren(all[0], link("curves", "Curves"), ...all.slice(1));
}

function renderTime() {
  const runs = data.runs.filter(run => Object.keys(run.seconds).length);
  if (!runs.length) return section("time", "Time");
  const phases = [...new Set(runs.flatMap(run => Object.keys(run.seconds)))];
  const total = run => Object.values(run.seconds).reduce((sum, value) => sum + value, 0);
  const bars = el("div", { class: "bars", "--height": `${70 + (runs.length > MANY ? 18 : 34) * runs.length}px` });
  const share = (run, phase) => 100 * (run.seconds[phase] || 0) / total(run);
  const rows = runs.map(run => [runName(run), duration(total(run)), ...phases.map(phase =>
    el("td", { class: "number" }, phase in run.seconds ? duration(run.seconds[phase]) : "", " ", el("small", {}, phase in run.seconds ? `${share(run, phase).toFixed(1)} %` : ""))),
  format(run.speed.iterations_per_second), format(run.speed.examples_per_second)]);
  const slow = runs.flatMap(run => run.slowest.map(each => [runName(run), format(each.iteration), duration(each.seconds), each.cause, each.place]));
  const slowest = slow.length ? table(["run", "slow iteration", "time", "cause", "line"], slow, [1, 2]) : "";
  const headings = ["run", "total", ...phases, "iterations/s", "examples/s"];
  section("time", "Time", el("div", { class: "card" }, bars), table(headings, rows, headings.map((_, i) => i).slice(1)), slowest);
  const series = phases.map((phase, i) => ({
    type: "bar", orientation: "h", name: phase, x: runs.map(run => share(run, phase)), y: runs.map(run => run.name),
    marker: { color: PHASES[i % PHASES.length] }, customdata: runs.map(run => duration(run.seconds[phase] || 0)),
    hovertemplate: "%{customdata}, %{x:.1f} %<extra>%{fullData.name}</extra>",
  }));
  Plotly.react(bars, series, {
    barmode: "stack", bargap: 0.3, margin: { l: 10, r: 10, t: 4, b: 20 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", color: css("--muted"), size: 12 }, legend: { orientation: "h", traceorder: "normal", y: -0.15, yanchor: "top" },
    xaxis: { ticksuffix: " %", gridcolor: css("--grid"), range: [0, 100], fixedrange: true, showticklabels: false },
    yaxis: { automargin: true, autorange: "reversed", fixedrange: true, type: "category" },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text") } },
  }, { responsive: true, displayModeBar: false });
  describeSvg(bars, "Time of each run by phase; the table below has the numbers");
}

function renderConfig() {
  if (!data.config.length) return section("config", "Config");
  const several = data.runs.length > 1, differing = data.config.filter(row => row.differs);
  const previous = $("config-all"), all = el("input", { type: "checkbox", id: "config-all", checked: previous ? previous.checked : !several, onchange: fill });
  const body = el("div");
  function fill() {
    const rows = all.checked ? data.config : differing;
    body.replaceChildren(rows.length
      ? table(["key", ...data.runs.map(runName)], rows.map(row => [row.path, ...row.values.map(value => el("td", { class: row.differs && all.checked && several ? "value best" : "value" }, value))]))
      : el("p", { class: "empty" }, "The configs are equal."));
  }
  fill();
  const title = several ? `${differing.length} of ${data.config.length} values differ` : `${data.config.length} values`;
  section("config", "Config", el("p", {}, el("label", {}, all, " show all"), " ", el("small", { class: "empty" }, title)), body);
}

function renderGroups() {
  const runs = data.runs.filter(run => run.groups);
  section("groups", "Parameter groups", ...runs.map(run => {
    const { columns, rows } = run.groups;
    const numbers = columns.map((name, i) => ["tensors", "parameters", "lr", "weight decay"].includes(name) ? i : -1);
    const size = `${count(run.model.parameters, "parameter")} in ${count(run.model.tensors, "tensor")}, ${format(run.model.bytes / 2 ** 20)} MiB`;
    return el("details", { open: runs.length < 3 }, el("summary", {}, runName(run), " ", el("small", {}, size)), table(columns, rows, numbers));
  }));
}

function renderVersions() {
  const runs = data.runs.filter(run => Object.keys(run.versions).length);
  const names = [...new Set(runs.flatMap(run => Object.keys(run.versions)))];
  const rows = runs.map(run => [runName(run), run.devices, String(run.seed), ...names.map(name => {
    const differs = new Set(runs.map(other => other.versions[name])).size > 1;
    return el("td", { class: differs ? "best" : null }, run.versions[name] || "");
  })]);
  section("versions", "Versions", ...(runs.length ? [table(["run", "devices", "seed", ...names], rows)] : []));
}

function renderPictures() {
  const names = [...new Set(data.runs.flatMap(run => run.images.map(image => image.name)))];
  section("pictures", "Pictures", ...names.map(name => {
    const found = data.runs.map(run => [run, run.images.find(image => image.name === name)]).filter(pair => pair[1]);
    const steps = [...new Set(found.flatMap(([, image]) => image.items.map(item => item.step)))].sort((a, b) => a - b);
    const slider = el("input", { type: "range", min: 0, max: steps.length - 1, "aria-label": `step of ${name}`, oninput: () => show(Number(slider.value)) });
    slider.value = steps.length - 1;
    const label = el("output"), strip = el("div", { class: "strip" });
    function show(index) {
      label.textContent = `step ${steps[index]}`;
      strip.replaceChildren(...found.map(([run, image]) => {
        const item = [...image.items].reverse().find(candidate => candidate.step <= steps[index]);
        if (!item) return "";
        const picture = el("img", { src: item.url, alt: `${name}, step ${item.step}`, onload: event => event.target.classList.toggle("small", event.target.naturalWidth < 160) });
        const zoom = el("button", { type: "button", class: "zoom", title: "Enlarge", onclick: () => view(item.url, `${run.name}: ${name}, step ${item.step}`) }, picture);
        const some = image.total > image.items.length ? `, ${image.items.length} of ${image.total} steps` : "";
        return el("figure", {}, zoom, el("figcaption", {}, runName(run), ` step ${item.step}${some}`));
      }));
    }
    show(steps.length - 1);
    return el("div", { class: "card" }, el("h3", {}, name), steps.length > 1 ? el("div", { class: "steps" }, slider, label) : null, strip);
  }));
}

function view(url, text) {
  const [image, caption] = [$("viewer").querySelector("img"), $("viewer").querySelector("p")];
  image.src = url;
  image.alt = text;
  caption.textContent = text;
  image.onload = () => image.classList.toggle("small", image.naturalWidth < 400);
  $("viewer").showModal();
}

// --- The page. ---

function render() {
  document.title = `${data.runs.map(run => run.name).join(", ")} - jengine report`;
  $("created").textContent = `${count(data.runs.length, "run")}, ${data.created}`;
  $("created").className = data.refresh ? "live" : "";
  const facts = (...names) => data.runs.map(run => names.map(name => run[name]));
  renderCurves();
  renderComparison();
  update("pictures", facts("images"), renderPictures);
  update("time", facts("seconds", "speed"), renderTime);
  update("config", data.config, renderConfig);
  update("groups", facts("groups", "model"), renderGroups);
  update("versions", facts("versions", "devices", "seed"), renderVersions);
  renderSections();
}

function applyTheme() {
  const dark = state.theme === "dark" || (state.theme === "system" && DARK.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = { system: "Theme: system", light: "Theme: light", dark: "Theme: dark" }[state.theme];
}

function connectControls() {
  $("smooth").value = state.smooth;
  $("smooth-value").textContent = state.smooth.toFixed(2);
  $("axis").value = state.axis;
  $("log").checked = state.log;
  $("smooth").oninput = event => { state.smooth = Number(event.target.value); $("smooth-value").textContent = state.smooth.toFixed(2); save(); redraw(); };
  $("axis").onchange = event => { state.axis = event.target.value; range = null; save(); redraw(); };
  $("log").onchange = event => { state.log = event.target.checked; save(); panels.forEach(panel => { panel.log = state.log; panel.mark(); }); redraw(); };
  $("search").oninput = event => { search = event.target.value; renderComparison(); };
  $("group").checked = state.group;
  $("group").onchange = event => { state.group = event.target.checked; save(); render(); };
  $("show-all").onclick = () => { hidden.clear(); search = $("search").value = ""; renderComparison(); };
  $("filter").oninput = event => { filter = event.target.value; renderCurves(); redraw(); };
  $("reset").onclick = () => { range = null; applyRange(null); };
  $("theme").onclick = () => {
    state.theme = { system: "light", light: "dark", dark: "system" }[state.theme];
    save(); applyTheme(); render();
  };
  DARK.onchange = () => { applyTheme(); render(); };
  addEventListener("beforeprint", () => panels.forEach(panel => panel.dirty && draw(panel)));  // all, not only those in sight
  document.addEventListener("keydown", event => {
    const full = document.querySelector(".panel.full");
    if (event.key === "Escape" && full) enlarge(panels.get(full.dataset.name));
  });
}

async function refresh() {
  try {
    const response = await fetch("data.json");
    if (!response.ok) throw new Error(response.status);
    data = await response.json();
    render();
  } catch {
    $("created").className = "live lost";
    $("created").textContent = `no answer from the server since ${data.created}`;
  }
  setTimeout(refresh, 1000 * data.refresh);
}

applyTheme();
connectControls();
startPlotly().then(() => {
  render();
  if (data.refresh) setTimeout(refresh, 1000 * data.refresh);
});
