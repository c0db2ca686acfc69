"""The operator: observes ResumableTrainingJobs, decides attempt, mesh and restore point, and applies what it decided.

It never touches the bytes of a checkpoint and never imports torch; of the training side it uses only
`trainer_sidecar.contract` and `trainer_sidecar.store`. The decisions themselves (`decide`, `mesh`, `pods`, `api`)
are pure: no Kubernetes, no object store, no clock, no chance.
"""
