// A narrow set transformer on a GPU, forward or with gradients: embedding, pre-norm
// layers and pooling in one kernel. The numbers are those of native/src/network.hpp.
//
// A thread computes one token, whose vectors lie in its registers. A block holds some
// whole sets at a time and goes through the batch in steps of the grid; tokens of a set
// meet in shared memory. The backward pass keeps the input of each layer and computes
// the rest again. Each block sums the gradients by weights of its sets, entry by entry,
// in an order that is always the same; the caller adds the blocks.
//
// call.py defines the sizes: DIM, HEADS, DIM_FF, LAYERS, ACTIVATION, FEATURES, TYPES,
// TYPE_WIDTH, INPUT_ACTIVATION, EXTRA, POOLING, POOLING_HEADS, QUERY, RESIDUAL; and REAL,
// float or double, and MOST_THREADS of a block.

typedef REAL Real;
typedef long long Long;
typedef unsigned char Byte;

#ifndef SHARED_MEMORY
extern __shared__ __align__(16) double shared_memory[];
#endif

constexpr int D = DIM, H = HEADS, FF = DIM_FF, INPUTS = FEATURES + TYPE_WIDTH;
enum Activation { kNone = 0, kGelu = 1, kRelu = 2 };
enum Pooling { kNoPooling = 0, kAvg = 1, kMax = 2, kSum = 3, kFirst = 4, kAda = 5 };
enum Query { kSelf = 0, kMean = 1, kLearned = 2 };

constexpr Real kLog2E = Real(1.4426950408889634074), kLn2 = Real(0.69314718055994530942);
// The largest number.
constexpr Real kHuge = Real(sizeof(Real) == 4 ? 3.4028234663852886e38 : 1.7976931348623157e308);

// ---- parameters

// Weights, and their gradients, lie one behind the other, each from a multiple of four
// numbers on (call.py, `_starts`).
constexpr int padded(int count) { return (count + 3) / 4 * 4; }

// Of a layer.
constexpr int kNorm1 = 0, kNorm1Bias = kNorm1 + padded(D);
constexpr int kWQuery = kNorm1Bias + padded(D), kWKey = kWQuery + padded(D * D);
constexpr int kWValue = kWKey + padded(D * D), kWOut = kWValue + padded(D * D);
constexpr int kNorm2 = kWOut + padded(D * D), kNorm2Bias = kNorm2 + padded(D);
constexpr int kUp = kNorm2Bias + padded(D), kUpBias = kUp + padded(FF * D);
constexpr int kDown = kUpBias + padded(FF), kDownBias = kDown + padded(D * FF);
constexpr int kLayerSize = kDownBias + padded(D);
// Of the network.
constexpr int kProject = 0;
constexpr int kProjectBias = kProject + (FEATURES ? padded(D * INPUTS) : 0);
constexpr int kTypes = kProjectBias + (FEATURES ? padded(D) : 0);
constexpr int kExtra = kTypes + padded(TYPES * TYPE_WIDTH);
constexpr int kLayers = kExtra + padded(EXTRA * D);
constexpr int kAdaQuery = kLayers + LAYERS * kLayerSize;
constexpr int kAdaKey = kAdaQuery + padded(D * D), kAdaValue = kAdaKey + padded(D * D);
constexpr int kAdaOut = kAdaValue + padded(D * D), kAdaLearned = kAdaOut + padded(D * D);

struct Batch {
  const Real *values;   // (B, N, F), or (B, N, D) vectors if FEATURES is 0
  const Long *types;    // (B, N) or null
  const Byte *padding;  // (B, N), 1 = absent, or null
  Long rows;            // B
  int tokens;           // N with the extra tokens
  int sets;             // sets of a block
  double scale, pooling_scale;
};

// ---- one token

// Four numbers, which one instruction reads.
struct alignas(16) Quad {
  Real at[4];
};

template <int n> struct Vec {
  Real at[n];
  Real &operator[](int i) { return at[i]; }
  Real operator[](int i) const { return at[i]; }
};
typedef Vec<D> Token;

#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < (n); i++)

// Read n numbers, by quads where rows of this length begin at multiples of four.
template <int n> Vec<n> load(const Real *at) {
  Vec<n> result;
  if (n % 4) {
    EACH(i, n) result[i] = at[i];
    return result;
  }
  EACH(q, n / 4) {
    const Quad quad = reinterpret_cast<const Quad *>(at)[q];
    EACH(i, 4) result[4 * q + i] = quad.at[i];
  }
  return result;
}

Token zero() {
  Token x;
  EACH(d, D) x[d] = 0;
  return x;
}

// W x, and Wᵀ x; W is (D, D).
Token product(const Real *w, const Token &x) {
  Token y;
  EACH(o, D) {
    const Token row = load<D>(w + o * D);
    y[o] = 0;
    EACH(i, D) y[o] += row[i] * x[i];
  }
  return y;
}
Token product_transposed(const Real *w, const Token &x) {
  Token y = zero();
  EACH(o, D) {
    const Token row = load<D>(w + o * D);
    EACH(i, D) y[i] += row[i] * x[o];
  }
  return y;
}
void add(Token &x, const Token &y) { EACH(d, D) x[d] += y[d]; }

// x φ(x) for the activation, and its derivative.
struct Activated {
  Real value, slope;
};
Activated activate(int kind, Real x) {
  if (kind == kRelu) return {x < 0 ? Real(0) : x, x > 0 ? Real(1) : Real(0)};
  if (kind != kGelu) return {x, 1};
  const Real below = Real(0.5) * (1 + erf(x * Real(0.70710678118654752440)));
  const Real density = Real(0.39894228040143267794) * exp2(x * x * (Real(-0.5) * kLog2E));
  return {x * below, below + x * density};
}

struct Norm {
  Token normed;
  Real scale;
};
Norm normalize(const Token &x) {
  constexpr Real share = Real(1.0 / D);
  Norm result;
  Real mean = 0, square = 0;
  EACH(d, D) mean += x[d];
  mean *= share;
  EACH(d, D) {
    result.normed[d] = x[d] - mean;
    square += result.normed[d] * result.normed[d];
  }
  result.scale = rsqrt(square * share + Real(1e-5));
  EACH(d, D) result.normed[d] *= result.scale;
  return result;
}
Token affine(const Token &normed, const Real *weight, const Real *bias) {
  Token y;
  EACH(d, D) y[d] = normed[d] * weight[d] + bias[d];
  return y;
}
// dx += the gradient through `normalize`, given that by its result.
void normalize_backward(const Norm &norm, const Token &gradient, Token &dx) {
  Real mean = 0, along = 0;
  EACH(d, D) {
    mean += gradient[d];
    along += gradient[d] * norm.normed[d];
  }
  mean *= Real(1.0 / D);
  along *= Real(1.0 / D);
  EACH(d, D) dx[d] += norm.scale * (gradient[d] - mean - norm.normed[d] * along);
}

// ---- one block

// Shared memory has regions, each with a row for every thread. A row's length is an odd
// number of quads, so that eight threads that follow each other meet in no bank.
constexpr int odd_quads(int width) {
  return padded(width) / 4 % 2 ? padded(width) : padded(width) + 4;
}
constexpr int P = padded(D);
constexpr int kPair = odd_quads(2 * P);                  // key and value
constexpr int kWork = odd_quads(2 * P + padded(2 * H));  // query, gradient, heads
constexpr int kLeft = odd_quads(3 * P), kRight = odd_quads(P);  // factors of products
constexpr int kRow = kPair + kWork + kLeft + kRight;
// Hidden numbers of the feed-forward part at a time, in place of `kWork`.
constexpr int kHidden = kWork / 2 / 4 * 4;

struct Team {
  Real *memory;
  int *present_, *own_;
  int thread, threads;
  int first, n, tokens;  // first thread of the set; token of this thread
  bool active;           // this thread has a token of a row
  Long row;

  Team(const Batch &b) {
    thread = threadIdx.x;
    threads = blockDim.x;
    memory = reinterpret_cast<Real *>(shared_memory);
    present_ = reinterpret_cast<int *>(memory + kRow * threads);
    own_ = present_ + threads;
    first = thread / b.tokens * b.tokens;
    n = thread - first;
    // Threads behind the last set have no tokens to meet.
    tokens = thread < b.sets * b.tokens ? b.tokens : 0;
  }
  // Take the sets of a step; the row of an idle thread is 0.
  void take(const Batch &b, Long group) {
    row = group * b.sets + thread / b.tokens;
    active = tokens && row < b.rows;
    if (!active) row = 0;
  }
  Real *key(int t) const { return memory + t * kPair; }
  Real *value(int t) const { return key(t) + P; }
  Real *work() const { return memory + kPair * threads; }
  Real *query(int t) const { return work() + t * kWork; }
  Real *gradient(int t) const { return query(t) + P; }
  Real *heads(int t) const { return query(t) + 2 * P; }
  Real *left() const { return work() + kWork * threads; }
  Real *right() const { return left() + kLeft * threads; }

  // Write to the row of a thread, which begins at a quad.
  template <int n> static void put(Real *at, const Vec<n> &x) {
    EACH(q, n / 4) {
      Quad quad;
      EACH(i, 4) quad.at[i] = x[4 * q + i];
      reinterpret_cast<Quad *>(at)[q] = quad;
    }
    EACH(i, n % 4) at[n / 4 * 4 + i] = x[n / 4 * 4 + i];
  }
  bool present(int j) const { return present_[first + j]; }
  bool own(int j) const { return own_[first + j]; }
};

// The sum over `slices` neighbouring threads, a power of two.
Real sum_of(Real x, int slices) {
  constexpr unsigned all = 0xffffffff;
  for (int step = 1; step < slices; step *= 2) x += __shfl_xor_sync(all, x, step);
  return x;
}

// Rows of a factor: `width` numbers of each thread, from `at` on with a stride.
struct Factor {
  const Real *at;
  int stride, width;
};

// gradient(o, i) += Σ of a(o) b(i) over the tokens of the block; and sums(o) += Σ of a(o)
// unless it is null. All threads take part, and a barrier stands on both sides. A thread
// takes one o and four i of some of the tokens. Rows of b are read by quads.
void add_outer(const Team &team, Factor a, Factor b, Real *gradient,
                          int leading, Real *sums) {
  const int quads = (b.width + 3) / 4, tiles = a.width * quads;
  int slices = 32;
  while (slices > 1 && slices * tiles > team.threads) slices /= 2;
  const int slice = team.thread % slices, at_once = team.threads / slices;
  __syncthreads();
  for (int base = 0; base < tiles; base += at_once) {
    const int tile = base + team.thread / slices;
    const int o = tile < tiles ? tile / quads : 0;
    const int i = tile < tiles ? (tile - o * quads) * 4 : 0;
    Real sum[4] = {0, 0, 0, 0}, own = 0;
    for (int t = slice; t < team.threads; t += slices) {
      const Real x = a.at[t * a.stride + o];
      const Vec<4> y = load<4>(b.at + t * b.stride + i);
      EACH(k, 4) sum[k] += x * y[k];
      own += x;
    }
    EACH(k, 4) sum[k] = sum_of(sum[k], slices);
    own = sum_of(own, slices);
    if (tile >= tiles || slice) continue;
    EACH(k, 4) if (i + k < b.width) gradient[o * leading + i + k] += sum[k];
    if (sums && i == 0) sums[o] += own;
  }
  __syncthreads();
}
// sums(o) += Σ of a(o).
void add_sums(const Team &team, Factor a, Real *sums) {
  int slices = 32;
  while (slices > 1 && slices * a.width > team.threads) slices /= 2;
  const int slice = team.thread % slices, at_once = team.threads / slices;
  __syncthreads();
  for (int base = 0; base < a.width; base += at_once) {
    const int o = base + team.thread / slices;
    Real sum = 0;
    for (int t = slice; t < team.threads; t += slices)
      sum += a.at[t * a.stride + (o < a.width ? o : 0)];
    sum = sum_of(sum, slices);
    if (o < a.width && !slice) sums[o] += sum;
  }
  __syncthreads();
}
// The same for the vectors of the threads.
void add_outer(const Team &team, const Token &a, const Token &b,
                          Real *gradient) {
  team.put(team.left() + team.thread * kLeft, a);
  team.put(team.right() + team.thread * kRight, b);
  const Factor left{team.left(), kLeft, D}, right{team.right(), kRight, D};
  add_outer(team, left, right, gradient, D, nullptr);
}
void add_sums(const Team &team, const Token &a, Real *sums) {
  team.put(team.left() + team.thread * kLeft, a);
  add_sums(team, {team.left(), kLeft, D}, sums);
}

// ---- attention

// The logarithm of Σ weights of one query for each of n heads, in units of ln 2; the
// weight of a key is 2^(score - total).
template <int n> struct Softmax {
  Real total[n];
};

template <int n> Vec<n> scores(const Token &query, const Real *key) {
  constexpr int W = D / n;
  const Vec<P> k = load<P>(key);
  Vec<n> result;
  EACH(h, n) {
    result[h] = 0;
    EACH(d, W) result[h] += query[h * W + d] * k[h * W + d];
  }
  return result;
}

// The weighted means of the values of the set; `query` is scaled, in units of ln 2.
template <int n>
Token attend(const Team &team, const Token &query, Softmax<n> &softmax) {
  constexpr int W = D / n;
  Token mixed = zero();
  Vec<n> peak, sum;
  EACH(h, n) {
    peak[h] = -kHuge;
    sum[h] = 0;
  }
  for (int j = 0; j < team.tokens; j++) {
    if (!team.present(j)) continue;
    const Vec<n> score = scores<n>(query, team.key(team.first + j));
    EACH(h, n) peak[h] = score[h] > peak[h] ? score[h] : peak[h];
  }
  for (int j = 0; j < team.tokens; j++) {
    if (!team.present(j)) continue;
    const Vec<n> score = scores<n>(query, team.key(team.first + j));
    const Vec<P> value = load<P>(team.value(team.first + j));
    EACH(h, n) {
      const Real weight = exp2(score[h] - peak[h]);
      sum[h] += weight;
      EACH(d, W) mixed[h * W + d] += weight * value[h * W + d];
    }
  }
  EACH(h, n) {
    const Real inverse = sum[h] > 0 ? 1 / sum[h] : Real(0);
    softmax.total[h] = sum[h] > 0 ? peak[h] + log2(sum[h]) : Real(0);
    EACH(d, W) mixed[h * W + d] *= inverse;
  }
  return mixed;
}

// Σ of gradient · mixed for each head.
template <int n> Vec<n> dots(const Token &gradient, const Token &mixed) {
  constexpr int W = D / n;
  Vec<n> along;
  EACH(h, n) {
    along[h] = 0;
    EACH(d, W) along[h] += gradient[h * W + d] * mixed[h * W + d];
  }
  return along;
}

// The gradient by a query before its scale, given that by `attend`'s result.
template <int n>
Token query_gradient(const Team &team, const Token &query,
                                const Softmax<n> &softmax, const Token &gradient,
                                const Vec<n> &along, Real scale) {
  constexpr int W = D / n;
  Token result = zero();
  for (int j = 0; j < team.tokens; j++) {
    if (!team.present(j)) continue;
    const Vec<P> key = load<P>(team.key(team.first + j));
    const Vec<P> value = load<P>(team.value(team.first + j));
    EACH(h, n) {
      Real score = -softmax.total[h], by_weight = -along[h];
      EACH(d, W) {
        score += query[h * W + d] * key[h * W + d];
        by_weight += gradient[h * W + d] * value[h * W + d];
      }
      const Real by_score = exp2(score) * by_weight;
      EACH(d, W) result[h * W + d] += by_score * key[h * W + d];
    }
  }
  EACH(d, D) result[d] *= scale;
  return result;
}

// The gradients by the key and value of this thread's token, from all queries of the set:
// shared are the queries, the gradients by their results, and total and along.
void key_gradients(const Team &team, const Token &key, const Token &value,
                              Token &for_key, Token &for_value) {
  constexpr int W = D / H;
  for_key = zero();
  for_value = zero();
  if (!team.present_[team.thread]) return;
  for (int i = 0; i < team.tokens; i++) {
    const int t = team.first + i;
    const Vec<P> query = load<P>(team.query(t)), gradient = load<P>(team.gradient(t));
    const Vec<padded(2 * H)> head = load<padded(2 * H)>(team.heads(t));
    EACH(h, H) {
      Real score = -head[h], by_weight = -head[H + h];
      EACH(d, W) {
        score += query[h * W + d] * key[h * W + d];
        by_weight += gradient[h * W + d] * value[h * W + d];
      }
      const Real weight = exp2(score), by_score = weight * by_weight;
      EACH(d, W) {
        for_key[h * W + d] += by_score * query[h * W + d];
        for_value[h * W + d] += weight * gradient[h * W + d];
      }
    }
  }
  EACH(d, D) for_key[d] *= kLn2;
}

// ---- a layer: x += attention(norm(x)), x += W₂ φ(W₁ norm(x) + b₁) + b₂

// What the backward pass needs of the attention.
struct Attention {
  Norm norm;
  Token query, key, value, mixed;
  Softmax<H> softmax;
};

Attention attention(const Team &team, const Real *w, double scale, Token &x) {
  Attention a;
  a.norm = normalize(x);
  const Token y = affine(a.norm.normed, w + kNorm1, w + kNorm1Bias);
  a.query = product(w + kWQuery, y);
  a.key = product(w + kWKey, y);
  a.value = product(w + kWValue, y);
  EACH(d, D) a.query[d] *= Real(scale) * kLog2E;
  __syncthreads();  // others may still read the keys of the layer before
  team.put(team.key(team.thread), a.key);
  team.put(team.value(team.thread), a.value);
  __syncthreads();
  a.mixed = attend<H>(team, a.query, a.softmax);
  add(x, product(w + kWOut, a.mixed));
  return a;
}

// Four hidden numbers from `f` on, and what comes back from them; beyond FF they are 0.
struct Hidden {
  Real value[4], slope[4], by_value[4];
};
Hidden hidden_numbers(const Real *w, int f, const Token &y) {
  Hidden hidden;
  EACH(k, 4) {
    hidden.value[k] = hidden.slope[k] = 0;
    if (FF % 4 && f + k >= FF) continue;
    const Token row = load<D>(w + kUp + (f + k) * D);
    Real sum = w[kUpBias + f + k];
    EACH(d, D) sum += row[d] * y[d];
    const Activated result = activate(ACTIVATION, sum);
    hidden.value[k] = result.value;
    hidden.slope[k] = result.slope;
  }
  return hidden;
}
// Column f to f + 3 of row d of W₂.
Vec<4> down_weights(const Real *w, int d, int f) {
  if (FF % 4 == 0) return load<4>(w + kDown + d * FF + f);
  Vec<4> result;
  EACH(k, 4) result[k] = f + k < FF ? w[kDown + d * FF + f + k] : Real(0);
  return result;
}

void feed_forward(const Real *w, Token &x) {
  const Token y = affine(normalize(x).normed, w + kNorm2, w + kNorm2Bias);
  EACH(d, D) x[d] += w[kDownBias + d];
  for (int f = 0; f < FF; f += 4) {
    const Hidden hidden = hidden_numbers(w, f, y);
    EACH(d, D) {
      const Vec<4> down = down_weights(w, d, f);
      EACH(k, 4) x[d] += down[k] * hidden.value[k];
    }
  }
}

// The gradients by a LayerNorm's weight and bias, which lie at g; then through the norm
// to dx.
void norm_gradients(const Team &team, const Norm &norm, const Token &gradient,
                               const Real *weight, Real *g, Token &dx) {
  Real *at = team.left() + team.thread * kLeft;
  Token by_normed;
  EACH(d, P) at[d] = d < D ? gradient[d] * norm.normed[d] : Real(0);
  EACH(d, D) {
    at[P + d] = gradient[d];
    by_normed[d] = gradient[d] * weight[d];
  }
  add_sums(team, {team.left(), kLeft, P + D}, g);
  normalize_backward(norm, by_normed, dx);
}

void feed_forward_backward(const Team &team, const Real *w, const Token &x,
                                      Token &dx, Real *g) {
  const Norm norm = normalize(x);
  const Token y = affine(norm.normed, w + kNorm2, w + kNorm2Bias);
  Token for_y = zero();
  // Some hidden numbers at a time: their rows take the place of queries and gradients.
  Real *const own = team.query(team.thread);
  for (int from = 0; from < FF; from += kHidden) {
    const int count = FF - from < kHidden ? FF - from : kHidden;
    for (int i = 0; i < count; i += 4) {
      const Hidden hidden = hidden_numbers(w, from + i, y);
      Vec<4> by_value;
      EACH(k, 4) by_value[k] = 0;
      EACH(d, D) {
        const Vec<4> down = down_weights(w, d, from + i);
        EACH(k, 4) by_value[k] += down[k] * dx[d];
      }
      EACH(k, 4) {
        const Real by_input = by_value[k] * hidden.slope[k];
        own[i + k] = hidden.value[k];
        own[kHidden + i + k] = by_input;
        if (FF % 4 && from + i + k >= FF) continue;
        const Token row = load<D>(w + kUp + (from + i + k) * D);
        EACH(d, D) for_y[d] += row[d] * by_input;
      }
    }
    team.put(team.left() + team.thread * kLeft, dx);
    team.put(team.right() + team.thread * kRight, y);
    const Factor left{team.left(), kLeft, D}, right{team.right(), kRight, D};
    const Factor value{team.work(), kWork, count};
    const Factor by_input{team.work() + kHidden, kWork, count};
    add_outer(team, left, value, g + kDown + from, FF, from ? nullptr : g + kDownBias);
    add_outer(team, by_input, right, g + kUp + from * D, D, g + kUpBias + from);
  }
  norm_gradients(team, norm, for_y, w + kNorm2, g + kNorm2, dx);
}

void attention_backward(const Team &team, const Real *w, const Attention &a,
                                   double scale, Token &dx, Real *g) {
  // Through the projection of the result.
  add_outer(team, dx, a.mixed, g + kWOut);
  const Token gradient = product_transposed(w + kWOut, dx);
  // Through the softmax: by the query of this thread, then by its key and value.
  const Vec<H> along = dots<H>(gradient, a.mixed);
  team.put(team.query(team.thread), a.query);
  team.put(team.gradient(team.thread), gradient);
  EACH(h, H) {
    team.heads(team.thread)[h] = a.softmax.total[h];
    team.heads(team.thread)[H + h] = along[h];
  }
  const Token for_query =
      query_gradient<H>(team, a.query, a.softmax, gradient, along, Real(scale));
  __syncthreads();
  Token for_key, for_value;
  key_gradients(team, a.key, a.value, for_key, for_value);
  // Through the projections to the norm.
  const Token y = affine(a.norm.normed, w + kNorm1, w + kNorm1Bias);
  Real *at = team.left() + team.thread * kLeft;
  team.put(at, for_query);
  team.put(at + P, for_key);
  team.put(at + 2 * P, for_value);
  team.put(team.right() + team.thread * kRight, y);
  const Factor right{team.right(), kRight, D};
  if (D % 4 == 0) {  // one behind the other, as the weights
    add_outer(team, {team.left(), kLeft, 3 * D}, right, g + kWQuery, D, nullptr);
  } else {
    add_outer(team, {team.left(), kLeft, D}, right, g + kWQuery, D, nullptr);
    add_outer(team, {team.left() + P, kLeft, D}, right, g + kWKey, D, nullptr);
    add_outer(team, {team.left() + 2 * P, kLeft, D}, right, g + kWValue, D, nullptr);
  }
  Token for_y = product_transposed(w + kWQuery, for_query);
  add(for_y, product_transposed(w + kWKey, for_key));
  add(for_y, product_transposed(w + kWValue, for_value));
  norm_gradients(team, a.norm, for_y, w + kNorm1, g + kNorm1, dx);
}

// ---- embedding

struct Input {
  Vec<(INPUTS > 0 ? INPUTS : 1)> at;
  int type;
  bool given;  // a token of the batch, neither a learned one nor an idle thread
};

// Read the token, mark it as present, and return its vector.
Token embed(const Team &team, const Real *w, const Batch &b, Input &input,
                       Token &slope) {
  Token x = zero();
  slope = zero();
  EACH(i, INPUTS) input.at[i] = 0;
  const int tokens = b.tokens - EXTRA;
  const Long place = team.row * tokens + team.n - EXTRA;
  input.given = team.active && team.n >= EXTRA;
  const bool absent = input.given && b.padding && b.padding[place];
  input.type = input.given && !absent && b.types ? int(b.types[place]) : 0;
  __syncthreads();  // others may still read the marks of the sets before
  team.present_[team.thread] = team.active && !absent;
  team.own_[team.thread] = input.given && !absent && b.types && input.type == 0;
  if (!team.active) return x;
  if (team.n < EXTRA) {
    EACH(d, D) x[d] = w[kExtra + team.n * D + d];
    return x;
  }
  if (!FEATURES) {
    EACH(d, D) x[d] = b.values[place * D + d];
    return x;
  }
  EACH(i, FEATURES) input.at[i] = absent ? Real(0) : b.values[place * FEATURES + i];
  if (TYPES && (input.type < 0 || input.type >= TYPES)) {
    // A host could raise an error; here the result is not a number.
    input.type = 0;
    input.at[0] = Real(nan(""));
  }
  EACH(i, TYPE_WIDTH)
    input.at[FEATURES + i] = w[kTypes + input.type * TYPE_WIDTH + i];
  EACH(d, D) {
    Real sum = w[kProjectBias + d];
    EACH(i, INPUTS) sum += w[kProject + d * INPUTS + i] * input.at[i];
    const Activated value = activate(INPUT_ACTIVATION, sum);
    x[d] = value.value;
    slope[d] = value.slope;
  }
  return x;
}

void embed_backward(const Team &team, const Real *w, const Batch &b,
                               const Input &input, const Token &slope, const Token &dx,
                               Real *g, Real *for_values) {
  const int tokens = b.tokens - EXTRA;
  const Long place = team.row * tokens + team.n - EXTRA;
  Real *const own = team.left() + team.thread * kLeft;
  if (EXTRA) {
    team.put(own, dx);
    __syncthreads();
    for (int entry = team.thread; entry < EXTRA * D; entry += team.threads) {
      Real sum = 0;
      for (int set = 0; set < b.sets; set++)
        sum += team.left()[(set * b.tokens + entry / D) * kLeft + entry % D];
      g[kExtra + entry] += sum;
    }
    __syncthreads();
  }
  if (!FEATURES) {
    if (for_values && input.given)
      EACH(d, D) for_values[place * D + d] = dx[d];
    return;
  }
  Token by_sum;
  EACH(d, D) by_sum[d] = input.given ? dx[d] * slope[d] : Real(0);
  // P inputs at a time.
  for (int from = 0; from < INPUTS; from += P) {
    const int count = INPUTS - from < P ? INPUTS - from : P;
    team.put(own, by_sum);
    EACH(i, INPUTS) {
      if (i >= from && i < from + P)
        team.right()[team.thread * kRight + i - from] = input.at[i];
    }
    add_outer(team, {team.left(), kLeft, D}, {team.right(), kRight, count},
              g + kProject + from, INPUTS, from ? nullptr : g + kProjectBias);
  }
  // Type embeddings: each token adds to the row of its type, some types at a time.
  for (int from = 0; TYPE_WIDTH && from < TYPES; from += 3 * P) {
    const int count = TYPES - from < 3 * P ? TYPES - from : 3 * P;
    for (int k = 0; k < count; k++) own[k] = input.given && input.type == from + k;
    // P features at a time.
    for (int first = 0; first < TYPE_WIDTH; first += P) {
      const int width = TYPE_WIDTH - first < P ? TYPE_WIDTH - first : P;
      for (int e = 0; e < width; e++) {
        Real sum = 0;
        EACH(d, D) sum += w[kProject + d * INPUTS + FEATURES + first + e] * by_sum[d];
        team.right()[team.thread * kRight + e] = sum;
      }
      add_outer(team, {team.left(), kLeft, count}, {team.right(), kRight, width},
                g + kTypes + from * TYPE_WIDTH + first, TYPE_WIDTH, nullptr);
    }
  }
  if (!for_values || !input.given) return;
  const bool present = team.present_[team.thread];
  EACH(i, FEATURES) {
    Real sum = 0;
    EACH(d, D) sum += w[kProject + d * INPUTS + i] * by_sum[d];
    for_values[place * FEATURES + i] = present ? sum : Real(0);
  }
}

// ---- pooling; the vectors of the set lie in the rows of queries

Real vector(const Team &team, int j, int d) {
  return team.query(team.first + j)[d];
}

struct Counts {
  int present, own;
};
Counts count(const Team &team) {
  Counts counts{0, 0};
  for (int j = 0; j < team.tokens; j++) {
    counts.present += team.present(j);
    counts.own += team.own(j);
  }
  return counts;
}

// Fixed weights: those of avg, sum and the first token.
Real pooling_weight(const Team &team, Counts counts, int j) {
  if (POOLING == kFirst) return j == 0;
  if (!team.present(j)) return 0;
  return POOLING == kAvg ? Real(1) / counts.present : Real(1);
}
// The weights of AdaPool's query: the mean of the observer's own tokens, or of all.
Real query_weight(const Team &team, Counts counts, int j) {
  const bool own = QUERY == kSelf && counts.own;
  if (!(own ? team.own(j) : team.present(j))) return 0;
  return Real(1) / (own ? counts.own : counts.present);
}

struct Ada {
  Token query, scaled, key, value, pooled;
  Softmax<POOLING_HEADS> softmax;
};

// AdaPool's result, which every thread of the set computes.
Token ada(const Team &team, const Real *w, const Batch &b, const Token &x,
                     Counts counts, Ada &a) {
  a.query = zero();
  for (int j = 0; j < team.tokens; j++) {
    const Real weight = QUERY == kLearned ? Real(0) : query_weight(team, counts, j);
    EACH(d, D) a.query[d] += weight == 0 ? Real(0) : weight * vector(team, j, d);
  }
  if (QUERY == kLearned) EACH(d, D) a.query[d] = w[kAdaLearned + d];
  a.scaled = product(w + kAdaQuery, a.query);
  EACH(d, D) a.scaled[d] *= Real(b.pooling_scale) * kLog2E;
  a.key = product(w + kAdaKey, x);
  a.value = product(w + kAdaValue, x);
  __syncthreads();
  team.put(team.key(team.thread), a.key);
  team.put(team.value(team.thread), a.value);
  __syncthreads();
  a.pooled = attend<POOLING_HEADS>(team, a.scaled, a.softmax);
  Token result = product(w + kAdaOut, a.pooled);
  if (RESIDUAL) add(result, a.query);
  return counts.present ? result : zero();
}

void ada_backward(const Team &team, const Real *w, const Batch &b,
                             const Token &x, Counts counts, const Ada &a,
                             const Token &gradient, Token &dx, Real *g) {
  constexpr int W = D / POOLING_HEADS;
  const bool first = team.n == 0;  // one thread stands for the set
  const Token by_pooled = product_transposed(w + kAdaOut, gradient);
  const Vec<POOLING_HEADS> along = dots<POOLING_HEADS>(by_pooled, a.pooled);
  const Token for_scaled = query_gradient<POOLING_HEADS>(
      team, a.scaled, a.softmax, by_pooled, along, Real(b.pooling_scale));
  // By the key and value of this token.
  Token for_key = zero(), for_value = zero();
  if (team.present_[team.thread]) {
    EACH(h, POOLING_HEADS) {
      Real score = -a.softmax.total[h], by_weight = -along[h];
      EACH(d, W) score += a.scaled[h * W + d] * a.key[h * W + d];
      const Real weight = exp2(score);
      EACH(d, W) by_weight += by_pooled[h * W + d] * a.value[h * W + d];
      EACH(d, W) {
        for_key[h * W + d] = weight * by_weight * kLn2 * a.scaled[h * W + d];
        for_value[h * W + d] = weight * by_pooled[h * W + d];
      }
    }
  }
  dx = product_transposed(w + kAdaKey, for_key);
  add(dx, product_transposed(w + kAdaValue, for_value));
  // By the query, of which each of its tokens gets its share.
  Token for_query = product_transposed(w + kAdaQuery, for_scaled);
  if (RESIDUAL) add(for_query, gradient);
  if (QUERY != kLearned && team.active) {
    const Real share = query_weight(team, counts, team.n);
    EACH(d, D) dx[d] += share * for_query[d];
  }
  // By the weights.
  const Token none = zero();
  add_outer(team, first ? gradient : none, a.pooled, g + kAdaOut);
  add_outer(team, first ? for_scaled : none, a.query, g + kAdaQuery);
  add_outer(team, for_key, x, g + kAdaKey);
  add_outer(team, for_value, x, g + kAdaValue);
  if (QUERY == kLearned) add_sums(team, first ? for_query : none, g + kAdaLearned);
}

// The pooled vector of the set, which every thread computes.
Token pool(const Team &team, const Real *w, const Batch &b, const Token &x,
                      Ada &a) {
  __syncthreads();
  team.put(team.query(team.thread), x);
  __syncthreads();
  const Counts counts = count(team);
  if (POOLING == kAda) return ada(team, w, b, x, counts, a);
  Token result = zero();
  bool any = false;
  for (int j = 0; j < team.tokens; j++) {
    if (POOLING != kFirst && !team.present(j)) continue;
    const Real weight = pooling_weight(team, counts, j);
    EACH(d, D) {
      const Real value = vector(team, j, d);
      if (POOLING != kMax)
        result[d] += weight == 0 ? Real(0) : weight * value;
      else if (!any || value > result[d] || isnan(value))
        result[d] = value;
    }
    any = true;
  }
  return result;
}

// dx, the gradient by the vector of this thread's token.
Token pool_backward(const Team &team, const Real *w, const Batch &b,
                               const Token &x, const Token &result, const Ada &a,
                               const Token &gradient, Real *g) {
  Token dx = zero();
  const Counts counts = count(team);
  if (POOLING == kAda) {
    ada_backward(team, w, b, x, counts, a, counts.present ? gradient : zero(), dx, g);
  } else if (POOLING == kMax) {
    // Tokens that tie share the gradient equally, as torch's amax does.
    EACH(d, D) {
      int ties = 0;
      for (int j = 0; j < team.tokens; j++)
        ties += team.present(j) && vector(team, j, d) == result[d];
      dx[d] = ties && x[d] == result[d] ? gradient[d] / ties : Real(0);
    }
  } else {
    const Real weight = pooling_weight(team, counts, team.n);
    EACH(d, D) dx[d] = weight * gradient[d];
  }
  const bool present = team.present_[team.thread];
  EACH(d, D) dx[d] = present ? dx[d] : Real(0);
  return dx;
}

// ---- the kernels

// More blocks on a multiprocessor hide more of the waiting for memory, but leave fewer
// registers. These numbers were the fastest of several on an H100.
constexpr int kForwardBlocks = 640 / MOST_THREADS, kBackwardBlocks = 512 / MOST_THREADS;

// Without __restrict__ on purpose: the compiler would keep the weights of all layers in
// registers, and have none left.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, kForwardBlocks)
    marl_pool_forward(const Real *weights, Batch b, Real *out) {
  Team team(b);
  const Long groups = (b.rows + b.sets - 1) / b.sets;
  for (Long group = blockIdx.x; group < groups; group += gridDim.x) {
    team.take(b, group);
    Input input;
    Token slope;
    Token x = embed(team, weights, b, input, slope);
    for (int l = 0; l < LAYERS; l++) {
      const Real *w = weights + kLayers + l * kLayerSize;
      attention(team, w, b.scale, x);
      feed_forward(w, x);
    }
    if (POOLING == kNoPooling) {
      if (team.active)
        EACH(d, D) out[(team.row * team.tokens + team.n) * D + d] = x[d];
      continue;
    }
    Ada a;
    const Token result = pool(team, weights, b, x, a);
    if (team.active && team.n == 0) EACH(d, D) out[team.row * D + d] = result[d];
  }
}

// Gradients by weights to the block's row of `partial`, (blocks, size); by the input to
// `for_values` unless it is null.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, kBackwardBlocks)
    marl_pool_backward(const Real *weights, Batch b, const Real *out_gradient, Long size,
                       Real *partial, Real *for_values) {
  Team team(b);
  Real *const gradients = partial + blockIdx.x * size;
  const Long groups = (b.rows + b.sets - 1) / b.sets;
  for (Long group = blockIdx.x; group < groups; group += gridDim.x) {
    team.take(b, group);
    Input input;
    Token slope, kept[LAYERS];
    Token x = embed(team, weights, b, input, slope);
    for (int l = 0; l < LAYERS; l++) {
      const Real *w = weights + kLayers + l * kLayerSize;
      kept[l] = x;
      attention(team, w, b.scale, x);
      feed_forward(w, x);
    }
    Token dx = zero();
    if (POOLING == kNoPooling) {
      if (team.active)
        EACH(d, D) dx[d] = out_gradient[(team.row * team.tokens + team.n) * D + d];
    } else {
      Ada a;
      const Token result = pool(team, weights, b, x, a);
      Token gradient = zero();
      if (team.active) EACH(d, D) gradient[d] = out_gradient[team.row * D + d];
      dx = pool_backward(team, weights, b, x, result, a, gradient, gradients);
    }
    for (int l = LAYERS - 1; l >= 0; l--) {
      const Real *w = weights + kLayers + l * kLayerSize;
      Real *g = gradients + kLayers + l * kLayerSize;
      x = kept[l];
      const Attention a = attention(team, w, b.scale, x);
      feed_forward_backward(team, w, x, dx, g);
      attention_backward(team, w, a, b.scale, dx, g);
    }
    embed_backward(team, weights, b, input, slope, dx, gradients, for_values);
  }
}
