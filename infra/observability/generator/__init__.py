"""Makes what Prometheus and Grafana read: `make dashboards` writes the files beside this folder.

What is made is committed; a test says that it is what would be made.
"""
