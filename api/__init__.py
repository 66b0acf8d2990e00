"""The gateway pod: HTTP in, jobs out; log in, frames out. It keeps nothing: kill it any time.

It knows no tokenizer, no engine and no Ray.
"""
