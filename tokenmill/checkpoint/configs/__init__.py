"""The parts of reading a config.json: model types and their defaults, rotary tables, mixers, feed-forwards."""
