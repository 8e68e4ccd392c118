"use strict";
// Polls /statusz and /history and draws them. Text from the daemon is set only by textContent and setAttribute, so a
// label that looks like markup is shown as text.

const STATUS_MS = 2000, HISTORY_MS = 5000, TIMEOUT_MS = 5000, COLUMNS_MAX = 120, KEPT_S = 3600, FAULTS_SHOWN = 15, PROBLEMS_SHOWN = 10;
const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);
let token = "", instance = "", rows = [], faults = [], sampleS = 5, answered = 0, bounds = [], missed = {};

// Making elements

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Values

const whole = new Intl.NumberFormat("en");
const count = (value) => whole.format(value);

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit++; }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

function seconds(value) {
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${+(value * 1e3).toPrecision(3)} ms`;
  if (value < 120) return `${+value.toPrecision(3)} s`;
  const minutes = Math.floor(value / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  return days ? `${days} d ${hours % 24} h` : hours ? `${hours} h ${minutes % 60} min` : `${minutes} min`;
}

const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");
const percent = (share) => `${Math.round(share * 100)} %`;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const named = (store, label) => `${store} (${label})`;
const total = (mapping) => sum(Object.values(mapping));

function quantile(latency, share) {
  const calls = sum(latency.counts);
  if (!calls) return "none yet";
  let seen = 0, place = 0;
  while ((seen += latency.counts[place]) < share * calls) place++;
  return place < bounds.length ? `≤ ${seconds(bounds[place])}` : `> ${seconds(bounds[bounds.length - 1])}`;
}

// A cell or fact: the shown text, with the exact value as its title.
const exact = (shown, value, path = "") => ({shown, title: String(value), path});
const size = (value, path) => exact(bytes(value), `${count(value)} bytes`, path);
const number = (value, path) => exact(count(value), count(value), path);

function put(element, value) {
  const cell = typeof value === "object" ? value : {shown: value};
  setText(element, cell.shown);
  for (const [name, text] of [["title", cell.title], ["data-path", cell.path]]) {
    if (text) element.setAttribute(name, text); else element.removeAttribute(name);
  }
}

// Fill a table in place: the cells stay and get new text, so a selection or a screen reader keeps its position.
function fill(id, heads, lines, empty) {
  const table = $(id);
  if (!table.tHead) {
    const row = make("tr", {}, ...heads.map(([head, kind]) => make("th", {scope: "col", class: kind || ""}, head)));
    table.append(make("thead", {}, row), make("tbody"), make("caption", {class: "muted"}, empty));
  }
  table.caption.hidden = lines.length > 0;
  table.tHead.hidden = !lines.length;
  const body = table.tBodies[0];
  while (body.rows.length > lines.length) body.deleteRow(-1);
  lines.forEach((line, at) => {
    const row = body.rows[at] || body.insertRow();
    line.forEach((value, column) => {
      const [head, kind] = heads[column];
      const cell = row.cells[column] || row.insertCell();
      cell.dataset.label = head;
      cell.className = `${kind || ""} ${value.tone || ""}`.trim();
      put(cell, value);
    });
  });
}

// The current state

const BREAKERS = {closed: ["● closed", "good"], half_open: ["◐ half open", "warn"], open: ["■ open", "bad"]};

function storesOf(status) {
  return status.namespaces.flatMap((namespace, at) => namespace.stores.map((store, place) => (
    {store, namespace, path: `namespaces.${at}.stores.${place}`}
  )));
}

const HEALTH = {keeps_nothing: "keeps nothing", failing: "cannot be read", partly: "works only in part"};

// Return the current problems as sentences: of stores, then of namespaces and of engines.
function problemsOf(status) {
  const found = [], affected = new Map(); // each problem of a store, with the namespaces that it affects
  for (const {store, namespace} of storesOf(status)) {
    const where = store.name, health = store.health, words = HEALTH[health.state];
    const add = (problem, more = "", key = problem) => {
      if (!affected.has(key)) affected.set(key, {problem, more, labels: []});
      affected.get(key).labels.push(namespace.label);
    };
    if (words) add(`${where} ${words} since ${clock(health.since_s)}`, `: ${health.what}. ${health.advice}.`, `${where} ${words} ${health.cause}`);
    for (const [direction, breaker] of Object.entries(store.guard?.breakers ?? {})) {
      const calls = `${where}: ${direction}s`;
      if (health.state === (direction === "write" ? "keeps_nothing" : "failing")) continue; // told above
      if (breaker.override === "off") add(`${calls} are forced off`);
      else if (breaker.state === "open") add(`${calls} are not made; the breaker is open (${breaker.reason})`);
      else if (breaker.state === "half_open") add(`${calls} are tried again; the breaker is half open`);
    }
    if (store.guard?.overdue_calls) add(`${where}: ${store.guard.overdue_calls} calls hang past their deadline`);
  }
  for (const {problem, more, labels} of affected.values()) {
    const names = labels.length > 3 ? `${labels.length} namespaces` : labels.join(", ");
    found.push(more ? `${problem} (${names})${more}` : `${problem}. In ${names}`);
  }
  for (const namespace of status.namespaces) {
    if (!namespace.stores.length) found.push(`${namespace.label}: no store is attached`);
  }
  for (const client of status.clients) {
    if (!client.is_alive) found.push(`engine ${client.name} is gone; its memory waits for ${client.operations} operations`);
  }
  return found;
}

function showTiers(status) {
  const pool = status.pool, boxes = document.querySelector(".tiers");
  const tiers = [{name: "Host pool", used: size(pool.used_bytes, "pool.used_bytes"), bytes: pool.used_bytes,
    capacity: pool.capacity_bytes, capacityPath: "pool.capacity_bytes", pinned: pool.pinned_bytes,
    more: pool.capacity_bytes ? `${count(pool.pages)} pages, ${bytes(pool.pinned_bytes)} pinned` : "no pool is configured"}];
  // Each namespace reports the whole of a store that they share, so show the largest report once.
  const stores = new Map();
  for (const found of storesOf(status)) {
    const known = stores.get(found.store.name);
    if (!known || (found.store.usage?.bytes ?? -1) > (known.store.usage?.bytes ?? -1)) stores.set(found.store.name, found);
  }
  for (const {store, path} of stores.values()) {
    const usage = store.usage, name = store.name;
    tiers.push(usage === null ? {name, used: "", bytes: 0, capacity: 0, pinned: 0, more: "usage is not known yet"} : {
      name, used: size(usage.bytes, `${path}.usage.bytes`), bytes: usage.bytes, capacity: usage.capacity_bytes ?? 0,
      capacityPath: `${path}.usage.capacity_bytes`, pinned: 0, more: `${count(usage.pages)} pages`});
  }
  while (boxes.children.length > tiers.length) boxes.lastChild.remove();
  tiers.forEach((tier, at) => {
    if (!boxes.children[at]) {
      boxes.append(make("div", {class: "tier"}, make("p", {}, make("strong"), make("span")),
        draw("svg", {role: "img"}, draw("rect", {height: "100%", class: "f0"}), draw("rect", {height: "100%", class: "f1"})),
        make("p", {class: "muted"}, make("span"), make("span"))));
    }
    const box = boxes.children[at], [name, share] = box.children[0].children, bar = box.children[1];
    const [used, more] = box.children[2].children, full = tier.capacity ? tier.bytes / tier.capacity : 0;
    setText(name, tier.name);
    setText(share, tier.capacity ? `${percent(full)} full` : "");
    bar.toggleAttribute("hidden", !tier.capacity);
    bar.setAttribute("aria-label", `${tier.name}: ${percent(full)} of ${bytes(tier.capacity)} in use`);
    bar.children[0].setAttribute("width", `${Math.min(100, full * 100)}%`);
    bar.children[1].setAttribute("width", `${tier.capacity ? Math.min(100, tier.pinned / tier.capacity * 100) : 0}%`);
    const capacity = make("span");
    put(capacity, tier.capacity ? size(tier.capacity, tier.capacityPath) : "");
    const now = make("span");
    put(now, tier.used);
    used.replaceChildren(...(tier.capacity ? [now, " of ", capacity] : [now]));
    setText(more, tier.capacity || !tier.used.shown || !at ? tier.more : `${tier.more}; the server sets the limit`);
  });
}

function showTables(status) {
  fill("guards", [["Store", "name"], ["Reads", "state-cell"], ["Writes", "state-cell"], ["Opened", "n"], ["Last reason"], ["Calls in flight", "n"],
    ["Bytes in flight", "n"], ["Overdue", "n"], ["Waiting copies", "n"]],
  storesOf(status).map(({store, namespace, path}) => {
    const guard = store.guard, copies = namespace.copies[store.name];
    const waiting = copies ? number(copies.waiting) : "";
    const name = named(store.name, namespace.label);
    const none = store.health.cause === "not_open" ? {shown: "■ not open", tone: "bad"} : "no guard";
    if (!guard) return [name, none, none, "", "", "", "", "", waiting];
    const shown = (direction) => {
      const {state, override} = guard.breakers[direction], [text, tone] = BREAKERS[state];
      if (direction === "write" && state === "closed" && store.health.state === "keeps_nothing") return {shown: "■ keeps nothing", tone: "bad"};
      return {shown: override === "auto" ? text : `${text} (operator: ${override})`, tone, path: `${path}.guard.breakers.${direction}.state`};
    };
    const breakers = Object.entries(guard.breakers).filter(([, breaker]) => breaker.reason);
    return [name, shown("read"), shown("write"),
      number(sum(Object.values(guard.breakers).map((breaker) => breaker.opens))),
      breakers.map(([direction, breaker]) => `${direction}: ${breaker.reason}`).join(", ") || "none",
      number(guard.in_flight_calls, `${path}.guard.in_flight_calls`), size(guard.in_flight_bytes, `${path}.guard.in_flight_bytes`),
      number(guard.overdue_calls, `${path}.guard.overdue_calls`), waiting];
  }), "No store is open: no engine has opened a namespace, or its store is detached.");
  fill("hot", [["Prefix ends at page"], ["Namespace", "name"], ["Pages", "n"], ["Uses", "n"]],
    status.hot.map((hot, at) => [hot.page, hot.label, number(hot.pages, `hot.${at}.pages`), number(hot.hits, `hot.${at}.hits`)]),
    "No prefix has been used twice yet.");
  const operations = [...new Set([...Object.keys(status.requests), ...Object.keys(status.latency)])].sort();
  fill("operations", [["Operation"], ["Answers", "n"], ["Errors", "n"], ["p50", "n"], ["p99", "n"]],
    operations.map((operation) => {
      const answers = status.requests[operation] ?? {}, latency = status.latency[operation];
      const failed = sum(Object.entries(answers).filter(([code]) => code >= 400).map(([, times]) => times));
      return [operation, number(total(answers)), {...number(failed), tone: failed ? "warn" : ""},
        latency ? quantile(latency, 0.5) : "", latency ? quantile(latency, 0.99) : ""];
    }), "No request yet.");
  fill("namespaces", [["Namespace", "name"], ["Digest"], ["Weights", "n"], ["Page", "n"], ["In the pool", "n"], ["Quota", "n"],
    ["Pool", "n"], ["Shared", "n"], ["Store", "n"], ["Missed", "n"], ["Damaged", "n"]],
  status.namespaces.map((namespace, at) => {
    const path = `namespaces.${at}`, sharing = namespace.sharing, damaged = sum(namespace.stores.map((s) => total(s.statistics.corrupt)));
    return [namespace.label, exact(namespace.namespace.slice(0, 12), namespace.namespace), number(namespace.weights_epoch),
      size(namespace.frame_bytes), size(namespace.pool_bytes, `${path}.pool_bytes`),
      namespace.quota_bytes === null ? "none" : size(namespace.quota_bytes),
      number(sharing.pool_hits, `${path}.sharing.pool_hits`), number(sharing.shared_reads, `${path}.sharing.shared_reads`),
      number(sharing.store_hits, `${path}.sharing.store_hits`), number(sharing.misses, `${path}.sharing.misses`),
      {...number(damaged), tone: damaged ? "bad" : ""}];
  }), "No engine has opened a namespace yet.");
  fill("clients", [["Memory"], ["Size", "n"], ["Operations in flight", "n"], ["State"]],
    status.clients.map((client) => [client.name, size(client.pages * client.frame_bytes), number(client.operations),
      client.is_alive ? "● alive" : {shown: "■ gone", tone: "bad"}]),
    "No engine on this host shares memory with the daemon.");
}

const TONES = {ready: ["● ready", "good"], degraded: ["◐ degraded", "warn"], starting: ["◐ starting", "warn"], draining: ["◐ draining", "warn"]};

function showState(name, tone) {
  setText($("state"), name);
  $("state").className = `state ${tone}`;
}

function showBanner(text, tone) {
  $("banner").hidden = !text;
  $("banner").className = `banner ${tone}`;
  setText($("banner"), text);
}

function show(status) {
  if (instance && instance !== status.instance) rows = faults = [];
  instance = status.instance;
  bounds = status.latency_bounds_s;
  const isDegraded = status.state === "ready" && storesOf(status).some(({store}) => HEALTH[store.health.state]);
  showState(...(TONES[isDegraded ? "degraded" : status.state] ?? [status.state, "warn"]));
  showBanner(status.state === "draining" ? "The daemon is draining: it completes requests in flight and accepts no new ones."
    : status.state === "starting" ? "The daemon is starting and does not accept requests yet." : "", "warn");
  const facts = {Up: seconds(status.uptime_s), "Run": status.instance.slice(0, 8),
    "Engines": number(status.clients.length), "Connections": number(total(status.connections)),
    "In flight": number(status.in_flight_requests, "in_flight_requests"), "Refused": number(total(status.refused))};
  const list = $("facts");
  for (const [name, value] of Object.entries(facts)) {
    let pair = [...list.children].find((child) => child.firstChild.textContent === name);
    if (!pair) list.append(pair = make("div", {}, make("dt", {}, name), make("dd")));
    put(pair.lastChild, value);
  }
  const problems = problemsOf(status), items = $("problems").querySelector("ul");
  const texts = problems.length ? problems.slice(0, PROBLEMS_SHOWN).map((text) => `▲ ${text}`) : ["● None: no store has a problem."];
  if (problems.length > PROBLEMS_SHOWN) texts.push(`▲ and ${problems.length - PROBLEMS_SHOWN} more, in the tables below`);
  if ([...items.children].map((item) => item.textContent).join("\n") !== texts.join("\n")) {
    items.replaceChildren(...texts.map((text) => make("li", {class: problems.length ? "bad" : "good"}, text)));
  }
  document.title = `${problems.length ? `(${problems.length}) ` : ""}hicache: ${status.state}`;
  showTiers(status);
  showTables(status);
  missed = {};
  for (const {sharing} of status.namespaces) {
    for (const [reason, details] of Object.entries(sharing.missed)) {
      for (const [detail, pages] of Object.entries(details)) add(missed, detail ? `${reason}/${detail}` : reason, pages);
    }
  }
  showMissed();
}

// The last hour

const MISSED = {new: "not seen before, or forgotten", "evicted/host": "evicted from the pool, and in no store",
  "evicted/storage": "evicted by a store", "evicted/cleared": "removed on request", "not_stored/full": "the store was full",
  "not_stored/paused": "the store was paused", "not_stored/failed": "the store failed to write it",
  "late/lookup": "the lookup took too long", "late/read": "the read took too long", unavailable: "the store was not available",
  damaged: "it failed verification", expired: "older than max_age"};
const add = (counts, name, pages) => { counts[name] = (counts[name] ?? 0) + pages; };

function showMissed() {
  const hour = {};
  rows.forEach((row) => Object.entries(row.missed).forEach(([name, pages]) => add(hour, name, pages)));
  const all = total(hour), of = (counts, name) => counts[name] ?? 0;
  const names = Object.keys({...missed, ...hour}).sort((one, other) => of(hour, other) - of(hour, one) || of(missed, other) - of(missed, one));
  fill("missed", [["Reason"], ["What happened"], ["Pages, last hour", "n"], ["Share", "n"], ["Pages since start", "n"]],
    names.map((name) => [name.replace("/", ": ").replace("_", " "), MISSED[name] ?? "", number(of(hour, name)),
      all ? percent(of(hour, name) / all) : "", number(of(missed, name))]), "No page was missed.");
}

const FAULTS = {damage: "page damaged", breaker_opened: "breaker opened", failed_calls: "calls failed",
  rejected: "pages rejected", limit: "request rejected", client_lost: "engine lost"};

function showFaults() {
  fill("faults", [["Time"], ["What"], ["Where", "name"], ["Times", "n"]],
    faults.slice(0, FAULTS_SHOWN).map((fault) => [
      exact(fault.first === fault.last ? clock(fault.last) : `${clock(fault.first)} to ${clock(fault.last)}`, new Date(fault.last * 1000).toISOString()),
      `${FAULTS[fault.kind] ?? fault.kind} (${fault.detail})`, fault.store ? named(fault.store, fault.namespace) : "the daemon", number(fault.count)]),
    "None recorded.");
  setText($("faults-h"), faults.length > FAULTS_SHOWN ? `Recent faults: the latest ${FAULTS_SHOWN} of ${faults.length}` : "Recent faults");
}

// The samples of the chosen time, joined into at most COLUMNS_MAX columns.
function columns() {
  const end = rows.length ? rows[rows.length - 1].time : 0, kept = rows.length ? end - rows[0].time + sampleS : 0;
  // Soon after a start, the charts show only the time since then, but at least a minute.
  const span = Math.min(+document.querySelector("#span input:checked").value, Math.max(60, kept));
  const width = Math.max(sampleS, span / COLUMNS_MAX), found = new Map();
  for (const row of rows) {
    if (row.time <= end - span) continue;
    const at = Math.floor((end - row.time) / width + 0.5), known = found.get(at);
    if (!known) { found.set(at, {...row}); continue; }
    for (const name of Object.keys(row)) {
      if (/_(pages|bytes)$|^seconds$/.test(name) && name !== "pool_used_bytes") known[name] += row[name];
      else known[name] = Math.max(known[name], row[name]);
    }
  }
  return {span, end, width, columns: [...found].sort((one, other) => other[0] - one[0]).map(([, column]) => column)};
}

const HIT_SERIES = [["Host pool", "pool_pages"], ["Read of another engine", "shared_pages"], ["Store", "store_pages"]];
const asked = (column) => sum(HIT_SERIES.map(([, name]) => column[name])) + column.missed_pages;
const rate = (name) => (column) => column.seconds ? column[name] / column.seconds : 0;
const perSecond = (value) => `${bytes(value)}/s`;
const CHARTS = [
  {id: "hits", unit: percent, stacked: true, ceiling: () => 1, gap: (column) => !asked(column), empty: "No page was read or missed in this time.",
    series: HIT_SERIES.map(([label, name]) => [label, (column) => column[name] / asked(column)]), rest: "Missed",
    figure: (found) => `${percent(1 - sum(found.map((column) => column.missed_pages)) / sum(found.map(asked)))} of ${count(sum(found.map(asked)))} pages`},
  {id: "engines", unit: perSecond, series: [["to engines", rate("sent_bytes")], ["from engines", rate("received_bytes")]]},
  {id: "stores", unit: perSecond, series: [["read from stores", rate("store_read_bytes")], ["written to stores", rate("store_written_bytes")]]},
  {id: "pool", unit: bytes, series: [["in use", (column) => column.pool_used_bytes]]},
  {id: "flight", unit: (value) => count(Math.round(value)), series: [["in flight", (column) => column.requests_in_flight]]},
];

// The next round value for an axis whose half is round too: 2, 4 or 10 times a power of ten; for bytes a power of two.
function ceiling(value, unit) {
  if (unit === bytes || unit === perSecond) return 2 ** Math.ceil(Math.log2(Math.max(value, 1024)));
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * [2, 4, 10].find((step) => step * power >= value);
}

function swatch(chart, at) {
  return chart.stacked ? draw("rect", {width: 22, height: 12, class: `f${at}`}) : draw("path", {d: "M0 6H22", class: `l${at}`});
}

// The elements of a chart that are created once: picture, value at the cursor, legend, table.
function build(chart) {
  const section = $(chart.id), picture = draw("svg", {role: "img", tabindex: "0", "aria-describedby": `${chart.id}-now`});
  chart.now = make("output", {id: `${chart.id}-now`, class: "muted"});
  chart.legend = make("ul", {class: "legend"}, ...chart.series.map(([label], at) => make("li", {},
    draw("svg", {"aria-hidden": "true"}, swatch(chart, at)), make("span", {}, label))));
  if (chart.rest) chart.legend.append(make("li", {}, draw("svg", {"aria-hidden": "true"}, draw("rect", {x: 1, y: 1, width: 20, height: 10, class: "frame"})), make("span", {}, chart.rest)));
  chart.table = make("table", {id: `${chart.id}-table`});
  const details = make("details", {}, make("summary", {}, "As a table"), chart.table);
  details.addEventListener("toggle", () => render(chart));
  chart.picture = picture;
  section.append(picture, chart.now, ...(chart.series.length > 1 ? [chart.legend] : []), details);
  const move = (at) => { chart.at = at; render(chart); };
  picture.addEventListener("pointermove", (event) => move(chart.nearest(event.offsetX)));
  picture.addEventListener("pointerleave", () => move(null));
  picture.addEventListener("blur", () => move(null));
  picture.addEventListener("keydown", (event) => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key], last = chart.shown.length - 1;
    if (!step || last < 0) return;
    event.preventDefault();
    move(Math.min(last, Math.max(0, (chart.at ?? last + (step < 0 ? 1 : 0)) + step)));
  });
}

function render(chart) {
  const {span, end, width, columns: shown} = columns(), picture = chart.picture, unit = chart.unit;
  const box = picture.getBoundingClientRect(), left = 70, right = box.width - 4, top = 8, bottom = box.height - 18;
  const values = chart.series.map(([, value]) => shown.map(value));
  const highest = chart.ceiling ? chart.ceiling() : ceiling(Math.max(0, ...values.flat()), unit);
  const x = (column) => right - (end - column.time) / span * (right - left);
  const y = (value) => bottom - Math.min(1, value / highest) * (bottom - top);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    parts.push(draw("line", {class: "grid", x1: left, x2: right, y1: y(share * highest), y2: y(share * highest)}),
      draw("text", {x: left - 6, y: y(share * highest) + 4, "text-anchor": "end"}, unit(share * highest)));
  }
  if (end) {
    for (const [share, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
      parts.push(draw("text", {x: left + share * (right - left), y: bottom + 14, "text-anchor": anchor},
        clock(end - (1 - share) * span).slice(0, span < 300 ? 8 : 5)));
    }
  }
  if (chart.stacked) {
    const wide = Math.max(1.5, width / span * (right - left) - 0.5);
    shown.forEach((column, at) => {
      let below = 0;
      if (chart.gap(column)) return;
      values.forEach((of, place) => {
        if (of[at]) parts.push(draw("rect", {class: `f${place} mark`, x: Math.max(left, x(column) - wide), width: wide, y: y(below + of[at]), height: y(below) - y(below + of[at])}));
        below += of[at];
      });
    });
  } else {
    values.forEach((of, place) => {
      // A line breaks where samples are missing, because the daemon did not run.
      const steps = shown.map((column, at) => {
        const follows = at && column.time - shown[at - 1].time < 3 * Math.max(width, sampleS);
        return `${follows ? "L" : "M"}${x(column).toFixed(1)} ${y(of[at]).toFixed(1)}`;
      });
      if (shown.length === 1) steps.push("h1");
      if (steps.length) parts.push(draw("path", {class: `l${place} mark`, d: steps.join("")}));
    });
  }
  const used = shown.length && !(chart.gap && shown.every(chart.gap));
  if (chart.at !== null && shown[chart.at]) parts.push(draw("line", {class: "cursor", x1: x(shown[chart.at]), x2: x(shown[chart.at]), y1: top, y2: bottom}));
  picture.replaceChildren(...parts);
  chart.shown = shown;
  chart.nearest = (at) => shown.reduce((best, column, place) => Math.abs(x(column) - at) < Math.abs(x(shown[best]) - at) ? place : best, 0);
  const reading = (at) => {
    if (chart.gap?.(shown[at])) return "no page was read or missed";
    const parts = chart.series.map(([label], place) => `${label} ${unit(values[place][at])}`);
    return [...parts, ...(chart.rest ? [`${chart.rest} ${unit(1 - sum(values.map((of) => of[at])))}`] : [])].join(", ");
  };
  if (chart.figure) setText($(`${chart.id}-figure`), used ? chart.figure(shown) : "");
  const at = chart.at ?? shown.length - 1, last = shown[at];
  const text = !used ? chart.empty ?? "No sample yet." : `${clock(last.time)}: ${reading(at)}`;
  setText(chart.now, text);
  picture.setAttribute("aria-label", `${$(`${chart.id}-h`).textContent}, last ${Math.round(span / 60)} minutes. ${text}`);
  if (chart.table.closest("details").open) {
    const step = Math.ceil(shown.length / 12), places = shown.map((_, place) => place).filter((place) => (shown.length - 1 - place) % step === 0);
    fill(chart.table.id, [["Time"], ...chart.series.map(([label]) => [label, "n"])],
      places.reverse().map((place) => [clock(shown[place].time), ...values.map((of) => chart.gap?.(shown[place]) ? "none" : unit(of[place]))]), "No sample yet.");
  }
}

const renderAll = () => CHARTS.forEach(render);

// Requests

async function ask(path) {
  const headers = token ? {Authorization: `Bearer ${token}`} : {};
  const answer = await fetch(path, {headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS)});
  if (answer.status === 401 || answer.status === 403) $("login").hidden = false;
  if (!answer.ok) throw new Error(answer.status === 401 ? "it requires a token" : `status ${answer.status}`);
  $("login").hidden = true;
  return answer.json();
}

async function pollStatus() {
  try {
    const status = await ask("statusz");
    answered = Date.now() / 1000;
    document.body.classList.remove("stale");
    show(status);
  } catch (error) {
    document.body.classList.add("stale");
    showState("■ unreachable", "bad");
    document.title = "(!) hicache: unreachable";
    const why = error.name === "TimeoutError" ? "no answer in time" : error.name === "TypeError" ? "no connection" : error.message;
    showBanner(`■ The daemon does not answer: ${why}. ${answered ? `The values below are from ${clock(answered)}.` : ""}`, "bad");
  }
}

async function pollHistory() {
  const since = rows.length ? rows[rows.length - 1].time : 0, of = instance;
  let history;
  try { history = await ask(`history?since=${since}`); } catch { return; } // pollStatus shows the error
  if (of !== instance) return; // the daemon was restarted: the next poll reads its rows
  sampleS = history.sample_s;
  const news = history.rows.map((row) => Object.fromEntries(history.columns.map((name, at) => [name, row[at]])));
  rows = rows.concat(news.filter((row) => row.time > since));
  const end = rows.length ? rows[rows.length - 1].time : 0;
  rows = rows.filter((row) => row.time > end - KEPT_S);
  faults = history.faults;
  showFaults();
  showMissed();
  renderAll();
}

// Polls one after the other, so a slow daemon is not overloaded. A hidden page does not poll.
async function every(interval, poll) {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((resume) => setTimeout(resume, interval));
  }
}

function patterns() {
  const defs = draw("defs", {},
    draw("pattern", {id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse"},
      draw("rect", {width: 6, height: 6, class: "back1"}), draw("path", {d: "M-1 7L7 -1M-1 1L1 -1M5 7L7 5", class: "ink1"})),
    draw("pattern", {id: "dots", width: 5, height: 5, patternUnits: "userSpaceOnUse"},
      draw("rect", {width: 5, height: 5, class: "back2"}), draw("circle", {cx: 2.5, cy: 2.5, r: 1.6, class: "ink2"})));
  document.body.append(draw("svg", {width: 0, height: 0, "aria-hidden": "true"}, defs));
}

patterns();
CHARTS.forEach((chart) => { chart.at = null; chart.shown = []; chart.nearest = () => 0; build(chart); });
document.querySelectorAll("#span input").forEach((input) => input.addEventListener("change", renderAll));
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value; // kept only in this page, until it is closed
  $("token").value = "";
  pollStatus().then(pollHistory);
});
addEventListener("resize", renderAll);
document.addEventListener("visibilitychange", () => { if (!document.hidden) pollStatus().then(pollHistory); });
pollStatus().then(() => { every(STATUS_MS, pollStatus); every(HISTORY_MS, pollHistory); });
