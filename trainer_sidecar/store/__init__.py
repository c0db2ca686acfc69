"""Object stores and the journal in them: everything that decides what is committed. No torch, no Kubernetes."""
