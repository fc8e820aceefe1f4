"""Kernels: op table (base.py), the plain torch spec (ref.py), C++ for CPUs (cpu.py over csrc/cpu)."""
