"use strict";
// What the server says of studies, put on the page as text. Nothing is loaded from elsewhere.

const EVERY_MS = 2000;
const COLORS = [  // as in the timeline
  "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#332288", "#999933", "#882255", "#88ccee", "#666666",
];
const SVG = "http://www.w3.org/2000/svg";
const chosen = { study: null, trial: null, chart: null };

const $ = (id) => document.getElementById(id);

function made(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

function drawn(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

// ---------------------------------------------------------------- words

function number(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size >= 0.001 && size < 1000 ? value.toPrecision(4) : value.toExponential(3);
}

function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function bytes(value) {
  if (!value) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) { value /= 1024; place += 1; }
  return `${place ? value.toFixed(1) : value} ${units[place]}`;
}

const color = (trial) => COLORS[trial % COLORS.length];

// ---------------------------------------------------------------- parts of the page

function table(id, header, rows) {
  const head = made("tr");
  for (const [title, isNumber] of header) head.append(made("th", title, isNumber ? "number" : ""));
  $(id).tHead.replaceChildren(head);
  $(id).tBodies[0].replaceChildren(...rows);
}

function row(header, cells) {
  const line = made("tr");
  cells.forEach((cell, index) => {
    const isNode = cell instanceof Node;
    const kind = header[index][1] ? "number" : "";
    const made_ = made("td", isNode ? undefined : cell, kind);
    if (isNode) made_.append(cell);
    line.append(made_);
  });
  return line;
}

function showStudies(found) {
  $("directory").textContent = found.directory;
  $("none").hidden = found.studies.length > 0;
  const items = found.studies.map((study) => {
    const button = made("button", study.name);
    const best = study.best_value === null || study.best_value === undefined
      ? "" : `, ${study.metric} ${number(study.best_value)}`;
    button.append(made("small", study.error || `${study.state}, ${study.finished} of ${study.total}${best}`));
    button.setAttribute("aria-current", String(study.name === chosen.study));
    button.addEventListener("click", () => { choose(study.name); });
    const item = made("li");
    item.append(button);
    return item;
  });
  $("studies").replaceChildren(...items);
}

function showStudy(study) {
  $("study").hidden = false;
  $("name").textContent = study.study;
  const counts = {};
  for (const trial of study.trials) counts[trial.state] = (counts[trial.state] || 0) + 1;
  const words = Object.entries(counts).map(([state, count]) => `${count} ${state}`);
  const eta = study.eta_seconds ? `, ${seconds(study.eta_seconds)} left` : "";
  $("line").textContent = [[study.state, words.join(", ")].filter(Boolean).join(": "),
    study.seconds ? seconds(study.seconds) + eta : "", study.source].filter(Boolean).join("; ");
  const total = study.trials.reduce((sum, trial) => sum + (trial.steps || trial.step), 0);
  const done = study.trials.reduce((sum, trial) => sum + (isOver(trial) ? trial.steps || trial.step : trial.step), 0);
  const share = total ? Math.min(100, (100 * done) / total) : 0;
  $("bar").firstElementChild.style.width = `${share}%`;
  $("bar").setAttribute("aria-valuenow", share.toFixed(0));
  $("remarks").replaceChildren(...study.remarks.map((line) => made("li", line)));
  $("metric").textContent = `${study.metric} over steps`;
  showTrials(study);
  showCurves(study);
  showDevices(study);
  showTimeline(study);
}

const isOver = (trial) => ["finished", "failed", "pruned", "stopped"].includes(trial.state);

function showTrials(study) {
  const header = [["", false], ["trial", true], ...study.settings.map((name) => [name, true]),
    ["how", false], ["state", false], ["step", true], ["loss", true], [study.metric, true],
    ["took", true], ["", false]];
  const rows = study.trials.map((trial) => {
    const swatch = made("span", undefined, "swatch");
    swatch.style.background = color(trial.number);
    const steps = trial.steps ? `${trial.step}/${trial.steps}` : String(trial.step);
    const line = row(header, [swatch, String(trial.number),
      ...study.settings.map((name) => number(trial.hp[name])), trial.how, trial.state, steps,
      number(trial.loss), number(trial.metrics[study.metric]),
      trial.step ? seconds(trial.seconds) : "-", trial.error]);
    line.children[3 + study.settings.length].classList.add(trial.state.replace(" ", "-"));
    line.lastElementChild.classList.add("failed");
    line.classList.toggle("chosen", trial.number === chosen.trial);
    line.addEventListener("click", () => { choose(chosen.study, trial.number); });
    return line;
  });
  $("trials").closest("section").hidden = !rows.length;
  table("trials", header, rows);
}

function showDevices(study) {
  const header = [["device", false], ["peak", true], ["budget", true], ["predicted", true],
    ["busy", true], ["restarts", true]];
  const rows = study.devices.map((device) => row(header, [device.name, bytes(device.peak_bytes),
    bytes(device.budget_bytes), bytes(device.predicted_bytes),
    device.busy === null ? "-" : `${(100 * device.busy).toFixed(0)}%`, String(device.restarts)]));
  $("devices").closest("section").hidden = !rows.length;
  table("devices", header, rows);
}

// The least and the greatest value to draw. Curves that are far from the better half leave the picture,
// which they would flatten.
function range(curves, mode) {
  const sign = mode === "min" ? 1 : -1, last = (curve) => sign * curve.points[curve.points.length - 1][1];
  const better = [...curves].sort((a, b) => last(a) - last(b)).slice(0, Math.ceil(curves.length / 2));
  const ends = (some) => {
    const values = some.flatMap((curve) => curve.points.map((p) => p[1]));
    return [Math.min(...values), Math.max(...values)];
  };
  const [low, high] = ends(curves), [least, most] = ends(better);
  if (most - least && high - low > 5 * (most - least)) return mode === "min" ? [low, most] : [least, high];
  return [low, high];
}

function showCurves(study) {
  const room = { left: 62, right: 10, top: 8, bottom: 24, width: 900, height: 260 };
  const curves = study.curves
    .map((curve) => ({ ...curve, points: curve.points.filter((p) => typeof p[1] === "number") }))
    .filter((curve) => curve.points.length);
  const all = curves.flatMap((curve) => curve.points);
  $("curves").closest("section").hidden = !all.length;
  if (!all.length) return;
  const steps = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  const values = range(curves, study.mode);
  const across = (step) => room.left + ((step - steps[0]) / (steps[1] - steps[0] || 1)) * (room.width - room.left - room.right);
  const up = (value) => {
    const part = Math.max(-9, Math.min(9, (value - values[0]) / (values[1] - values[0] || 1)));  // no renderer draws to 1e9
    return room.height - room.bottom - part * (room.height - room.top - room.bottom);
  };
  const parts = [], marked = new Set();
  const inside = drawn("clipPath", { id: "inside" });
  inside.append(drawn("rect", { x: room.left - 2, y: room.top - 2, width: room.width - room.left - room.right + 4, height: room.height - room.top - room.bottom + 4 }));
  parts.push(inside);
  for (let tick = 0; tick <= 4; tick += 1) {
    const value = values[0] + (tick / 4) * (values[1] - values[0]);
    parts.push(drawn("line", { x1: room.left, x2: room.width - room.right, y1: up(value), y2: up(value), class: "axis" }));
    parts.push(drawn("text", { x: room.left - 6, y: up(value) + 4, "text-anchor": "end" }, number(value)));
    const step = Math.round(steps[0] + (tick / 4) * (steps[1] - steps[0]));
    if (marked.has(step)) continue;
    marked.add(step);
    parts.push(drawn("text", { x: across(step), y: room.height - 6, "text-anchor": tick === 4 ? "end" : "middle" }, String(step)));
  }
  for (const curve of curves) {
    const points = curve.points.map(([step, value]) => `${across(step).toFixed(1)},${up(value).toFixed(1)}`);
    if (points.length === 1) {
      const [x, y] = points[0].split(",");
      parts.push(drawn("circle", { cx: x, cy: y, r: 3, fill: color(curve.trial) }));
    }
    const line = drawn("polyline", { points: points.join(" "), stroke: color(curve.trial), "clip-path": "url(#inside)" });
    if (curve.trial === chosen.trial) line.classList.add("chosen");
    line.append(drawn("title", {}, `trial ${curve.trial}`));
    parts.push(line);
  }
  $("curves").replaceChildren(...parts);
}

function showTimeline(study) {
  const isThere = study.devices.some((device) => device.busy !== null) && study.state !== "running";
  $("timeline").hidden = !isThere;
  const version = isThere ? `${study.study} ${study.state} ${study.seconds}` : null;
  if (!isThere || version === chosen.chart) return;
  chosen.chart = version;
  $("timeline").querySelector("img").src =
    `api/studies/${encodeURIComponent(chosen.study)}/chart.svg?${Date.now()}`;
}

function showTrial(trial) {
  const place = $("trial");
  place.hidden = !trial;
  if (!trial) return;
  place.querySelector("h3").textContent = `Trial ${trial.number}`;
  const [text, log] = place.querySelectorAll("pre");
  text.textContent = trial.text;
  log.textContent = trial.log.join("") || "nothing";
}

// ---------------------------------------------------------------- what is asked for, and when

// The address says what is shown: it can be kept, and the browser's way back works.
function choose(name, trial = null) {
  location.hash = encodeURIComponent(name) + (trial === null ? "" : `/${trial}`);
}

function readAddress() {
  const [name, trial] = location.hash.slice(1).split("/");
  chosen.study = name ? decodeURIComponent(name) : null;
  chosen.trial = /^[0-9]+$/.test(trial || "") ? Number(trial) : null;
}

async function refresh() {
  try {
    const found = await ask("api/studies");
    const names = found.studies.map((study) => study.name);
    if (!names.includes(chosen.study)) { chosen.study = names[0] || null; chosen.trial = null; }
    if (chosen.drawn !== chosen.study) { chosen.drawn = chosen.study; chosen.chart = null; }
    showStudies(found);
    if (chosen.study) {
      const path = `api/studies/${encodeURIComponent(chosen.study)}`;
      showStudy(await ask(path));
      showTrial(chosen.trial === null ? null : await ask(`${path}/trials/${chosen.trial}`));
    } else {
      $("study").hidden = true;
    }
    $("trouble").hidden = true;
  } catch (error) {
    $("trouble").textContent = error instanceof TypeError ? "shoal ui has ended." : error.message;
    $("trouble").hidden = false;
  }
}

async function follow() {
  if (!document.hidden) await refresh();
  setTimeout(follow, EVERY_MS);
}

window.addEventListener("hashchange", () => { readAddress(); refresh(); });
readAddress();
follow();
