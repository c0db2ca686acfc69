"""The fault drills D1 to D10 as a campaign on a real cluster (`rtj drill faults`): inject, prove, measure.

They do what a user with kubectl, the store's credentials and, for some, the installation's fault key can do, and judge
from outside: from the journal, from what the ranks print, from the API server. `training` alone runs in pods.
"""
