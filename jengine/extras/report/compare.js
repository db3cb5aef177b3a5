// --- Which runs are shown, in which color, and one by one or as means over seeds. ---

const MANY = 8;  // runs; with more the cards are small, and a curve under the pointer is described alone
const GOLDEN_ANGLE = 137.508;  // hues that are far apart, whatever their number

function palette(index, count) {
  if (count <= COLORS.length) return COLORS[index];
  return `hsl(${Math.round(index * GOLDEN_ANGLE) % 360}, ${[70, 55, 85][index % 3]}%, ${[48, 62, 40][index % 3]}%)`;
}
function translucent(color, alpha) {
  if (color.startsWith("hsl(")) return color.replace("hsl(", "hsla(").replace(")", `, ${alpha})`);
  return color + Math.round(255 * alpha).toString(16).padStart(2, "0");
}
function isGrouped() { return state.group && data.table.groups.length < data.runs.length; }
function color(run) {
  return isGrouped() ? palette(run.group, data.table.groups.length) : palette(data.runs.indexOf(run), data.runs.length);
}
function settings(item) {
  // The hyperparameters of a run or a group as text.
  return Object.entries(data.table.hyperparams).filter(([path]) => path in item.hyperparams)
    .map(([path, name]) => `${name}=${format(item.hyperparams[path])}`).join(" ");
}
function isFound(run) {
  // Each word must be in one of the run's values; `lr=0.1` is a value with its name.
  const text = [run.name, settings(run), `seed=${run.seed}`, run.status].join(" ").toLowerCase();
  return search.toLowerCase().split(/\s+/).every(word => text.includes(word));
}
function visibleRuns() { return data.runs.filter(run => !hidden.has(run.name) && isFound(run)); }
function entries() {
  // What is drawn: runs, or with `isGrouped` groups of runs that differ only in their seed.
  const runs = visibleRuns();
  if (!isGrouped()) return runs.map(run => ({ name: run.name, text: settings(run), color: color(run), item: run, runs: [run] }));
  return data.table.groups.map((group, index) => {
    const members = runs.filter(run => run.group === index), text = settings(group) || "all runs";
    return { name: text, text: count(members.length, "seed"), color: palette(index, data.table.groups.length), item: group, runs: members };
  }).filter(entry => entry.runs.length);
}
function hideOthers(runs) {
  // A second call shows all again.
  const others = data.runs.filter(run => !runs.includes(run)), isSolo = visibleRuns().every(run => runs.includes(run));
  hidden.clear();
  if (!isSolo) others.forEach(run => hidden.add(run.name));
  renderComparison();
}
function toggle(runs) {
  const isHidden = runs.every(run => hidden.has(run.name));
  runs.forEach(run => isHidden ? hidden.delete(run.name) : hidden.add(run.name));
  renderComparison();
}
function renderComparison() {
  renderRuns();
  renderTable();
  renderParallel();
  redraw();
}

// --- Cards. ---

function renderRuns() {
  const many = data.runs.length > MANY, { main, metrics } = data.table;
  const shown = data.runs.filter(isFound);
  const worst = metrics[main] === "greater" ? -Infinity : Infinity, score = run => run.values.best[main] ?? worst;
  if (many) shown.sort((a, b) => metrics[main] === "greater" ? score(b) - score(a) : score(a) - score(b));
  $("run-list").className = many ? "many" : "";
  keepFocus($("run-list"), shown.map(run => {
    const box = el("input", { type: "checkbox", checked: !hidden.has(run.name), "data-focus": `card ${run.name}`, onchange: () => toggle([run]) });
    const only = onlyButton([run], run.name, "card");
    const total = Object.values(run.seconds).reduce((sum, value) => sum + value, 0);
    const epoch = run.max_epochs && run.epoch_length ? `, epoch ${Math.min(run.max_epochs, Math.floor(run.iter / run.epoch_length))} of ${run.max_epochs}` : "";
    const facts = [
      run.max_iters ? `${run.iter.toLocaleString("en")} of ${run.max_iters.toLocaleString("en")} iterations${epoch}` : `${run.iter.toLocaleString("en")} iterations`,
      total ? duration(total) : null, run.started ? `started ${run.started}` : null, run.sessions > 1 ? `${run.sessions} sessions` : null,
      ...run.tests.flatMap(test => Object.entries(test.metrics).map(([name, value]) => `test ${name} ${format(value)}${test.checkpoint ? ` (${test.checkpoint})` : ""}`)),
    ].filter(Boolean).join(" · ");
    const value = run.values.best[main] ?? run.values.final[main];
    const metric = value === undefined ? null : el("span", { class: "metric" }, el("span", { class: "unseen" }, `${main in run.values.best ? "best" : "last"} ${main} `), format(value));
    const status = el("span", { class: `status ${run.status.split(" ")[0]}` }, run.status);
    const notes = many && run.notes.length ? [el("div", { class: "note", title: run.notes.join("\n") }, run.notes[0])] : run.notes.map(note => el("div", { class: "note" }, note));
    const title = many ? [run.path, settings(run), facts].join("\n") : run.path;
    const done = run.max_iters ? Math.round(Math.min(100, 100 * run.iter / run.max_iters)) : 0;
    return el("div", { class: hidden.has(run.name) ? "run hidden-run" : "run", role: "listitem", "--color": color(run), title },
      el("label", {}, box, el("span", { class: "swatch" }), el("span", { class: "run-name" }, run.name)), data.runs.length > 1 ? only : null, metric, status,
      el("div", { class: "progress", role: "progressbar", "aria-label": `iterations of ${run.name}`, "aria-valuenow": String(done) }, el("div", { style: `width:${done}%` })),
      many ? null : el("div", { class: "facts" }, facts), ...notes);
  }));
  if (!shown.length) $("run-list").append(el("p", { class: "empty" }, `No run has all of these words: ${search}`));
}
function onlyButton(runs, name, place) {
  const click = event => { event.preventDefault(); hideOthers(runs); };
  return el("button", { type: "button", class: "only", title: "Show only this, or all again", "aria-label": `only ${name}`, "data-focus": `only ${place} ${name}`, onclick: click }, "only");
}
function keepFocus(root, children) {
  // Replace the children; the new control in the place of the one with the focus has it then.
  const key = root.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  root.replaceChildren(...children);
  if (key !== undefined) [...root.querySelectorAll("[data-focus]")].find(node => node.dataset.focus === key)?.focus();
}

// --- The table. ---

function columns() {
  // Headings, and how to find the value of a run or a group: a number, text, or `[mean, spread, seeds]`.
  const { hyperparams, metrics } = data.table, arrow = { greater: " ↑", less: " ↓" };
  const status = { key: "status", name: "status", get: item => isGrouped() ? countStatus(item) : item.status };
  const found = [status, ...Object.entries(hyperparams).map(([path, name]) => ({ key: path, name, title: path, get: item => item.hyperparams[path] }))];
  for (const [metric, rule] of Object.entries(metrics)) {
    if (rule) found.push({ key: `best ${metric}`, name: `best ${metric}${arrow[rule]}`, rule, metric, get: item => item.values.best[metric] });
    found.push({ key: `last ${metric}`, name: `last ${metric}`, rule, get: item => item.values.final[metric] });
  }
  if (isGrouped()) return [...found, { key: "seeds", name: "seeds", get: item => item.runs.length }];
  const total = run => Object.values(run.seconds).reduce((sum, value) => sum + value, 0);
  return [...found, { key: "seed", name: "seed", get: run => run.seed }, { key: "iterations", name: "iterations", get: run => run.iter },
    { key: "time", name: "time", get: total, show: duration }];
}
function countStatus(group) {
  // The status of all runs in a group, or how many have each: a crash shows in a mean.
  const all = data.runs.filter(run => data.table.groups[run.group] === group).map(run => run.status), kinds = [...new Set(all)];
  return kinds.length < 2 ? kinds.join() : kinds.map(kind => `${kind} ${all.filter(status => status === kind).length}`).join(", ");
}
function plain(value) { return Array.isArray(value) ? value[0] : value; }  // a mean is sorted and compared as a number
function compare(a, b) {
  const [first, second] = [plain(a), plain(b)], isLast = value => value === undefined || value === null || value === "" || value === "NaN";
  if (isLast(first) || isLast(second)) return 0;
  return typeof first === "number" && typeof second === "number" ? first - second : String(first).localeCompare(String(second), "en", { numeric: true });
}
function isDescending(column) { return (column.rule === "greater") !== (state.reverse && state.sort === column.key); }  // the best first
function sorted(rows, list) {
  const column = list.find(item => item.key === state.sort) || list.find(item => item.metric === data.table.main);
  if (!column) return rows;
  const sign = isDescending(column) ? -1 : 1;
  const isEmpty = row => [undefined, null, "", "NaN"].includes(plain(column.get(row.item)));
  return [...rows].sort((a, b) => isEmpty(a) - isEmpty(b) || sign * compare(column.get(a.item), column.get(b.item)));
}
function tableRows() {
  const runs = data.runs.filter(isFound);
  if (!isGrouped()) return runs.map(run => ({ item: run, runs: [run], name: run.name }));
  return data.table.groups.map((group, index) => ({ item: group, runs: runs.filter(run => run.group === index), name: "" })).filter(row => row.runs.length);
}
function renderTable() {
  const list = columns(), rows = sorted(tableRows(), list), several = data.runs.length > 1;
  const best = new Map(list.filter(column => column.metric).map(column => {
    const values = rows.map(row => plain(column.get(row.item))).filter(value => typeof value === "number");
    return [column.key, values.length < 2 ? null : column.rule === "greater" ? Math.max(...values) : Math.min(...values)];
  }));
  const sortBy = key => () => { state.reverse = state.sort === key && !state.reverse; state.sort = key; save(); renderTable(); };
  const isNumeric = column => rows.some(row => typeof plain(column.get(row.item)) === "number");
  const heading = column => el("th", { class: isNumeric(column) ? "number" : null, scope: "col", title: column.title || null, "aria-sort": state.sort !== column.key ? null : isDescending(column) ? "descending" : "ascending" },
    el("button", { type: "button", "data-focus": `sort ${column.key}`, onclick: sortBy(column.key) }, column.name));
  const cell = (row, column) => {
    const value = column.get(row.item), number = plain(value);
    const reached = column.metric && !Array.isArray(value) && row.item.best.find(item => item.metric === column.metric)?.best;
    const when = reached ? (row.item.epoch_length && row.item.max_epochs ? `epoch ${Math.round(reached.iter / row.item.epoch_length)}` : `iter ${reached.iter}`) : "";
    const spread = Array.isArray(value) && value[2] > 1 ? ` ± ${format(Number(value[1].toPrecision(2)))}` : "";
    const isBest = typeof number === "number" && number === best.get(column.key);
    return el("td", { class: [typeof number === "number" ? "number" : "", isBest ? "best" : ""].join(" ").trim() || null },
      column.show ? column.show(value) : format(number), spread, when ? el("small", {}, ` ${when}`) : null);
  };
  const first = row => {
    const name = row.name || settings(row.item) || "all runs", isShown = !row.runs.every(run => hidden.has(run.name));
    const press = el("button", { type: "button", class: "toggle", "--color": color(row.runs[0]), title: "Hide or show", "aria-label": `show ${name}`, "aria-pressed": String(isShown), "data-focus": `show ${name}`, onclick: () => toggle(row.runs) });
    return el("th", { class: "run-cell", scope: "row" }, press, several ? onlyButton(row.runs, name, "row") : null, row.name);
  };
  keepFocus($("table"), [el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, isGrouped() ? "setting" : "run"), ...list.map(heading))),
    el("tbody", {}, ...rows.map(row => el("tr", { class: row.runs.every(run => hidden.has(run.name)) ? "hidden-run" : null }, first(row), ...list.map(column => cell(row, column))))))]);
  $("table").hidden = !rows.length;
  const shown = visibleRuns().length;
  $("shown").textContent = several ? `${shown} of ${data.runs.length} runs shown` : "";
  $("show-all").hidden = shown === data.runs.length;
  $("group-label").hidden = data.table.groups.length === data.runs.length;
  $("comparison").querySelector(".controls").hidden = !several;
}

// --- Parallel coordinates: a line for each run through its hyperparameters to the main metric. ---

const SCALE = [[122, 72, 178], [75, 105, 180], [33, 145, 140], [94, 201, 98], [253, 200, 37]];  // from the worst to the best
const AXIS_WIDTH = 105;  // pixels, at least
const BETWEEN = 24;  // points from one axis to the next, which the pointer can find

function scaleColor(share) {
  const place = Math.min(Math.max(share, 0), 0.9999) * (SCALE.length - 1), index = Math.floor(place);
  return `rgb(${SCALE[index].map((low, i) => Math.round(low + (place - index) * (SCALE[index + 1][i] - low))).join(",")})`;
}
function makeAxis(name, values) {
  // Positions from 0 to 1: of numbers by size, on a logarithmic scale if they span two orders; of others in their order.
  const known = values.filter(value => value !== undefined && value !== null && value !== "NaN");
  const distinct = [...new Set(known)].sort(compare), isNumeric = distinct.every(value => typeof value === "number");
  if (!isNumeric || distinct.length < 2) {
    const place = value => distinct.length < 2 ? 0.5 : distinct.indexOf(value) / (distinct.length - 1);
    return { name, place, ticks: distinct.slice(0, 12).map(value => [place(value), format(value)]) };
  }
  const isLog = distinct[0] > 0 && distinct.at(-1) / distinct[0] >= 50, size = isLog ? Math.log : value => value;
  const [low, high] = [size(distinct[0]), size(distinct.at(-1))], place = value => (size(value) - low) / (high - low);
  const middle = isLog ? Math.exp((low + high) / 2) : (low + high) / 2;
  const isApart = (value, i) => i === 0 || place(value) - place(distinct[i - 1]) > 0.07;  // else the labels overlap
  const ticks = distinct.length <= 6 && distinct.every(isApart) ? distinct : [distinct[0], Number(middle.toPrecision(3)), distinct.at(-1)];
  return { name: isLog ? `${name} (log)` : name, place, ticks: ticks.map(value => [place(value), format(value)]) };
}
function renderParallel() {
  const { hyperparams, metrics, main } = data.table, paths = Object.keys(hyperparams).slice(0, 10);
  const shown = entries().filter(entry => entry.runs.length);
  const isUseful = paths.length > 0 && main && shown.length > 1;
  $("parallel").hidden = !isUseful;
  if (!isUseful) return;
  const score = entry => plain(entry.item.values.best[main]);
  const list = [...paths.map(path => ({ name: hyperparams[path], get: entry => entry.item.hyperparams[path] })), { name: `best ${main}`, get: score }];
  const axes = list.map(item => ({ ...makeAxis(item.name, shown.map(item.get)), get: item.get }));
  const ranked = axes.at(-1).place, quality = entry => metrics[main] === "greater" ? ranked(score(entry)) : 1 - ranked(score(entry));
  const series = shown.map(entry => {
    const heights = axes.map(axis => { const value = axis.get(entry); return value === undefined || value === null || value === "NaN" ? null : axis.place(value); });
    const x = [], y = [];
    heights.slice(1).forEach((next, i) => {
      for (let j = 0; j <= BETWEEN; j++) {
        const share = j / BETWEEN, ease = (1 - Math.cos(Math.PI * share)) / 2;
        x.push(i + share);
        y.push(heights[i] === null || next === null ? null : heights[i] + ease * (next - heights[i]));
      }
    });
    const number = score(entry), text = [`<b>${escapeHtml(entry.name)}</b>`, escapeHtml(entry.text), typeof number === "number" ? `best ${escapeHtml(main)} ${format(number)}` : ""].filter(Boolean).join("<br>");
    return { x, y, type: "scatter", mode: "lines", name: entry.name, legendgroup: entry.name, line: { width: 2, color: typeof number === "number" ? scaleColor(quality(entry)) : css("--muted") }, hovertemplate: `${text}<extra></extra>` };
  });
  // On a phone the axes keep their distance, and the plot scrolls.
  $("parallel-plot").style.minWidth = `${axes.length * AXIS_WIDTH}px`;
  const described = `Parallel coordinates of ${shown.length} runs: ${axes.map(axis => axis.name).join(", ")}. The table has the values.`;
  const label = (x, y, text, more) => ({ x, y, text: escapeHtml(text), showarrow: false, font: { size: 11 }, ...more });
  Plotly.react($("parallel-plot"), series, {
    margin: { l: 60, r: 60, t: 34, b: 14 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest", hoverdistance: 12,
    font: { family: "system-ui, sans-serif", color: css("--muted"), size: 12 },
    xaxis: { visible: false, range: [-0.05, axes.length - 0.95], fixedrange: true }, yaxis: { visible: false, range: [-0.06, 1.06], fixedrange: true },
    shapes: axes.map((_, i) => ({ type: "line", x0: i, x1: i, y0: 0, y1: 1, line: { color: css("--line"), width: 2 }, layer: "below" })),
    annotations: axes.flatMap((axis, i) => [label(i, 1.06, axis.name, { yanchor: "bottom", font: { size: 12, color: css("--text") } }),
      ...axis.ticks.map(([y, text]) => label(i, y, text.length > 14 ? `${text.slice(0, 13)}…` : text, { xanchor: i === axes.length - 1 ? "left" : "right", xshift: i === axes.length - 1 ? 6 : -6, bgcolor: translucent(css("--card"), 0.8) }))]),
    hoverlabel: hoverLabel(),
  }, { responsive: true, displayModeBar: false });
  describeSvg($("parallel-plot"), described);
  followPointer($("parallel-plot"));
}

// --- The curve under the pointer. ---

function escapeHtml(text) { return String(text).replace(/[&<>]/g, char => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" }[char])); }
function hoverLabel() { return { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text"), size: 12 }, namelength: -1, align: "left" }; }
function followPointer(plot) {
  // Among many curves the others fade while the pointer is on one.
  if (plot.dataset.follows) return;
  plot.dataset.follows = "true";
  const fade = chosen => plot.querySelectorAll(".scatterlayer .trace").forEach(node => {
    const trace = plot.data[node.__data__?.[0]?.trace?.index];
    node.style.opacity = (trace?.opacity ?? 1) * (!chosen || trace?.legendgroup === chosen ? 1 : 0.12);
  });
  plot.on("plotly_hover", event => { if (plot.layout.hovermode === "closest") fade(event.points[0].data.legendgroup); });
  plot.on("plotly_unhover", () => fade(null));
}

// --- Means over seeds. ---

function interpolate(points, grid) {
  // The values of a curve at the positions of another; null outside of it.
  const known = points.x.map((x, i) => [x, points.y[i]]).filter(([, y]) => y !== null);
  let next = 0;
  return grid.map(x => {
    while (next < known.length && known[next][0] < x) next += 1;
    if (next === known.length) return null;
    const [right, high] = known[next];
    if (right === x || next === 0) return right === x ? high : null;
    const [left, low] = known[next - 1];
    return low + (high - low) * (x - left) / (right - left);
  });
}
function average(curves) {
  // Mean and sample deviation at the positions of the longest curve, over the curves that reach them.
  const x = curves.reduce((longest, curve) => curve.x.length > longest.length ? curve.x : longest, []);
  const values = curves.map(curve => interpolate(curve, x));
  const y = [], spread = [];
  x.forEach((_, i) => {
    const found = values.map(list => list[i]).filter(value => value !== null);
    const mean = found.reduce((sum, value) => sum + value, 0) / found.length;
    y.push(found.length ? mean : null);
    spread.push(found.length > 1 ? Math.sqrt(found.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (found.length - 1)) : 0);
  });
  return { x, y, spread };
}
