"""One file per verb: a pure function from the verb's result (the object of `--json`) to a `Screen`."""
