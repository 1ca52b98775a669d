"""Two engines that share one cache: run it with ``python -m examples.demo``."""
