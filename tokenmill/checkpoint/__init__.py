"""Checkpoints: files and directories that hold a model. See base.py for the contract."""
