// How many cores this process may use. Reads Linux's affinity mask, sysfs topology and cgroup quota.
//
// Knows nothing of threads; called once by whoever builds a pool of default size.
#include <algorithm>
#include <fstream>
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
int read_int(const std::string& path, int fallback) {
  std::ifstream file(path);
  int value = fallback;
  return file >> value ? value : fallback;
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
  std::ifstream membership("/proc/self/cgroup");
  std::string line, path;
  while (std::getline(membership, line)) {
    if (line.rfind("0::", 0) == 0) path = line.substr(3);
  }
  int best = 0;
  const auto consider = [&best](double quota, double period) {
    if (quota <= 0 || period <= 0) return;
    const int cpus = std::max(1, static_cast<int>(quota / period));
    best = best == 0 ? cpus : std::min(best, cpus);
  };
  for (;;) {
    std::ifstream file("/sys/fs/cgroup" + (path == "/" ? "" : path) + "/cpu.max");
    std::string quota;
    double period = 0;
    if (file >> quota >> period && quota != "max") consider(std::stod(quota), period);
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
