// Hidden layers and heads of a stack of networks, forward and backward, and Adam: what networks/dense.py and
// networks/optimizer.py compute by torch, for float32 on a CPU.
//
// Small networks do little arithmetic in each of torch's operations, so calls and memory traffic dominate there. Here
// each agent's rows pass through the whole network in blocks whose activations stay in the core's cache.
//
// Layout: outside as in networks/dense.py, tensors [P, rows, units] and weights [P * branches, read, produced]. Inside,
// a block is a matrix [units, stride] with its rows, the samples, as the inner axis: then products, norms and
// activations are all loops over whole vectors, and layer norm needs no sum within a vector.
//
// Agents are independent, so results do not depend on the number of threads. Only vector extensions of GCC and Clang
// are used, no intrinsics. Non-finite numbers propagate as in torch, because faults are found by them: compile without
// -ffast-math.

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// ---------------------------------------------------------------------------------------------------- vectors

#ifdef __AVX512F__
constexpr long LANES = 16, TILE_ROWS = 8;  // 24 of 32 registers hold a tile of a product.
#else
constexpr long LANES = 8, TILE_ROWS = 4;  // 12 of 16 registers.
#endif
constexpr long TILE_VECTORS = 3;
constexpr long BLOCK = 128;  // Rows of a block.

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef float Unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Int __attribute__((vector_size(LANES * 4)));

inline Vec load(const float* from) { return *(const Unaligned*)from; }
inline void store(float* to, Vec values) { *(Unaligned*)to = values; }
inline Vec all(float value) { return Vec{} + value; }
inline float sum(Vec values) {
  for (long half = LANES / 2; half; half /= 2)
    for (long i = 0; i < half; i++) values[i] += values[i + half];
  return values[0];
}

// exp by Cody and Waite's reduction and a polynomial, to 2 units in the last place; exp(0) is exactly 1.
inline Vec exponential(Vec x) {
  x = x < -87.f ? all(-87.f) : x;  // Written so that NaN stays.
  x = x > 88.f ? all(88.f) : x;
  const Vec magic = all(12582912.f), n = (x * 1.44269504f + magic) - magic;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  const Int exponent = (__builtin_convertvector(n, Int) + 127) << 23;
  return p * (Vec)exponent;
}

inline long up(long count) { return (count + LANES - 1) / LANES * LANES; }

// Floats from one unit of a block to the next: no large power of two, which would map all units to few cache lines.
inline long stride_of(long rows) {
  const long padded = up(rows);
  return padded % 128 ? padded : padded + LANES;
}

// Allocates at whole vectors: one that crosses a cache line takes twice as long to load or store.
template <class T>
struct Aligned {
  using value_type = T;
  T* allocate(size_t count) { return (T*)::operator new(count * sizeof(T), std::align_val_t(sizeof(Vec))); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t(sizeof(Vec))); }
  bool operator==(const Aligned&) const { return true; }
  bool operator!=(const Aligned&) const { return false; }
};
typedef std::vector<float, Aligned<float>> Floats;

// ---------------------------------------------------------------------------------------------------- products

enum class Start { zero, bias, add };

// A tile of C = A B: rows ROWS, columns VECTORS * LANES. A is read at [m * a_row + k * a_column].
template <int ROWS, int VECTORS>
inline void tile(const float* a, long a_row, long a_column, const float* b, long b_row, float* c, long c_row,
                 long depth, const float* bias, Start start) {
  Vec sums[ROWS][VECTORS];
  for (int m = 0; m < ROWS; m++)
    for (int n = 0; n < VECTORS; n++)
      sums[m][n] = start == Start::bias ? all(bias[m]) : start == Start::add ? load(c + m * c_row + LANES * n) : Vec{};
  for (long k = 0; k < depth; k++) {
    if constexpr (VECTORS == 1) __builtin_prefetch(a + (k + 16) * a_column);  // For few rows, A is all of the traffic.
    Vec columns[VECTORS];
    for (int n = 0; n < VECTORS; n++) columns[n] = load(b + k * b_row + LANES * n);
    for (int m = 0; m < ROWS; m++) {
      const Vec factor = all(a[m * a_row + k * a_column]);
      for (int n = 0; n < VECTORS; n++) sums[m][n] += factor * columns[n];
    }
  }
  for (int m = 0; m < ROWS; m++)
    for (int n = 0; n < VECTORS; n++) store(c + m * c_row + LANES * n, sums[m][n]);
}

template <int VECTORS>
void column(const float* a, long a_row, long a_column, const float* b, long b_row, float* c, long c_row, long rows,
            long depth, const float* bias, Start start) {
  long m = 0;
  const auto next = [&](auto size) {
    constexpr int ROWS = decltype(size)::value;
    for (; m + ROWS <= rows; m += ROWS)
      tile<ROWS, VECTORS>(a + m * a_row, a_row, a_column, b, b_row, c + m * c_row, c_row, depth, bias ? bias + m : bias,
                          start);
  };
  if constexpr (VECTORS == 1) next(std::integral_constant<int, 2 * TILE_ROWS>());
  next(std::integral_constant<int, TILE_ROWS>());
  next(std::integral_constant<int, 4>());
  next(std::integral_constant<int, 2>());
  next(std::integral_constant<int, 1>());
}

// C [rows, columns] = A [rows, depth] B [depth, columns], columns a multiple of LANES, on top of a start.
void multiply(const float* a, long a_row, long a_column, const float* b, long b_row, float* c, long c_row, long rows,
              long columns, long depth, Start start, const float* bias = nullptr) {
  for (long n = 0; n < columns;) {
    const long vectors = (columns - n) / LANES;
    if (vectors == 3 || vectors > 4) {
      column<TILE_VECTORS>(a, a_row, a_column, b + n, b_row, c + n, c_row, rows, depth, bias, start);
      n += 3 * LANES;
    } else if (vectors >= 2) {
      column<2>(a, a_row, a_column, b + n, b_row, c + n, c_row, rows, depth, bias, start);
      n += 2 * LANES;
    } else {
      column<1>(a, a_row, a_column, b + n, b_row, c + n, c_row, rows, depth, bias, start);
      n += LANES;
    }
  }
}

// The lower, or upper, halves of two vectors with their elements in turns.
template <bool UPPER>
inline Vec zip(Vec a, Vec b) {
#ifdef __AVX512F__
  if constexpr (UPPER)
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  else
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
  if constexpr (UPPER)
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  else
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#endif
}

// to [columns, rows] = from [rows, columns].
void transpose(const float* from, long rows, long columns, long from_row, float* to, long to_row) {
  for (long r = 0; r < rows; r += LANES)
    for (long c = 0; c < columns; c += LANES) {
      if (r + LANES > rows || c + LANES > columns) {
        for (long j = c; j < std::min(c + LANES, columns); j++)
          for (long i = r; i < std::min(r + LANES, rows); i++) to[j * to_row + i] = from[i * from_row + j];
        continue;
      }
      // Zipping the halves of a square log2(LANES) times transposes it.
      Vec square[LANES], zipped[LANES];
      for (long i = 0; i < LANES; i++) square[i] = load(from + (r + i) * from_row + c);
      for (long round = 1; round < LANES; round *= 2) {
        for (long i = 0; i < LANES / 2; i++) {
          zipped[2 * i] = zip<false>(square[i], square[i + LANES / 2]);
          zipped[2 * i + 1] = zip<true>(square[i], square[i + LANES / 2]);
        }
        for (long i = 0; i < LANES; i++) square[i] = zipped[i];
      }
      for (long i = 0; i < LANES; i++) store(to + (c + i) * to_row + r, square[i]);
    }
}

// ---------------------------------------------------------------------------------------------------- the network

enum Activation : int64_t { RELU, TANH, ELU, GELU, SILU };

// value = f(z) and slope = f'(z).
template <Activation KIND>
inline void activation(Vec z, Vec& value, Vec& slope) {
  const Vec zero{}, one = all(1.f);
  switch (KIND) {
    case RELU:
      value = z < zero ? zero : z;
      slope = z > zero ? one : zero;
      return;
    case TANH: {
      const Vec small = z * z, e = exponential(z + z);
      // Near 0 the quotient loses digits; the series has an error below 1e-7 of the value there.
      const Vec series = z * (one - small * (0.333333333f - small * (0.133333333f - small * 0.053968254f)));
      value = small < 0.01f ? series : one - 2.f / (e + one);
      slope = one - value * value;
      return;
    }
    case ELU: {
      const Vec e = exponential(z < zero ? z : z != z ? z : zero);
      value = z > zero ? z : e - one;
      slope = z > zero ? one : e;
      return;
    }
    case GELU: {
      // The normal distribution function by Abramowitz and Stegun 7.1.26, to 1.5e-7.
      const Vec size = z < zero ? -z : z, density = exponential(z * z * -0.5f), t = one / (size * 0.2316418882f + one);
      const Vec inner = 1.421413741f + t * (-1.453152027f + t * 1.061405429f);
      const Vec tail = density * t * 0.5f * (0.254829592f + t * (-0.284496736f + t * inner));
      const Vec below = z < zero ? tail : one - tail;
      value = z * below;
      slope = below + z * density * 0.3989422804f;
      return;
    }
    case SILU: {
      const Vec sigmoid = one / (exponential(-z) + one);
      value = z * sigmoid;
      slope = sigmoid * (z * (one - sigmoid) + one);
      return;
    }
  }
}

struct Tensor {
  float* values;
  float* gradient;  // Null where none is wanted, and in a forward pass.
};

struct Layer {
  long units, branches, stored;  // The first branches are computed, of those stored.
  // Of all agents and branches. Without values: `gain` and `shift` without layer norm, `share` if all units take part
  // in its statistics, `scale` unless the layer is residual.
  Tensor bias, gain, shift, share, scale;
  std::vector<Tensor> weights;  // One for each source in the first layer.
};

struct Head {
  long outputs;
  Tensor weight, bias, output;  // The output is [P, rows, outputs].
};

struct Source {
  long width;
  Tensor tensor;  // [P, rows, width]
};

struct Network {
  long agents, rows, branches, width;  // Width is that of all sources together.
  bool backward, to_parameters;
  Activation kind;
  float* trace;     // What a forward pass keeps for the backward pass, or null.
  Tensor features;  // The input of the first head [P, rows, units], or null.
  std::vector<Source> sources;
  std::vector<Layer> layers;
  std::vector<Head> heads;

  // Reads what networks/kernel.py writes: the `words` of a plan, with the place of each parameter in the flat buffers
  // `parameters` and `gradient` (null where none is wanted), and the `addresses` of a call.
  Network(const int64_t* words, const int64_t* addresses, long rows, float* parameters, float* gradient, bool backward,
          float* trace)
      : rows(rows), width(0), backward(backward), to_parameters(gradient), trace(trace), features{} {
    const auto number = [&] { return (long)*words++; };
    const auto parameter = [&] {
      const long place = number();
      return place < 0 ? Tensor{} : Tensor{parameters + place, gradient ? gradient + place : nullptr};
    };
    const auto tensor = [&] {
      addresses += 2;
      return Tensor{(float*)addresses[-2], (float*)addresses[-1]};
    };
    agents = number(), branches = number();
    sources.resize(number()), layers.resize(number()), heads.resize(number());
    const bool gives_features = number();
    kind = (Activation)number();
    for (Source& source : sources) {
      source.width = number(), source.tensor = tensor();
      width += source.width;
    }
    for (Layer& layer : layers) {
      layer.units = number(), layer.branches = number(), layer.stored = number();
      layer.bias = parameter(), layer.gain = parameter(), layer.shift = parameter(), layer.scale = parameter();
      layer.share = {(float*)*addresses++, nullptr};
      layer.weights.resize(&layer == &layers[0] ? sources.size() : 1);
      for (Tensor& weight : layer.weights) weight = parameter();
    }
    for (Head& head : heads) {
      head.outputs = number(), head.weight = parameter(), head.bias = parameter(), head.output = tensor();
    }
    if (gives_features) features = tensor();
  }

  long stride() const { return stride_of(std::min(rows, BLOCK)); }
  long below(size_t layer) const { return layer ? layers[layer - 1].units : width; }
  long branch_below(size_t layer, long branch) const {
    return layer && layers[layer - 1].branches > 1 ? branch : 0;
  }
  // Floats of a block's trace: of each layer and branch [z or normalised, output] and with layer norm the reciprocals
  // of the standard deviations. The backward pass reads the sources from the caller.
  long block_size() const {
    long units = 0;
    for (const Layer& layer : layers) units += layer.branches * (2 * layer.units + 1);
    return units * stride();
  }
  // The same without a trace, where two layers at a time have [output] and those reciprocals, in turns.
  long layer_size() const {
    long units = 0;
    for (const Layer& layer : layers) units = std::max(units, layer.branches * (layer.units + 1));
    return units * stride();
  }
  long small_size() const { return 2 * layer_size(); }
  // Multiplications of a forward pass.
  long products() const {
    long weights = 0;
    for (size_t l = 0; l < layers.size(); l++) weights += layers[l].branches * layers[l].units * below(l);
    return agents * rows * weights;
  }
  long trace_size() const { return agents * ((rows + BLOCK - 1) / BLOCK) * block_size(); }
};

// Where a block keeps the activations of each layer and branch.
struct Block {
  float* inputs;  // In a forward pass.
  struct Branch { float *normal, *output, *scale; };
  std::vector<std::vector<Branch>> layers;
  Block(const Network& network, float* memory, float* inputs) : inputs(inputs) {
    const long stride = network.stride();
    float* const first = memory;
    for (const Layer& layer : network.layers) {
      if (!network.trace) memory = first + layers.size() % 2 * network.layer_size();
      layers.emplace_back();
      for (long branch = 0; branch < layer.branches; branch++) {
        float *normal = memory, *output = network.trace ? normal + layer.units * stride : normal;
        memory = output + layer.units * stride;
        layers.back().push_back({normal, output, memory});
        memory += stride;
      }
    }
  }
  const float* below(const Network& network, size_t layer, long branch) const {
    return layer ? layers[layer - 1][network.branch_below(layer, branch)].output : inputs;
  }
};

// One agent's and branch's part of a layer.
struct Member {
  long units;
  Tensor bias, gain, shift, share, scale;
  Member(const Layer& layer, long member) : units(layer.units) {
    const auto from = [&](float* all) { return all ? all + member * units : nullptr; };
    const auto part = [&](Tensor all) { return Tensor{from(all.values), from(all.gradient)}; };
    bias = part(layer.bias), gain = part(layer.gain), shift = part(layer.shift), share = part(layer.share);
    scale = part(layer.scale);
  }
  // The weight of a unit in layer norm's statistics.
  float share_of(long unit) const { return share.values ? share.values[unit] : 1.f / units; }
};

template <class Work>
inline void with_activation(Activation kind, const Work& work) {
  switch (kind) {
    case RELU: return work(std::integral_constant<Activation, RELU>());
    case TANH: return work(std::integral_constant<Activation, TANH>());
    case ELU: return work(std::integral_constant<Activation, ELU>());
    case GELU: return work(std::integral_constant<Activation, GELU>());
    case SILU: return work(std::integral_constant<Activation, SILU>());
  }
}

// GROUP vectors of rows, whose sums over units do not wait for one another.
template <Activation KIND, int GROUP>
void normalise_and_activate(const Member& of, long stride, const float* in, float* normal, float* output, float* scale) {
  // Locals, which no store can change.
  const float *gain = of.gain.values, *shift = of.shift.values, *of_output = of.scale.values;
  const long units = of.units;
  Vec mean[GROUP] = {}, square[GROUP] = {}, deviation[GROUP];
  if (gain) {
    for (long u = 0; u < units; u++)
      for (long g = 0; g < GROUP; g++) mean[g] += load(normal + u * stride + g * LANES) * of.share_of(u);
    for (long u = 0; u < units; u++)
      for (long g = 0; g < GROUP; g++) {
        const Vec centred = load(normal + u * stride + g * LANES) - mean[g];
        square[g] += centred * centred * of.share_of(u);
      }
    for (long g = 0; g < GROUP; g++) {
      for (long i = 0; i < LANES; i++) deviation[g][i] = 1.f / std::sqrt(square[g][i] + 1e-5f);
      store(scale + g * LANES, deviation[g]);
    }
  }
  for (long u = 0; u < units; u++)
    for (long g = 0; g < GROUP; g++) {
      const long at = u * stride + g * LANES;
      Vec z = load(normal + at), value, slope;
      if (gain) {
        z = (z - mean[g]) * deviation[g];
        store(normal + at, z);
        z = z * gain[u] + shift[u];
      }
      activation<KIND>(z, value, slope);
      if (of_output) value = load(in + at) + value * of_output[u];
      store(output + at, value);
    }
}

// Rows [first, first + count) of one agent's source as a block, with zeros up to a whole vector.
void read_source(const Network& network, const Source& source, long agent, long first, long count, float* to) {
  const long width = source.width, stride = network.stride();
  transpose(source.tensor.values + (agent * network.rows + first) * width, count, width, width, to, stride);
  for (long unit = 0; unit < width; unit++)
    std::fill(to + unit * stride + count, to + unit * stride + up(count), 0.f);
}

// Rows [first, first + count) of one agent through the network.
void forward(const Network& network, long agent, long first, long count, Block& block, Floats& scratch) {
  const long stride = network.stride(), padded = up(count);
  float* input = block.inputs;
  for (const Source& source : network.sources) {
    read_source(network, source, agent, first, count, input);
    input += source.width * stride;
  }
  for (size_t l = 0; l < network.layers.size(); l++) {
    const Layer& layer = network.layers[l];
    const long units = layer.units, read = network.below(l);
    for (long branch = 0; branch < layer.branches; branch++) {
      const long member = agent * layer.stored + branch;
      const Block::Branch& out = block.layers[l][branch];
      const float *in = block.below(network, l, branch), *part = in;
      const Member of(layer, member);
      for (size_t i = 0; i < layer.weights.size(); i++) {
        const long width = l ? read : network.sources[i].width;
        multiply(layer.weights[i].values + member * width * units, 1, units, part, stride, out.normal, stride, units,
                 padded, width, i ? Start::add : Start::bias, of.bias.values);
        part += width * stride;
      }
      with_activation(network.kind, [&](auto constant) {
        constexpr Activation KIND = decltype(constant)::value;
        long b = 0;
        for (; b + 4 * LANES <= padded; b += 4 * LANES)
          normalise_and_activate<KIND, 4>(of, stride, in + b, out.normal + b, out.output + b, out.scale + b);
        for (; b < padded; b += LANES)
          normalise_and_activate<KIND, 1>(of, stride, in + b, out.normal + b, out.output + b, out.scale + b);
      });
    }
  }
  const size_t last = network.layers.size();
  const long read = network.below(last);
  for (size_t h = 0; h < network.heads.size(); h++) {
    const Head& head = network.heads[h];
    const float* in = block.below(network, last, network.branches > 1 ? h : 0);
    scratch.resize(std::max<size_t>(scratch.size(), head.outputs * stride));
    const long n = head.outputs;
    multiply(head.weight.values + agent * read * n, 1, n, in, stride, scratch.data(), stride, n, padded, read,
             Start::bias, head.bias.values + agent * n);
    transpose(scratch.data(), n, count, stride, head.output.values + (agent * network.rows + first) * n, n);
  }
  if (network.features.values)
    transpose(block.below(network, last, 0), read, count, stride,
              network.features.values + (agent * network.rows + first) * read, read);
}

// Adds a block's part of the gradient of one weight: weight [read, produced] += in gradient^T.
struct WeightGradient {
  long stride, padded;
  bool first_block;
  Floats &transposed, &product;

  void operator()(const float* in, long read, const float* gradient, long produced, float* weight) {
    const long wide = up(produced), row = stride_of(produced);
    transposed.resize(std::max<size_t>(transposed.size(), padded * row));
    if (wide != produced) std::fill(transposed.begin(), transposed.begin() + padded * row, 0.f);
    transpose(gradient, produced, padded, stride, transposed.data(), row);
    if (wide == produced) {
      multiply(in, stride, 1, transposed.data(), row, weight, produced, read, produced, padded,
               first_block ? Start::zero : Start::add);
      return;
    }
    product.resize(std::max<size_t>(product.size(), read * wide));
    multiply(in, stride, 1, transposed.data(), row, product.data(), wide, read, wide, padded, Start::zero);
    for (long r = 0; r < read; r++)
      for (long c = 0; c < produced; c++) {
        float& to = weight[r * produced + c];
        to = product[r * wide + c] + (first_block ? 0.f : to);
      }
  }

  void put(float& to, float value) const { to = first_block ? value : to + value; }

  float total(const float* values) const {
    Vec sums{};
    for (long b = 0; b < padded; b += LANES) sums += load(values + b);
    return sum(sums);
  }
};

// The gradient of z, from that of a layer's output, with the sums over rows that are gradients of each unit's numbers.
// A residual layer passes its output's gradient on `to` its source as well.
template <Activation KIND>
void activation_gradient(const Member& of, const WeightGradient& add, const Block::Branch& out, const float* from,
                         float* z_gradient, float* to, bool first_writer) {
  const long units = of.units, stride = add.stride;
  for (long u = 0; u < units; u++) {
    Vec scale_sum{}, gain_sum{}, shift_sum{};
    for (long b = 0; b < add.padded; b += LANES) {
      const long at = u * stride + b;
      const Vec normal = load(out.normal + at);
      Vec incoming = load(from + at), value, slope;
      if (KIND == TANH && !of.scale.values)  // Its slope follows from its value, which costs an exponential.
        value = load(out.output + at), slope = all(1.f) - value * value;
      else
        activation<KIND>(of.gain.values ? normal * of.gain.values[u] + of.shift.values[u] : normal, value, slope);
      if (of.scale.values) {
        store(to + at, first_writer ? incoming : load(to + at) + incoming);
        scale_sum += incoming * value;
        incoming *= of.scale.values[u];
      }
      incoming *= slope;
      shift_sum += incoming;
      gain_sum += incoming * normal;
      store(z_gradient + at, incoming);
    }
    if (of.scale.gradient) add.put(of.scale.gradient[u], sum(scale_sum));
    if (of.gain.gradient) add.put(of.gain.gradient[u], sum(gain_sum));
    float* of_sum = of.gain.values ? of.shift.gradient : of.bias.gradient;
    if (of_sum) add.put(of_sum[u], sum(shift_sum));
  }
}

struct Scratch {
  Floats gradient, gradient_below, z, transposed, product, source;
};

// Rows [first, first + count) of one agent: gradients of the heads' outputs to those of parameters and sources.
void backward(const Network& network, long agent, long first, long count, Block& block, Scratch& scratch) {
  const long stride = network.stride(), padded = up(count), top = network.layers.size();
  long widest = network.width;
  for (const Layer& layer : network.layers) widest = std::max(widest, layer.units * layer.branches);
  for (const Head& head : network.heads) widest = std::max(widest, head.outputs);
  for (auto* each : {&scratch.gradient, &scratch.gradient_below, &scratch.z}) each->resize(widest * stride);
  float *gradient = scratch.gradient.data(), *gradient_below = scratch.gradient_below.data();
  float* z_gradient = scratch.z.data();
  WeightGradient add{stride, padded, first == 0, scratch.transposed, scratch.product};

  const long read = network.below(top), branches_on_top = network.layers.back().branches;
  std::fill(gradient, gradient + branches_on_top * read * stride, 0.f);
  for (size_t h = 0; h < network.heads.size(); h++) {
    const Head& head = network.heads[h];
    const long branch = network.branches > 1 ? h : 0, n = head.outputs;
    if (head.output.gradient) {
      std::fill(z_gradient, z_gradient + n * stride, 0.f);
      transpose(head.output.gradient + (agent * network.rows + first) * n, count, n, n, z_gradient, stride);
      multiply(head.weight.values + agent * read * n, n, 1, z_gradient, stride, gradient + branch * read * stride,
               stride, read, padded, n, Start::add);
    }
    if (!network.to_parameters) continue;
    float *weight = head.weight.gradient + agent * read * n, *bias = head.bias.gradient + agent * n;
    if (head.output.gradient) {
      add(block.below(network, top, branch), read, z_gradient, n, weight);
      for (long i = 0; i < n; i++) add.put(bias[i], add.total(z_gradient + i * stride));
    } else if (first == 0) {
      std::fill(weight, weight + read * n, 0.f), std::fill(bias, bias + n, 0.f);
    }
  }
  if (network.features.gradient) {
    scratch.product.assign(read * stride, 0.f);
    transpose(network.features.gradient + (agent * network.rows + first) * read, count, read, read,
              scratch.product.data(), stride);
    for (long i = 0; i < read * stride; i++) gradient[i] += scratch.product[i];
  }

  for (long l = top - 1; l >= 0; l--) {
    const Layer& layer = network.layers[l];
    const long units = layer.units, below = network.below(l), branches_below = l ? network.layers[l - 1].branches : 1;
    for (long branch = 0; branch < layer.branches; branch++) {
      const long member = agent * layer.stored + branch;
      const Block::Branch& out = block.layers[l][branch];
      const float* from = gradient + branch * units * stride;
      float* to = gradient_below + network.branch_below(l, branch) * below * stride;
      const bool first_writer = branches_below > 1 || branch == 0;
      const Member of(layer, member);
      with_activation(network.kind, [&](auto constant) {
        activation_gradient<decltype(constant)::value>(of, add, out, from, z_gradient, to, first_writer);
      });
      if (of.gain.values) {
        // Every unit in the statistics moves mean and variance by its share (the quotient rule).
        for (long b = 0; b < padded; b += LANES) {
          Vec plain{}, along{};
          for (long u = 0; u < units; u++) {
            const Vec inner = load(z_gradient + u * stride + b) * of.gain.values[u];
            store(z_gradient + u * stride + b, inner);
            plain += inner;
            along += inner * load(out.normal + u * stride + b);
          }
          const Vec deviation = load(out.scale + b);
          for (long u = 0; u < units; u++) {
            const Vec inner = load(z_gradient + u * stride + b);
            const Vec moved = plain + load(out.normal + u * stride + b) * along;
            store(z_gradient + u * stride + b, (inner - moved * of.share_of(u)) * deviation);
          }
        }
        for (long u = 0; of.bias.gradient && u < units; u++)
          add.put(of.bias.gradient[u], add.total(z_gradient + u * stride));
      }
      for (size_t i = 0; i < layer.weights.size(); i++) {
        const long width = l ? below : network.sources[i].width;
        const Tensor& weight = layer.weights[i];
        float* weight_gradient = weight.gradient ? weight.gradient + member * width * units : nullptr;
        if (weight_gradient && !l) {
          // As rows they took 1.1 times as long with 1,024 units, whose values of all rows share one set of the cache.
          scratch.source.resize(std::max<size_t>(scratch.source.size(), width * stride));
          read_source(network, network.sources[i], agent, first, count, scratch.source.data());
        }
        if (weight_gradient)
          add(l ? block.below(network, l, branch) : scratch.source.data(), width, z_gradient, units, weight_gradient);
        if (l || network.sources[i].tensor.gradient)
          multiply(weight.values + member * width * units, units, 1, z_gradient, stride, to, stride, width, padded,
                   units, first_writer && !of.scale.values ? Start::zero : Start::add);
        to += width * stride;
      }
    }
    std::swap(gradient, gradient_below);
  }
  for (const Source& source : network.sources) {
    const long width = source.width;
    if (source.tensor.gradient)
      transpose(gradient, width, count, stride, source.tensor.gradient + (agent * network.rows + first) * width, width);
    gradient += width * stride;
  }
}

void run(const Network& network, long agent) {
  thread_local Floats memory, inputs, outputs;
  thread_local Scratch scratch;
  const long size = network.block_size();
  if (!network.trace) memory.resize(network.small_size());
  if (!network.backward) inputs.resize(network.width * network.stride());
  for (long first = 0; first < network.rows; first += BLOCK) {
    const long count = std::min(BLOCK, network.rows - first);
    const long index = agent * ((network.rows + BLOCK - 1) / BLOCK) + first / BLOCK;
    Block block(network, network.trace ? network.trace + index * size : memory.data(), inputs.data());
    if (network.backward)
      backward(network, agent, first, count, block, scratch);
    else
      forward(network, agent, first, count, block, outputs);
  }
}

// ---------------------------------------------------------------------------------------------------- threads

// Threads that stay between calls, since to start one takes as long as a call. Each takes one item after another, so
// that one whose core another program occupies delays a call only if it holds an item then.
class Crew {
 public:
  // The crew of this process, since a fork has none of its parent's threads. Never freed, for its threads never end.
  static Crew& of_process() {
    static std::atomic<Crew*> current{nullptr};
    Crew* crew = current;
    if (!crew || crew->process != getpid()) current = crew = new Crew;
    return *crew;
  }

  // Work on items [0, count) by the caller and `helpers` other threads.
  void run(long count, long helpers, const std::function<void(long)>& item) {
    const std::unique_lock<std::mutex> only(in_call, std::try_to_lock);
    if (!only) {  // Another thread of the program has the crew.
      for (long i = 0; i < count; i++) item(i);
      return;
    }
    while (size < helpers && add_helper()) size++;
    work = &item;
    unfinished = count;
    {
      const std::lock_guard<std::mutex> guard(asleep);
      waiting = count;
    }
    wake.notify_all();
    help();
    while (unfinished) std::this_thread::yield();
  }

 private:
  static constexpr int POLLS = 500;  // Some 100 us, longer than what lies between the calls of an update.
  const pid_t process = getpid();
  std::mutex in_call, asleep;
  std::condition_variable wake;
  std::atomic<long> waiting{0}, unfinished{0};
  const std::function<void(long)>* work;
  long size = 0;

  // False if the system gives no more threads. Signals are for the program's own, which may block them; crashes are not.
  bool add_helper() {
    sigset_t others, before;
    sigfillset(&others);
    for (const int crash : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&others, crash);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    bool added = true;
    try {
      std::thread([this] { help_forever(); }).detach();
    } catch (const std::system_error&) {
      added = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return added;
  }

  // Taking an item keeps the call from ending, so `work` is that of the item's call.
  void help() {
    for (long left = waiting; left > 0; left = waiting)
      if (waiting.compare_exchange_strong(left, left - 1)) {
        (*work)(left - 1);
        unfinished--;
      }
  }

  void help_forever() {
    for (;;) {
      for (int poll = 0; poll < POLLS && waiting <= 0; poll++) std::this_thread::yield();
      if (waiting <= 0) {
        std::unique_lock<std::mutex> lock(asleep);
        wake.wait(lock, [this] { return waiting > 0; });
      }
      help();
    }
  }
};

constexpr long SHORT = 1000000;  // Multiplications, some 10 us, which are done before another thread has begun.

}  // namespace

extern "C" {

// Floats that a forward pass over `rows` keeps for its backward pass.
int64_t dense_trace_size(const int64_t* words, const int64_t* addresses, int64_t rows) {
  return Network(words, addresses, rows, nullptr, nullptr, false, nullptr).trace_size();
}

void dense(const int64_t* words, const int64_t* addresses, int64_t rows, float* parameters, float* gradient,
           int64_t backward, float* trace, int64_t threads) {
  const Network network(words, addresses, rows, parameters, gradient, backward, trace);
  const auto item = [&](long agent) { run(network, agent); };
  if (threads > 1 && network.agents > 1 && network.products() > SHORT)
    Crew::of_process().run(network.agents, std::min<long>(threads, network.agents) - 1, item);
  else
    for (long agent = 0; agent < network.agents; agent++) item(agent);
}

// Flat buffers hold tensor after tensor, each [agents, sizes[t]].

// Each agent's sum of squares of a flat buffer.
void squares(int64_t tensors, int64_t agents, const int64_t* sizes, const float* values, double* sums) {
  std::fill(sums, sums + agents, 0.);
  for (int64_t t = 0; t < tensors; t++)
    for (int64_t agent = 0; agent < agents; agent++, values += sizes[t]) {
      Vec lanes{};
      const int64_t whole = sizes[t] / LANES * LANES;
      for (int64_t i = 0; i < whole; i += LANES) lanes += load(values + i) * load(values + i);
      for (int64_t i = whole; i < sizes[t]; i++) lanes[0] += values[i] * values[i];
      sums[agent] += sum(lanes);
    }
}

// A step of Adam (arXiv 1412.6980) on flat buffers, by a gradient times `clip`, with each agent's learning rate and its
// number of updates, this one included. Agents whose `active` is 0 keep everything.
void adam(int64_t tensors, int64_t agents, const int64_t* sizes, float* __restrict parameters, float* __restrict mean,
          float* __restrict square, const float* __restrict gradient, const double* updates, double epsilon,
          const float* learning_rate, const float* clip, const float* active) {
  for (int64_t t = 0; t < tensors; t++)
    for (int64_t agent = 0; agent < agents; agent++) {
      if (!active || active[agent] != 0.f) {
        const double root = std::sqrt(1. - std::pow(0.999, updates[agent]));
        const float rate = learning_rate[agent] * root / (1. - std::pow(0.9, updates[agent]));
        const float corrected = epsilon * root, share = clip ? clip[agent] : 1.f;
        for (int64_t i = 0; i < sizes[t]; i++) {
          const float g = gradient[i] * share;
          mean[i] += 0.1f * (g - mean[i]);
          square[i] += 0.001f * (g * g - square[i]);
          parameters[i] -= rate * mean[i] / (std::sqrt(square[i]) + corrected);
        }
      }
      parameters += sizes[t], mean += sizes[t], square += sizes[t], gradient += sizes[t];
    }
}

// Each agent's `target` moves to its parameters by a share `tau`, with 1 exactly.
void follow(int64_t tensors, int64_t agents, const int64_t* sizes, float* __restrict target,
            const float* __restrict parameters, const float* tau) {
  for (int64_t t = 0; t < tensors; t++)
    for (int64_t agent = 0; agent < agents; agent++) {
      if (tau[agent] == 1.f)
        std::copy(parameters, parameters + sizes[t], target);
      else if (tau[agent] != 0.f)
        for (int64_t i = 0; i < sizes[t]; i++) target[i] += tau[agent] * (parameters[i] - target[i]);
      target += sizes[t], parameters += sizes[t];
    }
}
}
