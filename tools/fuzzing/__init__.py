"""The parts of tools/fuzz.py: seeded mutations, the doors that inputs go through, and the processes that try them."""
