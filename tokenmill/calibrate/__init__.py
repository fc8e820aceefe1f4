"""Measures this machine for the planner (`tokenmill plan --calibrate`): roofs, engine steps, a served run.

Drives the real engine and server, so it lies above plan/, which reads the stored result and never imports torch.
"""
