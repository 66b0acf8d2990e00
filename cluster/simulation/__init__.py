"""The simulator: traces, a fleet of model replicas in discrete events, the rivals' laws, sweeps and pictures.

It runs the same function object as Ray Serve does (`cluster/law.py`), needs no Ray, and knows nothing of the broker.
"""
