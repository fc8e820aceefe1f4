"""Recurrent states: what layers read and write of them (specs.py), and the slots that hold them (store.py)."""
