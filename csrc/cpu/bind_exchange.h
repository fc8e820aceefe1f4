// An exchange as Python holds it: with the shared memory that it lies in.
#pragma once

#include <memory>

#include "bind.h"
#include "exchange.h"

namespace tokenmill {

struct SharedExchange {
  AnyTensor memory;  // kept as long as the exchange
  std::shared_ptr<Exchange> exchange;
};

}  // namespace tokenmill
