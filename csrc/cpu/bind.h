// Shared by the binding files: tensor types as they arrive from Python (torch, numpy; no copy) and their checks.
//
// Each bind_*.cpp adds its part of the module tokenmill.kernels._cpu. Bad shapes raise ValueError: they are our own bugs,
// the Python side checks what users can get wrong.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>

#include "float_kernels.h"

namespace tokenmill {

namespace nb = nanobind;

template <typename T, typename... Extra>
using Tensor = nb::ndarray<T, nb::device::cpu, Extra...>;
using Matrix = Tensor<float, nb::ndim<2>, nb::c_contig>;
using ConstMatrix = Tensor<const float, nb::ndim<2>, nb::c_contig>;
using ConstVector = Tensor<const float, nb::ndim<1>, nb::c_contig>;
using Int64Vector = Tensor<const int64_t, nb::ndim<1>, nb::c_contig>;
using Int32Vector = Tensor<const int32_t, nb::ndim<1>, nb::c_contig>;
using Int32Matrix = Tensor<const int32_t, nb::ndim<2>, nb::c_contig>;
using AnyTensor = nb::ndarray<nb::device::cpu>;

inline void require(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

Activation activation_of(const std::string& name);

void bind_pool(nb::module_& module);
void bind_adapters(nb::module_& module);
void bind_linear(nb::module_& module);
void bind_ops(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_program(nb::module_& module);
void bind_recurrent(nb::module_& module);
void bind_quantize(nb::module_& module);
void bind_exchange(nb::module_& module);
void bind_byte_pairs(nb::module_& module);

}  // namespace tokenmill
