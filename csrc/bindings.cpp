// The lattices as operations of torch: torch.ops.effasr_c, after `import effasr_kernels._C`.
//
// Only here are tensors: their checks and the memory to work in.

#include <Python.h>
#include <ATen/Parallel.h>
#include <torch/library.h>
#include <torch/types.h>

#include "lattice.h"

namespace effasr {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check(const char* op, const char* name, const at::Tensor& x, at::ScalarType dtype,
           const at::Tensor& like) {
  TORCH_CHECK_VALUE(x.scalar_type() == dtype, op, ": `", name, "` must be ", dtype, ", but is ",
                    x.scalar_type(), ".");
  TORCH_CHECK_VALUE(x.device() == like.device(), op, ": `", name, "` must be on ", like.device(),
                    ", but is on ", x.device(), ".");
  TORCH_CHECK_VALUE(x.is_contiguous(), op, ": `", name,
                    "` must be contiguous, but has strides ", x.strides(), ".");
}

void check_shape(const char* op, const char* name, const at::Tensor& x, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(x.sizes() == shape, op, ": `", name, "` must have shape ", shape,
                    ", but has ", x.sizes(), ".");
}

int64_t count_sequences(const char* op, const char* name, const at::Tensor& offsets) {
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.numel() > 0, op, ": `", name,
                    "` must have shape (N + 1,), but has ", offsets.sizes(), ".");
  return offsets.numel() - 1;
}

float* pointer(const OptionalTensor& x) { return x ? x->data_ptr<float>() : nullptr; }

at::Tensor results_of(const at::Tensor& like, int64_t sequences) {
  return at::empty({sequences}, like.options().dtype(at::kDouble));
}

void check_range(const char* op, const char* name, int64_t begin, int64_t length, int64_t rows) {
  TORCH_CHECK_VALUE(begin >= 0 && length >= 0 && begin + length <= rows, op, ": `", name,
                    "` must lie in the ", rows, " elements there are, but gives a sequence ", begin,
                    " to ", begin + length, ".");
}

void check_ranges(const char* op, const TransducerLattice& a, int64_t nodes) {
  for (int n = 0; n < a.sequences; ++n) {
    const int64_t frames = a.cu_frames[n + 1] - a.cu_frames[n];
    const int64_t labels = a.cu_labels[n + 1] - a.cu_labels[n];
    check_range(op, "cu_frames", 0, frames, INT32_MAX);
    check_range(op, "cu_labels", 0, labels, INT32_MAX);
    check_range(op, "first_nodes", a.first_nodes[n], frames * (labels + 1), nodes);
  }
}

void check_ranges(const char* op, const CtcLattice& a, int64_t rows, int64_t targets) {
  for (int n = 0; n < a.sequences; ++n) {
    const int64_t labels = a.cu_targets[n + 1] - a.cu_targets[n];
    check_range(op, "cu_frames", a.cu_frames[n], a.cu_frames[n + 1] - a.cu_frames[n], rows);
    check_range(op, "cu_targets", a.cu_targets[n], labels, targets);
    check_range(op, "cu_targets", 1, labels, a.columns);
  }
}

template <class Lattice>
void run_on_cpu(const char* op, const Lattice& lattice, int (*run)(const Lattice*, int)) {
  const int code = run(&lattice, at::get_num_threads());
  TORCH_CHECK(code == 0, op, ": out of memory.");
}

at::Tensor transducer_lattice(const at::Tensor& log_blank, const at::Tensor& log_label,
                              const OptionalTensor& occ_blank, const OptionalTensor& occ_label,
                              const at::Tensor& cu_frames, const at::Tensor& cu_labels,
                              const at::Tensor& first_nodes) {
  const char* op = "transducer_lattice";
  const int64_t sequences = count_sequences(op, "cu_frames", cu_frames);
  check(op, "log_blank", log_blank, at::kFloat, log_blank);
  TORCH_CHECK_VALUE(log_blank.dim() == 1, op, ": `log_blank` must have shape (nodes,), but has ",
                    log_blank.sizes(), ".");
  check(op, "log_label", log_label, at::kFloat, log_blank);
  check_shape(op, "log_label", log_label, log_blank.sizes());
  TORCH_CHECK_VALUE(occ_blank.has_value() == occ_label.has_value(), op,
                    ": `occ_blank` and `occ_label` must be given together.");
  if (occ_blank) {
    check(op, "occ_blank", *occ_blank, at::kFloat, log_blank);
    check_shape(op, "occ_blank", *occ_blank, log_blank.sizes());
    check(op, "occ_label", *occ_label, at::kFloat, log_blank);
    check_shape(op, "occ_label", *occ_label, log_blank.sizes());
  }
  check(op, "cu_frames", cu_frames, at::kInt, log_blank);
  check(op, "cu_labels", cu_labels, at::kInt, log_blank);
  check_shape(op, "cu_labels", cu_labels, {sequences + 1});
  check(op, "first_nodes", first_nodes, at::kLong, log_blank);
  check_shape(op, "first_nodes", first_nodes, {sequences});
  at::Tensor result = results_of(log_blank, sequences);
  TransducerLattice lattice = {};
  lattice.log_blank = log_blank.const_data_ptr<float>();
  lattice.log_label = log_label.const_data_ptr<float>();
  lattice.occ_blank = pointer(occ_blank);
  lattice.occ_label = pointer(occ_label);
  lattice.log_likelihood = result.data_ptr<double>();
  lattice.cu_frames = cu_frames.const_data_ptr<int32_t>();
  lattice.cu_labels = cu_labels.const_data_ptr<int32_t>();
  lattice.first_nodes = first_nodes.const_data_ptr<int64_t>();
  lattice.sequences = static_cast<int32_t>(sequences);
  check_ranges(op, lattice, log_blank.numel());
  run_on_cpu(op, lattice, transducer_lattice_cpu);
  return result;
}

at::Tensor ctc_lattice(const at::Tensor& scores, const OptionalTensor& log_normalizer,
                       const OptionalTensor& occupancies, const at::Tensor& targets,
                       const at::Tensor& cu_frames, const at::Tensor& cu_targets) {
  const char* op = "ctc_lattice";
  const int64_t sequences = count_sequences(op, "cu_frames", cu_frames);
  check(op, "scores", scores, at::kFloat, scores);
  TORCH_CHECK_VALUE(scores.dim() == 2 && scores.size(1) > 0 && scores.size(1) < INT32_MAX, op,
                    ": `scores` must have shape (T, K + 1), with K + 1 below 2**31 - 1, but has ",
                    scores.sizes(), ".");
  if (log_normalizer) {
    check(op, "log_normalizer", *log_normalizer, at::kFloat, scores);
    check_shape(op, "log_normalizer", *log_normalizer, {scores.size(0)});
  }
  if (occupancies) {
    check(op, "occupancies", *occupancies, at::kFloat, scores);
    check_shape(op, "occupancies", *occupancies, scores.sizes());
  }
  const at::ScalarType kind = targets.scalar_type() == at::kInt ? at::kInt : at::kLong;
  check(op, "targets", targets, kind, scores);
  check(op, "cu_frames", cu_frames, at::kInt, scores);
  check(op, "cu_targets", cu_targets, at::kInt, scores);
  check_shape(op, "cu_targets", cu_targets, {sequences + 1});
  at::Tensor result = results_of(scores, sequences);
  const at::Tensor shares = occupancies ? at::empty_like(scores) : at::Tensor();
  CtcLattice lattice = {};
  lattice.scores = scores.const_data_ptr<float>();
  lattice.log_normalizer = pointer(log_normalizer);
  lattice.occupancies = pointer(occupancies);
  lattice.shares = occupancies ? shares.data_ptr<float>() : nullptr;
  lattice.log_likelihood = result.data_ptr<double>();
  lattice.targets = targets.const_data_ptr();
  lattice.cu_frames = cu_frames.const_data_ptr<int32_t>();
  lattice.cu_targets = cu_targets.const_data_ptr<int32_t>();
  lattice.sequences = static_cast<int32_t>(sequences);
  lattice.columns = static_cast<int32_t>(scores.size(1));
  lattice.wide_targets = kind == at::kLong;
  check_ranges(op, lattice, scores.size(0), targets.numel());
  run_on_cpu(op, lattice, ctc_lattice_cpu);
  return result;
}

}  // namespace
}  // namespace effasr

TORCH_LIBRARY(effasr_c, library) {
  library.def(
      "transducer_lattice(Tensor log_blank, Tensor log_label, Tensor(a!)? occ_blank, "
      "Tensor(b!)? occ_label, Tensor cu_frames, Tensor cu_labels, Tensor first_nodes) -> Tensor");
  library.def(
      "ctc_lattice(Tensor scores, Tensor? log_normalizer, Tensor(a!)? occupancies, "
      "Tensor targets, Tensor cu_frames, Tensor cu_targets) -> Tensor");
}

TORCH_LIBRARY_IMPL(effasr_c, CPU, library) {
  library.impl("transducer_lattice", &effasr::transducer_lattice);
  library.impl("ctc_lattice", &effasr::ctc_lattice);
}

// To import the module is to load the library; it holds nothing else.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, 0, nullptr,
                               nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
