"""Ray Serve: placement of replicas, their restart and their number. The only importer of ray.

Replicas pull from the queue, so Serve routes no requests; it has no proxy here.
"""
