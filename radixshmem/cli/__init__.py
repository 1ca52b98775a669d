"""The commands ``radix-server`` and ``radixctl``."""
