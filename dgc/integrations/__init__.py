"""Frameworks that have a training loop of their own. Each is imported where it is used; the user
installs it.
"""
