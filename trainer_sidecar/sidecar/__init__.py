"""The checkpoint sidecar: the only process of a pod that talks to the store and holds its credentials. No torch."""
