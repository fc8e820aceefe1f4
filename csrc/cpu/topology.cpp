// How many cores this process may use. Reads Linux's affinity mask, sysfs topology and cgroup quota.
//
// Knows nothing of threads; called once by whoever builds a pool of default size. Reads files with C's stdio: C++ streams crash
// in a process where another library has brought a second copy of their locale tables, as some torch builds do.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "pool.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace tokenmill {
namespace {

#if defined(__linux__)
// The first line of a small file without its newline; empty if it cannot be read.
std::string read_line(const std::string& path) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "r"), std::fclose);
  char line[4096];
  if (!file || !std::fgets(line, sizeof(line), file.get())) return "";
  std::string text = line;
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

int read_int(const std::string& path, int fallback) {
  const std::string line = read_line(path);
  char* end = nullptr;
  const long value = std::strtol(line.c_str(), &end, 10);
  return end == line.c_str() ? fallback : static_cast<int>(value);
}

int cores_in_affinity_mask() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return 0;
  std::set<std::pair<int, int>> cores;  // (package, core): hyperthreads fall together
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &mask)) continue;
    const std::string topology = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    const int core = read_int(topology + "core_id", -1);
    cores.emplace(core < 0 ? -1 : read_int(topology + "physical_package_id", 0), core < 0 ? cpu : core);
  }
  return static_cast<int>(cores.size());
}

// Whole CPUs of the tightest quota on the way from our cgroup (version 2) to the root; 0: no quota.
int quota_from_cgroup() {
  // Version 2 alone has one line, "0::/path"; beside version 1 its line comes last and the quota is in the old place.
  const std::string membership = read_line("/proc/self/cgroup");
  std::string path = membership.rfind("0::/", 0) == 0 ? membership.substr(3) : "";
  int best = 0;
  const auto consider = [&best](double quota, double period) {
    if (quota <= 0 || period <= 0) return;
    const int cpus = std::max(1, static_cast<int>(quota / period));
    best = best == 0 ? cpus : std::min(best, cpus);
  };
  for (;;) {
    const std::string limit = read_line("/sys/fs/cgroup" + (path == "/" ? "" : path) + "/cpu.max");
    double quota = 0, period = 0;  // "max 100000" reads as no number at all
    if (std::sscanf(limit.c_str(), "%lf %lf", &quota, &period) == 2) consider(quota, period);
    if (path.empty() || path == "/") break;
    path.resize(path.rfind('/'));
  }
  consider(read_int("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", -1), read_int("/sys/fs/cgroup/cpu/cpu.cfs_period_us", 0));
  return best;
}
#endif

}  // namespace

int physical_cores() {
  int cores = 0;
#if defined(__linux__)
  cores = cores_in_affinity_mask();
  const int quota = quota_from_cgroup();
  if (quota > 0) cores = std::min(cores, quota);
#endif
  if (cores < 1) cores = std::max(1u, std::thread::hardware_concurrency());
  return cores;
}

}  // namespace tokenmill
