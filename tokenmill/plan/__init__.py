"""The planner: a question about serving a model, answered by arithmetic, tables and simulation. Never imports torch.

Rooms, top to bottom; a room imports only those below it (import contracts in pyproject.toml):

* search/, simulate/, validate/: the cheapest deployment; a load through the real scheduler; scores on measured rows
* cost/: milliseconds of a step, and what follows from them for latency and throughput
* question/: what is asked: model, workload, prices, limits, one deployment and its memory

What measures this machine with the real engine is tokenmill/calibrate. Charts and pages are tokenmill/report.
"""
