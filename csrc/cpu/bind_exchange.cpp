// Exchanges between ranks for Python: shapes are checked, then ranks wait for each other without the GIL.
#include "bind_exchange.h"

namespace tokenmill {
namespace {

bool gather(SharedExchange& self, ConstMatrix x, const std::vector<int64_t>& widths, Matrix out) {
  Exchange& exchange = *self.exchange;
  int64_t total = 0;
  for (int64_t width : widths) total += width;
  require(int(widths.size()) == exchange.ranks() && int64_t(x.shape(1)) == widths[exchange.rank()] &&
              x.shape(0) == out.shape(0) && int64_t(out.shape(1)) == total,
          "gather: shapes do not match");
  nb::gil_scoped_release release;
  return exchange.gather(x.data(), int(x.shape(0)), widths, out.data());
}

bool sum(SharedExchange& self, ConstMatrix x, Matrix out) {
  require(x.shape(0) == out.shape(0) && x.shape(1) == out.shape(1), "sum: shapes do not match");
  nb::gil_scoped_release release;
  return self.exchange->sum(x.data(), int64_t(x.size()), out.data());
}

}  // namespace

void bind_exchange(nb::module_& module) {
  nb::class_<SharedExchange>(module, "Exchange", "Ranks of one host put together what each has computed")
      .def(
          "__init__",
          [](SharedExchange* self, AnyTensor memory, int ranks, int rank, double timeout) {
            require(ranks > 0 && rank >= 0 && rank < ranks, "no such rank");
            require(memory.nbytes() >= Exchange::room_for(ranks), "too little memory for so many ranks");
            auto exchange = std::make_shared<Exchange>(memory.data(), ranks, rank, timeout);
            new (self) SharedExchange{std::move(memory), std::move(exchange)};
          },
          nb::arg("memory"), nb::arg("ranks"), nb::arg("rank"), nb::arg("timeout"))
      .def_static("room_for", &Exchange::room_for, "Bytes of shared memory, zero at first")
      .def("gather", &gather, "False if a rank did not come")
      .def("sum", &sum, "Of all ranks, in their order; False if one did not come")
      .def("abort", [](SharedExchange& self) { self.exchange->abort(); }, "Nobody waits any more");
}

}  // namespace tokenmill
