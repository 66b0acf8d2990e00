"""The floor every other room stands on: messages, Redis keys, the verbs, the token log, settings, errors, metrics.

It knows nothing of HTTP, Ray or engines, and imports no other room.
"""
