"""Other people's training loops over the session: each brings its own loop, the session data order, saves and resumes.

A module here is imported by name, and only where its framework is installed. Nothing here saves or restores by itself.
"""
