"""The router: sends requests to the replica that has most of the prompt and least to do, and keeps streams alive."""
