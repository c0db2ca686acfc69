"""Drills: the second kind of the API group, and the schedules that ask for some. A drill is a fork that is thrown away:
a job of its own restores the checkpoint, compares, and goes; only its verdict reaches the run that it is about.
"""
