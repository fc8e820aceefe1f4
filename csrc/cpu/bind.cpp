// The Python module tokenmill.kernels._cpu: the thread pool, and the parts that the other bind_*.cpp add.
#include "bind.h"

#include "machine_limits.h"
#include "memory.h"
#include "pool.h"

namespace tokenmill {

void bind_pool(nb::module_& module) {
  nb::class_<ThreadPool>(module, "Pool", "Worker threads shared by everyone who asks for the same number of them")
      .def_static("shared", &ThreadPool::shared, nb::arg("num_threads") = 0)
      .def_prop_ro("size", &ThreadPool::size);
  module.def("physical_cores", &physical_cores);
  module.def("read_bandwidth", &read_bandwidth, nb::arg("pool"), nb::arg("bytes"),
             nb::call_guard<nb::gil_scoped_release>(), "Bytes per second that all threads read, measured");
  module.def("int8_peak", &int8_peak, nb::arg("pool"), nb::call_guard<nb::gil_scoped_release>(),
             "Integer operations per second of the best instruction set, measured");
  module.def("park_weights", &park_blocks, nb::arg("file"), nb::call_guard<nb::gil_scoped_release>(),
             "Write packed weights to an open file, once, and give their memory back; returns bytes");
  module.def("unpark_weights", &unpark_blocks, nb::arg("file"), nb::call_guard<nb::gil_scoped_release>(),
             "Read them back to where they were; returns bytes");
}

}  // namespace tokenmill

NB_MODULE(_cpu, module) {
  tokenmill::nb::set_leak_warnings(false);  // the shared pool lives until the process ends
  tokenmill::bind_pool(module);
  tokenmill::bind_adapters(module);
  tokenmill::bind_linear(module);
  tokenmill::bind_ops(module);
  tokenmill::bind_attention(module);
  tokenmill::bind_exchange(module);
  tokenmill::bind_program(module);
  tokenmill::bind_recurrent(module);
  tokenmill::bind_quantize(module);
  tokenmill::bind_byte_pairs(module);
}
