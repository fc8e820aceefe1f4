// The Python module tokenmill.kernels._cpu: the thread pool, and the parts that the other bind_*.cpp add.
#include "bind.h"

#include "pool.h"

namespace tokenmill {

void bind_pool(nb::module_& module) {
  nb::class_<ThreadPool>(module, "Pool", "Worker threads shared by everyone who asks for the same number of them")
      .def_static("shared", &ThreadPool::shared, nb::arg("num_threads") = 0)
      .def_prop_ro("size", &ThreadPool::size);
  module.def("physical_cores", &physical_cores);
}

}  // namespace tokenmill

NB_MODULE(_cpu, module) {
  tokenmill::nb::set_leak_warnings(false);  // the shared pool lives until the process ends
  tokenmill::bind_pool(module);
  tokenmill::bind_linear(module);
  tokenmill::bind_ops(module);
  tokenmill::bind_attention(module);
  tokenmill::bind_program(module);
  tokenmill::bind_quantize(module);
}
