"use strict";
/* The report's script: theme, cross-hairs on charts, and the trajectory reader.
   All text from the run reaches the page through textContent, never as markup. */
(() => {
  const $ = (id) => document.getElementById(id);
  const root = document.documentElement;
  window.addEventListener("error", (e) => { root.dataset.error = e.message; });
  window.addEventListener("unhandledrejection", (e) => { root.dataset.error = String(e.reason); });

  const make = (tag, cls, text) => {
    const node = document.createElement(tag);
    if (cls) node.className = cls;
    if (text !== undefined) node.textContent = text;
    return node;
  };

  /* ---- theme ---- */
  const theme = $("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  /* ---- tooltip and charts ---- */
  const tip = $("tip");
  const showTip = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
  };
  const hideTip = () => { tip.hidden = true; };

  for (const svg of document.querySelectorAll("svg[data-chart]")) {
    const chart = JSON.parse(svg.dataset.chart);
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    line.setAttribute("class", "cross");
    line.setAttribute("y1", chart.top);
    line.setAttribute("y2", chart.bottom);
    svg.addEventListener("pointermove", (e) => {
      const box = svg.getBoundingClientRect();
      const at = ((e.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      let best = null;
      for (const s of chart.series) s.px.forEach((px, i) => {
        if (best === null || Math.abs(px - at) < Math.abs(best.px - at)) best = { px, x: s.x[i] };
      });
      if (best === null) return;
      line.setAttribute("x1", best.px);
      line.setAttribute("x2", best.px);
      if (!line.parentNode) svg.appendChild(line);
      const lines = chart.series.flatMap((s) => { const i = s.x.lastIndexOf(best.x); return i < 0 ? [] : [s.name + ": " + s.t[i]]; });
      showTip(chart.x + " " + best.x + "\n" + lines.join("\n"), e.clientX, e.clientY);
    });
    svg.addEventListener("pointerleave", () => { line.remove(); hideTip(); });
  }

  /* ---- data ---- */
  async function unpack() {
    const body = $("data").textContent;
    if (!body || !body.length) return null;
    if (typeof DecompressionStream === "undefined") throw new Error("this browser has no DecompressionStream; use a newer one");
    const bytes = Uint8Array.from(atob(body), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  /* ---- the reader ---- */
  function reader(data) {
    const all = data.trajectories;
    const text = new Map(data.ids.map((id, i) => [id, data.texts[i]]));
    const word = (id) => text.get(id) ?? "⟨" + id + "⟩";
    const state = { shown: [], at: -1, mode: 0, prompt: false, row: 0, tokens: [] };
    const ROW = 58;
    let started = false; // the address follows the selection only once a person selects
    all.forEach((t, i) => {
      t.index = i;
      t.gap = meanGap(t);
      t.label = t.reward === null ? "–" : Math.abs(t.reward) >= 100 ? t.reward.toFixed(0) : t.reward.toFixed(2);
    });

    function meanGap(t) {
      let sum = 0, n = 0;
      for (const row of t.rows) for (const s of row[2]) if (s[0] === 1 && s[3] && s[4]) s[3].forEach((lp, i) => { sum += Math.abs(s[4][i] - lp); n += 1; });
      return n ? sum / n : null;
    }

    /* tokens of a row: the shared prefix is context, the row's own spans follow */
    function flatten(t, index) {
      const [parent, fork, spans] = t.rows[index];
      const out = parent === null ? [] : flatten(t, parent).slice(0, fork).map((k) => ({ ...k, ctx: true, trained: false }));
      for (const s of spans) {
        const origin = data.origins[s[0]];
        const ids = s[0] === 1 ? s[2] : data.pool[s[2]];
        let run = 0;
        ids.forEach((id, i) => {
          const token = { id, origin, turn: s[1], at: out.length, ctx: false, trained: t.fate === "trained" && (origin === "sampled" || origin === "target") };
          if (s[0] === 1) {
            token.lp = s[3] ? s[3][i] : null;
            token.scored = s[4] ? s[4][i] : null;
            while (run < s[5].length && i >= s[5][run][1]) run += 1;
            token.version = run < s[5].length ? s[5][run][0] : null;
          }
          out.push(token);
        });
      }
      return out;
    }

    /* colourings: [label, colour of a token, legend] */
    const rgb = (name, alpha) => "rgb(var(--" + name + ") / " + Math.min(0.85, Math.max(0, alpha)).toFixed(3) + ")";
    const palette = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
    const tint = (name) => "color-mix(in srgb, var(" + name + ") 34%, transparent)";
    const modes = [
      ["Origin", (k) => "var(--o-" + k.origin + ")", () => data.origins.map((o) => ["var(--o-" + o + ")", o])],
      ["Trained", (k) => k.trained ? rgb("pos", 0.35) : "transparent", () => [[rgb("pos", 0.35), "trained on"], ["transparent", "not trained on"]]],
      ["Advantage", (k, t) => !k.trained || t.adv === null ? "transparent" : rgb(t.adv >= 0 ? "pos" : "neg", 0.12 + Math.abs(t.adv) * 0.25),
        (t) => [[rgb("pos", 0.5), "positive"], [rgb("neg", 0.5), "negative"], ["transparent", t.adv === null ? "this trajectory has no advantage" : "not trained on"]]],
      ["Log-prob", (k) => k.lp == null ? "transparent" : rgb("low", -k.lp / 5), () => [[rgb("low", 0.08), "likely"], [rgb("low", 0.4), "p = 13 %"], [rgb("low", 0.8), "p < 2 %"]]],
      ["Log-prob gap", (k) => k.lp == null || k.scored == null ? "transparent" : rgb("gap", Math.abs(k.scored - k.lp) * 4),
        (t) => t.gap === null ? [["transparent", "the trainer's log-probs were not recorded"]] : [[rgb("gap", 0.08), "|trainer − sampler| 0.02"], [rgb("gap", 0.4), "0.1"], [rgb("gap", 0.8), "≥ 0.2"]]],
      ["Version", (k) => k.version == null ? "transparent" : tint(palette[k.version % palette.length]),
        () => [...new Set(state.tokens.filter((k) => k.version != null).map((k) => k.version))].map((v) => [tint(palette[v % palette.length]), data.versions[v]])],
    ];

    /* filters */
    const distinct = (get) => [...new Set(all.map(get))];
    const fill = (id, first, values) => {
      const select = $(id);
      select.append(new Option(first, ""));
      for (const v of values) select.append(new Option(String(v), String(v)));
      select.hidden = values.length < 2;
      select.addEventListener("change", apply);
    };
    fill("f-phase", "All phases", distinct((t) => t.phase));
    fill("f-step", "All steps", distinct((t) => t.step).sort((a, b) => a - b));
    fill("f-source", "All sources", distinct((t) => t.source).sort());
    fill("f-outcome", "All outcomes", distinct((t) => t.outcome).sort());
    fill("f-fate", "All fates", distinct((t) => t.fate).sort());
    fill("f-reward", "Any reward", ["positive", "zero", "negative", "missing"]);
    const sorts = {
      "In order": (a, b) => a.index - b.index,
      "Reward, high first": (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
      "Reward, low first": (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
      "Largest |advantage|": (a, b) => Math.abs(b.adv ?? 0) - Math.abs(a.adv ?? 0),
      "Longest": (a, b) => b.n - a.n,
      "Slowest": (a, b) => b.seconds - a.seconds,
      "Largest log-prob gap": (a, b) => (b.gap ?? -1) - (a.gap ?? -1),
      "Latest step": (a, b) => b.step - a.step || a.index - b.index,
    };
    for (const name of Object.keys(sorts)) $("sort").append(new Option(name, name));
    $("sort").addEventListener("change", () => { state.at = -1; list.scrollTop = 0; apply(); });
    let pending = 0;
    $("q").addEventListener("input", () => { clearTimeout(pending); pending = setTimeout(apply, 120); });

    const sign = (t) => t.reward === null ? "missing" : t.reward > 0 ? "positive" : t.reward < 0 ? "negative" : "zero";
    function haystack(t) {
      if (t.hay === undefined) {
        const words = t.rows.flatMap((r) => r[2].filter((s) => s[0] === 1).map((s) => s[2].map(word).join("")));
        t.hay = [t.id, t.uid, t.asked, t.why, ...words].join("\n").toLowerCase();
      }
      return t.hay;
    }
    function apply() {
      const want = (id) => $(id).value;
      const q = $("q").value.trim().toLowerCase();
      const current = state.shown[state.at];
      state.shown = all.filter((t) =>
        (!want("f-phase") || t.phase === want("f-phase")) && (!want("f-step") || String(t.step) === want("f-step")) &&
        (!want("f-source") || t.source === want("f-source")) && (!want("f-outcome") || t.outcome === want("f-outcome")) &&
        (!want("f-fate") || t.fate === want("f-fate")) && (!want("f-reward") || sign(t) === want("f-reward")) &&
        (!q || haystack(t).includes(q))).sort(sorts[$("sort").value]);
      $("count").textContent = state.shown.length.toLocaleString("en") + " shown";
      $("spacer").style.height = state.shown.length * ROW + "px";
      const kept = state.shown.indexOf(current);
      select(kept >= 0 ? kept : state.shown.length ? 0 : -1);
    }

    /* the list draws only what is in view */
    const list = $("list");
    function draw() {
      const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
      const last = Math.min(state.shown.length, first + Math.ceil((list.clientHeight || 600) / ROW) + 10);
      const items = [];
      for (let i = first; i < last; i += 1) items.push(item(state.shown[i], i));
      $("spacer").replaceChildren(...items);
    }
    function item(t, i) {
      const node = make("div", "item");
      node.id = "item-" + i;
      node.setAttribute("role", "option");
      node.setAttribute("aria-selected", String(i === state.at));
      node.setAttribute("aria-posinset", String(i + 1));
      node.setAttribute("aria-setsize", String(state.shown.length));
      node.style.top = i * ROW + "px";
      const l1 = make("div", "l1");
      l1.append(make("span", "rew " + (t.reward === null ? "zero" : t.reward > 0 ? "pos" : t.reward < 0 ? "neg" : "zero"), t.label));
      l1.append(make("span", "pill", t.phase === "train" ? "step " + t.step : "eval " + t.step));
      l1.append(make("span", "pill " + (t.outcome === "completed" ? t.fate : t.outcome), t.outcome === "completed" ? t.fate : t.outcome));
      if (t.source) l1.append(make("span", "pill", t.source));
      l1.append(make("span", "right", t.n + " tok"));
      node.append(l1, make("div", "l2", t.asked.trim().split("\n").pop() || t.id));
      node.addEventListener("click", () => { select(i); list.focus({ preventScroll: true }); });
      return node;
    }
    list.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });

    function select(i) {
      state.at = i;
      state.row = 0;
      if (i >= 0) {
        const top = i * ROW, height = list.clientHeight || 600;
        if (top < list.scrollTop) list.scrollTop = top;
        else if (top + ROW > list.scrollTop + height) list.scrollTop = top + ROW - height;
        list.setAttribute("aria-activedescendant", "item-" + i);
        if (started) history.replaceState(null, "", "#t=" + encodeURIComponent(state.shown[i].id));
      }
      draw();
      show();
    }

    /* one trajectory */
    function fact(parent, name, value, cls) {
      if (value === null || value === undefined || value === "") return;
      const span = make("span", "", name + " ");
      span.append(make("b", cls || "", String(value)));
      parent.append(span);
    }
    function show() {
      const view = $("view");
      const t = state.shown[state.at];
      if (!t) { view.replaceChildren(make("p", "empty", "Nothing matches these filters.")); return; }
      state.tokens = flatten(t, state.row);
      const facts = make("p", "facts");
      fact(facts, "reward", t.label);
      fact(facts, "advantage", t.adv);
      fact(facts, "outcome", t.outcome + (t.why ? " (" + t.why + ")" : ""));
      fact(facts, "fate", t.fate);
      fact(facts, t.phase === "train" ? "consumed at step" : "at step", t.step);
      if (t.phase === "train") fact(facts, "scheduled at", t.scheduled); else fact(facts, "", t.phase);
      fact(facts, "sampled", t.n + " tokens");
      fact(facts, "took", t.seconds + " s");
      fact(facts, "mean gap", t.gap === null ? null : t.gap.toFixed(4));
      fact(facts, "environment", t.env);
      fact(facts, "group", t.group, "mono");
      fact(facts, "sample", t.sample + (t.attempt ? " (attempt " + t.attempt + ")" : ""));
      view.replaceChildren(facts, bar(t), ...blocks(t));
      view.scrollTop = 0;
    }
    function bar(t) {
      const box = make("div", "modes");
      const seg = make("div", "seg");
      seg.setAttribute("role", "group");
      seg.setAttribute("aria-label", "Colour tokens by");
      modes.forEach(([name], i) => {
        const button = make("button", "", name);
        button.type = "button";
        button.setAttribute("aria-pressed", String(i === state.mode));
        button.addEventListener("click", () => colour(i));
        seg.append(button);
      });
      box.append(seg);
      if (t.rows.length > 1) {
        const rows = make("select");
        rows.setAttribute("aria-label", "Row");
        t.rows.forEach((r, i) => rows.append(new Option("row " + i + (r[0] === null ? "" : " (forks row " + r[0] + " at " + r[1] + ")"), String(i), false, i === state.row)));
        rows.addEventListener("change", () => { state.row = Number(rows.value); show(); });
        box.append(rows);
      }
      box.append(legend(t));
      return box;
    }
    function legend(t) {
      const keys = make("div", "keys");
      keys.id = "keys";
      for (const [colour, label] of modes[state.mode][2](t)) {
        const key = make("span");
        const chip = make("i");
        chip.style.background = colour;
        key.append(chip, document.createTextNode(label));
        keys.append(key);
      }
      return keys;
    }
    function colour(mode) {
      state.mode = (mode + modes.length) % modes.length;
      const t = state.shown[state.at];
      if (!t) return;
      const paint = modes[state.mode][1];
      for (const node of $("view").querySelectorAll(".t")) node.style.background = paint(state.tokens[node.dataset.i], t);
      document.querySelectorAll(".seg button").forEach((b, i) => b.setAttribute("aria-pressed", String(i === state.mode)));
      $("keys").replaceWith(legend(t));
    }
    function stream(tokens, t) {
      const box = make("div", "tokens");
      const paint = modes[state.mode][1];
      for (const k of tokens) {
        const shown = word(k.id);
        const node = make("span", "t " + k.origin + (k.ctx ? " ctx" : ""), shown.replace(/\n/g, "⏎\n").replace(/\t/g, "→\t"));
        node.dataset.i = k.at;
        node.style.background = paint(k, t);
        box.append(node);
      }
      return box;
    }
    function blocks(t) {
      const head = [], turns = new Map();
      let current = null;
      for (const k of state.tokens) {
        if (k.origin === "sampled" && k.turn !== null) current = k.turn;
        else if (k.turn !== null && k.turn !== undefined) current = k.turn;
        if (current === null) { head.push(k); continue; }
        if (!turns.has(current)) turns.set(current, []);
        turns.get(current).push(k);
      }
      for (const turn of t.turns) if (!turns.has(turn.i)) turns.set(turn.i, []);
      const out = [promptBlock(head, t)];
      for (const [number, tokens] of [...turns].sort((a, b) => a[0] - b[0])) {
        const block = make("section", "turn");
        block.append(make("h4", "", "TURN " + number + " · " + tokens.filter((k) => k.origin === "sampled").length + " sampled tokens"));
        block.append(stream(tokens, t), environment(t.turns.find((x) => x.i === number)));
        out.push(block);
      }
      return out;
    }
    function promptBlock(tokens, t) {
      const block = make("section", "prompt");
      block.append(make("h4", "", "PROMPT · " + tokens.length + " tokens"));
      const button = make("button", "", state.prompt ? "Hide the prompt" : "Show the whole prompt");
      button.type = "button";
      button.addEventListener("click", togglePrompt);
      const tail = state.prompt ? tokens : tokens.slice(-60);
      if (tokens.length > 60) block.append(button);
      block.append(stream(tail, t));
      return block;
    }
    function togglePrompt() { state.prompt = !state.prompt; show(); }
    function environment(turn) {
      const box = make("aside", "env");
      if (!turn) { box.append(make("span", "meta", "no environment step")); return box; }
      const rewards = make("div", "rw");
      for (const [name, value, missing] of turn.rewards) {
        const node = make("span", "rew " + (value === null ? "zero" : value > 0 ? "pos" : value < 0 ? "neg" : "zero"), value === null ? "missing: " + missing : (value > 0 ? "+" : "") + Number(value.toFixed(4)));
        const pair = make("span", "", name + " ");
        pair.append(node);
        rewards.append(pair);
      }
      box.append(rewards);
      for (const [role, content] of turn.obs) box.append(make("div", "role", "environment → " + role), make("div", "obs", content));
      box.append(make("div", "meta", "model " + turn.llm + " s · environment " + turn.env + " s · ended by " + turn.end));
      return box;
    }

    /* hovering a token tells everything that is known of it */
    const describe = (k) => {
      const t = state.shown[state.at];
      const lines = [JSON.stringify(word(k.id)) + "  id " + k.id, k.origin + (k.ctx ? ", context of this row" : "") + ", position " + k.at];
      if (k.lp != null) lines.push("log-prob " + k.lp.toFixed(3) + "  (p = " + (100 * Math.exp(k.lp)).toFixed(1) + " %)");
      if (k.scored != null) lines.push("trainer " + k.scored.toFixed(3) + ", gap " + (k.scored - k.lp).toFixed(3));
      if (k.version != null) lines.push("sampled by " + data.versions[k.version]);
      lines.push(k.trained ? "trained on, advantage " + (t.adv === null ? "not recorded" : t.adv) : "not trained on");
      return lines.join("\n");
    };
    $("view").addEventListener("pointermove", (e) => {
      const node = e.target.closest && e.target.closest(".t");
      if (node) showTip(describe(state.tokens[node.dataset.i]), e.clientX, e.clientY); else hideTip();
    });
    $("view").addEventListener("pointerleave", hideTip);

    /* keys */
    const step = (by) => { if (state.shown.length) select(Math.max(0, Math.min(state.shown.length - 1, state.at + by))); };
    const sibling = (by) => {
      const t = state.shown[state.at];
      if (!t) return;
      const group = all.filter((x) => x.group === t.group && x.phase === t.phase);
      const next = group[(group.indexOf(t) + by + group.length) % group.length];
      let i = state.shown.indexOf(next);
      if (i < 0) { for (const id of ["f-outcome", "f-fate", "f-reward"]) $(id).value = ""; $("q").value = ""; apply(); i = state.shown.indexOf(next); }
      if (i >= 0) select(i);
    };
    document.addEventListener("keydown", (e) => {
      if (e.ctrlKey || e.metaKey || e.altKey) return;
      if (/^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName)) { if (e.key === "Escape") { e.target.blur(); list.focus(); } return; }
      const inList = document.activeElement === list;
      const keys = { j: () => step(1), k: () => step(-1), c: () => colour(state.mode + 1), C: () => colour(state.mode - 1), p: togglePrompt, "[": () => sibling(-1), "]": () => sibling(1), "/": () => $("q").focus() };
      if (inList) Object.assign(keys, { ArrowDown: () => step(1), ArrowUp: () => step(-1), PageDown: () => step(8), PageUp: () => step(-8), Home: () => step(-state.shown.length), End: () => step(state.shown.length) });
      if (keys[e.key]) { e.preventDefault(); keys[e.key](); }
    });

    const linked = location.hash.startsWith("#t=") ? decodeURIComponent(location.hash.slice(3)) : null;
    $("app").hidden = false;
    apply();
    const found = linked ? state.shown.findIndex((t) => t.id === linked) : -1;
    if (found >= 0) select(found);
    started = true;
    root.dataset.trajectories = String(all.length);
    root.dataset.drawn = String(document.querySelectorAll("#spacer .item").length);
    root.dataset.tokens = String(document.querySelectorAll("#view .t").length);
  }

  $("loading").hidden = false;
  unpack().then((data) => {
    if (data) reader(data);
    $("loading").hidden = true;
    root.dataset.ready = "yes";
    root.dataset.milliseconds = String(Math.round(performance.now()));
  }).catch((error) => {
    $("loading").textContent = "The trajectories cannot be shown: " + error.message;
    root.dataset.error = error.message;
  });
})();
