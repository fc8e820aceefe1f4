"""PEFT adapters as files: adapter.py (the record), peft.py (reading), fit.py (onto a base), write.py."""
