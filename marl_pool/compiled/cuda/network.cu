// A narrow set transformer on a GPU, forward or with gradients: embedding, pre-norm
// layers and pooling in one kernel. It computes what native/src/network.hpp does.
//
// A thread computes one token, whose vectors are in its registers. A block takes a group
// of whole sets at a time, in a grid-stride loop over the batch; the tokens of a set
// communicate through shared memory. The backward pass keeps the input of each layer and
// recomputes the rest. Each block sums the weights' gradients over its sets in a fixed
// order; the caller sums over the blocks.
//
// call.py defines the sizes: DIM, HEADS, DIM_FF, LAYERS, ACTIVATION, FEATURES, TYPES,
// TYPE_WIDTH, INPUT_ACTIVATION, EXTRA, POOLING, POOLING_HEADS, QUERY, RESIDUAL; and REAL,
// float or double, and MOST_THREADS, the most threads of a block.

typedef REAL Real;
typedef long long Long;
typedef unsigned char Byte;

#ifndef SHARED_MEMORY  // the tests define it, to compile this file for a CPU
extern __shared__ __align__(16) double shared_memory[];
#endif

constexpr int D = DIM, H = HEADS, FF = DIM_FF, INPUTS = FEATURES + TYPE_WIDTH;
enum Activation { kNone = 0, kGelu = 1, kRelu = 2 };
enum Pooling { kNoPooling = 0, kAvg = 1, kMax = 2, kSum = 3, kFirst = 4, kAda = 5 };
enum Query { kSelf = 0, kMean = 1, kLearned = 2 };

constexpr Real kLog2E = Real(1.4426950408889634074), kLn2 = Real(0.69314718055994530942);
// The largest finite number.
constexpr Real kHuge = Real(sizeof(Real) == 4 ? 3.4028234663852886e38 : 1.7976931348623157e308);

// ---- parameters

// Offsets of the weights, and of their gradients, in a contiguous array. Each is a
// multiple of four (call.py, `_starts`).
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
  int tokens;           // N with the learned tokens
  int sets;             // sets that a block takes at a time
  double scale, pooling_scale;
};

// ---- one token

// Four numbers, which a vector instruction loads.
struct alignas(16) Quad {
  Real data[4];
};

template <int n> struct Vec {
  Real data[n];
  Real &operator[](int i) { return data[i]; }
  Real operator[](int i) const { return data[i]; }
};
typedef Vec<D> Token;

#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < (n); i++)

// Load n numbers, by quads if n is a multiple of four, as rows of this length are then
// aligned.
template <int n> Vec<n> load(const Real *from) {
  Vec<n> result;
  if (n % 4) {
    EACH(i, n) result[i] = from[i];
    return result;
  }
  EACH(q, n / 4) {
    const Quad quad = reinterpret_cast<const Quad *>(from)[q];
    EACH(i, 4) result[4 * q + i] = quad.data[i];
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

// An activation's value and derivative.
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
  constexpr Real inv_dim = Real(1.0 / D);
  Norm result;
  Real mean = 0, square = 0;
  EACH(d, D) mean += x[d];
  mean *= inv_dim;
  EACH(d, D) {
    result.normed[d] = x[d] - mean;
    square += result.normed[d] * result.normed[d];
  }
  result.scale = rsqrt(square * inv_dim + Real(1e-5));
  EACH(d, D) result.normed[d] *= result.scale;
  return result;
}
Token affine(const Token &normed, const Real *weight, const Real *bias) {
  Token y;
  EACH(d, D) y[d] = normed[d] * weight[d] + bias[d];
  return y;
}
// dx += the gradient w.r.t. x of `normalize`, given that w.r.t. its result.
void normalize_backward(const Norm &norm, const Token &gradient, Token &dx) {
  Real mean = 0, projection = 0;
  EACH(d, D) {
    mean += gradient[d];
    projection += gradient[d] * norm.normed[d];
  }
  mean *= Real(1.0 / D);
  projection *= Real(1.0 / D);
  EACH(d, D) dx[d] += norm.scale * (gradient[d] - mean - norm.normed[d] * projection);
}

// ---- one block

// Shared memory is divided into regions with a row for every thread. Rows are padded to
// an odd number of quads: then the quads of float that eight consecutive threads access
// at once are in different banks.
constexpr int odd_quads(int width) {
  return padded(width) / 4 % 2 ? padded(width) : padded(width) + 4;
}
constexpr int P = padded(D);
constexpr int kPair = odd_quads(2 * P);                  // key and value
constexpr int kWork = odd_quads(2 * P + padded(2 * H));  // query, gradient, per-head sums
constexpr int kLeft = odd_quads(3 * P), kRight = odd_quads(P);  // for outer products
constexpr int kRow = kPair + kWork + kLeft + kRight;
// Hidden units of the feed-forward part at a time: with their gradients they fit in a row
// of `kWork`.
constexpr int kHidden = kWork / 2 / 4 * 4;

// A thread's view of its block: its token, and the block's shared memory.
struct Team {
  Real *memory;
  int *present_, *own_type_;
  int thread, threads;
  int first, n, tokens;  // the set's first thread, this thread's token, number of tokens
  bool active;           // this thread has a token
  Long row;

  Team(const Batch &b) {
    thread = threadIdx.x;
    threads = blockDim.x;
    memory = reinterpret_cast<Real *>(shared_memory);
    present_ = reinterpret_cast<int *>(memory + kRow * threads);
    own_type_ = present_ + threads;
    first = thread / b.tokens * b.tokens;
    n = thread - first;
    // Threads after the last set are idle.
    tokens = thread < b.sets * b.tokens ? b.tokens : 0;
  }
  // Take the sets of a group; the row of an idle thread is 0.
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

  // Write to a thread's row, which is aligned to quads.
  template <int n> static void store(Real *to, const Vec<n> &x) {
    EACH(q, n / 4) {
      Quad quad;
      EACH(i, 4) quad.data[i] = x[4 * q + i];
      reinterpret_cast<Quad *>(to)[q] = quad;
    }
    EACH(i, n % 4) to[n / 4 * 4 + i] = x[n / 4 * 4 + i];
  }
  bool present(int j) const { return present_[first + j]; }
  bool own_type(int j) const { return own_type_[first + j]; }
};

// The sum over `slices` adjacent threads of a warp, a power of two, by a butterfly.
Real shuffle_sum(Real x, int slices) {
  constexpr unsigned all = 0xffffffff;
  for (int step = 1; step < slices; step *= 2) x += __shfl_xor_sync(all, x, step);
  return x;
}

// A factor of an outer product: the first `width` numbers of each thread's row.
struct Factor {
  const Real *data;
  int stride, width;
};

// gradient(o, i) += Σ a(o) b(i) over the tokens of the block, with `leading` numbers from
// one row of the gradient to the next; and sums(o) += Σ a(o) unless it is null. All
// threads of the block must call it; it starts and ends with a barrier. A thread computes
// a tile of one o and four i over a slice of the tokens, and reads rows of b by quads.
void add_outer(const Team &team, Factor a, Factor b, Real *gradient, int leading,
               Real *sums) {
  const int quads = (b.width + 3) / 4, tiles = a.width * quads;
  int slices = 32;
  while (slices > 1 && slices * tiles > team.threads) slices /= 2;
  const int slice = team.thread % slices, at_once = team.threads / slices;
  __syncthreads();
  for (int base = 0; base < tiles; base += at_once) {
    // Threads past the last tile compute the first: the shuffles need whole warps.
    const int tile = base + team.thread / slices;
    const int o = tile < tiles ? tile / quads : 0;
    const int i = tile < tiles ? (tile - o * quads) * 4 : 0;
    Real sum[4] = {0, 0, 0, 0}, a_sum = 0;
    for (int t = slice; t < team.threads; t += slices) {
      const Real x = a.data[t * a.stride + o];
      const Vec<4> y = load<4>(b.data + t * b.stride + i);
      EACH(k, 4) sum[k] += x * y[k];
      a_sum += x;
    }
    EACH(k, 4) sum[k] = shuffle_sum(sum[k], slices);
    a_sum = shuffle_sum(a_sum, slices);
    if (tile >= tiles || slice) continue;
    EACH(k, 4) if (i + k < b.width) gradient[o * leading + i + k] += sum[k];
    if (sums && i == 0) sums[o] += a_sum;
  }
  __syncthreads();
}
// sums(o) += Σ a(o), likewise.
void add_sums(const Team &team, Factor a, Real *sums) {
  int slices = 32;
  while (slices > 1 && slices * a.width > team.threads) slices /= 2;
  const int slice = team.thread % slices, at_once = team.threads / slices;
  __syncthreads();
  for (int base = 0; base < a.width; base += at_once) {
    const int o = base + team.thread / slices;
    Real sum = 0;
    for (int t = slice; t < team.threads; t += slices)
      sum += a.data[t * a.stride + (o < a.width ? o : 0)];
    sum = shuffle_sum(sum, slices);
    if (o < a.width && !slice) sums[o] += sum;
  }
  __syncthreads();
}
// The same for a vector of each thread.
void add_outer(const Team &team, const Token &a, const Token &b, Real *gradient) {
  team.store(team.left() + team.thread * kLeft, a);
  team.store(team.right() + team.thread * kRight, b);
  const Factor left{team.left(), kLeft, D}, right{team.right(), kRight, D};
  add_outer(team, left, right, gradient, D, nullptr);
}
void add_sums(const Team &team, const Token &a, Real *sums) {
  team.store(team.left() + team.thread * kLeft, a);
  add_sums(team, {team.left(), kLeft, D}, sums);
}

// ---- attention

// log2 Σ 2^score of one query, for each of n heads; the weight of a key is
// 2^(score - log2_sum).
template <int n> struct Softmax {
  Real log2_sum[n];
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

// The weighted means of the set's values; `query` is scaled and in units of ln 2.
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
    softmax.log2_sum[h] = sum[h] > 0 ? peak[h] + log2(sum[h]) : Real(0);
    EACH(d, W) mixed[h * W + d] *= inverse;
  }
  return mixed;
}

// gradient · mixed for each head.
template <int n> Vec<n> head_dots(const Token &gradient, const Token &mixed) {
  constexpr int W = D / n;
  Vec<n> delta;
  EACH(h, n) {
    delta[h] = 0;
    EACH(d, W) delta[h] += gradient[h * W + d] * mixed[h * W + d];
  }
  return delta;
}

// The gradient w.r.t. a query before it is scaled, given that w.r.t. the result of
// `attend`.
template <int n>
Token query_gradient(const Team &team, const Token &query, const Softmax<n> &softmax,
                     const Token &gradient, const Vec<n> &delta, Real scale) {
  constexpr int W = D / n;
  Token result = zero();
  for (int j = 0; j < team.tokens; j++) {
    if (!team.present(j)) continue;
    const Vec<P> key = load<P>(team.key(team.first + j));
    const Vec<P> value = load<P>(team.value(team.first + j));
    EACH(h, n) {
      Real score = -softmax.log2_sum[h], d_weight = -delta[h];
      EACH(d, W) {
        score += query[h * W + d] * key[h * W + d];
        d_weight += gradient[h * W + d] * value[h * W + d];
      }
      const Real d_score = exp2(score) * d_weight;
      EACH(d, W) result[h * W + d] += d_score * key[h * W + d];
    }
  }
  EACH(d, D) result[d] *= scale;
  return result;
}

// The gradients w.r.t. the key and value of this thread's token, over all queries of the
// set. Shared memory holds the queries, the gradients w.r.t. their results, and log2_sum
// and delta per head.
void key_gradients(const Team &team, const Token &key, const Token &value, Token &d_key,
                   Token &d_value) {
  constexpr int W = D / H;
  d_key = zero();
  d_value = zero();
  if (!team.present_[team.thread]) return;
  for (int i = 0; i < team.tokens; i++) {
    const int t = team.first + i;
    const Vec<P> query = load<P>(team.query(t)), gradient = load<P>(team.gradient(t));
    const Vec<padded(2 * H)> head = load<padded(2 * H)>(team.heads(t));
    EACH(h, H) {
      Real score = -head[h], d_weight = -head[H + h];
      EACH(d, W) {
        score += query[h * W + d] * key[h * W + d];
        d_weight += gradient[h * W + d] * value[h * W + d];
      }
      const Real weight = exp2(score), d_score = weight * d_weight;
      EACH(d, W) {
        d_key[h * W + d] += d_score * query[h * W + d];
        d_value[h * W + d] += weight * gradient[h * W + d];
      }
    }
  }
  EACH(d, D) d_key[d] *= kLn2;
}

// ---- a layer: x += attention(norm(x)), x += W₂ φ(W₁ norm(x) + b₁) + b₂

// Intermediate results of the attention, for the backward pass.
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
  __syncthreads();  // others may still read the keys of the previous layer
  team.store(team.key(team.thread), a.key);
  team.store(team.value(team.thread), a.value);
  __syncthreads();
  a.mixed = attend<H>(team, a.query, a.softmax);
  add(x, product(w + kWOut, a.mixed));
  return a;
}

// Four hidden units from `f` on, and the derivatives of their activations; 0 beyond FF.
struct Hidden {
  Real value[4], slope[4];
};
Hidden hidden_units(const Real *w, int f, const Token &y) {
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
// Columns f to f + 3 of row d of W₂; 0 beyond FF.
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
    const Hidden hidden = hidden_units(w, f, y);
    EACH(d, D) {
      const Vec<4> down = down_weights(w, d, f);
      EACH(k, 4) x[d] += down[k] * hidden.value[k];
    }
  }
}

// Add to the gradients w.r.t. a LayerNorm's weight and bias, which start at g, and,
// through the norm, to dx.
void norm_gradients(const Team &team, const Norm &norm, const Token &gradient,
                    const Real *weight, Real *g, Token &dx) {
  Real *row = team.left() + team.thread * kLeft;
  Token d_normed;
  EACH(d, P) row[d] = d < D ? gradient[d] * norm.normed[d] : Real(0);
  EACH(d, D) {
    row[P + d] = gradient[d];
    d_normed[d] = gradient[d] * weight[d];
  }
  add_sums(team, {team.left(), kLeft, P + D}, g);
  normalize_backward(norm, d_normed, dx);
}

void feed_forward_backward(const Team &team, const Real *w, const Token &x, Token &dx,
                           Real *g) {
  const Norm norm = normalize(x);
  const Token y = affine(norm.normed, w + kNorm2, w + kNorm2Bias);
  Token d_y = zero();
  // Some hidden units at a time: their rows take the place of queries and gradients.
  Real *const hidden_row = team.query(team.thread);
  for (int from = 0; from < FF; from += kHidden) {
    const int count = FF - from < kHidden ? FF - from : kHidden;
    for (int i = 0; i < count; i += 4) {
      const Hidden hidden = hidden_units(w, from + i, y);
      Vec<4> d_hidden;
      EACH(k, 4) d_hidden[k] = 0;
      EACH(d, D) {
        const Vec<4> down = down_weights(w, d, from + i);
        EACH(k, 4) d_hidden[k] += down[k] * dx[d];
      }
      EACH(k, 4) {
        const Real d_input = d_hidden[k] * hidden.slope[k];
        hidden_row[i + k] = hidden.value[k];
        hidden_row[kHidden + i + k] = d_input;
        if (FF % 4 && from + i + k >= FF) continue;
        const Token row = load<D>(w + kUp + (from + i + k) * D);
        EACH(d, D) d_y[d] += row[d] * d_input;
      }
    }
    team.store(team.left() + team.thread * kLeft, dx);
    team.store(team.right() + team.thread * kRight, y);
    const Factor left{team.left(), kLeft, D}, right{team.right(), kRight, D};
    const Factor value{team.work(), kWork, count};
    const Factor d_input{team.work() + kHidden, kWork, count};
    add_outer(team, left, value, g + kDown + from, FF, from ? nullptr : g + kDownBias);
    add_outer(team, d_input, right, g + kUp + from * D, D, g + kUpBias + from);
  }
  norm_gradients(team, norm, d_y, w + kNorm2, g + kNorm2, dx);
}

void attention_backward(const Team &team, const Real *w, const Attention &a, double scale,
                        Token &dx, Real *g) {
  // Through the output projection.
  add_outer(team, dx, a.mixed, g + kWOut);
  const Token gradient = product_transposed(w + kWOut, dx);
  // Through the softmax, w.r.t. this thread's query, then its key and value.
  const Vec<H> delta = head_dots<H>(gradient, a.mixed);
  team.store(team.query(team.thread), a.query);
  team.store(team.gradient(team.thread), gradient);
  EACH(h, H) {
    team.heads(team.thread)[h] = a.softmax.log2_sum[h];
    team.heads(team.thread)[H + h] = delta[h];
  }
  const Token d_query =
      query_gradient<H>(team, a.query, a.softmax, gradient, delta, Real(scale));
  __syncthreads();
  Token d_key, d_value;
  key_gradients(team, a.key, a.value, d_key, d_value);
  // Through the input projections to the norm.
  const Token y = affine(a.norm.normed, w + kNorm1, w + kNorm1Bias);
  Real *row = team.left() + team.thread * kLeft;
  team.store(row, d_query);
  team.store(row + P, d_key);
  team.store(row + 2 * P, d_value);
  team.store(team.right() + team.thread * kRight, y);
  const Factor right{team.right(), kRight, D};
  if (D % 4 == 0) {  // no padding between the three, neither here nor in the weights
    add_outer(team, {team.left(), kLeft, 3 * D}, right, g + kWQuery, D, nullptr);
  } else {
    add_outer(team, {team.left(), kLeft, D}, right, g + kWQuery, D, nullptr);
    add_outer(team, {team.left() + P, kLeft, D}, right, g + kWKey, D, nullptr);
    add_outer(team, {team.left() + 2 * P, kLeft, D}, right, g + kWValue, D, nullptr);
  }
  Token d_y = product_transposed(w + kWQuery, d_query);
  add(d_y, product_transposed(w + kWKey, d_key));
  add(d_y, product_transposed(w + kWValue, d_value));
  norm_gradients(team, a.norm, d_y, w + kNorm1, g + kNorm1, dx);
}

// ---- embedding

struct Input {
  Vec<(INPUTS > 0 ? INPUTS : 1)> values;
  int type;
  bool from_batch;  // a token of the batch, neither a learned one nor an idle thread
};

// Load this thread's token, set its masks, and return its vector.
Token embed(const Team &team, const Real *w, const Batch &b, Input &input, Token &slope) {
  Token x = zero();
  slope = zero();
  EACH(i, INPUTS) input.values[i] = 0;
  const int tokens = b.tokens - EXTRA;
  const Long index = team.row * tokens + team.n - EXTRA;
  input.from_batch = team.active && team.n >= EXTRA;
  const bool absent = input.from_batch && b.padding && b.padding[index];
  input.type = input.from_batch && !absent && b.types ? int(b.types[index]) : 0;
  __syncthreads();  // others may still read the masks of the previous sets
  team.present_[team.thread] = team.active && !absent;
  team.own_type_[team.thread] = input.from_batch && !absent && b.types && input.type == 0;
  if (!team.active) return x;
  if (team.n < EXTRA) {
    EACH(d, D) x[d] = w[kExtra + team.n * D + d];
    return x;
  }
  if (!FEATURES) {
    EACH(d, D) x[d] = b.values[index * D + d];
    return x;
  }
  EACH(i, FEATURES) input.values[i] = absent ? Real(0) : b.values[index * FEATURES + i];
  if (TYPES && (input.type < 0 || input.type >= TYPES)) {
    // A kernel cannot raise an error, so the result is NaN.
    input.type = 0;
    input.values[0] = Real(nan(""));
  }
  EACH(i, TYPE_WIDTH)
    input.values[FEATURES + i] = w[kTypes + input.type * TYPE_WIDTH + i];
  EACH(d, D) {
    Real sum = w[kProjectBias + d];
    EACH(i, INPUTS) sum += w[kProject + d * INPUTS + i] * input.values[i];
    const Activated value = activate(INPUT_ACTIVATION, sum);
    x[d] = value.value;
    slope[d] = value.slope;
  }
  return x;
}

void embed_backward(const Team &team, const Real *w, const Batch &b, const Input &input,
                    const Token &slope, const Token &dx, Real *g, Real *values_gradient) {
  const int tokens = b.tokens - EXTRA;
  const Long index = team.row * tokens + team.n - EXTRA;
  Real *const row = team.left() + team.thread * kLeft;
  if (EXTRA) {
    team.store(row, dx);
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
    if (values_gradient && input.from_batch)
      EACH(d, D) values_gradient[index * D + d] = dx[d];
    return;
  }
  Token d_sum;
  EACH(d, D) d_sum[d] = input.from_batch ? dx[d] * slope[d] : Real(0);
  // P inputs at a time, for which the right factor has room.
  for (int from = 0; from < INPUTS; from += P) {
    const int count = INPUTS - from < P ? INPUTS - from : P;
    team.store(row, d_sum);
    EACH(i, INPUTS) {
      if (i >= from && i < from + P)
        team.right()[team.thread * kRight + i - from] = input.values[i];
    }
    add_outer(team, {team.left(), kLeft, D}, {team.right(), kRight, count},
              g + kProject + from, INPUTS, from ? nullptr : g + kProjectBias);
  }
  // Type embeddings: an outer product with the one-hot types, some types at a time.
  for (int from = 0; TYPE_WIDTH && from < TYPES; from += 3 * P) {
    const int count = TYPES - from < 3 * P ? TYPES - from : 3 * P;
    for (int k = 0; k < count; k++) row[k] = input.from_batch && input.type == from + k;
    // P features at a time.
    for (int first = 0; first < TYPE_WIDTH; first += P) {
      const int width = TYPE_WIDTH - first < P ? TYPE_WIDTH - first : P;
      for (int e = 0; e < width; e++) {
        Real sum = 0;
        EACH(d, D) sum += w[kProject + d * INPUTS + FEATURES + first + e] * d_sum[d];
        team.right()[team.thread * kRight + e] = sum;
      }
      add_outer(team, {team.left(), kLeft, count}, {team.right(), kRight, width},
                g + kTypes + from * TYPE_WIDTH + first, TYPE_WIDTH, nullptr);
    }
  }
  if (!values_gradient || !input.from_batch) return;
  const bool present = team.present_[team.thread];
  EACH(i, FEATURES) {
    Real sum = 0;
    EACH(d, D) sum += w[kProject + d * INPUTS + i] * d_sum[d];
    values_gradient[index * FEATURES + i] = present ? sum : Real(0);
  }
}

// ---- pooling; the set's encoded vectors are in the rows of the queries

Real encoded(const Team &team, int j, int d) { return team.query(team.first + j)[d]; }

struct Counts {
  int present, own_type;
};
Counts count(const Team &team) {
  Counts counts{0, 0};
  for (int j = 0; j < team.tokens; j++) {
    counts.present += team.present(j);
    counts.own_type += team.own_type(j);
  }
  return counts;
}

// The weight of token j in `avg`, `sum` and `first`.
Real pooling_weight(const Team &team, Counts counts, int j) {
  if (POOLING == kFirst) return j == 0;
  if (!team.present(j)) return 0;
  return POOLING == kAvg ? Real(1) / counts.present : Real(1);
}
// The weight of token j in AdaPool's query: the mean of those of the observer's own type,
// or of all where there are none.
Real query_weight(const Team &team, Counts counts, int j) {
  const bool by_type = QUERY == kSelf && counts.own_type;
  if (!(by_type ? team.own_type(j) : team.present(j))) return 0;
  return Real(1) / (by_type ? counts.own_type : counts.present);
}

struct Ada {
  Token query, scaled, key, value, pooled;
  Softmax<POOLING_HEADS> softmax;
};

// AdaPool's result, which every thread of the set computes.
Token ada(const Team &team, const Real *w, const Batch &b, const Token &x, Counts counts,
          Ada &a) {
  a.query = zero();
  for (int j = 0; j < team.tokens; j++) {
    const Real weight = QUERY == kLearned ? Real(0) : query_weight(team, counts, j);
    EACH(d, D) a.query[d] += weight == 0 ? Real(0) : weight * encoded(team, j, d);
  }
  if (QUERY == kLearned) EACH(d, D) a.query[d] = w[kAdaLearned + d];
  a.scaled = product(w + kAdaQuery, a.query);
  EACH(d, D) a.scaled[d] *= Real(b.pooling_scale) * kLog2E;
  a.key = product(w + kAdaKey, x);
  a.value = product(w + kAdaValue, x);
  __syncthreads();
  team.store(team.key(team.thread), a.key);
  team.store(team.value(team.thread), a.value);
  __syncthreads();
  a.pooled = attend<POOLING_HEADS>(team, a.scaled, a.softmax);
  Token result = product(w + kAdaOut, a.pooled);
  if (RESIDUAL) add(result, a.query);
  return counts.present ? result : zero();
}

void ada_backward(const Team &team, const Real *w, const Batch &b, const Token &x,
                  Counts counts, const Ada &a, const Token &gradient, Token &dx,
                  Real *g) {
  constexpr int W = D / POOLING_HEADS;
  const bool first = team.n == 0;  // one thread contributes for the set
  const Token d_pooled = product_transposed(w + kAdaOut, gradient);
  const Vec<POOLING_HEADS> delta = head_dots<POOLING_HEADS>(d_pooled, a.pooled);
  const Token d_scaled = query_gradient<POOLING_HEADS>(
      team, a.scaled, a.softmax, d_pooled, delta, Real(b.pooling_scale));
  // W.r.t. the key and value of this token.
  Token d_key = zero(), d_value = zero();
  if (team.present_[team.thread]) {
    EACH(h, POOLING_HEADS) {
      Real score = -a.softmax.log2_sum[h], d_weight = -delta[h];
      EACH(d, W) score += a.scaled[h * W + d] * a.key[h * W + d];
      const Real weight = exp2(score);
      EACH(d, W) d_weight += d_pooled[h * W + d] * a.value[h * W + d];
      EACH(d, W) {
        d_key[h * W + d] = weight * d_weight * kLn2 * a.scaled[h * W + d];
        d_value[h * W + d] = weight * d_pooled[h * W + d];
      }
    }
  }
  dx = product_transposed(w + kAdaKey, d_key);
  add(dx, product_transposed(w + kAdaValue, d_value));
  // W.r.t. the query, which is a weighted sum of tokens.
  Token d_query = product_transposed(w + kAdaQuery, d_scaled);
  if (RESIDUAL) add(d_query, gradient);
  if (QUERY != kLearned && team.active) {
    const Real share = query_weight(team, counts, team.n);
    EACH(d, D) dx[d] += share * d_query[d];
  }
  // W.r.t. the weights.
  const Token none = zero();
  add_outer(team, first ? gradient : none, a.pooled, g + kAdaOut);
  add_outer(team, first ? d_scaled : none, a.query, g + kAdaQuery);
  add_outer(team, d_key, x, g + kAdaKey);
  add_outer(team, d_value, x, g + kAdaValue);
  if (QUERY == kLearned) add_sums(team, first ? d_query : none, g + kAdaLearned);
}

// The pooled vector of the set, which every thread computes.
Token pool(const Team &team, const Real *w, const Batch &b, const Token &x, Ada &a) {
  __syncthreads();
  team.store(team.query(team.thread), x);
  __syncthreads();
  const Counts counts = count(team);
  if (POOLING == kAda) return ada(team, w, b, x, counts, a);
  Token result = zero();
  bool any_present = false;
  for (int j = 0; j < team.tokens; j++) {
    if (POOLING != kFirst && !team.present(j)) continue;
    const Real weight = pooling_weight(team, counts, j);
    EACH(d, D) {
      const Real value = encoded(team, j, d);
      if (POOLING != kMax)
        result[d] += weight == 0 ? Real(0) : weight * value;
      else if (!any_present || value > result[d] || isnan(value))
        result[d] = value;
    }
    any_present = true;
  }
  return result;
}

// The gradient w.r.t. the encoded vector of this thread's token.
Token pool_backward(const Team &team, const Real *w, const Batch &b, const Token &x,
                    const Token &result, const Ada &a, const Token &gradient, Real *g) {
  Token dx = zero();
  const Counts counts = count(team);
  if (POOLING == kAda) {
    ada_backward(team, w, b, x, counts, a, counts.present ? gradient : zero(), dx, g);
  } else if (POOLING == kMax) {
    // Tied tokens share the gradient equally, as in torch's amax.
    EACH(d, D) {
      int ties = 0;
      for (int j = 0; j < team.tokens; j++)
        ties += team.present(j) && encoded(team, j, d) == result[d];
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

// More blocks per multiprocessor hide more memory latency, but leave fewer registers per
// thread. These numbers were the fastest of several on an H100.
constexpr int kForwardBlocks = 640 / MOST_THREADS, kBackwardBlocks = 512 / MOST_THREADS;

// Deliberately without __restrict__, with which the compiler would keep the weights of
// all layers in registers and run out of them.
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

// Add the gradients w.r.t. the weights to the block's row of `partial`, (blocks, size),
// and write that w.r.t. the input to `values_gradient` unless it is null.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, kBackwardBlocks)
    marl_pool_backward(const Real *weights, Batch b, const Real *out_gradient, Long size,
                       Real *partial, Real *values_gradient) {
  Team team(b);
  Real *const gradients = partial + blockIdx.x * size;
  const Long groups = (b.rows + b.sets - 1) / b.sets;
  for (Long group = blockIdx.x; group < groups; group += gridDim.x) {
    team.take(b, group);
    Input input;
    Token slope, layer_inputs[LAYERS];
    Token x = embed(team, weights, b, input, slope);
    for (int l = 0; l < LAYERS; l++) {
      const Real *w = weights + kLayers + l * kLayerSize;
      layer_inputs[l] = x;
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
      x = layer_inputs[l];
      const Attention a = attention(team, w, b.scale, x);
      feed_forward_backward(team, w, x, dx, g);
      attention_backward(team, w, a, b.scale, dx, g);
    }
    embed_backward(team, weights, b, input, slope, dx, gradients, values_gradient);
  }
}
