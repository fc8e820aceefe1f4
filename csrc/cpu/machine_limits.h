// Measured ceilings of this machine. See machine_limits.cpp.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>

#include "pool.h"

namespace tokenmill {

double read_bandwidth(ThreadPool& pool, size_t bytes);  // bytes per second, all threads, best of five
double int8_peak(ThreadPool& pool);  // integer operations (two per product) per second; 0 without integer kernels

}  // namespace tokenmill
