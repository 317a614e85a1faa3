"""The parameter server: what happens to a gradient after it arrives, and how processes reach one
another.
"""
