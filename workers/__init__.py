"""One replica: it claims jobs, drives an engine, appends the engine's steps to the log, and settles.

It knows nothing of HTTP or Ray. Only `workers/engines/` imports an engine.
"""
