"""The planner: what a model needs, what a device gives, what a deployment costs, and how far to trust the answer."""
