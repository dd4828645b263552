"""Moment matching: the statistics of queries and keys, and the curves that turn them into alpha and beta."""
