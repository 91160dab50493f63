// Packed attention on CPUs as operations of torch: torch.ops.effasr_c.attention_forward and
// attention_backward. Only here are tensors: their checks, and the memory of results.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "attention.h"

namespace effasr {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check_float(const char* op, const char* name, const at::Tensor& x, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat && x.device().is_cpu(), op, ": `", name,
                    "` must be float32 on a CPU, but is ", x.scalar_type(), " on ", x.device(),
                    ".");
  TORCH_CHECK_VALUE(x.sizes() == shape, op, ": `", name, "` must have shape ", shape,
                    ", but has ", x.sizes(), ".");
}

// Its rows and heads may lie apart, its channels may not.
PackedHeads heads_of(const char* op, const char* name, const at::Tensor& x,
                     at::IntArrayRef shape) {
  check_float(op, name, x, shape);
  TORCH_CHECK_VALUE(x.stride(2) == 1 || x.size(2) <= 1, op, ": `", name,
                    "` must have stride 1 in its last dimension, but has strides ", x.strides(),
                    "; .contiguous() makes it so.");
  return {x.data_ptr<float>(), x.stride(0), x.stride(1)};
}

float* contiguous(const char* op, const char* name, const OptionalTensor& x,
                  at::IntArrayRef shape) {
  if (!x) return nullptr;
  check_float(op, name, *x, shape);
  TORCH_CHECK_VALUE(x->is_contiguous(), op, ": `", name, "` must be contiguous, but has strides ",
                    x->strides(), ".");
  return x->data_ptr<float>();
}

const int32_t* offsets(const char* op, const char* name, const at::Tensor& x, int64_t rows) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kInt && x.device().is_cpu() && x.is_contiguous(), op,
                    ": `", name, "` must be int32 and contiguous on a CPU, but is ",
                    x.scalar_type(), " on ", x.device(), ".");
  TORCH_CHECK_VALUE(x.dim() == 1 && x.numel() > 0, op, ": `", name,
                    "` must have shape (N + 1,), but has ", x.sizes(), ".");
  const int32_t* found = x.const_data_ptr<int32_t>();
  for (int64_t n = 0; n < x.numel(); ++n) {
    const bool rises = n == 0 ? found[n] == 0 : found[n] >= found[n - 1];
    TORCH_CHECK_VALUE(rises && found[n] <= rows, op, ": `", name,
                      "` must rise from 0 to at most ", rows, " rows, but element ", n, " is ",
                      found[n], ".");
  }
  return found;
}

struct Options {
  double scale;
  bool causal;
  std::optional<double> sigma;
  double dropout;
  int64_t seed;
};

void describe_position(const char* op, PackedAttention& a, const OptionalTensor& content_bias,
                       const OptionalTensor& position_bias, const OptionalTensor& table) {
  TORCH_CHECK_VALUE(content_bias.has_value() == table.has_value() &&
                        position_bias.has_value() == table.has_value(),
                    op, ": `content_bias`, `position_bias` and `table` must be given together.");
  if (!table) return;
  a.content_bias = contiguous(op, "content_bias", content_bias, {a.heads, a.width});
  a.position_bias = contiguous(op, "position_bias", position_bias, {a.heads, a.width});
  TORCH_CHECK_VALUE(table->dim() == 3 && table->size(0) % 2 == 1, op,
                    ": `table` must have shape (2L-1, H, D), but has ", table->sizes(), ".");
  a.table = contiguous(op, "table", table, {table->size(0), a.heads, a.width});
  a.reach = static_cast<int32_t>((table->size(0) + 1) / 2);
  for (int n = 0; n < a.sequences; ++n) {
    const int queries = a.cu_q[n + 1] - a.cu_q[n], keys = a.cu_k[n + 1] - a.cu_k[n];
    const int longest = std::max(queries, keys);
    TORCH_CHECK_VALUE(longest <= a.reach, op, ": `table` must have at least 2 * ", longest,
                      " - 1 rows, for the longest sequence, but has ", table->size(0), ".");
  }
}

PackedAttention describe(const char* op, const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const at::Tensor& cu_q, const at::Tensor& cu_k,
                         const OptionalTensor& content_bias, const OptionalTensor& position_bias,
                         const OptionalTensor& table, const Options& options) {
  TORCH_CHECK_VALUE(q.dim() == 3 && k.dim() == 3, op,
                    ": `q` and `k` must have shape (T, H, D), but have ", q.sizes(), " and ",
                    k.sizes(), ".");
  TORCH_CHECK_VALUE(q.numel() < INT32_MAX && k.numel() < INT32_MAX, op,
                    ": `q` and `k` must have less than 2**31 - 1 elements, but have ", q.numel(),
                    " and ", k.numel(), ".");
  TORCH_CHECK_VALUE(options.dropout >= 0 && options.dropout < 1, op,
                    ": `dropout` must be in [0, 1), but is ", options.dropout, ".");
  TORCH_CHECK_VALUE(!options.sigma || *options.sigma > 0, op, ": `sigma` must be positive, but is ",
                    options.sigma.value_or(0.0), ".");
  PackedAttention a = {};
  a.heads = static_cast<int32_t>(q.size(1));
  a.width = static_cast<int32_t>(q.size(2));
  a.rows_q = q.size(0);
  a.rows_k = k.size(0);
  a.q = heads_of(op, "q", q, q.sizes());
  a.k = heads_of(op, "k", k, {a.rows_k, a.heads, a.width});
  a.v = heads_of(op, "v", v, k.sizes());
  a.cu_q = offsets(op, "cu_q", cu_q, a.rows_q);
  a.cu_k = offsets(op, "cu_k", cu_k, a.rows_k);
  TORCH_CHECK_VALUE(cu_q.numel() == cu_k.numel(), op, ": `cu_k` must have ", cu_q.numel(),
                    " elements as `cu_q` has, but has ", cu_k.numel(), ".");
  a.sequences = static_cast<int32_t>(cu_q.numel() - 1);
  a.scale = static_cast<float>(options.scale);
  a.sigma = static_cast<float>(options.sigma.value_or(1.0));
  a.dropout = static_cast<float>(options.dropout);
  a.seed = options.seed;
  a.causal = options.causal;
  describe_position(op, a, content_bias, position_bias, table);
  return a;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_q,
    const at::Tensor& cu_k, const OptionalTensor& content_bias,
    const OptionalTensor& position_bias, const OptionalTensor& table, double scale, bool causal,
    std::optional<double> sigma, double dropout, int64_t seed) {
  const char* op = "attention_forward";
  PackedAttention a = describe(op, q, k, v, cu_q, cu_k, content_bias, position_bias, table,
                               {scale, causal, sigma, dropout, seed});
  const at::Tensor out = at::empty({a.rows_q, a.heads, a.width}, q.options());
  const at::Tensor softmax = at::empty({a.rows_q, a.heads, 2}, q.options());
  const at::Tensor penalty = at::empty({sigma ? a.rows_q : 0, a.heads}, q.options());
  a.out = heads_of(op, "out", out, out.sizes());
  a.softmax = softmax.data_ptr<float>();
  a.penalty = sigma ? penalty.data_ptr<float>() : nullptr;
  TORCH_CHECK(attention_forward_cpu(&a, at::get_num_threads()) == 0, op, ": out of memory.");
  return {out, softmax, penalty};
}

void attention_backward(const at::Tensor& d_out, const OptionalTensor& d_penalty,
                        const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& out, const at::Tensor& softmax,
                        const OptionalTensor& penalty, const at::Tensor& cu_q,
                        const at::Tensor& cu_k, const OptionalTensor& content_bias,
                        const OptionalTensor& position_bias, const OptionalTensor& table,
                        const at::Tensor& d_q, const at::Tensor& d_k, const at::Tensor& d_v,
                        const OptionalTensor& d_content_bias,
                        const OptionalTensor& d_position_bias, const OptionalTensor& d_table,
                        double scale, bool causal, std::optional<double> sigma, double dropout,
                        int64_t seed) {
  const char* op = "attention_backward";
  PackedAttention a = describe(op, q, k, v, cu_q, cu_k, content_bias, position_bias, table,
                               {scale, causal, sigma, dropout, seed});
  TORCH_CHECK_VALUE(penalty.has_value() == sigma.has_value(), op,
                    ": `penalty` and `sigma` must be given together.");
  TORCH_CHECK_VALUE(!d_penalty || penalty, op, ": `d_penalty` must be given with `penalty`.");
  for (const OptionalTensor* x : {&d_content_bias, &d_position_bias, &d_table}) {
    TORCH_CHECK_VALUE(x->has_value() == table.has_value(), op,
                      ": gradients of biases and of the table must be given where these are.");
  }
  a.out = heads_of(op, "out", out, q.sizes());
  a.softmax = contiguous(op, "softmax", softmax, {a.rows_q, a.heads, 2});
  a.penalty = contiguous(op, "penalty", penalty, {a.rows_q, a.heads});
  AttentionGradients g = {};
  g.out = heads_of(op, "d_out", d_out, q.sizes());
  g.penalty = contiguous(op, "d_penalty", d_penalty, {a.rows_q, a.heads});
  g.q = heads_of(op, "d_q", d_q, q.sizes());
  g.k = heads_of(op, "d_k", d_k, k.sizes());
  g.v = heads_of(op, "d_v", d_v, k.sizes());
  g.content_bias = contiguous(op, "d_content_bias", d_content_bias, {a.heads, a.width});
  g.position_bias = contiguous(op, "d_position_bias", d_position_bias, {a.heads, a.width});
  g.table = contiguous(op, "d_table", d_table, {2 * a.reach - 1, a.heads, a.width});
  const int code = attention_backward_cpu(&a, &g, at::get_num_threads());
  TORCH_CHECK(code == 0, op, ": out of memory.");
}

}  // namespace
}  // namespace effasr

TORCH_LIBRARY_FRAGMENT(effasr_c, library) {
  library.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, "
      "Tensor? content_bias, Tensor? position_bias, Tensor? table, float scale, bool causal, "
      "float? sigma, float dropout, int seed) -> (Tensor, Tensor, Tensor)");
  library.def(
      "attention_backward(Tensor d_out, Tensor? d_penalty, Tensor q, Tensor k, Tensor v, "
      "Tensor out, Tensor softmax, Tensor? penalty, Tensor cu_q, Tensor cu_k, "
      "Tensor? content_bias, Tensor? position_bias, Tensor? table, Tensor(a!) d_q, "
      "Tensor(b!) d_k, Tensor(c!) d_v, Tensor(d!)? d_content_bias, Tensor(e!)? d_position_bias, "
      "Tensor(f!)? d_table, float scale, bool causal, float? sigma, float dropout, int seed) "
      "-> ()");
}

TORCH_LIBRARY_IMPL(effasr_c, CPU, library) {
  library.impl("attention_forward", &effasr::attention_forward);
  library.impl("attention_backward", &effasr::attention_backward);
}
