// Vocabularies for Python: built from the bytes of a file, then asked for words.
#include "bind.h"
#include "byte_pairs.h"

namespace tokenmill {
namespace {

using Bytes = Tensor<const uint8_t, nb::ndim<1>, nb::c_contig>;
using Positions = Tensor<const uint64_t, nb::ndim<1>, nb::c_contig>;

StringTable table_of(const Bytes& buffer, const Positions& starts) {
  return {buffer.data(), buffer.size(), starts.data(), static_cast<int64_t>(starts.size())};
}

std::string_view text_of(nb::handle word) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(word.ptr(), &size);
  if (text == nullptr) throw nb::python_error();
  return {text, static_cast<size_t>(size)};
}

nb::list encode(const BytePairs& self, nb::list words) {
  std::vector<int32_t> ids;
  for (nb::handle word : words) self.encode(text_of(word), ids);
  nb::list out;
  for (const int32_t id : ids) out.append(id);
  return out;
}

uint64_t walk(Bytes buffer, uint64_t end, uint64_t position, Tensor<uint64_t, nb::ndim<1>, nb::c_contig> starts) {
  require(end <= buffer.size(), "the end lies outside the buffer");
  return walk_strings(buffer.data(), end, position, starts.size(), starts.data());
}

}  // namespace

void bind_byte_pairs(nb::module_& module) {
  module.def("walk_strings", &walk, nb::arg("buffer"), nb::arg("end"), nb::arg("position"), nb::arg("starts"),
             "Fill in the positions of strings that follow their lengths; returns where they end, 0 if outside");
  nb::class_<BytePairs>(module, "BytePairs", "A byte-level BPE vocabulary")
      .def(
          "__init__",
          [](BytePairs* self, Bytes buffer, Positions pieces, Bytes merge_buffer, Positions merges, bool whole_words) {
            new (self) BytePairs(table_of(buffer, pieces), table_of(merge_buffer, merges), whole_words);
          },
          nb::arg("buffer"), nb::arg("pieces"), nb::arg("merge_buffer"), nb::arg("merges"), nb::arg("whole_words"))
      .def("piece",
           [](const BytePairs& self, int64_t id) {
             const std::string_view text = self.piece(id);
             return nb::bytes(text.data(), text.size());
           })
      .def("find", [](const BytePairs& self, nb::str piece) { return self.find(text_of(piece)); }, "-1: no such piece")
      .def("encode", &encode, "Tokens of words one after another; bytes without a token become the number of pieces");
}

}  // namespace tokenmill
