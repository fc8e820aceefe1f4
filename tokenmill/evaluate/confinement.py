"""Confines the calling process by the kernel, for code that nobody has reviewed: Landlock, seccomp, limits, namespaces.

Afterwards it can read Python's library, write in its own folder, and has no system calls for sockets, processes,
signals, mounts or tracing; it gains no rights (no_new_privs). For any user on Linux 5.13 or later, x86_64 and aarch64.
Standard library only: sandbox_child.py imports it as a plain file.
"""

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig

_NOBODY = 65534
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC, _CLONE_NEWUTS = 0x10000000, 0x40000000, 0x08000000, 0x04000000
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 4, 38, 22, 2

# Landlock: the same numbers on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14  # those that a rule for a file may have
# Read, write, truncate, make and remove plain files and folders: no links, sockets or devices.
_FOLDER_RIGHTS = _WRITE_FILE | _READ_FILE | _READ_DIR | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 14

# System calls that stay: what an interpreter needs to compute, to read its library and to use its own folder.
# Each with its numbers on aarch64 and x86_64; "-" where there is none.
_ALLOWED_CALLS = """
read 63 0, write 64 1, readv 65 19, writev 66 20, pread64 67 17, pwrite64 68 18, lseek 62 8, close 57 3, dup 23 32,
dup2 - 33, dup3 24 292, pipe - 22, pipe2 59 293, poll - 7, ppoll 73 271, select - 23, pselect6 72 270, fsync 82 74,
open - 2, openat 56 257, stat - 4, lstat - 6, fstat 80 5, newfstatat 79 262, statx 291 332, access - 21,
faccessat 48 269, faccessat2 439 439, readlink - 89, readlinkat 78 267, getdents - 78, getdents64 61 217, getcwd 17 79,
chdir 49 80, mkdir - 83, mkdirat 34 258, rmdir - 84, unlink - 87, unlinkat 35 263, rename - 82, renameat2 276 316,
ftruncate 46 77, mmap 222 9, munmap 215 11, mremap 216 25, mprotect 226 10, madvise 233 28, brk 214 12,
membarrier 283 324, futex 98 202, set_robust_list 99 273, rseq 293 334, arch_prctl - 158, rt_sigaction 134 13,
rt_sigprocmask 135 14, rt_sigreturn 139 15, sigaltstack 132 131, restart_syscall 128 219, nanosleep 101 35,
clock_gettime 113 228, clock_getres 114 229, clock_nanosleep 115 230, gettimeofday 169 96, time - 201, times 153 100,
getitimer 102 36, setitimer 103 38, sched_yield 124 24, sched_getaffinity 123 204, getrusage 165 98, sysinfo 179 99,
uname 160 63, getrandom 278 318, getpid 172 39, getppid 173 110, gettid 178 186, getuid 174 102, geteuid 175 107,
getgid 176 104, getegid 177 108, exit 93 60, exit_group 94 231
"""
# These two by their second argument, for others send signals: duplicate, flags; close-on-exec, non-blocking, terminal.
_FCNTL = ((25, 72), (0, 1, 2, 3, 4, 1030))
_IOCTL = ((29, 16), (0x5401, 0x5413, 0x5421, 0x5450, 0x5451))
_ARCHITECTURES = {"aarch64": (0, 0xC00000B7), "x86_64": (1, 0xC000003E)}  # column of the numbers, audit name
_RETURN_ALLOW, _RETURN_ERRNO, _RETURN_KILL = 0x7FFF0000, 0x00050000, 0x80000000


def missing() -> list[str]:
    """What the kernel lacks for a confinement that holds; empty where nothing is missing. Changes nothing."""
    lacking = []
    if sys.platform != "linux":
        return ["Linux"]
    if _landlock_version() < 1:
        lacking.append("Landlock (Linux 5.13)")
    if platform.machine() not in _ARCHITECTURES or not os.path.exists("/proc/sys/kernel/seccomp/actions_avail"):
        lacking.append("seccomp filters")
    return lacking


def confine(folder: str, seconds: float, memory_bytes: int, file_bytes: int) -> list[str]:
    """Confine this process for good; what could not be done is returned by name."""
    _leave_namespaces()
    _drop_rights(folder)
    _limit(seconds, memory_bytes, file_bytes)
    os.chdir(folder)
    failed = []
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # its memory is nobody's business
    if library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return ["no_new_privs"]
    if not _restrict_files(library, folder):
        failed.append("Landlock")
    if not _restrict_calls(library):
        failed.append("seccomp")
    return failed


def _landlock_version() -> int:
    library = ctypes.CDLL(None, use_errno=True)
    return int(library.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG)))


def _restrict_files(library: ctypes.CDLL, folder: str) -> bool:
    version = _landlock_version()
    if version < 1:
        return False
    rights = _RIGHTS_BY_VERSION.get(version, _RIGHTS_BY_VERSION[5])
    rules = ctypes.create_string_buffer(struct.pack("=Q", rights))
    ruleset = library.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(8), ctypes.c_uint32(0))
    if ruleset < 0:
        return False
    reading = _EXECUTE | _READ_FILE | _READ_DIR  # executing: libraries are mapped; there is no system call to start one
    places = [(path, reading & rights) for path in _library_folders()]
    places += [("/dev/null", (_READ_FILE | _WRITE_FILE) & rights), ("/dev/urandom", _READ_FILE)]
    places.append((folder, _FOLDER_RIGHTS & rights))
    for path, allowed in places:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
            allowed &= rights if os.path.isdir(path) else _FILE_RIGHTS & rights
            rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, descriptor))
            added = library.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, ctypes.c_uint32(0))
            os.close(descriptor)
            if added != 0:
                return False
    restricted: int = library.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)
    return restricted == 0


def _library_folders() -> list[str]:
    """Where Python's standard library and the shared objects it loads are."""
    paths = sysconfig.get_paths()
    found = {paths["stdlib"], paths["platstdlib"], os.path.join(sys.base_prefix, "lib")}
    found |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo"}
    return sorted(os.path.realpath(path) for path in found)


def _restrict_calls(library: ctypes.CDLL) -> bool:
    """A filter that answers EPERM to every system call but the listed ones."""
    if platform.machine() not in _ARCHITECTURES:
        return False
    column, architecture = _ARCHITECTURES[platform.machine()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, refuse = (answer, 0, 0, _RETURN_ALLOW), (answer, 0, 0, _RETURN_ERRNO | 1)
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, _RETURN_KILL), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, 0x40000000), refuse]  # the x32 ABI has calls of its own
    for call in _ALLOWED_CALLS.split(","):
        number = call.split()[1 + column]
        if number != "-":
            program += [(equal, 0, 1, int(number)), allow]
    for numbers, values in (_FCNTL, _IOCTL):
        second = [(load, 0, 0, 24)]  # the low half of the second argument
        for value in values:
            second += [(equal, 0, 1, value), allow]
        program += [(equal, 0, len(second) + 1, numbers[column]), *second, refuse]
    program.append(refuse)
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    instructions = ctypes.create_string_buffer(code, len(code))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(instructions)))
    return bool(library.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0) == 0)


def _limit(seconds: float, memory_bytes: int, file_bytes: int) -> None:
    whole = max(1, int(seconds))
    limits = [(resource.RLIMIT_CPU, whole), (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, file_bytes)]
    for kind, limit in [*limits, (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_NPROC, 0)]:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file too large is an error of the write, not the end
    signal.setitimer(signal.ITIMER_REAL, 2 * seconds)  # a program that sleeps uses no processor time


def _leave_namespaces() -> None:
    """A second fence where the system has it: no network, no shared memory of others."""
    with contextlib.suppress(Exception):
        library = ctypes.CDLL(None)
        flags = _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
        if library.unshare(flags) != 0:
            library.unshare(_CLONE_NEWUSER | flags)


def _drop_rights(folder: str) -> None:
    """Root becomes nobody, if nobody can read Python: limits on processes do not bind root."""
    if os.geteuid() != 0:
        return
    with contextlib.suppress(OSError):
        os.chown(folder, _NOBODY, _NOBODY)
        os.setegid(_NOBODY)
        os.seteuid(_NOBODY)
        readable = os.access(os.__file__, os.R_OK, effective_ids=True)
        os.seteuid(0)
        os.setegid(0)
        if readable:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
