// The page of `pserver web`: asks for what is new, keeps it, draws it.  Nothing is loaded from elsewhere.
"use strict";
(() => {
  const MOST_POINTS = 10000;
  const EACH_MS = 500;
  const HIDDEN_MS = 5000;
  const LOG_MS = 2000;
  const HEIGHT = 150;
  const MARKED = new Set(["lost", "failed", "unreachable", "restarted", "back", "saved", "draining"]);
  const WORDS = { good: "good", warn: "look here", bad: "bad", unknown: "not known" };
  const SVG = "http://www.w3.org/2000/svg";

  const curves = new Map(); // key -> {times: [], values: []}
  let events = [];
  let now = null;
  let tick = 0;
  let csrf = "";
  let acting = null; // the name of the act that the dialog asks for

  const $ = (id) => document.getElementById(id);

  // ---- elements ----

  function make(parent, tag, attributes = {}, text = "") {
    const svg = parent instanceof SVGElement || tag === "svg";
    const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== "") made.textContent = text;
    parent.append(made);
    return made;
  }

  function say(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  // ---- numbers ----

  function short(value) {
    if (typeof value === "string") return value;
    const size = Math.abs(value);
    if (size >= 1e9) return `${(value / 1e9).toPrecision(3)} G`;
    if (size >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
    if (size >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
    if (size >= 100 || value === 0) return value.toFixed(0);
    return size >= 0.001 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
  }

  function bytes(value) {
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (Math.abs(value) < 1000) return `${value.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
      value /= 1000;
    }
    return `${value.toFixed(1)} TB`;
  }

  function seconds(value) {
    if (value < 0.01) return `${(value * 1000).toFixed(2)} ms`;
    if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
    if (value < 120) return `${value.toFixed(1)} s`;
    return value < 7200 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
  }

  const rate = (value) => `${bytes(value)}/s`;
  const plain = (value) => value.toLocaleString("en");
  const lately = (value) => (value === null ? "" : short(value));
  const clock = (time) => new Date(time * 1000).toTimeString().slice(0, 8);

  // ---- what is kept ----

  function keep(key, points) {
    if (!curves.has(key)) curves.set(key, { times: [], values: [] });
    const curve = curves.get(key);
    for (const [time, value] of points) {
      if (curve.times.length >= MOST_POINTS) thin(curve);
      curve.times.push(time);
      curve.values.push(typeof value === "string" ? NaN : value);
    }
  }

  function thin(curve) { // as pserver/telemetry/job_view.py does
    const half = MOST_POINTS / 2;
    for (const name of ["times", "values"]) {
      const kept = curve[name].slice(0, half).filter((_, place) => place % 2 === 0);
      curve[name] = kept.concat(curve[name].slice(half));
    }
  }

  // ---- curves ----

  const PARTS = { compute: "compute", others: "waiting for others", wire: "wire", update: "update" };
  const LOOKS = { compute: "c0", [PARTS.others]: "c1", wire: "c3", update: "c2" };

  const FIGURES = [ // prefix, title, how a value is said, what a curve is called
    ["values/", (name) => name, short, (last) => `trainer ${last}`],
    ["samples/", () => "Samples a second", short, (last) => (last === "all" ? "all" : `trainer ${last}`)],
    ["steps/", () => "Updates a second", short, (last) => `lane ${last}`],
    ["split/", (name) => `A step of lane ${name}`, seconds, (last) => PARTS[last]],
    ["staleness/", () => "Staleness, in steps", short, (last) => `lane ${last}`],
    ["bytes/", () => "Bytes a second at the servers", rate, (last) => last],
    ["memory/", () => "Memory", bytes, (last) => last],
  ];

  function groups() { // [id, title, say, [[label, curve], ...]] in the order of FIGURES
    const found = [];
    for (const [prefix, title, speak, label] of FIGURES) {
      const parts = new Map();
      for (const [key, curve] of curves) {
        if (!key.startsWith(prefix)) continue;
        const rest = key.slice(prefix.length);
        const cut = prefix === "values/" || prefix === "split/" ? rest.lastIndexOf("/") : -1;
        const name = cut < 0 ? "" : rest.slice(0, cut);
        if (!parts.has(name)) parts.set(name, []);
        parts.get(name).push([label(rest.slice(cut + 1)), curve]);
      }
      for (const [name, lines] of parts) found.push([prefix + name, title(name), speak, lines]);
    }
    return found;
  }

  function lowerBound(times, time) {
    let low = 0;
    let high = times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  // A curve as a path: of the points in one column of pixels the least and the most are drawn.
  function path(curve, from, x, y) {
    const { times, values } = curve;
    let text = "";
    let pen = false;
    let column = -1;
    let least = 0;
    let most = 0;
    let last = 0;
    const flush = () => {
      if (column < 0) return;
      text += `${pen ? "L" : "M"}${column} ${y(least).toFixed(1)}`;
      if (most !== least) text += `L${column} ${y(most).toFixed(1)}`;
      if (last !== most) text += `L${column} ${y(last).toFixed(1)}`;
      pen = true;
    };
    for (let place = from; place < times.length; place += 1) {
      const value = values[place];
      if (Number.isNaN(value)) {
        flush();
        pen = false;
        column = -1;
        continue;
      }
      const at = Math.round(x(times[place]));
      if (at !== column) {
        flush();
        column = at;
        least = most = value;
      } else if (value < least) least = value;
      else if (value > most) most = value;
      last = value;
    }
    flush();
    return text;
  }

  function extent(lines, since) {
    let low = Infinity;
    let high = -Infinity;
    for (const [, curve] of lines) {
      for (let place = lowerBound(curve.times, since); place < curve.times.length; place += 1) {
        const value = curve.values[place];
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    if (low > high) return [0, 1];
    if (low > 0 && low < 0.5 * high) low = 0;
    const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
    return [low === 0 ? 0 : low - room, high + room];
  }

  const figures = new Map(); // id -> the elements of a figure

  function figureOf(id, title) {
    if (!figures.has(id)) {
      const figure = make($("figures"), "figure");
      make(figure, "figcaption", {}, title);
      const svg = make(figure, "svg", { role: "img" });
      const legend = make(figure, "ul", { class: "legend" });
      const made = { figure, svg, legend, wide: 0, pointer: null, drawn: null };
      svg.addEventListener("pointermove", (event) => {
        const box = svg.getBoundingClientRect();
        made.pointer = (event.clientX - box.left) / box.width;
        point(made);
      });
      svg.addEventListener("pointerleave", () => {
        made.pointer = null;
        point(made);
      });
      figures.set(id, made);
    }
    return figures.get(id);
  }

  let room = { map: 280, figure: 300, splits: 260 }; // widths, read before anything is written

  function measure() {
    const figure = $("figures").firstElementChild;
    room = {
      map: $("map-picture").clientWidth,
      figure: figure ? figure.clientWidth : Math.min(400, $("figures").clientWidth),
      splits: $("splits").clientWidth,
    };
    for (const each of figures.values()) each.wide = each.figure.clientWidth;
  }

  function drawCurves() {
    const range = Number($("range").value);
    const wanted = new Set();
    for (const [place, [id, title, speak, lines]] of groups().entries()) {
      wanted.add(id);
      const elements = figureOf(id, title);
      const there = $("figures").children[place];
      if (there !== elements.figure) $("figures").insertBefore(elements.figure, there);
      drawFigure(elements, title, speak, lines, range);
    }
    for (const [id, { figure }] of figures) {
      if (!wanted.has(id)) {
        figure.remove();
        figures.delete(id);
      }
    }
  }

  function drawFigure(elements, title, speak, lines, range) {
    const { svg, legend } = elements;
    const width = Math.max(240, (elements.wide || room.figure) - 18);
    const left = 62;
    const right = width - 6;
    const bottom = HEIGHT - 18;
    const first = Math.min(...lines.map(([, curve]) => curve.times[0] ?? now.time));
    const since = range ? Math.max(now.time - range, first) : first;
    const until = Math.max(now.time, since + 10);
    const [low, high] = extent(lines, since);
    const x = (time) => left + ((time - since) / (until - since)) * (right - left);
    const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - 8);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    for (const part of [0, 0.5, 1]) {
      const value = low + part * (high - low);
      make(svg, "path", { class: "grid", d: `M${left} ${y(value)}H${right}` });
      make(svg, "text", { x: 0, y: y(value) + 4 }, speak(value));
    }
    for (const [anchor, time, at] of [["start", since, left], ["end", until, right]]) {
      make(svg, "text", { x: at, y: HEIGHT - 4, "text-anchor": anchor }, clock(time));
    }
    for (const event of events) {
      if (!MARKED.has(event.kind) || event.time < since || event.time > until) continue;
      const kind = event.kind === "saved" || event.kind === "back" ? "mark" : "mark bad";
      const line = make(svg, "path", { class: kind, d: `M${x(event.time).toFixed(1)} 4V${bottom}` });
      make(line, "title", {}, `${clock(event.time)} ${event.text}`);
    }
    legend.replaceChildren();
    const said = [];
    lines.forEach(([label, curve], number) => {
      const look = `curve ${LOOKS[label] ?? `c${number % 8}`}${number >= 8 ? " dash" : ""}`;
      const from = Math.max(0, lowerBound(curve.times, since) - 1);
      make(svg, "path", { class: look, d: path(curve, from, x, y) });
      const last = curve.values[curve.values.length - 1];
      if (Number.isNaN(last)) make(svg, "circle", { class: "nan", cx: right - 4, cy: 12, r: 4 });
      if (number >= 12) return;
      const entry = make(legend, "li");
      const line = make(entry, "svg", { viewBox: "0 0 18 8", "aria-hidden": "true" });
      make(line, "path", { class: look, d: "M0 4H18" });
      make(entry, "span", {}, `${label} ${spoken(last, speak)}`);
      said.push(entry.textContent);
    });
    svg.setAttribute("aria-label", `${title}: ${said.join(", ")}`);
    elements.drawn = { lines, speak, width, left, right, bottom, since, until, x, y };
    point(elements);
  }

  const spoken = (value, speak) => (Number.isNaN(value) ? "not finite" : speak(value));

  // The values under the pointer: a line at its time, and each curve's value there in the legend.
  function point({ svg, legend, pointer, drawn }) {
    svg.querySelector(".pointer")?.remove();
    if (drawn === null) return;
    const { lines, speak, width, left, right, bottom, since, until, x, y } = drawn;
    const at = pointer === null ? null : Math.min(right, Math.max(left, pointer * width));
    const time = at === null ? null : since + ((at - left) / (right - left)) * (until - since);
    const texts = legend.querySelectorAll("span");
    const group = at === null ? null : make(svg, "g", { class: "pointer" });
    if (group !== null) {
      make(group, "path", { d: `M${at.toFixed(1)} 4V${bottom}` });
      const anchor = at > (left + right) / 2 ? "end" : "start";
      make(group, "text", { x: at + (anchor === "end" ? -5 : 5), y: 12, "text-anchor": anchor }, clock(time));
    }
    lines.slice(0, texts.length).forEach(([label, curve], number) => {
      const place = time === null ? curve.values.length - 1 : nearest(curve.times, time);
      const value = curve.values[place];
      say(texts[number], `${label} ${spoken(value, speak)}`);
      if (group !== null && !Number.isNaN(value)) {
        make(group, "circle", { cx: x(curve.times[place]).toFixed(1), cy: y(value).toFixed(1), r: 3 });
      }
    });
  }

  function nearest(times, time) {
    const after = Math.min(lowerBound(times, time), times.length - 1);
    return after > 0 && time - times[after - 1] < times[after] - time ? after - 1 : after;
  }

  // ---- the map ----

  function drawMap() {
    const box = $("map-picture");
    const servers = now.servers.slice(0, 24);
    const trainers = now.trainers.slice(0, 24);
    const width = Math.max(280, room.map);
    const height = 230;
    const place = (index, count) => ((index + 0.5) * width) / Math.max(count, 1);
    box.replaceChildren();
    const svg = make(box, "svg", { role: "img", viewBox: `0 0 ${width} ${height}` });
    const at = new Map(trainers.map((trainer, index) => [trainer.number, place(index, trainers.length)]));
    const labels = now.links.length <= 8 && width > 500;
    for (const link of now.links) {
      if (link.server >= servers.length || !at.has(link.trainer)) continue;
      const total = link.up + link.down;
      const kind = link.state === "lost" ? "link bad" : total > 0 ? "link" : "link still";
      const [x1, x2] = [place(link.server, servers.length), at.get(link.trainer)];
      const wide = total > 0 ? Math.min(6, 1 + Math.log10(1 + total / 1e4)) : 1;
      const line = make(svg, "path", { class: kind, d: `M${x1} 52L${x2} 172`, "stroke-width": wide.toFixed(1) });
      make(line, "title", {}, `trainer ${link.trainer}, server ${link.server}: ${rate(total)}`);
      if (labels) {
        const part = 0.3 + 0.4 * ((link.trainer + link.server) % 2);
        make(svg, "text", { class: "state", x: x1 + (x2 - x1) * part, y: 52 + 120 * part }, rate(total));
      }
    }
    servers.forEach((server, index) => {
      const look = server.up ? (server.state === "serving" ? "good" : server.state === "failed" ? "bad" : "warn") : "bad";
      node(svg, place(index, servers.length), 8, width / servers.length, `S${server.index}`, server.state, look);
    });
    trainers.forEach((trainer, index) => {
      const look = { joined: "good", lost: "bad" }[trainer.state] ?? "warn";
      node(svg, place(index, trainers.length), 172, width / trainers.length, `T${trainer.number}`, trainer.state, look);
    });
    const flow = now.links.reduce((sum, link) => sum + link.up + link.down, 0);
    svg.setAttribute("aria-label", `${now.servers.length} servers, ${now.trainers.length} trainers, ${rate(flow)} between them`);
  }

  function node(svg, x, y, room, name, state, look) {
    const wide = Math.min(90, Math.max(14, room - 6));
    make(svg, "rect", { class: `box ${look}`, x: x - wide / 2, y, width: wide, height: 44, rx: 6 });
    make(svg, "text", { class: "node", x, y: y + (wide > 60 ? 20 : 27) }, name);
    if (wide > 60) make(svg, "text", { class: "state", x, y: y + 36 }, state);
  }

  // ---- steps ----

  function drawSteps() {
    const box = $("splits");
    box.replaceChildren();
    if (!now.lanes.some((lane) => Object.keys(lane.by_trainer).length)) {
      make(box, "p", {}, "No step has been measured in the last seconds.");
    }
    for (const [number, lane] of now.lanes.entries()) {
      const rows = Object.entries(lane.by_trainer).slice(0, 64);
      if (!rows.length) continue;
      make(box, "h3", {}, `Lane ${number}, ${lane.mode}: ${short(lane.steps_per_second)} updates a second`);
      if (lane.staleness !== null) {
        make(box, "p", {}, `Staleness: ${short(lane.staleness)} steps on average, at most ${lane.most_stale}.`);
      }
      const longest = Math.max(...rows.map(([, parts]) => total(parts)));
      for (const [trainer, parts] of rows) splitRow(box, `trainer ${trainer}`, parts, longest);
    }
    const late = now.lanes.flatMap((lane, number) => Object.entries(lane.lateness)
      .map(([trainer, value]) => [`lane ${number}`, `trainer ${trainer}`, seconds(value)]));
    list($("lateness"), "", ["lane", "waited for", "each step"], late);
  }

  const total = (parts) => Object.values(parts).reduce((sum, value) => sum + value, 0);

  function splitRow(box, name, parts, longest) {
    const width = Math.max(260, room.splits);
    const text = Object.entries(parts).map(([part, value]) => `${PARTS[part]} ${seconds(value)}`).join(", ");
    make(box, "p", { class: "split" }, `${name}: ${seconds(total(parts))} = ${text}`);
    const svg = make(box, "svg", { "aria-hidden": "true", viewBox: `0 0 ${width} 11` });
    let x = 0;
    for (const [part, value] of Object.entries(parts)) {
      const wide = longest > 0 ? (value / longest) * width : 0;
      if (wide > 0) make(svg, "rect", { class: part, x: x.toFixed(1), y: 0, width: wide.toFixed(1), height: 11 });
      x += wide;
    }
  }

  // ---- tables ----

  function list(box, title, head, rows) { // text columns: the first, and those named "doing", "error"
    box.replaceChildren();
    if (!rows.length) {
      make(box, "p", {}, title ? `${title}: none.` : "None.");
      return;
    }
    const scroll = make(box, "div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title || head.join(", ") });
    const table = make(scroll, "table");
    if (title) make(table, "caption", {}, title);
    const top = make(make(table, "thead"), "tr");
    const texts = head.map((name, place) => place === 0 || ["state", "doing", "error", "value", "waited for"].includes(name));
    head.forEach((name, place) => make(top, "th", { scope: "col", class: texts[place] ? "text" : "" }, name));
    const body = make(table, "tbody");
    for (const cells of rows) {
      const row = make(body, "tr");
      cells.forEach((cell, place) => {
        const kind = ["error", "value"].includes(head[place]) ? "wrap" : texts[place] ? "text" : "";
        make(row, "td", { class: kind }, cell);
      });
    }
  }

  const LISTS = [
    ["Servers", ["server", "state", "updates", "holds", "memory", "in", "out", "up", "error"],
      () => now.servers.map((each) => {
        const name = `server ${each.index} ${each.endpoint}`;
        if (each.age === null) return [name, each.state, "", "", "", "", "", "", each.error];
        const error = each.up ? each.error : `last answer ${seconds(each.age)} ago: ${each.error}`;
        return [name, each.state, plain(each.version), bytes(each.bytes_held), bytes(each.memory_bytes),
          rate(each.bytes_in_per_second), rate(each.bytes_out_per_second), seconds(each.uptime_seconds), error];
      })],
    ["Trainers", ["trainer", "state", "step", "steps/s", "samples/s", "memory", "doing"],
      () => now.trainers.map((each) => [`trainer ${each.number}`, each.state, plain(each.step),
        lately(each.steps_per_second), lately(each.samples_per_second), bytes(each.memory_bytes),
        each.behind ? `${each.activity} (slow: ${each.behind.toFixed(1)} times the others)` : each.activity])],
    ["Links", ["link", "state", "to the server", "to the trainer", "transport", "reconnects"],
      () => now.links.slice(0, 200).map((each) => [`trainer ${each.trainer} - server ${each.server}`, each.state,
        rate(each.up), rate(each.down), each.transport, plain(each.reconnects)])],
    ["Tables of rows", ["table", "rows in memory", "on disk", "waiting", "hit rate", "lookups/s", "admitted", "not admitted",
      "removed", "bytes"],
      () => now.tables.map((each) => [each.name, plain(each.memory_rows), plain(each.disk_rows), plain(each.counters.waiting ?? 0),
        each.hit_rate === null ? "" : `${(100 * each.hit_rate).toFixed(1)} %`, short(each.lookups_per_second),
        plain(each.counters.admitted ?? 0), plain(each.counters.refused ?? 0), plain(each.removed),
        bytes(each.bytes_held)])],
  ];

  function drawSettings() {
    if ($("settings").contains(document.activeElement)) return; // as in drawLists
    list($("setting-list"), "", ["setting", "value"], Object.entries(now.settings));
  }

  function drawLists() {
    const box = $("lists");
    LISTS.forEach(([title, head, rows], number) => {
      const part = box.children[number] ?? make(box, "div");
      // who reads a table with the keyboard or selects in it keeps it as it is
      if (!part.contains(document.activeElement)) list(part, title, head, rows());
    });
  }

  // ---- answers, events, acts ----

  function drawAnswers() {
    const box = $("answers");
    now.answers.forEach((answer, number) => {
      const item = box.children[number] ?? make(box, "li");
      if (!item.firstChild) {
        const head = make(item, "h3");
        make(head, "span");
        make(head, "b");
        make(item, "p");
      }
      item.className = answer.verdict;
      say(item.querySelector("span"), answer.question);
      say(item.querySelector("b"), WORDS[answer.verdict]);
      say(item.querySelector("p"), answer.text);
    });
  }

  function drawNotices() {
    const box = $("notices");
    const lasting = now.notices.filter((notice) => notice.kind !== "brief");
    box.hidden = lasting.length === 0;
    lasting.forEach((notice, number) => {
      const item = box.children[number] ?? make(box, "li");
      item.className = notice.kind;
      say(item, notice.text);
    });
    while (box.children.length > lasting.length) box.lastChild.remove();
  }

  function drawEvents() {
    const box = $("happened");
    box.replaceChildren();
    for (const event of events.slice(-200).reverse()) {
      const item = make(box, "li");
      make(item, "time", {}, clock(event.time));
      item.append(`${event.kind}: ${event.text}`);
    }
    if (!events.length) make(box, "li", {}, "Nothing yet.");
  }

  const ASKS = {
    save: "Save what the servers hold as a checkpoint?  A running job waits meanwhile.",
    drain: "Drain all servers?  The job ends, for all its trainers; save it first.",
  };

  function drawActs(acts) {
    const buttons = $("buttons");
    if (buttons.dataset.names !== acts.names.join()) {
      buttons.dataset.names = acts.names.join();
      buttons.replaceChildren();
      for (const name of [...acts.names].reverse()) {
        const button = make(buttons, "button", { type: "button", id: `act-${name}` },
          name[0].toUpperCase() + name.slice(1));
        if (name === "drain") button.className = "danger";
        button.addEventListener("click", () => {
          acting = name;
          say($("confirm-text"), ASKS[name]);
          $("confirm").showModal();
          $("confirm-no").focus();
        });
        buttons.append(" ");
      }
    }
    for (const button of buttons.querySelectorAll("button")) button.disabled = acts.busy;
    say($("act-state"), acts.refusal || (acts.busy ? "At work ..." : acts.last || "Save writes a checkpoint; Drain ends the servers."));
  }

  async function act() {
    $("confirm").close();
    const answer = await fetch(`/act/${acting}`, { method: "POST", headers: { "x-pserver-csrf": csrf } });
    if (!answer.ok) say($("act-state"), await answer.text());
  }

  // ---- logs ----

  function drawLogNames(names) {
    const select = $("log-name");
    if (select.dataset.names === names.join("/")) return;
    select.dataset.names = names.join("/");
    const chosen = select.value;
    select.replaceChildren();
    for (const name of names) make(select, "option", {}, name);
    if (names.includes(chosen)) select.value = chosen;
    select.disabled = names.length === 0;
    if (!names.length) say($("log"), "No logs: --log-dir names their folder.");
    else readLog();
  }

  async function readLog() {
    const name = $("log-name").value;
    if (!name || document.hidden) return;
    const lines = $("log-lines").value;
    try {
      const answer = await fetch(`/log?name=${encodeURIComponent(name)}&lines=${lines}`);
      if (!answer.ok) return;
      const log = $("log");
      const end = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
      say(log, (await answer.json()).lines.join("\n") || "(nothing yet)");
      if (end) log.scrollTop = log.scrollHeight;
    } catch { /* the status line says it */ }
  }

  // ---- asking ----

  function draw() {
    if (now === null || !now.servers) return;
    const began = performance.now();
    measure();
    drawAnswers();
    drawNotices();
    drawMap();
    drawCurves();
    drawSteps();
    drawLists();
    drawSettings();
    drawEvents();
    const body = document.body.dataset; // for whoever measures
    body.frameMs = (performance.now() - began).toFixed(1);
    body.points = String([...curves.values()].reduce((sum, curve) => sum + curve.times.length, 0));
    body.tick = String(tick);
  }

  function report() {
    const gone = now.servers.filter((server) => !server.up).map((server) => server.endpoint);
    const status = $("status");
    status.className = gone.length ? "lost" : "";
    say(status, gone.length ? `No answer from ${gone.join(", ")}; asking again.` : "Connected.");
    say($("job"), now.fingerprint ? `job ${now.fingerprint}, ${now.mode}` : "no job");
    const pass = now.progress ? [`pass ${now.progress.number}: ${now.progress.text}`] : [];
    say($("headline"), [...pass, ...now.headline].join(" \u00b7 "));
    document.title = `${gone.length ? "! " : ""}pserver: ${now.answers[0].text}`;
  }

  async function ask() {
    try {
      const answer = await fetch(`/data?since=${tick}`);
      if (answer.status === 403) {
        $("status").className = "lost";
        say($("status"), "This address is no longer valid: open the one that pserver web printed last.");
        return;
      }
      const found = await answer.json();
      if (found.tick < tick) { // another process serves the page
        curves.clear();
        events = [];
        tick = 0;
        return;
      }
      csrf = found.csrf;
      drawActs(found.acts);
      drawLogNames(found.logs);
      if (found.tick !== tick && found.now.servers) {
        for (const [key, points] of Object.entries(found.curves)) keep(key, points);
        events = events.concat(found.events).sort((a, b) => a.time - b.time).slice(-500);
        tick = found.tick;
        now = found.now;
        report();
        if (!document.hidden) requestAnimationFrame(draw);
      }
    } catch {
      $("status").className = "lost";
      say($("status"), "The process that serves this page does not answer; asking again.");
    } finally {
      setTimeout(ask, document.hidden ? HIDDEN_MS : EACH_MS);
    }
  }

  history.replaceState(null, "", location.pathname); // the token is in a cookie by now
  $("range").addEventListener("change", draw);
  $("log-name").addEventListener("change", readLog);
  $("log-lines").addEventListener("change", readLog);
  $("confirm-no").addEventListener("click", () => $("confirm").close());
  $("confirm-yes").addEventListener("click", act);
  window.addEventListener("resize", draw);
  setInterval(readLog, LOG_MS);
  ask();
})();
