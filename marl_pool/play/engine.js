"use strict";
// Replaces the server in exported pages: environment, policies and perturbations in float64.
// It exchanges the messages of session.py. `DEMO` holds the data exported from torch.

// ---- random numbers: the streams of utils/randomness.py --------------------------------

const GAMMA = 0x9E3779B97F4A7C15n, MIX = [0xBF58476D1CE4E5B9n, 0x94D049BB133111EBn];
const word = (bits) => BigInt.asUintN(64, bits);
function mix(bits) {
  bits = word((bits ^ (bits >> 30n)) * MIX[0]);
  bits = word((bits ^ (bits >> 27n)) * MIX[1]);
  return bits ^ (bits >> 31n);
}
const PURPOSE = { reset: 1n, dynamics: 2n, perturbation: 4n };
function streamKey(seed, env, episode, purpose) {
  let key = mix(word(BigInt(seed) + GAMMA));
  for (const name of [BigInt(env), BigInt(episode), purpose]) key = mix(key ^ word(name * GAMMA + MIX[1]));
  return key;
}
function uniform(key, count, start = 0) {
  return Array.from({ length: count }, (_, i) => {
    const bits = mix(mix(word(key + BigInt(start + i + 1) * GAMMA)) ^ key);
    return (Number(bits >> 12n) + .5) * 2 ** -52;
  });
}
const normal = (numbers) => numbers.map((u, i) => Math.sqrt(-2 * Math.log(u)) * Math.cos(2 * Math.PI * numbers[(i + 1) % numbers.length]));

// ---- environments ------------------------------------------------------------------------

class Centroid {
  constructor(about, seed, number) {
    Object.assign(this, about, { steps: 0 });
    const [env, moving] = [BigInt(about.first_env) + BigInt(number), about.num_agents + about.num_signal];
    this.dynamics = streamKey(seed, env, 0, PURPOSE.dynamics);
    const numbers = uniform(streamKey(seed, env, 0, PURPOSE.reset), 4 * moving + 2 + 2 * about.num_noise);
    const scale = [this.spread, this.spread, 2, 2], centred = (u) => 2 * u - 1;
    this.state = Array.from({ length: moving }, (_, i) => scale.map((s, j) => centred(numbers[4 * i + j]) * s));
    const [angle, offset] = numbers.slice(4 * moving), turn = 2 * Math.PI * angle;
    const shift = [Math.cos(turn), Math.sin(turn)].map((x) => this.noise_offset * offset * x);
    for (let i = 0; i < about.num_noise; i++) this.state.push([...shift.map((s, j) => s + centred(numbers[4 * moving + 2 + 2 * i + j]) * this.spread), 0, 0]);
    this.moving = moving;
  }
  get goal() {
    const signal = this.state.slice(this.num_agents, this.moving);
    return [0, 1].map((j) => signal.reduce((sum, s) => sum + s[j], 0) / signal.length);
  }
  tokens(agent) {
    const order = this.orders[agent], own = this.state[order[0]];
    return order.map((entity, i) => ({ f: this.state[entity].map((x, j) => (x - own[j]) / this.feature_scale), type: this.token_types[agent][i], pad: false, origin: i, entity }));
  }
  step(actions) {
    const forces = actions.map((action) => {
      if (!Array.isArray(action)) return [[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]][action].map((x) => x * this.acceleration);
      const a = action.map((x) => Math.min(1, Math.max(0, x)));
      return [(a[2] - a[1]) * this.acceleration, (a[4] - a[3]) * this.acceleration];
    });
    for (const turn of uniform(this.dynamics, this.num_signal, this.steps * this.num_signal)) forces.push([Math.sin(2 * Math.PI * turn), Math.sin(2 * Math.PI * turn + Math.PI / 2)]);
    forces.forEach((force, i) => {
      const s = this.state[i], fastest = i < this.num_agents ? 5 : 2;
      for (const j of [0, 1]) { s[j] += .1 * s[j + 2]; s[j + 2] = .75 * s[j + 2] + .1 * force[j]; }
      const speed = Math.hypot(s[2], s[3]), slower = speed > fastest ? fastest / speed : 1;
      s[2] *= slower; s[3] *= slower;
    });
    this.steps += 1;
    const goal = this.goal;
    const rewards = this.state.slice(0, this.num_agents).map((s) => -this.reward_scale * Math.sqrt(Math.hypot(s[0] - goal[0], s[1] - goal[1])));
    return { reward: rewards.reduce((a, b) => a + b) / rewards.length, over: this.steps >= this.max_steps ? "time is up" : "" };
  }
  scene() { return { state: this.state, goals: [this.goal] }; }
  places(tokens, agent) {
    const own = this.state[this.orders[agent][0]];
    return tokens.map(({ f }) => [own[0] + this.feature_scale * f[0], own[1] + this.feature_scale * f[1]]);
  }
  signal(entity) { return entity < this.moving && entity >= this.num_agents; }
  observer(agent) { return this.orders[agent][0]; }
  move(entity, x, y) { if (this.state[entity]) this.state[entity] = [...[x, y].map((at) => Math.min(this.extent, Math.max(-this.extent, at))), 0, 0]; }
  push() {}
}

class CartPole {
  constructor(about, seed, number) {
    Object.assign(this, about, { steps: 0 });
    const env = BigInt(about.first_env) + BigInt(number), scale = [2.4, about.start_speed, about.start_angle, about.start_speed];
    const start = uniform(streamKey(seed, env, 0, PURPOSE.reset), 4).map((u, i) => (2 * u - 1) * scale[i]);
    [this.x, this.v, this.angle, this.turn] = start;
    this.angle += Math.PI;
  }
  get channels() { return [this.x, this.v, Math.cos(this.angle), Math.sin(this.angle), this.turn]; }
  tokens() { const own = this.channels; return this.order.map((c, i) => ({ f: [own[c]], type: this.token_types[i], pad: false, origin: i, entity: i })); }
  step([action]) {
    const force = 10 * Math.min(1, Math.max(-1, action[0])), cos = Math.cos(this.angle), sin = Math.sin(this.angle);
    const pull = cos * 14.73 - .6 * this.turn ** 2;
    const a = (4 * force - .4 * this.v + sin * pull) / (4 - 1.5 * cos * cos), b = 2.5 * (9.82 * sin + cos * a);
    this.x += .01 * this.v; this.angle += .01 * this.turn; this.v += .01 * a; this.turn += .01 * b;
    this.steps += 1;
    const reward = (Math.cos(this.angle) + 1) / 2 * Math.cos(this.x * Math.PI / 4.8);
    return { reward, over: Math.abs(this.x) > 2.4 ? "terminated" : this.steps >= this.max_steps ? "time is up" : "" };
  }
  scene() { return { cart: [this.x, this.angle] }; }
  places() { return null; }
  signal() { return true; }
  observer() { return 0; }
  move() {}
  push(strength) { this.turn -= 6 * strength; }
}

// ---- networks ----------------------------------------------------------------------------

/** Error function to full precision: a series of positive terms. */
function erf(x) {
  const size = Math.abs(x);
  if (size > 6) return Math.sign(x);
  let term = size, sum = size;
  for (let n = 1; term > 1e-18 * sum; n++) sum += term *= 2 * size * size / (2 * n + 1);
  return Math.sign(x) * 2 / Math.sqrt(Math.PI) * Math.exp(-size * size) * sum;
}
const ACTIVATIONS = { gelu: (x) => .5 * x * (1 + erf(x / Math.SQRT2)), relu: (x) => Math.max(0, x), tanh: Math.tanh, silu: (x) => x / (1 + Math.exp(-x)), none: (x) => x };
const sigmoid = (x) => 1 / (1 + Math.exp(-x));
const dot = (a, b) => { let sum = 0; for (let i = 0; i < a.length; i++) sum += a[i] * b[i]; return sum; };
const add = (a, b) => a.map((x, i) => x + b[i]);

class Weights {
  constructor(stored) {
    this.all = {};
    for (const [name, [shape, text]] of Object.entries(stored)) {
      const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0)), flat = Array.from(new Float32Array(bytes.buffer));
      const width = shape.at(-1);
      this.all[name] = shape.length < 2 ? flat : Array.from({ length: shape[0] }, (_, i) => flat.slice(i * width, (i + 1) * width));
    }
  }
  linear(name, x) {
    const bias = this.all[name + ".bias"];
    return this.all[name + ".weight"].map((row, i) => dot(row, x) + (bias ? bias[i] : 0));
  }
  norm(name, x) {
    const mean = x.reduce((a, b) => a + b) / x.length, variance = x.reduce((a, b) => a + (b - mean) ** 2, 0) / x.length;
    return x.map((v, i) => (v - mean) / Math.sqrt(variance + 1e-5) * this.all[name + ".weight"][i] + this.all[name + ".bias"][i]);
  }
  mlp(name, places, x, activation, last = ACTIVATIONS.none) {
    return places.reduce((y, place, i) => this.linear(`${name}.${place}`, y).map(i < places.length - 1 ? activation : last), x);
  }
  /** Attend from queries to the vectors of present tokens; return results and weights. */
  attend(name, { heads, scale }, queries, context) {
    const keys = context.map((x) => this.linear(name + ".to_key", x)), values = context.map((x) => this.linear(name + ".to_value", x));
    const dim = queries[0].length, width = dim / heads, shares = [];
    const mixed = queries.map((query) => {
      const q = this.linear(name + ".to_query", query), result = Array(dim).fill(0);
      for (let from = 0; from < dim; from += width) {
        const weights = keys.map((key) => { let sum = 0; for (let j = from; j < from + width; j++) sum += q[j] * key[j]; return scale * sum; });
        const top = weights.reduce((a, b) => Math.max(a, b));
        let total = 0;
        for (let i = 0; i < weights.length; i++) total += weights[i] = Math.exp(weights[i] - top);
        for (let i = 0; i < weights.length; i++) { weights[i] /= total; for (let j = from; j < from + width; j++) result[j] += weights[i] * values[i][j]; }
        shares.push(weights);
      }
      return this.linear(name + ".to_out", result);
    });
    return [mixed, shares];
  }
}

class TokenNetwork {
  constructor(about) { Object.assign(this, about); this.w = new Weights(about.weights); }
  start() { return null; }
  /** Return the action, the attention to each token, and the next memory. */
  act(tokens) {
    const { w, network } = this, phi = ACTIVATIONS[this.input_activation], here = tokens.filter((t) => !t.pad);
    const types = w.all[network + ".embedding.types.weight"];
    const project = w.all[network + ".embedding.project.weight"] ? (f) => w.linear(network + ".embedding.project", f).map(phi) : (f) => f;
    let x = here.map((t) => project([...t.f, ...(types ? types[t.type] : [])]));
    for (let i = 0; i < this.layers.length; i++) {
      const name = `${network}.encoder.layers.${i}`, layer = this.layers[i];
      const normed = x.map((v) => w.norm(name + ".attention_norm", v));
      if (x.length) x = x.map(((mixed) => (v, k) => add(v, mixed[k]))(w.attend(name + ".attention", layer, normed, normed)[0]));
      x = x.map((v) => add(v, w.mlp(name + ".feedforward", [0, 2], w.norm(name + ".feedforward_norm", v), ACTIVATIONS[layer.activation])));
    }
    if (this.final_norm) x = x.map((v) => w.norm(network + ".encoder.final_norm", v));
    const [pooled, shares] = this.pool(x, here);
    const logits = w.mlp("action_head", this.head, pooled, ACTIVATIONS[this.activation]);
    const own = new Map(here.map((t, i) => [t, i]));
    return [this.n ? logits.indexOf(Math.max(...logits)) : logits.slice(0, this.low.length), shares && tokens.map((t) => (own.has(t) ? shares[own.get(t)] : 0)), null];
  }
  pool(x, here) {
    const width = this.width, mean = (part) => (part.length ? Array.from({ length: width }, (_, j) => part.reduce((s, v) => s + v[j], 0) / part.length) : Array(width).fill(0));
    if (this.pooling.name === "avg") return [mean(x), x.map(() => 1 / x.length)];
    if (this.pooling.name === "max") return [x.length ? Array.from({ length: width }, (_, j) => Math.max(...x.map((v) => v[j]))) : mean([]), null];
    if (!x.length) return [mean([]), []];
    const own = x.filter((_, i) => here[i].type === 0), name = this.network + ".pooling";
    const query = this.pooling.query === "learned" ? this.w.all[name + ".learned_query"] : mean(this.pooling.query === "self" && own.length ? own : x);
    const [[mixed], shares] = this.w.attend(name + ".attention", this.pooling, [query], x);
    return [this.pooling.residual ? add(mixed, query) : mixed, x.map((_, i) => shares.reduce((s, h) => s + h[i], 0) / shares.length)];
  }
}

class SensoryNetwork {
  constructor(about) {
    Object.assign(this, about);
    this.w = new Weights(about.weights);
    this.queries = this.table.map((row) => this.w.linear("sensor.query", row));
  }
  start() { return { action: this.low.map(() => 0), cells: [] }; }
  act(tokens, { action, cells }) {
    const { w } = this, after = [], weights = tokens.map((token, i) => {
      const [h, c] = cells[i] || [Array(this.units).fill(0), Array(this.units).fill(0)];
      if (token.pad) { after.push([h, c]); return this.queries.map(() => 0); }
      const gates = ["ih", "hh"].map((part) => w.all["sensor.cell.weight_" + part].map((row, j) => dot(row, part === "ih" ? [...token.f, ...action] : h) + w.all["sensor.cell.bias_" + part][j]));
      const all = add(...gates), gate = (k) => all.slice(k * this.units, (k + 1) * this.units);
      const [input, forget, update, output] = [0, 1, 2, 3].map(gate);
      const cell = c.map((x, j) => sigmoid(forget[j]) * x + sigmoid(input[j]) * Math.tanh(update[j]));
      const hidden = cell.map((x, j) => sigmoid(output[j]) * Math.tanh(x));
      after.push([hidden, cell]);
      const key = w.linear("sensor.key", hidden);
      return this.queries.map((q) => Math.tanh(this.scale * dot(q, key)));
    });
    const codes = this.queries.map((_, m) => tokens.reduce((sum, t, i) => sum + weights[i][m] * (t.pad ? 0 : t.f[0]), 0)).map(this.squash ? Math.tanh : (x) => x);
    const result = w.mlp("body", this.body, codes, Math.tanh, Math.tanh), count = this.queries.length;
    const totals = this.queries.map((_, m) => weights.reduce((s, row) => s + Math.abs(row[m]), 0) || 1);
    return [result, weights.map((row) => row.reduce((s, x, m) => s + Math.abs(x) / totals[m], 0) / count), { action: result.map((a) => Math.fround(Math.min(1, Math.max(-1, a)))), cells: after }];
  }
}
const NETWORKS = { token: TokenNetwork, sensory: SensoryNetwork }, ENVS = { simple_centroid: Centroid, cartpole: CartPole };

// ---- perturbations: those of marl_pool/perturbations, with other random numbers ------------

const CHAIN = ["hand", "freeze", "delay", "bias", "scale", "jitter", "rewire", "confuse", "occlude", "duplicate", "inject", "shuffle"], ACTS = ["action_noise", "drop_actions"];
const copy = (token) => ({ ...token, f: [...token.f] });
/** Round a positive number as torch does: halves to the even neighbour. */
const halfEven = (x) => (x % 2 === .5 ? Math.floor(x) : Math.round(x));

class Perception {
  constructor(seed, number, hasSelf, types) { Object.assign(this, { seed, number, hasSelf, types, turns: {}, memory: {}, severities: {}, chosen: { hidden: [], frozen: [], twice: [] } }); }
  numbers(name, count, turn = this.turns[name] || 0) { return uniform(streamKey(this.seed + turn, this.number, [...CHAIN, ...ACTS].indexOf(name), PURPOSE.perturbation), count); }
  share(name, tokens, free) {
    const scores = this.numbers(name, tokens.length), eligible = tokens.map((_, i) => i).filter((i) => free(tokens[i])).sort((a, b) => scores[a] - scores[b]);
    return eligible.slice(0, halfEven(this.severities[name] * eligible.length));
  }
  permute(chosen) { const places = [...chosen].sort((a, b) => a - b); return new Map(places.map((p, i) => [p, chosen[i]])); }
  see(tokens, steps, commit) {
    const own = (t) => this.hasSelf && t.type === 0, free = (t) => !t.pad && !own(t), { chosen, memory } = this;
    const hold = (key, now) => { if (!(key in memory)) memory[key] = [...now]; return [...memory[key]]; };
    for (const key of Object.keys(memory)) if (key.startsWith("hand") && !chosen.frozen.includes(+key.slice(4))) delete memory[key];
    for (const t of tokens) {
      if (own(t)) continue;
      if (chosen.frozen.includes(t.entity)) t.f = hold("hand" + t.entity, t.f);
      if (chosen.hidden.includes(t.entity)) t.pad = true;
    }
    tokens.push(...tokens.filter((t) => chosen.twice.includes(t.entity) && !own(t)).map(copy));
    for (const name of CHAIN) if (this.severities[name]) tokens = this[name](tokens, this.severities[name], { own, free, hold, steps, commit });
    return tokens;
  }
  freeze(tokens, s, { free, hold }) { for (const i of this.share("freeze", tokens, free)) tokens[i].f = hold("freeze" + i, tokens[i].f); return tokens; }
  delay(tokens, s, { own, commit }) {
    const past = this.memory.delay || tokens.map((t) => Array(9).fill(t.f)), now = tokens.map((t, i) => [t.f, ...(past[i] || Array(9).fill(t.f))].slice(0, 9));
    if (commit) this.memory.delay = now;
    return tokens.map((t, i) => (own(t) ? t : { ...t, f: [...now[i][halfEven(8 * s)]] }));
  }
  errors(name, tokens, turn) { const count = tokens[0] ? tokens[0].f.length : 0, all = normal(this.numbers(name, tokens.length * count + 1, turn)); return (i, j) => all[i * count + j]; }
  bias(tokens, s, { own }) { const e = this.errors("bias", tokens); return tokens.map((t, i) => (own(t) ? t : { ...t, f: t.f.map((x, j) => x + s * e(i, j)) })); }
  jitter(tokens, s, { own, steps }) { const e = this.errors("jitter", tokens, steps + 1); return tokens.map((t, i) => (own(t) ? t : { ...t, f: t.f.map((x, j) => x + s * e(i, j)) })); }
  scale(tokens, s, { own }) { const e = this.errors("scale", tokens); return tokens.map((t, i) => (own(t) ? t : { ...t, f: t.f.map((x, j) => x * Math.exp(s * e(i, j))) })); }
  rewire(tokens) { const moved = this.permute(this.share("rewire", tokens, (t) => !t.pad)); return tokens.map((t, i) => (moved.has(i) ? { ...t, f: [...tokens[moved.get(i)].f], origin: tokens[moved.get(i)].origin, entity: tokens[moved.get(i)].entity } : t)); }
  confuse(tokens, s, { free }) {
    const first = this.hasSelf ? 1 : 0, choice = this.numbers("confuse", 2 * tokens.length).slice(tokens.length);
    for (const i of this.share("confuse", tokens, free)) { const others = this.types.map((_, k) => k).filter((k) => k >= first && k !== tokens[i].type); tokens[i].type = others[Math.floor(choice[i] * others.length)]; }
    return tokens;
  }
  occlude(tokens, s, { free }) { for (const i of this.share("occlude", tokens, free)) tokens[i].pad = true; return tokens; }
  duplicate(tokens, s, { free }) { return [...tokens, ...this.share("duplicate", tokens, free).map((i) => copy(tokens[i]))]; }
  inject(tokens, s, { free }) {
    const type = this.types.length - 1, alike = tokens.filter((t) => !t.pad && t.type === type), anchors = alike.length ? alike : tokens.filter(free), numbers = this.numbers("inject", 96);
    if (!anchors.length) return tokens;
    return [...tokens, ...Array.from({ length: halfEven(32 * s) }, (_, i) => {
      const anchor = anchors[Math.floor(numbers[3 * i] * anchors.length)], f = [...anchor.f];
      f[0] += (2 * numbers[3 * i + 1] - 1) * .1; f[1] += (2 * numbers[3 * i + 2] - 1) * .1;
      return { f, type, pad: false, origin: -1, entity: -1 };
    })];
  }
  /** Return the executed actions of all agents, each an integer below n or a list between low and high. */
  act(actions, steps, { n, low, high }) {
    const clip = (a, j) => Math.min(high[j], Math.max(low[j], a)), past = this.memory.executed, size = n ? 2 : low.length;
    for (const name of ACTS) {
      const s = this.severities[name], numbers = s ? this.numbers(name, actions.length * size + 1, steps + 1) : [], errors = s ? normal(numbers) : [];
      if (s) actions = actions.map((action, i) => {
        const own = i * size, hit = numbers[own] < s;
        if (name === "drop_actions") return !hit ? action : past ? past[i] : n ? 0 : low.map((_, j) => clip(0, j));
        if (n) return hit ? Math.floor(numbers[own + 1] * n) : action;
        return action.map((a, j) => clip(clip(a, j) + s * errors[own + j] * (high[j] - low[j]) / 2, j));
      });
    }
    return this.memory.executed = actions;
  }
  shuffle(tokens) { const moved = this.permute(this.share("shuffle", tokens, () => true)); return tokens.map((t, i) => tokens[moved.has(i) ? moved.get(i) : i]); }
}

// ---- session ------------------------------------------------------------------------------

class EpisodeRun {
  constructor(policy, seed, number, perception) {
    Object.assign(this, { policy, perception, env: new ENVS[DEMO.env.name](DEMO.env, seed, number), total: 0, over: "", actions: null, executed: null, decided: [] });
    this.memories = Array.from({ length: DEMO.hello.agents }, () => policy.start());
  }
  see(agent, commit) { const tokens = this.env.tokens(agent); return this.perception ? this.perception.see(tokens, this.env.steps, commit) : tokens; }
  /** Return tokens, action, attention and memory, cached until a step or a change. */
  decide(agent) {
    if (!this.decided[agent]) { const tokens = this.see(agent, false); this.decided[agent] = [tokens, ...this.policy.act(tokens, this.memories[agent])]; }
    return this.decided[agent];
  }
  step() {
    if (this.over) return;
    const { low, high, n } = this.policy;
    this.actions = this.memories.map((_, agent) => {
      const [, action, , memory] = this.decide(agent);
      if (this.perception) this.see(agent, true); // remembers readings to delay
      this.memories[agent] = memory;
      return n ? action : action.map((a, i) => low[i] + (a + 1) * (high[i] - low[i]) / 2);
    });
    this.executed = this.perception ? this.perception.act(this.actions, this.env.steps, this.policy) : this.actions;
    const { reward, over } = this.env.step(this.executed);
    this.total += reward; this.over = over; this.decided = [];
  }
  inRange(action) { const { low, high, n } = this.policy; return n ? action : action.map((a, j) => Math.min(high[j], Math.max(low[j], a))); }
  /** Return an agent's executed action, or null if it is the chosen one. */
  change(agent) {
    if (!this.actions) return null;
    const [chosen, executed] = [this.actions[agent], this.executed[agent]].map((action) => this.inRange(action));
    return String(chosen) === String(executed) ? null : executed;
  }
  moment(agent) {
    const { env } = this, result = { scene: env.scene(), observer: env.observer(agent), steps: env.steps, return: this.total, over: this.over, action: this.actions && this.inRange(this.actions[agent]), executed: this.change(agent) };
    if (this.over) return result;
    const [tokens, , attention] = this.decide(agent), places = env.places(tokens, agent);
    result.tokens = { entity: tokens.map((t) => t.entity), padding: tokens.map((t) => +t.pad), types: tokens.map((t) => t.type), places };
    if (!places) result.tokens.readings = tokens.map((t) => t.f.at(-1));
    if (!attention) return result;
    const total = attention.reduce((a, b) => a + b, 0) || 1, shares = attention.map((w) => w / total), here = tokens.filter((t) => !t.pad).length;
    result.attention = attention;
    result.entropy = here > 1 ? -shares.reduce((s, p) => s + (p > 0 ? p * Math.log(p) : 0), 0) / Math.log(here) : null;
    result.signal = shares.reduce((s, p, i) => s + (tokens[i].entity >= 0 && (tokens[i].entity === result.observer && places !== null || env.signal(tokens[i].entity)) ? p : 0), 0);
    return result;
  }
}

window.engine = function (receive) {
  const policies = DEMO.policies.map((about) => new NETWORKS[about.kind](about)), s = { seed: DEMO.seed, number: 0, paused: false, speed: 30, agent: 0, severities: {}, chosen: { hidden: [], frozen: [], twice: [] }, turns: {}, lanes: [] };
  const spec = DEMO.hello, unfit = Object.fromEntries(spec.perturbations.map((p) => [p.name, p.unfit]));
  const restart = () => {
    s.chosen = { hidden: [], frozen: [], twice: [] };
    s.lanes = policies.map((policy) => {
      const perception = new Perception(s.seed, s.number, DEMO.has_self, spec.types);
      Object.assign(perception, { severities: s.severities, chosen: s.chosen, turns: s.turns });
      return { parted: null, episode: new EpisodeRun(policy, s.seed, s.number, perception), twin: new EpisodeRun(policy, s.seed, s.number, null) };
    });
  };
  const step = () => s.lanes.forEach((lane) => {
    lane.episode.step(); lane.twin.step();
    // Single precision: the last digits depend on the order of a sum.
    const flat = (run) => [...run.actions, ...run.executed.map((action) => run.inRange(action))].flat().map(Math.fround).join();
    if (lane.parted === null && flat(lane.episode) !== flat(lane.twin)) lane.parted = lane.episode.env.steps;
  });
  const runs = () => s.lanes.flatMap((lane) => [lane.episode, lane.twin]).filter((run) => !run.over);
  const severity = (name, value) => {
    if (value && unfit[name]) return receive({ kind: "error", text: `${name}: ${unfit[name]}` });
    if (value) s.severities[name] = value; else delete s.severities[name];
    s.lanes.forEach(({ episode }) => Object.keys(episode.perception.memory).filter((key) => key.startsWith(name)).forEach((key) => delete episode.perception.memory[key]));
  };
  const send = (m) => {
    const toggled = { occlude: "hidden", freeze: "frozen", duplicate: "twice" }[m.do];
    if (toggled) { const own = s.chosen[toggled], at = own.indexOf(m.entity); if (at < 0) own.push(m.entity); else own.splice(at, 1); }
    else if (m.do === "pause") s.paused = m.on;
    else if (m.do === "speed") s.speed = m.value;
    else if (m.do === "step") { s.paused = true; step(); }
    else if (m.do === "restart") restart();
    else if (m.do === "next") { s.number += 1; restart(); }
    else if (m.do === "seed") { s.seed = m.value; s.number = 0; restart(); }
    else if (m.do === "severity") severity(m.name, m.value);
    else if (m.do === "shuffle") { s.turns.shuffle = (s.turns.shuffle || 0) + 1; severity("shuffle", s.severities.shuffle || 1); }
    else if (m.do === "clear") { for (const own of Object.values(s.chosen)) own.length = 0; Object.keys(s.severities).forEach((name) => severity(name, 0)); }
    else if (m.do === "distractors") severity("inject", m.value / 32);
    else if (m.do === "observe") s.agent = m.agent;
    else if (m.do === "move") runs().forEach((run) => run.env.move(m.entity, m.x, m.y));
    else if (m.do === "push") runs().forEach((run) => run.env.push(m.value));
    runs().forEach((run) => { run.decided = []; });
    s.touched = true;
  };
  const frame = () => receive({
    kind: "frame", number: s.number, seed: s.seed, paused: s.paused, speed: s.speed, agent: s.agent, severities: s.severities, chosen: s.chosen,
    distractors: halfEven(32 * (s.severities.inject || 0)), note: s.note,
    lanes: s.lanes.map(({ parted, episode, twin }) => ({ parted, episode: episode.moment(s.agent), twin: twin.moment(s.agent) })),
  });
  /** Return the largest difference from the actions, rewards and attention of torch. */
  const check = () => Math.max(...DEMO.golden.map((steps, i) => {
    const run = new EpisodeRun(policies[i], DEMO.seed, 0, null);
    return Math.max(...steps.map(([actions, attention, total]) => {
      const seen = run.decide(0)[2] || [];
      run.step();
      const pairs = [...run.actions.flat().map((a, k) => [a, actions[k]]), ...seen.map((w, k) => [w, attention[k]]), [run.total, total]];
      return Math.max(...pairs.map(([a, b]) => Math.abs(a - b)));
    }));
  }));
  let credit = 0, ended = 0, last = 0;
  const tick = (now) => {
    requestAnimationFrame(tick);
    if (now - last < 30) return;
    const passed = Math.min(.1, (now - last) / 1000);
    last = now;
    if (!s.paused && !runs().length) { ended = ended || now; if (now - ended > 1500) { ended = 0; send({ do: "next" }); } }
    if (!s.paused && runs().length) for (credit += s.speed * passed; credit >= 1; credit--) { step(); s.touched = true; }
    if (s.touched) { s.touched = false; frame(); }
  };
  setTimeout(() => {
    receive(spec);
    restart();
    s.error = check();
    s.note = `No server: environment and policy run in this page, in float64. Largest difference from torch over ${DEMO.golden[0].length} steps: ${s.error.toExponential(1)}.`;
    window.engine.state = s;
    s.touched = true;
    requestAnimationFrame(tick);
  });
  return send;
};
