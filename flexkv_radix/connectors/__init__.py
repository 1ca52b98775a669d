"""Engines' connectors: the part they share (`base`), and one package per engine.

An engine is imported only inside its own package, so that this one works wherever flexkv_radix does.
"""
