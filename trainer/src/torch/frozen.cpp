// A product whose gradient is computed in Rust, as a node of libtorch's graph: tch binds no custom functions.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace {
// dx = dy W for `rows` rows, both contiguous; false, with words in `why`, where it failed.
using Backward = bool (*)(const void* weight, const void* dy, void* dx, int64_t rows, std::string* why);
using Drop = void (*)(const void* weight);

// A share of the weight keeps it alive as long as the graph that needs it.
struct FrozenProduct final : torch::autograd::Node {
  FrozenProduct(const void* weight, int64_t k, Backward backward, Drop drop)
      : weight_(weight), k_(k), backward_(backward), drop_(drop) {}
  ~FrozenProduct() override { drop_(weight_); }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    if (!grads[0].defined() || !should_compute_output(0)) return {at::Tensor()};
    const at::Tensor dy = grads[0].contiguous();
    at::Tensor dx = at::empty({dy.size(0), k_}, dy.options());
    std::string why;
    if (!backward_(weight_, dy.const_data_ptr(), dx.data_ptr(), dy.size(0), &why)) {
      throw std::runtime_error(why);
    }
    return {dx};
  }
  std::string name() const override { return "FrozenProduct"; }

 private:
  const void* weight_;
  int64_t k_;
  Backward backward_;
  Drop drop_;
};
}  // namespace

// Makes `y` the product of `x` in the graph; takes the share of `weight` whatever comes of it.
extern "C" bool q4_frozen_attach(const at::Tensor* x, at::Tensor* y, int64_t k, const void* weight,
                                 Backward backward, Drop drop) {
  try {
    const std::shared_ptr<FrozenProduct> node(new FrozenProduct(weight, k, backward, drop),
                                              torch::autograd::deleteNode);
    if (!at::GradMode::is_enabled()) return true;
    node->set_next_edges(torch::autograd::collect_next_edges(*x));
    torch::autograd::set_history(*y, node);
    return true;
  } catch (...) {
    return false;
  }
}

extern "C" void q4_text(std::string* to, const char* text, size_t len) {
  try {
    to->assign(text, len);
  } catch (...) {
  }
}
