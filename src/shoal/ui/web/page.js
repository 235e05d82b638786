"use strict";
// What the server says of studies, put on the page as text. Nothing is loaded from elsewhere.

const EVERY_MS = 2000;
const COLORS = 12, DASHES = 4;  // classes of page.css
const SVG = "http://www.w3.org/2000/svg";
const chosen = { study: null, trial: null, chart: null, isNew: false };

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

// Put new content there, unless it is the same: then what is marked or focused stays so. What had the
// focus has it again in the new content, where something has its key there.
function fill(element, ...content) {
  const draft = element.cloneNode(false);
  draft.append(...content);
  if (draft.innerHTML === element.innerHTML) return;
  const active = document.activeElement;
  const key = element.contains(active) ? active.dataset.key : undefined;
  element.replaceChildren(...draft.childNodes);
  if (key === undefined) return;
  for (const one of element.querySelectorAll("[data-key]")) if (one.dataset.key === key) one.focus();
}

// A tick's value with the digits that the distance to the next one needs.
function tickText(value, step) {
  const size = Math.abs(value);
  if (size && (size < 0.001 || size >= 1e6)) return value.toExponential(1);
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
}

// Round values from low to high, about as many as ``most``.
function ticks(low, high, most, least = 0) {
  if (!(high > low)) return [[low], 10 ** (Math.floor(Math.log10(Math.abs(low) || 1)) - 3)];
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = Math.max(least, [1, 2, 5, 10].map((f) => f * power).find((f) => f * most >= (high - low) * 0.999) || power);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return [found, step];
}

const look = (trial) => `c${trial % COLORS} d${Math.floor(trial / COLORS) % DASHES}`;

// ---------------------------------------------------------------- parts of the page

function table(id, header, rows) {
  const head = made("tr");
  for (const [title, isNumber] of header) {
    const cell = made("th", undefined, isNumber ? "number" : "");
    title.split(/(?<=_)/).forEach((part, index) => cell.append(...(index ? [made("wbr")] : []), part));
    head.append(cell);
  }
  fill($(id).tHead, head);
  fill($(id).tBodies[0], ...rows);
}

function row(header, cells) {
  const line = made("tr");
  cells.forEach((cell, index) => {
    const isNode = cell instanceof Node;
    const kind = header[index][1] ? "number" : "";
    const made_ = made("td", isNode ? undefined : cell, kind);
    if (isNode) made_.append(cell);
    else if (cell.length > 30) made_.title = cell;
    line.append(made_);
  });
  return line;
}

function showStudies(found) {
  $("directory").textContent = found.directory;
  $("none").hidden = found.studies.length > 0;
  const items = found.studies.map((study) => {
    const button = made("button", study.name);
    const words = [`${study.state}: ${study.finished} of ${study.total} trials`];
    if (study.pruned) words.push(`${study.pruned} pruned`);
    if (study.failed) words.push(`${study.failed} failed`);
    if (study.best_value !== "-") words.push(`${study.metric} ${study.best_value}`);
    button.dataset.key = study.name;
    button.append(made("small", study.error || words.join(", ")));
    button.setAttribute("aria-current", String(study.name === chosen.study));
    button.addEventListener("click", () => { choose(study.name); });
    const item = made("li");
    item.append(button);
    return item;
  });
  fill($("studies"), ...items);
}

function showStudy(study) {
  $("study").hidden = false;
  $("name").textContent = study.study;
  document.title = `${study.study} - shoal`;
  const counts = {};
  for (const trial of study.trials) counts[trial.state] = (counts[trial.state] || 0) + 1;
  const words = Object.entries(counts).map(([state, count]) => `${count} ${state}`);
  $("line").textContent = [[study.state, words.join(", ")].filter(Boolean).join(": "),
    study.time, study.source].filter(Boolean).join("; ");
  const share = study.total_steps ? Math.min(100, (100 * study.steps_done) / study.total_steps) : 0;
  $("bar").hidden = !study.total_steps;
  $("bar").firstElementChild.style.width = `${share}%`;
  $("bar").setAttribute("aria-valuenow", share.toFixed(0));
  fill($("remarks"), ...study.remarks.map(remark));
  $("metric").textContent = `${study.metric} over steps`;
  showTrials(study);
  showCurves(study);
  showDevices(study);
  showTimeline(study);
}

// "warning   words": the label and what it says.
function remark(line) {
  const [, label, words] = line.match(/^(goes on|no best|[a-z]+) +(.*)$/) || [line, "", line];
  const item = made("li", "", ["unfused", "replanned", "goes on"].includes(label) ? "dim" : "");
  item.append(made("strong", label), ` ${words}`);
  return item;
}

function mark(trial) {
  const swatch = drawn("svg", { class: `swatch ${look(trial)}`, viewBox: "0 0 22 10", "aria-hidden": "true" });
  swatch.append(drawn("polyline", { points: "0,5 22,5" }));
  return swatch;
}

function showTrials(study) {
  const isNumber = (name) => study.trials.every((trial) => ["number", "undefined"].includes(typeof trial.hp[name]));
  const taken = study.trials.some((trial) => trial.from !== "-") ? ["from"] : [];
  const header = [["", false], ["trial", true], ...study.settings.map((name) => [name, isNumber(name)]),
    ...taken.map((name) => [name, false]), ["how", false], ["state", false], ["step", true],
    ["loss", true], [study.metric, true], ["took", true], ["", false]];
  const rows = study.trials.map((trial) => {
    const button = made("button", String(trial.number)), cells = trial.cells;
    button.dataset.key = String(trial.number);
    button.setAttribute("aria-label", `trial ${trial.number}`);
    button.setAttribute("aria-expanded", String(trial.number === chosen.trial));
    const line = row(header, [mark(trial.number), button,
      ...study.settings.map((name) => trial.settings[name] ?? "-"),
      ...taken.map((name) => trial[name]), trial.how, trial.state, cells.step, cells.loss,
      cells.metric, cells.took, trial.error]);
    line.children[3 + study.settings.length + taken.length].classList.add(trial.state.replace(" ", "-"));
    line.lastElementChild.classList.add("failed");
    line.classList.toggle("chosen", trial.number === chosen.trial);
    line.addEventListener("click", () => { toggle(trial.number); });  // the button's too
    return line;
  });
  $("trials").closest("section").hidden = !rows.length;
  table("trials", header, rows);
}

function showDevices(study) {
  const header = study.device_header.map((name, index) => [name, index > 0]);
  const rows = study.devices.map((device) => row(header, device.cells));
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
  const width = $("curves").clientWidth || 900;
  const room = { left: 62, right: 12, top: 8, bottom: 38, width, height: 260 };
  const curves = study.curves
    .map((curve) => ({ ...curve, points: curve.points.filter((p) => typeof p[1] === "number") }))
    .filter((curve) => curve.points.length);
  const all = curves.flatMap((curve) => curve.points);
  $("curves").closest("section").hidden = !all.length;
  if (!all.length) return;
  const steps = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  const values = range(curves, study.mode);
  const right = room.width - room.right, floor = room.height - room.bottom;
  const across = (step) => room.left + (steps[1] > steps[0] ? (step - steps[0]) / (steps[1] - steps[0]) : 0.5) * (right - room.left);
  const up = (value) => {
    const part = Math.max(-9, Math.min(9, values[1] > values[0] ? (value - values[0]) / (values[1] - values[0]) : 0.5));  // no renderer draws to 1e9
    return floor - part * (floor - room.top);
  };
  const inside = drawn("clipPath", { id: "inside" });
  inside.append(drawn("rect", { x: room.left - 4, y: room.top - 4, width: right - room.left + 8, height: floor - room.top + 8 }));
  const parts = [inside, drawn("text", { x: (room.left + right) / 2, y: room.height - 4, "text-anchor": "middle" }, "step")];
  const [marks, apart] = ticks(...values, 5);
  for (const value of marks) {
    parts.push(drawn("line", { x1: room.left, x2: right, y1: up(value), y2: up(value), class: "axis" }));
    parts.push(drawn("text", { x: room.left - 6, y: up(value) + 4, "text-anchor": "end" }, tickText(value, apart)));
  }
  for (const step of ticks(...steps, Math.max(2, Math.floor(room.width / 110)), 1)[0]) {
    parts.push(drawn("text", { x: across(step), y: floor + 16, "text-anchor": "middle" }, String(Math.round(step))));
  }
  for (const curve of curves) {
    const points = curve.points.map(([step, value]) => `${across(step).toFixed(1)},${up(value).toFixed(1)}`);
    if (points.length === 1) {
      const [x, y] = points[0].split(",");
      parts.push(drawn("circle", { cx: x, cy: y, r: 3, class: look(curve.trial), "clip-path": "url(#inside)" }));
    }
    const line = drawn("polyline", { points: points.join(" "), class: look(curve.trial), "clip-path": "url(#inside)" });
    line.classList.toggle("chosen", curve.trial === chosen.trial);
    line.append(drawn("title", {}, `trial ${curve.trial}`));
    line.addEventListener("click", () => { toggle(curve.trial); });
    parts.push(line);
  }
  $("curves").setAttribute("viewBox", `0 0 ${room.width} ${room.height}`);
  fill($("curves"), ...parts);
}

function showTimeline(study) {
  const isThere = study.devices.some((device) => device.busy !== null) && study.state !== "running";
  $("timeline").hidden = !isThere;
  const version = isThere ? `${study.study} ${study.state} ${study.seconds}` : null;
  if (!isThere || version === chosen.chart) return;
  chosen.chart = version;
  const chart = `api/studies/${encodeURIComponent(chosen.study)}/chart.svg`;
  $("timeline").querySelector("a").href = chart;
  $("timeline").querySelector("img").src = `${chart}?${Date.now()}`;
}

function showTrial(trial) {
  const place = $("trial");
  place.hidden = !trial;
  if (!trial) return;
  place.querySelector("h3").textContent = `Trial ${trial.number}`;
  const [text, log] = place.querySelectorAll("pre");
  const [words, ...rows] = trial.text.split("\n\n");  // tables and tracebacks keep their lines
  fill(text, words, ...rows.map((part) => made("span", part, "rows")));
  fill(log, trial.log.join("") || "nothing");
  if (chosen.isNew) place.scrollIntoView({ block: "nearest" });
  chosen.isNew = false;
}

// ---------------------------------------------------------------- what is asked for, and when

// The address says what is shown: it can be kept, and the browser's way back works.
function choose(name, trial = null) {
  location.hash = encodeURIComponent(name) + (trial === null ? "" : `/${trial}`);
}

// A trial, in sight; the one that is open is closed.
function toggle(trial) {
  chosen.isNew = trial !== chosen.trial;
  choose(chosen.study, chosen.isNew ? trial : null);
}

function readAddress() {
  const [name, trial] = location.hash.slice(1).split("/");
  chosen.study = name ? decodeURIComponent(name) : null;
  chosen.trial = /^[0-9]+$/.test(trial || "") ? Number(trial) : null;
}

// An answer that comes when something else is asked for already is left to who asks for that.
let asked = 0;

async function refresh() {
  const mine = asked += 1;
  try {
    const found = await ask("api/studies");
    if (mine !== asked) return;
    const names = found.studies.map((study) => study.name);
    if (!names.includes(chosen.study)) { chosen.study = names[0] || null; chosen.trial = null; }
    if (chosen.drawn !== chosen.study) {
      chosen.drawn = chosen.study; chosen.chart = null;
      document.querySelector(".tall").scrollTop = 0;
    }
    showStudies(found);
    if (chosen.study) {
      const path = `api/studies/${encodeURIComponent(chosen.study)}`;
      const study = await ask(path);
      if (mine !== asked) return;
      showStudy(study);
      const trial = chosen.trial === null ? null : await ask(`${path}/trials/${chosen.trial}`);
      if (mine !== asked) return;
      showTrial(trial);
    } else {
      $("study").hidden = true;
    }
    $("trouble").hidden = true;
  } catch (error) {
    if (mine !== asked) return;
    $("trouble").textContent = error instanceof TypeError ? "shoal ui has ended." : error.message;
    $("trouble").hidden = false;
  }
}

async function follow() {
  if (!document.hidden) await refresh();
  setTimeout(follow, EVERY_MS);
}

window.addEventListener("hashchange", () => { readAddress(); refresh(); });
let resized;
window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(refresh, 200); });
readAddress();
follow();
