"""The simulator: the engine's own scheduler and KV manager, driven by a cost model instead of a device."""
