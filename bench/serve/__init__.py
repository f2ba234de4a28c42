"""Measures what `q4 serve` promises: a module for each part. See bench/serve.sh."""
