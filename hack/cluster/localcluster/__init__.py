"""A real Kubernetes in network namespaces of one machine, for tests and demonstrations.

The package behind ``python3 hack/cluster``. It needs Python's standard library and root, nothing of
the project: the cluster must start where the project is broken.
"""
