"use strict";
// The browser of trajectories: a filtered and sorted list over the columns of the index, and one opened trajectory.
const trajectories = (() => {
  const LIVE_MS = 5000;
  const ROW = 54;  // pixels, as in the stylesheet
  const FIELDS = ["phase", "from", "to", "env", "source", "outcome", "category", "stop", "min", "max", "short", "long", "text", "sort"];
  const $ = selector => document.querySelector(selector);
  const main = $("main"), list = $("#list"), canvas = list.firstElementChild, detail = $("#detail"), form = $("#filters form");
  const chunks = new Map();  // name → promise of its trajectories
  const waiting = new Map();  // name → function that resolves the promise
  let isFollowing = false, version = null, index = null, fileOf = null, shown = [], cursor = -1, opened = -1, shade = "";

  function h(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter(child => child !== null && child !== undefined));
    return element;
  }

  async function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed), character => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  }

  function load(name) {
    return new Promise((resolve, reject) => {
      const script = h("script", { src: `report_files/${name}` });
      script.onload = () => { script.remove(); resolve(); };
      script.onerror = () => { script.remove(); reject(new Error(`report_files/${name} cannot be loaded`)); };
      document.head.append(script);
    });
  }

  // -- the index

  async function setIndex(options, packed) {
    const first = index === null, before = opened < 0 ? null : link(opened);
    index = Object.assign(await unpack(packed), options);
    fileOf = new Uint32Array(index.columns.uid.length);
    index.files.forEach((file, number) => fileOf.fill(number, file.first, file.first + file.n_rows));
    for (const name of ["env", "source", "category", "stop"]) fillSelect(form.elements[name], name);
    if (first) readHash();
    if (before !== null && link(opened) !== before) opened = index.columns.uid.findIndex((uid, i) => link(i) === before);  // after a rewind
    select();
    if (first && opened < 0) openFromHash();
    if (!options.complete) setTimeout(loadIndex, 1000);
    else if (main.hasAttribute("data-live") && !isFollowing) {
      isFollowing = true;
      setTimeout(follow, LIVE_MS);
    }
  }

  function loadIndex() {
    return load(`index.js?${Date.now()}`).catch(error => { $("#count").textContent = error.message; });
  }

  async function follow() {  // asks the server of a run in progress for news
    try {
      const state = await (await fetch("state.json")).json();
      if (state.version !== version && !document.hidden) await loadIndex();
      version = document.hidden ? version : state.version;
    } finally {
      setTimeout(follow, LIVE_MS);
    }
  }

  function fillSelect(element, name) {
    const counts = new Map(), column = index.columns[name], chosen = element.value;
    for (const value of column) counts.set(value, (counts.get(value) ?? 0) + 1);
    const options = [...counts].sort((a, b) => b[1] - a[1]).filter(([value]) => index.tables[name][value] !== "");
    element.replaceChildren(h("option", { value: "" }, "all"), ...options.map(([value, count]) => {
      const text = index.tables[name][value];
      return h("option", { value: text }, `${text} (${count.toLocaleString("en")})`);
    }));
    element.value = chosen;
  }

  function outcome(i) {
    return index.columns.reward[i] === null ? "invalid" : index.columns.success[i] ? "success" : "failure";
  }

  function number(name) {
    const text = form.elements[name].value;
    return text === "" ? null : Number(text);
  }

  function select() {
    const f = form.elements, c = index.columns, n = c.uid.length;
    const wanted = {};
    for (const name of ["env", "source", "category", "stop"]) {
      wanted[name] = f[name].value === "" ? null : index.tables[name].indexOf(f[name].value);
    }
    const [from, to, min, max, short, long] = ["from", "to", "min", "max", "short", "long"].map(number);
    const text = f.text.value.trim().toLowerCase();
    const prompts = text && new Set([...index.tables.prompt.keys()].filter(i => matches(i, text)));
    const phase = f.phase.value, result = f.outcome.value;
    const files = index.files.map(file => (!phase || file.phase === phase)
      && (from === null || (file.step ?? 0) >= from) && (to === null || (file.step ?? 0) <= to));
    shown = [];
    for (let i = 0; i < n; i++) {
      const reward = c.reward[i];
      if (files[fileOf[i]]
        && (wanted.env === null || c.env[i] === wanted.env) && (wanted.source === null || c.source[i] === wanted.source)
        && (wanted.category === null || c.category[i] === wanted.category) && (wanted.stop === null || c.stop[i] === wanted.stop)
        && (!result || outcome(i) === result)
        && (min === null || (reward !== null && reward >= min)) && (max === null || (reward !== null && reward <= max))
        && (short === null || c.tokens[i] >= short) && (long === null || c.tokens[i] <= long)
        && (!text || prompts.has(c.prompt[i]) || c.uid[i].toLowerCase().startsWith(text))) shown.push(i);
    }
    const key = f.sort.value.replace("-", ""), sign = f.sort.value.startsWith("-") ? -1 : 1;
    const value = key === "step" ? i => index.files[fileOf[i]].step ?? 0 : i => c[key][i] ?? (sign < 0 ? -Infinity : Infinity);
    shown.sort((a, b) => sign * (value(a) - value(b)) || a - b);
    const all = n === shown.length ? "" : ` of ${n.toLocaleString("en")}`;
    $("#count").textContent = `${shown.length.toLocaleString("en")}${all} trajectories${index.complete ? "" : ", indexing …"}`;
    cursor = shown.indexOf(opened);
    canvas.style.height = `${shown.length * ROW}px`;
    draw();
  }

  function matches(i, text) {
    return index.tables.prompt[i].toLowerCase().includes(text) || index.previews[i].toLowerCase().includes(text);
  }

  // -- the list: only the visible rows are elements

  function draw() {
    const start = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
    const end = Math.min(shown.length, start + Math.ceil(list.clientHeight / ROW) + 8);
    canvas.replaceChildren(...shown.slice(start, end).map((i, k) => entry(i, start + k)));
    if (cursor >= 0) list.setAttribute("aria-activedescendant", `entry-${cursor}`);
    else list.removeAttribute("aria-activedescendant");
  }

  function entry(i, position) {
    const c = index.columns, file = index.files[fileOf[i]], kind = outcome(i);
    const reason = index.tables.category[c.category[i]];
    return h("div", {
      class: `entry${position === cursor ? " cursor" : ""}`, id: `entry-${position}`, role: "option",
      "aria-selected": String(position === cursor), style: `top:${position * ROW}px`, onclick: () => { cursor = position; open(i); },
    },
    h("div", {}, h("b", {}, stepName(file)), h("span", { class: "quiet" }, `#${c.uid[i]}`),
      h("span", { class: kind }, reason || kind), h("b", { class: `end ${kind}` }, format(c.reward[i]))),
    h("div", {}, h("span", { class: "quiet" }, index.previews[c.prompt[i]]),
      h("span", { class: "quiet end" }, `${c.turns[i]} turn${c.turns[i] === 1 ? "" : "s"} · ${c.tokens[i].toLocaleString("en")} tok`)));
  }

  function stepName(file) {
    return `${file.phase === "eval" ? "eval" : "train"}${file.step === null ? "" : ` ${file.step}`}`;
  }

  function format(value) {
    return value === null || value === undefined ? "–" : String(Number(Number(value).toPrecision(4)));
  }

  function move(to) {
    if (!shown.length) return;
    cursor = Math.max(0, Math.min(shown.length - 1, to));
    const top = cursor * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
    draw();
  }

  // -- one trajectory

  function link(i) {
    const file = index.files[fileOf[i]];
    if (!file) return null;
    return [file.phase, file.step ?? "only", index.tables.source[index.columns.source[i]], index.columns.uid[i]].join("/");
  }

  function locate(i) {
    const file = index.files[fileOf[i]];
    let position = i - file.first, chunk = 0;
    while (position >= file.chunks[chunk][1]) position -= file.chunks[chunk++][1];
    return { file, chunk, position };
  }

  async function fetchOne(i) {
    const { file, chunk, position } = locate(i);
    if (index.written !== null && !index.written.includes(file.name)) {
      throw new Error(`The texts of ${file.path} are not part of this page. Run: skyrl watch RUN_FOLDER`);
    }
    const name = `${file.name}-${chunk}.js`;
    if (!chunks.has(name)) {
      const loaded = new Promise(resolve => waiting.set(name, resolve));
      chunks.set(name, load(name).then(() => loaded));
      chunks.get(name).catch(() => chunks.delete(name));
      if (chunks.size > 40) chunks.delete(chunks.keys().next().value);
    }
    return (await chunks.get(name))[position];
  }

  async function open(i, focus = true) {
    opened = i;
    cursor = shown.indexOf(i);
    draw();
    writeHash();
    const heading = describe(i);
    let body;
    try {
      body = show(i, await fetchOne(i));
    } catch (error) {
      body = [h("p", { class: "warning" }, error.message)];
    }
    if (opened !== i) return;
    detail.replaceChildren(...heading, ...body);
    if (focus) {
      detail.focus({ preventScroll: true });
      if (matchMedia("(max-width: 900px)").matches) detail.scrollIntoView();
      else if (detail.getBoundingClientRect().top < 0) detail.scrollIntoView();
    }
  }

  function describe(i) {
    const c = index.columns, file = index.files[fileOf[i]], kind = outcome(i);
    const fact = (name, value, style) => h("span", {}, `${name} `, h("b", { class: style ?? null }, value));
    return [
      h("p", { class: "label" }, `${index.tables.source[c.source[i]]} · ${index.tables.env[c.env[i]]}`),
      h("h2", {}, `${file.phase === "eval" ? "Evaluation" : "Training"}${file.step === null ? "" : ` at step ${file.step}`}, #${c.uid[i]}`),
      h("p", { class: "facts" }, fact("reward", format(c.reward[i]), kind), fact("outcome", index.tables.category[c.category[i]] || kind, kind),
        fact("turns", c.turns[i]), fact("tokens", c.tokens[i].toLocaleString("en"))),
      h("div", { class: "tools" },
        h("button", { type: "button", onclick: copyLink }, "Copy link"),
        h("button", { type: "button", onclick: () => step(-1), title: "key [" }, "← same prompt"),
        h("button", { type: "button", onclick: () => step(1), title: "key ]" }, "same prompt →")),
    ];
  }

  async function copyLink(event) {
    try {
      await navigator.clipboard.writeText(location.href);
      event.target.textContent = "Copied";
    } catch {
      event.target.textContent = "The address bar has the link";
    }
  }

  function samePrompt(i) {
    const prompt = index.columns.prompt[i], found = [];
    index.columns.prompt.forEach((value, k) => { if (value === prompt) found.push(k); });
    const file = k => index.files[fileOf[k]];
    return found.sort((a, b) => file(a).phase.localeCompare(file(b).phase) || (file(a).step ?? 0) - (file(b).step ?? 0) || a - b);
  }

  function step(by) {
    if (opened < 0) return;
    const same = samePrompt(opened), next = same[same.indexOf(opened) + by];
    if (next !== undefined) open(next);
  }

  function show(i, t) {
    const folder = `${index.files[fileOf[i]].path.split("/")[0]}/images`;
    const failures = Object.entries(t.failures).map(([name, evidence]) => h("p", { class: "warning" }, `${name}: ${evidence}`));
    const parts = [
      h("p", { class: "quiet" }, t.ending),
      t.error ? h("p", { class: "warning" }, t.error) : null,
      ...failures,
      sameList(i),
      tokenTools(t),
    ];
    const chat = h("div", { id: "chat" });
    chat.append(...(shade && t.tokens.length ? tokenView(t) : chatView(t, folder)));
    const facts = { turns: t.turns, "reward components": t.components, "metrics of the environment": t.metrics, seconds: t.timing, "weight versions": t.versions };
    const rest = Object.entries(facts).filter(([, value]) => Object.keys(value).length)
      .map(([name, value]) => h("details", {}, h("summary", {}, name), h("pre", {}, JSON.stringify(value, null, 2))));
    if (t.extras) rest.push(h("details", {}, h("summary", {}, "environment extras"), h("pre", {}, t.extras)));
    return [...parts.filter(Boolean), chat, ...rest];
  }

  function sameList(i) {
    const same = samePrompt(i);
    if (same.length < 2) return null;
    const groups = new Map();
    for (const k of same) {
      const name = stepName(index.files[fileOf[k]]);
      groups.set(name, [...(groups.get(name) ?? []), k]);
    }
    return h("details", { open: same.length <= 60 }, h("summary", {}, `${same.length} answers to this prompt`),
      h("div", { class: "same" }, [...groups].map(([name, ks]) => h("div", {}, h("span", { class: "step" }, name),
        ks.map(k => h("button", { class: `chip ${outcome(k)}`, type: "button", "aria-current": k === i ? "true" : null, onclick: () => open(k) },
          h("span", {}, format(index.columns.reward[k]))))))));
  }

  function chatView(t, folder) {
    return [...t.prompt, ...t.messages].map(message => h("div", { class: `message ${message.role}` },
      h("p", { class: "label" }, message.role),
      message.thought ? h("details", {}, h("summary", {}, `thought, ${message.thought.length.toLocaleString("en")} characters`), h("div", { class: "text quiet" }, message.thought)) : null,
      message.text ? h("div", { class: "text" }, withImages(message.text, t.images, folder)) : null,
      (message.calls ?? []).map(call => h("div", { class: "call" }, h("b", {}, call.name), ` ${JSON.stringify(call.arguments, null, 2)}`)),
      message.fault ? h("p", { class: "warning" }, message.fault) : null));
  }

  function withImages(text, images, folder) {
    return text.split(/(<\|image:[0-9a-f]{8}\|>)/).map(part => {
      const digest = part.match(/^<\|image:([0-9a-f]{8})\|>$/)?.[1];
      const name = digest && images.find(image => image.startsWith(digest));
      return name ? h("a", { href: `${folder}/${name}`, target: "_blank" }, h("img", { src: `${folder}/${name}`, alt: `image ${digest}`, loading: "lazy" })) : part;
    });
  }

  // -- tokens, shaded by a value

  function tokenTools(t) {
    if (!t.tokens.length) return null;
    const has = name => t.tokens.some(segment => segment[name]?.length);
    const options = [["", "conversation"], ["logprobs", "log-probs"], ["advantages", "advantages"], ["loss_mask", "trained tokens"], ["rewards", "rewards"]];
    const chosen = h("select", { onchange: event => { shade = event.target.value; open(opened, false); } },
      options.filter(([name]) => !name || name === "rewards" || has(name)).map(([name, text]) => h("option", { value: name, selected: name === shade }, text)));
    return h("div", { class: "tools" }, h("label", {}, "Show", chosen));
  }

  function tokenView(t) {
    return t.tokens.map((segment, k) => {
      const values = (shade === "rewards" ? t.rewards[k] : segment[shade]) ?? [];
      const largest = Math.max(1e-9, ...values.map(value => Math.abs(value ?? 0)));
      return h("p", { class: "tokens" }, (segment.tokens ?? []).map((text, position) => {
        const value = values[position], isTrained = segment.loss_mask?.[position] ?? 1;
        const title = [`${shade}: ${format(value)}`, shade === "logprobs" && isTrained ? `probability ${format(Math.exp(value))}` : "", isTrained ? "" : "not trained"];
        return h("span", { style: `background:${color(value, isTrained, largest)}`, title: title.filter(Boolean).join(", ") }, text.replace(/\n/g, "↵\n"));
      }));
    });
  }

  function color(value, isTrained, largest) {
    if (shade === "loss_mask") return value ? "rgb(47 111 222 / 0.30)" : "transparent";
    if (value === null || value === undefined || (shade === "logprobs" && !isTrained)) return "transparent";
    if (shade === "logprobs") return `rgb(224 116 44 / ${(0.85 * (1 - Math.exp(value))).toFixed(2)})`;
    const share = (0.7 * Math.abs(value) / largest).toFixed(2);
    return value > 0 ? `rgb(23 160 70 / ${share})` : value < 0 ? `rgb(210 45 80 / ${share})` : "transparent";
  }

  // -- the address and the keys

  function writeHash() {
    const state = new URLSearchParams();
    for (const name of FIELDS) {
      const value = form.elements[name].value;
      if (value && !(name === "sort" && value === "-step")) state.set(name, value);
    }
    if (opened >= 0) state.set("open", link(opened));
    history.replaceState(null, "", `#${state}`);
  }

  function readHash() {
    const state = new URLSearchParams(location.hash.slice(1));
    for (const name of FIELDS) form.elements[name].value = state.get(name) ?? (name === "sort" ? "-step" : "");
  }

  function openFromHash() {
    const wanted = new URLSearchParams(location.hash.slice(1)).get("open");
    if (!wanted) return;
    const found = index.columns.uid.findIndex((uid, i) => wanted.endsWith(uid) && link(i) === wanted);
    if (found >= 0) {
      open(found);
      move(cursor);
    } else if (index.complete) {
      detail.replaceChildren(h("p", { class: "warning" }, `This run has no trajectory ${wanted}.`));
    }
  }

  form.addEventListener("input", () => { select(); list.scrollTop = 0; draw(); writeHash(); });
  form.addEventListener("submit", event => event.preventDefault());
  $("#reset").addEventListener("click", () => { for (const name of FIELDS) form.elements[name].value = name === "sort" ? "-step" : ""; select(); writeHash(); });
  list.addEventListener("scroll", draw, { passive: true });
  addEventListener("resize", () => index && draw());
  addEventListener("hashchange", () => { readHash(); select(); openFromHash(); });
  addEventListener("keydown", event => {
    const isTyping = event.target.matches("input, select, textarea");
    if (event.key === "Escape") { list.focus(); return; }
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || index === null) return;
    const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1);
    const isList = document.activeElement === list || document.activeElement === document.body;
    const moves = isList ? { ArrowDown: cursor + 1, ArrowUp: cursor - 1, PageDown: cursor + page, PageUp: cursor - page, Home: 0, End: shown.length - 1 } : {};
    Object.assign(moves, { j: cursor + 1, k: cursor - 1 });
    if (event.key in moves) {
      move(moves[event.key]);
      if ("jk".includes(event.key) && opened >= 0) open(shown[cursor], false);
      event.preventDefault();
    } else if (event.key === "Enter" && isList && cursor >= 0) { open(shown[cursor]); event.preventDefault(); }
    else if (event.key === "[") step(-1);
    else if (event.key === "]") step(1);
    else if (event.key === "/") { $("#filters").open = true; form.elements.text.focus(); event.preventDefault(); }
  });
  if (matchMedia("(max-width: 900px)").matches) $("#filters").open = false;

  return {
    start: () => main.hasAttribute("data-live") ? loadIndex() : load("index.js").catch(error => { $("#count").textContent = error.message; }),
    index: setIndex,
    chunk: async (name, packed) => { const resolve = waiting.get(name); waiting.delete(name); resolve?.(await unpack(packed)); },
  };
})();
trajectories.start();
