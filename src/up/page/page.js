// The page of a Baton service. It asks the same paths as curl and `baton top`, shows nothing but text, and keeps the keys in
// this tab's session alone.
"use strict";

const LOOK_EVERY_MS = 2000;
const ANSWER_WITHIN_MS = 5000;
const RATE_WINDOW_MS = 10000;
const DECISIONS_KEPT = 40;
// Lines between more nodes than these would hide the picture.
const LIKELY_LINES_MAX = 16;

const $ = (id) => document.getElementById(id);

// An element with attributes and children; text is only ever text.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}
function table(caption, heads, rows, numbersFrom) {
  const kind = (at) => (at >= numbersFrom ? { class: "n" } : {});
  const head = heads.map((text, at) => el("th", { scope: "col", ...kind(at) }, text));
  const body = rows.map(({ cells, chosen }) =>
    el("tr", chosen ? { class: "chosen" } : {}, ...cells.map((cell, at) => el(at ? "td" : "th", at ? kind(at) : { scope: "row" }, cell))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body)));
}
// Draws a part again only where its data changed, so that focus, selection and scrolling stay.
const drawn = {};
function part(id, data, draw) {
  const now = JSON.stringify(data);
  if (drawn[id] === now) return;
  drawn[id] = now;
  $(id).replaceChildren(...draw(data));
}

// Rounded down: one late request of thousands is not 100 %.
const percent = (share) => `${Math.floor(1000 * share + 1e-6) / 10} %`;
const count = (number) => number.toLocaleString("en-US");
function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (number >= 1024 && at < units.length - 1) { number /= 1024; at += 1; }
  return `${number.toFixed(at && number < 100 ? 1 : 0)} ${units[at]}`;
}
// The conductor's "never" is 2^52 µs.
function time(us) {
  if (us === null || us === undefined || us >= 2 ** 52) return "–";
  if (us < 1e6) return `${(us / 1e3).toFixed(us < 1e5 ? 1 : 0)} ms`;
  if (us < 120e6) return `${(us / 1e6).toFixed(1)} s`;
  const minutes = Math.floor(us / 60e6);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// Asking

const keys = {
  get: (name) => sessionStorage.getItem(`baton.${name}`) || "",
  set: (name, key) => (key ? sessionStorage.setItem(`baton.${name}`, key) : sessionStorage.removeItem(`baton.${name}`)),
};
function headers(key, more = {}) {
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}
async function ask(path, { key, method = "GET", body, basis } = {}) {
  const reply = await fetch(path, { method, body, headers: headers(key, basis ? { "if-match": basis } : {}), signal: AbortSignal.timeout(ANSWER_WITHIN_MS), cache: "no-store" });
  const text = await reply.text();
  return { status: reply.status, ok: reply.ok, text, tag: reply.headers.get("etag"), why: reply.ok ? "" : reason(text) || `HTTP ${reply.status}` };
}
const operate = (path, more) => ask(path, { ...more, key: keys.get("admin") });
function reason(text) {
  try { return JSON.parse(text).error.message; } catch { return text.slice(0, 300); }
}
function lost(error) {
  return error.name === "TimeoutError" ? `no answer within ${ANSWER_WITHIN_MS / 1000} s` : error.message || error.name;
}

// Looking

const looks = [];
let admitted = false;
let seenAt = null;

async function look() {
  try {
    const reply = await operate("/admin/page");
    seenAt = new Date();
    trouble("");
    if (reply.ok) {
      show(JSON.parse(reply.text));
    } else {
      refused(reply);
      const ready = await ask("/ready");
      const { ready: serves, detail } = JSON.parse(ready.text);
      health(serves, detail);
    }
  } catch (error) {
    health(false, "no answer");
    trouble(`No answer from Baton: ${lost(error)}.${seenAt ? ` What is shown is from ${seenAt.toLocaleTimeString()}.` : ""} Trying again every ${LOOK_EVERY_MS / 1000} s.`);
  }
}
function trouble(text) {
  $("trouble").hidden = !text;
  if ($("trouble").textContent !== text) $("trouble").textContent = text;
  document.body.classList.toggle("stale", Boolean(text));
}
function health(ready, detail) {
  const text = `${ready ? "Ready" : "Not ready"}${detail ? `: ${detail}` : ""}`;
  if ($("health").textContent !== text) $("health").textContent = text;
  $("health").className = `pill ${ready ? "good" : "bad"}`;
}
function admit(yes) {
  const changed = admitted !== yes;
  admitted = yes;
  $("admin").hidden = !yes;
  $("key").hidden = yes;
  for (const link of document.querySelectorAll("[data-admin]")) link.hidden = !yes;
  $("key-change").hidden = !(yes && keys.get("admin"));
  if (changed && yes) readPolicy();
}
function refused({ status, why }) {
  const shown = keys.get("admin");
  if (status === 401) {
    keys.set("admin", "");
    if (shown) $("key-why").textContent = "That admin key is wrong. Type the value of service.admin_key of the configuration that this service runs with.";
  } else {
    $("key-why").textContent = `The cluster is not shown: ${why}.`;
  }
  $("key-why").className = shown || status !== 401 ? "bad" : "";
  $("key-form").hidden = status !== 401;
  if (shown && status === 401) $("key-input").focus();
  admit(false);
}
function show(status) {
  const at = Date.now();
  const before = looks.length ? looks[looks.length - 1] : null;
  // Another process answers: nothing of the one before can be compared.
  if (before && status.uptime_us < before.status.uptime_us) looks.length = 0;
  looks.push({ at, status });
  while (looks.length > 2 && at - looks[1].at >= RATE_WINDOW_MS) looks.shift();
  admit(true);
  health(status.ready, status.detail || "no node has attached yet");
  $("uptime").textContent = `up ${time(status.uptime_us)}`;
  figures(status);
  picture(status, looks.length > 1 ? before.status : null);
  part("outside", status.outside, outside);
  part("classes", [status.slo, objectives], ([slo]) => slo.map(classCard));
  part("predictions", status.slo.map(({ class: name, predictions }) => [name, predictions]), predictions);
  part("tiers", tierFigures(status), tiers);
  part("refusals", status.refused, refusals);
  decisions(status.decisions);
  classChoices(status.slo);
}

// Cluster

function figures(status) {
  const first = looks[0];
  const seconds = (looks[looks.length - 1].at - first.at) / 1000;
  const rate = (name) => (seconds > 0 ? Math.max(0, ((status.counters[name] || 0) - (first.status.counters[name] || 0)) / seconds).toFixed(1) : "–");
  const sum = (name) => status.nodes.reduce((total, node) => total + node[name], 0);
  const shown = [
    [count(status.live_requests), "under way"], [count(sum("waiting")), "waiting for a prefill"], [count(sum("running")), "in batches"],
    [rate("arrived"), "requests/s"], [rate("output_tokens"), "tokens/s, as answers end"], [count(status.counters.rejected || 0), "refused since the start"],
  ];
  part("figures", shown, () => shown.map(([number, what]) => el("span", {}, el("b", {}, number), what)));
}

const COLUMNS = [["prefill", "Prefill"], ["both", "Prefill and decode"], ["decode", "Decode"], ["store", "Store"]];

function picture(status, before) {
  const moved = movedBytes(status, before);
  const columns = COLUMNS.map(([role, title]) => [role, title, status.nodes.filter((node) => node.role === role)]);
  part("columns", [columns, [...moved.sent], [...moved.received]], () => columns.filter(([, , nodes]) => nodes.length).map(([role, title, nodes]) => {
    nodes.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    return el("div", { class: `column ${role}` }, el("h3", {}, `${title} (${nodes.length})`),
      el("ul", nodes.length > 4 ? { class: "many" } : {}, ...nodes.map((node) => nodeCard(node, moved))));
  }));
  if (!status.nodes.length) $("columns").replaceChildren(el("p", { class: "empty" }, "No node is attached. Start one with: baton node --name NAME --role prefill --conductor URL"));
  links(status, moved);
}
// What nodes sent and received since the look before.
function movedBytes(status, before) {
  const moved = { sent: new Map(), received: new Map() };
  for (const node of status.nodes) {
    const earlier = before && before.nodes.find((other) => other.name === node.name && other.epoch === node.epoch);
    if (!earlier) continue;
    if (node.handoff_bytes > earlier.handoff_bytes) moved.sent.set(node.instance, node.handoff_bytes - earlier.handoff_bytes);
    if (node.received_bytes > earlier.received_bytes) moved.received.set(node.instance, node.received_bytes - earlier.received_bytes);
  }
  return moved;
}
function nodeCard(node, moved) {
  const facts = [];
  const fact = (name, value) => facts.push(el("div", {}, el("dt", {}, `${name} `), el("dd", {}, value)));
  if (node.role === "prefill" || node.role === "both") {
    fact("queue", count(node.waiting + node.dispatched));
    fact("backlog", time(node.backlog_us));
  }
  if (node.role !== "store") fact("batch", count(node.running));
  if (node.role === "decode" || node.role === "both") {
    fact("decodes", count(node.decodes));
    fact("step", time(node.step_us));
  }
  if (moved.sent.has(node.instance)) fact("handed off", bytes(moved.sent.get(node.instance)));
  if (moved.received.has(node.instance)) fact("received", bytes(moved.received.get(node.instance)));
  if (node.integrity_rejects) fact("bad blocks", count(node.integrity_rejects));
  const silent = node.heard_us_ago > 3e6;
  const state = silent ? `silent for ${time(node.heard_us_ago)}` : node.state === "serving" ? "" : node.state;
  return el("li", { class: `node ${node.role}${state ? " away" : ""}`, "data-instance": node.instance },
    state ? el("span", { class: "state" }, state) : null, el("b", {}, node.name), el("dl", {}, ...facts),
    ...node.tiers.filter((tier) => tier[3] > 0).map(tierGauge));
}
function tierGauge([name, used, reserved, capacity]) {
  const share = Math.min(1, (used + reserved) / capacity);
  const fill = el("i");
  fill.style.width = `${100 * share}%`;
  return el("div", { class: "tier" }, el("span", {}, name), el("span", { class: "gauge", role: "img", "aria-label": `${percent(share)} of ${name} in use` }, fill),
    el("span", {}, `${count(used + reserved)}/${count(capacity)}`));
}
// Lines of requests under way whose pair is known; dashed ones where bytes moved and only their ends are known.
function links(status, moved) {
  const pairs = new Map();
  const pair = (from, to) => pairs.get(`${from}>${to}`) || pairs.set(`${from}>${to}`, { from, to, requests: 0 }).get(`${from}>${to}`);
  for (const request of status.requests) {
    if (request.prefill === null || request.decode === null || request.prefill === request.decode) continue;
    pair(request.prefill, request.decode).requests += 1;
  }
  if (moved.sent.size * moved.received.size <= LIKELY_LINES_MAX) {
    for (const from of moved.sent.keys()) for (const to of moved.received.keys()) if (from !== to) pair(from, to).moves = true;
  }
  const total = [...moved.received.values()].reduce((sum, more) => sum + more, 0);
  const handed = status.requests.filter((request) => request.stage === "handoff").length;
  $("moved").textContent = total || pairs.size
    ? `${bytes(total)} of KV reached other nodes since the last look; ${handed} hand-offs under way. Solid lines: prefill and decode node of requests under way. Dashed: nodes between which KV moved.`
    : "No KV moves between nodes right now. Lines appear with the next hand-off: a request whose prefill and decode run on two nodes.";
  drawLinks([...pairs.values()]);
}
let latestLinks = [];
function drawLinks(pairs, still) {
  latestLinks = pairs;
  const frame = $("picture").getBoundingClientRect();
  const lines = $("links");
  const moving = [];
  lines.replaceChildren();
  for (const { from, to, requests, moves } of pairs) {
    const [a, b] = [from, to].map((id) => document.querySelector(`[data-instance="${id}"]`)).map((card) => card && card.getBoundingClientRect());
    if (!a || !b) continue;
    const right = b.left >= a.right;
    const left = b.right <= a.left;
    const [x1, x2] = right ? [a.right, b.left] : left ? [a.left, b.right] : [a.right, b.right];
    const [y1, y2] = [a.top + a.height / 2 - frame.top, b.top + b.height / 2 - frame.top];
    const [u1, u2] = [x1 - frame.left, x2 - frame.left];
    const bend = right || left ? (u2 - u1) / 2 : 30;
    const path = `M${u1} ${y1} C${u1 + bend} ${y1} ${u2 + (right || left ? -bend : 30)} ${y2} ${u2} ${y2}`;
    const line = svg("path", { d: path, class: requests ? "" : "likely" });
    line.style.strokeWidth = `${Math.min(8, 1.5 + requests)}px`;
    lines.append(line);
    if (still || !(requests || moves)) continue;
    const dot = svg("circle", { r: 5 });
    const motion = svg("animateMotion", { dur: `${LOOK_EVERY_MS * 0.9}ms`, path, begin: "indefinite", fill: "remove" });
    dot.append(motion);
    lines.append(dot);
    moving.push([dot, motion]);
  }
  for (const [dot, motion] of moving) {
    motion.addEventListener("endEvent", () => dot.remove());
    motion.beginElement();
  }
}
function outside(servers) {
  const names = Object.keys(servers);
  if (!names.length) return [];
  return [el("h3", {}, "Servers that are not attached"), el("ul", {}, ...names.map((name) => el("li", { class: "warn" }, `${name}: ${servers[name]}`)))];
}

// SLO

let objectives = {};

function classCard(slo) {
  const [inSlo, judged] = slo.last_15m.reduce((sum, minute) => [sum[0] + minute[0], sum[1] + minute[1]], [0, 0]);
  const share = judged ? inSlo / judged : null;
  const kept = share === null || share >= slo.target;
  const verdict = share === null ? "no request in 15 min" : kept ? "meets the target" : "below the target";
  const objective = objectives[slo.class];
  const ends = [["in SLO", slo.in_slo], ["late first token", slo.late_ttft], ["late TBT", slo.late_tbt], ["late end", slo.late_e2e], ["refused", slo.refused], ["failed", slo.failed], ["cancelled", slo.cancelled]];
  const admittedInTime = slo.ttft_attained === null ? "" : ` First tokens of admitted requests in time: ${percent(slo.ttft_attained)}.`;
  return el("div", { class: "card" },
    el("h3", {}, el("span", {}, slo.class), objective ? el("span", { class: "dim" }, `TTFT ${objective.ttft}, TBT ${objective.tbt}${objective.e2e && objective.e2e !== "0s" ? `, E2E ${objective.e2e}` : ""}`) : null),
    el("p", {}, el("span", { class: `share ${share === null ? "dim" : kept ? "good" : "bad"}` }, share === null ? "–" : percent(share)), " ",
      el("span", { class: share === null ? "dim" : kept ? "good" : "bad" }, verdict), el("span", { class: "dim" }, ` (${percent(slo.target)}, ${count(judged)} requests)`)),
    minutes(slo), el("p", { class: "axis dim", "aria-hidden": "true" }, el("span", {}, "14 min ago"), el("span", {}, "this minute")),
    el("p", { class: "dim" }, `Since the start: ${ends.filter(([, n]) => n).map(([what, n]) => `${count(n)} ${what}`).join(", ") || "no request"}.${admittedInTime}`));
}
function minutes(slo) {
  const [width, height, top, foot] = [300, 64, 4, 2];
  const minutes = slo.last_15m.length ? slo.last_15m : Array(15).fill([0, 0]);
  const each = width / minutes.length;
  const y = (share) => top + (1 - share) * (height - top - foot);
  const words = minutes.map(([good, all], at) => (all ? `${minutes.length - 1 - at} min ago ${percent(good / all)}` : "")).filter(Boolean).join(", ");
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "minutes", role: "img", preserveAspectRatio: "none", "aria-label": `In SLO by minute: ${words || "no request"}` });
  minutes.forEach(([good, all], at) => {
    const share = all ? good / all : 0;
    const from = all ? y(share) : y(0) - 1;
    chart.append(svg("rect", { x: at * each + 2, width: each - 4, y: Math.min(from, y(0) - 2), height: Math.max(y(0) - from, 2), class: all ? (share < slo.target ? "missed" : "") : "none" }));
  });
  chart.append(svg("line", { x1: 0, x2: width, y1: y(slo.target), y2: y(slo.target) }));
  return chart;
}

// Predictions, cache, refusals

function predictions(classes) {
  const rows = classes.flatMap(([name, paths]) => paths.filter(({ ttft }) => ttft.requests).map(({ path, ttft, tbt }) => ({
    cells: [`${name}, ${path}`, count(ttft.requests), factor(ttft.bias), factor(ttft.p90), ttft.covered === null ? "–" : percent(ttft.covered), tbt.requests ? factor(tbt.bias) : "–"],
  })));
  if (!rows.length) return [el("p", { class: "empty" }, "No served request to compare with its prediction yet.")];
  return [table("Predictions by class and path", ["class, path", "n", "TTFT", "p90", "kept", "TBT"], rows, 1),
    el("p", { class: "dim" }, "Since the start: measured over predicted, so above ×1 it took longer. TTFT and TBT: the median. p90: nine of ten TTFT did not exceed it. Kept: the share of first tokens no later than the latest that was predicted.")];
}
const factor = (error) => (error === null ? "–" : `×${(1 + error).toFixed(2)}`);

function tierFigures(status) {
  const tiers = new Map();
  for (const node of status.nodes) {
    for (const [name, used, reserved, capacity, hits, evicted] of node.tiers) {
      const sum = tiers.get(name) || { name, used: 0, capacity: 0, hits: 0, evicted: 0 };
      tiers.set(name, { name, used: sum.used + used + reserved, capacity: sum.capacity + capacity, hits: sum.hits + hits, evicted: sum.evicted + evicted });
    }
  }
  const { cached_tokens: cached = 0, prefilled_tokens: computed = 0 } = status.counters;
  return { tiers: [...tiers.values()].filter(({ capacity }) => capacity), cached, computed };
}
function tiers({ tiers, cached, computed }) {
  if (!tiers.length) return [el("p", { class: "empty" }, "No node reports a tier.")];
  const hits = tiers.reduce((sum, tier) => sum + tier.hits, 0);
  const rows = tiers.map((tier) => ({ cells: [tier.name, count(tier.hits), hits ? percent(tier.hits / hits) : "–", percent(tier.used / tier.capacity), count(tier.evicted)] }));
  const all = cached + computed;
  return [el("p", {}, el("span", { class: "share" }, all ? percent(cached / all) : "–"), el("span", { class: "dim" }, ` of ${count(all)} prompt tokens were in a cache`)),
    table("Tiers", ["tier", "blocks hit", "of all hits", "in use", "evicted"], rows, 1), el("p", { class: "dim" }, "Since the start, all nodes together. A block counts as hit wherever it is read: before a prefill or before a decode.")];
}

const REASONS = {
  ttft: "no placement meets the class's time to first token", tbt: "one more decode would break the time between tokens",
  room: "no decode node will have room for its KV in time", costly: "under the present overload it would displace others",
  queue_full: "as many requests are under way as the conductor takes", no_instance: "no prefill and decode pair is there", no_model: "no node has attached yet",
  shutting_down: "the service drains", conductor_busy: "the conductor's inbox is full", too_long: "more tokens than any instance holds",
  objective_unreachable: "it would be late even if nothing else were served", unknown_class: "there is no such class",
};
function refusals(refused) {
  const names = Object.keys(refused).sort((a, b) => refused[b] - refused[a]);
  if (!names.length) return [el("p", { class: "empty" }, "No request was refused since the start.")];
  const rows = names.map((name) => ({ cells: [name, REASONS[name] || "see docs/troubleshoot.md", count(refused[name])] }));
  return [table("Refusals by reason", ["reason", "meaning", "n"], rows, 2), el("p", { class: "dim" }, "Since the start, before any work was done.")];
}

// Decisions

const known = new Map();

function decisions(latest) {
  const list = $("decision-list");
  if (!latest.length) return;
  if (!known.size) list.replaceChildren();
  for (const words of [...latest].reverse()) {
    // A decision is the same one once it is known where the answer is decoded.
    const key = words.replace(/ decode=\S+$/, "");
    const item = known.get(key);
    if (item && item.words !== words) saysNow(item, words);
    if (item) continue;
    known.set(key, decision(words));
    list.prepend(known.get(key));
  }
  for (const [key, item] of known) {
    if (known.size <= DECISIONS_KEPT) break;
    // One that is read stays.
    if (item.querySelector("details[open]")) continue;
    item.remove();
    known.delete(key);
  }
}
function decision(words) {
  const id = words.slice(0, words.indexOf(" "));
  const what = inShort(words);
  const answer = el("div");
  const details = id === "-" ? what
    : el("details", { ontoggle: () => details.open && explain(id, answer) }, el("summary", {}, what, el("code", {}, id)), answer);
  return Object.assign(el("li", {}, details), { words, what });
}
function saysNow(item, words) {
  const what = inShort(words);
  item.what.replaceWith(what);
  Object.assign(item, { words, what });
}
function inShort(words) {
  const rest = words.slice(words.indexOf(" ") + 1);
  const value = (name) => (rest.match(new RegExp(`(?:^| )${name}=(\\S+)`)) || [])[1];
  if (rest.startsWith("refused")) return el("b", { class: "bad" }, `refused: ${value("reason") || "–"}, class ${value("class") || "–"}`);
  const nodes = [value("prefill"), value("decode")].filter(Boolean).join(" → ");
  return el("span", {}, el("b", {}, nodes || "–"), ` TTFT ${value("ttft_ms")} ms, ${value("cached_tokens")} tokens cached, ${value("candidates")} candidates`);
}
async function explain(id, into) {
  into.textContent = "Asking …";
  try {
    const reply = await operate(`/admin/explain/${encodeURIComponent(id)}`);
    into.replaceChildren(...(reply.ok ? JSON.parse(reply.text).decisions.map(candidates) : [el("p", { class: "bad" }, reply.why)]));
  } catch (error) {
    into.replaceChildren(el("p", { class: "bad" }, `No answer from Baton: ${lost(error)}`));
  }
}
function candidates({ candidates, decode, refused }) {
  const back = refused && refused.retry_after_us ? `; come back in ${time(refused.retry_after_us)}` : "";
  const end = refused ? `Refused (${refused.reason}): ${REASONS[refused.reason] || "see docs/troubleshoot.md"}${back}.` : decode ? `Decoded at ${decode}.` : "";
  return el("div", {}, end ? el("p", {}, end) : "", considered(candidates));
}
function considered(candidates) {
  if (!candidates.length) return el("p", { class: "empty" }, "No node was compared.");
  const rows = candidates.map((c) => ({
    chosen: c.chosen,
    cells: [c.chosen ? `${c.node}, chosen` : c.node, c.feasible ? "yes" : "no", time(c.queue_us), time(c.load_us), time(c.compute_us), count(c.cached_tokens), c.fetch_from || "–", time(c.ttft_us), count(Math.round(c.score))],
  }));
  return table("Candidates of this decision", ["node", "in time", "queue", "load KV", "compute", "cached tokens", "fetch from", "TTFT", "score"], rows, 2);
}

// Policy: the TOML in force, line by line; a field of the form is one line of it.

const UNITS = [["_us", (n) => (n % 1e6 === 0 ? `${n / 1e6}s` : n % 1e3 === 0 ? `${n / 1e3}ms` : `${n}us`)], ["_permille", (n) => `${n / 10}%`]];
let checked = null;
// The tag of the policy that the page has read: a change replaces that one, or none.
let basis = null;

async function readPolicy({ keepEdits = false } = {}) {
  try {
    const reply = await operate("/admin/policy");
    if (!reply.ok) return answer("bad", reply.why);
    basis = reply.tag;
    objectives = readObjectives(reply.text);
    if (!keepEdits) edit(reply.text);
  } catch (error) {
    answer("bad", `The policy could not be read: ${lost(error)}`);
  }
}
function entries(text) {
  let section = "";
  let classAt = -1;
  return text.split("\n").flatMap((line, at) => {
    const head = line.match(/^\s*\[\[?([^\]]+)\]?\]\s*$/);
    if (head) {
      section = head[1].trim();
      if (section === "scheduler.classes") classAt += 1;
    }
    const entry = line.match(/^\s*([\w-]+)\s*=\s*(.+?)\s*$/);
    return entry ? [{ at, section, classAt: section === "scheduler.classes" ? classAt : null, name: entry[1], literal: entry[2] }] : [];
  });
}
// A setting as people write it: name, value, and how what they type goes back into the line.
function readable({ name, literal }) {
  const unit = UNITS.find(([end]) => name.endsWith(end) && /^\d+$/.test(literal));
  if (unit) {
    const short = name.slice(0, -unit[0].length);
    return { name: short, value: unit[1](Number(literal)), line: (typed) => `${short} = ${JSON.stringify(typed)}` };
  }
  const text = /^"/.test(literal);
  let value = literal;
  if (text) try { value = JSON.parse(literal); } catch { /* It is TOML's own form, and stays as it is. */ }
  return { name, value, line: (typed) => `${name} = ${text && value !== literal ? JSON.stringify(typed) : typed}` };
}
function readObjectives(text) {
  const classes = [];
  for (const entry of entries(text)) {
    if (entry.classAt === null) continue;
    const { name, value } = readable(entry);
    (classes[entry.classAt] = classes[entry.classAt] || {})[name] = value;
  }
  return Object.fromEntries(classes.map((one) => [one.name, one]));
}
function edit(text) {
  $("policy-text").value = text;
  fields();
  unchecked();
  answer("", "");
}
function fields() {
  const groups = new Map();
  const rest = [];
  for (const entry of entries($("policy-text").value)) {
    const { name, value, line } = readable(entry);
    const input = el("input", { value, spellcheck: "false", autocomplete: "off", oninput: () => {
      const lines = $("policy-text").value.split("\n");
      lines[entry.at] = input.value === value ? `${entry.name} = ${entry.literal}` : line(input.value);
      $("policy-text").value = lines.join("\n");
      input.classList.toggle("changed", input.value !== value);
      unchecked();
    } });
    const label = el("label", {}, entry.classAt === null && entry.section !== "scheduler" ? `${entry.section.replace("scheduler.", "")} ${name}` : name, input);
    if (entry.classAt === null) rest.push(label);
    else groups.set(entry.classAt, [...(groups.get(entry.classAt) || []), [name, value, label]]);
  }
  const order = ["ttft", "tbt", "e2e", "target"];
  const rank = ([name]) => (order.includes(name) ? order.indexOf(name) : order.length);
  $("policy-classes").replaceChildren(...[...groups.values()].map((group) => {
    const named = group.find(([name]) => name === "name");
    return el("fieldset", {}, el("legend", {}, `Class ${named ? named[1] : ""}`),
      el("div", { class: "fields" }, ...group.filter(([name]) => name !== "name").sort((a, b) => rank(a) - rank(b)).map(([, , label]) => label)));
  }));
  $("policy-rest").replaceChildren(...rest);
}
function unchecked() {
  checked = null;
  $("policy-apply").disabled = true;
}
function answer(kind, text, changes) {
  $("policy-answer").replaceChildren(text ? el("p", { class: kind }, text) : "", changes && changes.length ? diff(changes) : "");
}
function diff(changes) {
  return el("ul", { class: "diff", "aria-label": "Changes" }, ...changes.map((change) => {
    const parts = change.match(/^(\S+): (.*) -> (.*)$/);
    return parts ? el("li", {}, `${parts[1]}: `, el("del", {}, parts[2]), " → ", el("ins", {}, parts[3])) : el("li", {}, change);
  }));
}
// The changes; null where there are none to show, and false where another change came first.
async function send(path, text, from) {
  try {
    const reply = await operate(path, { method: "POST", body: text, basis: from });
    if (reply.ok) return JSON.parse(reply.text).changed;
    if (reply.status === 412) return false;
    answer("bad", reply.status === 401 ? "The admin key is no longer taken; nothing was changed." : `Refused, and nothing was changed: ${reply.why}`);
  } catch (error) {
    answer("bad", `No answer from Baton: ${lost(error)}. Look at the policy in force before you try again.`);
  }
  return null;
}
async function check() {
  const text = $("policy-text").value;
  const changes = await send("/admin/policy/check", text);
  if (!changes || text !== $("policy-text").value) return null;
  const any = changes.length > 0;
  answer(any ? "good" : "", any ? `It is valid and changes ${changes.length} ${changes.length === 1 ? "setting" : "settings"}. Press Apply to put it into force:` : "It is valid, and it is what is in force already.", changes);
  checked = any ? text : null;
  $("policy-apply").disabled = !any;
  return changes;
}
async function apply() {
  const text = checked;
  // Pressed twice, it would come after its own change.
  unchecked();
  const applied = await send("/admin/policy", text, basis);
  if (applied === false) return overtaken();
  if (!applied) return;
  await readPolicy();
  answer("good", "Applied. From the next decision on:", applied);
}
async function overtaken() {
  await readPolicy({ keepEdits: true });
  const changes = await check();
  if (!changes || !changes.length) return;
  answer("bad", "Somebody else changed the policy after this page had read it, so nothing was applied. Your text would make these changes to the policy that is in force now, and may undo theirs. Press Apply to make them all, or discard your edits to start from that policy:", changes);
}
async function rollback() {
  const changes = await send("/admin/policy/rollback", "", basis);
  if (changes === null) return;
  await readPolicy();
  if (changes) answer("good", "Rolled back:", changes);
  else answer("bad", "Somebody else changed the policy after this page had read it, so nothing was rolled back. The policy in force is shown now. Roll back again to undo their change.");
}

// Chat

let talking = null;

async function readModels() {
  try {
    const reply = await ask("/v1/models", { key: keys.get("client") });
    $("chat-key-label").hidden = reply.status !== 401 && !keys.get("client");
    if (reply.status === 401) return note(keys.get("client") ? "That API key is wrong: type one of service.api_keys." : "This service serves clients with an API key: type one of service.api_keys.");
    if (!reply.ok) return note(`The models are not known: ${reply.why}`);
    const models = JSON.parse(reply.text).data.map(({ id }) => id);
    note(!models.length ? "No model is served yet: no node is attached."
      : models.includes("baton-seeded") ? "The model of this demo is small and its weights are random: its answers are noise. It shows how requests are placed and handed over, not what a model can say." : "");
    part("chat-model", models, () => models.map((id) => el("option", { value: id }, id)));
  } catch (error) {
    note(`The models are not known: ${lost(error)}`);
  }
  snippets();
}
function note(text) {
  $("chat-note").hidden = !text;
  $("chat-note").textContent = text;
}
function classChoices(slo) {
  part("chat-class", slo.map((one) => one.class), (names) => [el("option", { value: "" }, names.length ? `the default (${names[0]})` : "the default"), ...names.slice(1).map((name) => el("option", { value: name }, name))]);
}
function chatBody(stream) {
  const model = $("chat-model").value;
  return { ...(model ? { model } : {}), messages: [{ role: "user", content: $("chat-text").value }], max_tokens: Number($("chat-tokens").value), stream };
}
function snippets() {
  const [key, name] = [!$("chat-key-label").hidden, $("chat-class").value];
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  $("snippet-curl").textContent = [`curl -N ${location.origin}/v1/chat/completions`, "-H 'Content-Type: application/json'", ...(key ? ['-H "Authorization: Bearer $API_KEY"'] : []),
    ...(name ? [`-H ${quoted(`x-slo-class: ${name}`)}`] : []), `-d ${quoted(JSON.stringify(chatBody(true)))}`].join(" \\\n  ");
  const { model, messages, max_tokens: tokens } = chatBody(true);
  $("snippet-python").textContent = ["import os", "from openai import OpenAI", "", `client = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key=${key ? 'os.environ["API_KEY"]' : '"none"'})`,
    "stream = client.chat.completions.create(", `    model=${JSON.stringify(model || "")},`, `    messages=${JSON.stringify(messages)},`, `    max_tokens=${tokens},`, "    stream=True,",
    ...(name ? [`    extra_headers={"x-slo-class": ${JSON.stringify(name)}},`] : []), ")", "for event in stream:", "    if event.choices:", '        print(event.choices[0].delta.content or "", end="", flush=True)'].slice(key ? 0 : 1).join("\n");
}
async function chat() {
  talking = new AbortController();
  busy(true);
  $("answer").textContent = "";
  $("answer-figures").textContent = "Waiting for the first token …";
  $("answer-why").replaceChildren();
  const begin = performance.now();
  let [first, pieces, id] = [null, 0, ""];
  try {
    const name = $("chat-class").value;
    const reply = await fetch("/v1/chat/completions", { method: "POST", signal: talking.signal, body: JSON.stringify(chatBody(true)),
      headers: headers(keys.get("client"), { "content-type": "application/json", ...(name ? { "x-slo-class": name } : {}) }) });
    id = reply.headers.get("x-request-id") || "";
    if (!reply.ok) {
      const retry = reply.headers.get("retry-after");
      throw new Error(`${reply.status} ${reply.headers.get("x-baton-reason") || ""}: ${reason(await reply.text())}${retry ? ` (come back in ${retry} s)` : ""}`);
    }
    for await (const event of events(reply.body)) {
      if (event.error) throw new Error(event.error.message);
      const text = event.choices && event.choices[0] && event.choices[0].delta && event.choices[0].delta.content;
      if (!text) continue;
      if (first === null) first = performance.now();
      pieces += 1;
      $("answer").append(text);
    }
    const after = first === null ? 0 : (performance.now() - first) / 1000;
    $("answer-figures").textContent = first === null ? "The answer is empty: the model ended it at once."
      : `First token after ${Math.round(first - begin)} ms, then ${pieces - 1} pieces in ${after.toFixed(2)} s, as seen from this browser.`;
  } catch (error) {
    $("answer-figures").textContent = error.name === "AbortError" ? "Stopped." : `No answer: ${error.message}`;
  }
  if (id && admitted) {
    const why = el("div");
    $("answer-why").append(el("button", { type: "button", onclick: () => explain(id, why) }, "Why did it go there?"), why);
  }
  busy(false);
}
function busy(yes) {
  $("chat-send").disabled = yes;
  $("chat-stop").disabled = !yes;
}
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (left + value).split("\n");
    left = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
async function copy(button) {
  const words = button.textContent;
  try {
    await navigator.clipboard.writeText($(button.dataset.copy).textContent);
    button.textContent = "Copied";
  } catch {
    // Without TLS browsers give no clipboard to pages from elsewhere than this machine.
    getSelection().selectAllChildren($(button.dataset.copy));
    button.textContent = "Selected: press Ctrl-C";
  }
  setTimeout(() => { button.textContent = words; }, 2000);
}

// Starting

function listen() {
  const on = (id, event, act) => $(id).addEventListener(event, act);
  const submits = (id, act) => on(id, "submit", (event) => { event.preventDefault(); act(); });
  submits("key-form", () => { keys.set("admin", $("key-input").value.trim()); $("key-input").value = ""; look(); });
  on("key-change", "click", () => { keys.set("admin", ""); $("key-why").textContent = "The key is forgotten."; look().then(() => $("key-input").focus()); });
  submits("policy-form", check);
  on("policy-apply", "click", apply);
  on("policy-reset", "click", () => readPolicy());
  on("policy-rollback", "click", rollback);
  on("policy-text", "input", () => { fields(); unchecked(); });
  submits("chat-form", chat);
  on("chat-stop", "click", () => talking.abort());
  on("chat-key", "change", () => { keys.set("client", $("chat-key").value.trim()); readModels(); });
  on("chat-form", "input", snippets);
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
  addEventListener("resize", () => drawLinks(latestLinks, true));
}
async function watch() {
  for (;;) {
    if (!document.hidden) {
      await look();
      if (!$("chat-model").options.length) await readModels();
    }
    await new Promise((wake) => setTimeout(wake, LOOK_EVERY_MS));
  }
}
listen();
snippets();
watch();
