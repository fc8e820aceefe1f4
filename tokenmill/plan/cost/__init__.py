"""What a deployment costs in time: kernels, communication, one engine step, a steady load, the measured machine.

`step_cost.py` is the centre: below it curves, tables and kernels, above it the closed loop and the steady state.
Knows neither dollars nor how candidates are found.
"""
